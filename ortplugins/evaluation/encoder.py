# SPDX-License-Identifier: MIT
"""How well a sentence encoder finds the rest of a paragraph by its first sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortplugins.errors import CalibrationError
from ortplugins.evaluation.text_model import TextModel
from ortplugins.model_io.saving import Progress
from ortplugins.samples.text import TextTokenizer, read_text

_MAX_TOKENS = 128
# Shorter sentences, and rests of paragraphs, are too much alike (in characters).
_SENTENCE, _REST = 40, 120

Embeddings = npt.NDArray[np.float32]


def pairs_of(path: Path, count: int) -> list[tuple[str, str]]:
    """Return first sentences of paragraphs, each with the rest, spread over a text."""
    found = []
    for paragraph in read_text(path).split("\n\n"):
        first, dot, rest = paragraph.partition(". ")
        if dot and len(first) > _SENTENCE and len(rest) > _REST:
            found.append((first + ".", rest))
    if len(found) < 2:
        raise CalibrationError(
            f"{path}: {len(found)} of its paragraphs (between empty lines) have a first "
            f"sentence of {_SENTENCE} characters and {_REST} more: two are needed at least"
        )
    return found[:: max(1, len(found) // count)][:count]


def embed(
    model: TextModel,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    progress: Progress | None,
) -> Embeddings:
    """Return the mean over its tokens for each text, ``[texts, hidden]``, of length 1."""
    length = model.feeds.length or _MAX_TOKENS
    rows = []
    ids = [tokenizer.encode(text, length) for text in texts]
    model.feeds.check(ids, tokenizer)
    for number, tokens in enumerate(ids):
        if progress is not None:
            progress(number, len(ids), model.name)
        rows.append(model.run(tokens, f"text {number}").mean(0))
    vectors = np.stack(rows)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def retrieval_accuracy(vectors: Embeddings) -> float:
    """Return how often a first text is nearest to its own second one.

    Args:
        vectors: ``[2 * pairs, hidden]``: all first texts, then all second ones.
    """
    first, second = np.split(vectors, 2)
    return float(((first @ second.T).argmax(1) == np.arange(len(first))).mean())
