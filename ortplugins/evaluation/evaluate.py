# SPDX-License-Identifier: MIT
"""Judges a model of text: by itself, or beside the float model that it was made of."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.comparison.given_model import GivenModel, ModelSource
from ortplugins.errors import CalibrationError, ModelFileError, UsageError
from ortplugins.evaluation.language_model import read_windows
from ortplugins.evaluation.text_model import TextModel
from ortplugins.model_io.model_folder import model_in, tokenizer_beside
from ortplugins.model_io.saving import Progress
from ortplugins.samples.text import TextTokenizer, read_text

# Tokens of a text that an encoder gets.
_MAX_TOKENS = 128
# Shorter sentences, and rests of paragraphs, are too much alike (in characters).
_SENTENCE, _REST = 40, 120

Embeddings = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class ModelFigures:
    """What was found of one model; NaN where it does not apply.

    Attributes:
        name: The model's.
        bytes: Of the .onnx file and its data.
        perplexity: Of the text, for a causal language model.
        retrieval_accuracy: For an encoder: how often a first sentence finds the rest of its
            paragraph among those of all others, 0 to 1.
        prefill_tokens_per_second: Of whole windows, or of whole texts.
        decode_tokens_per_second: Of tokens one by one, with a cache, after a prompt of 256.
    """

    name: str
    bytes: int
    perplexity: float = math.nan
    retrieval_accuracy: float = math.nan
    prefill_tokens_per_second: float = math.nan
    decode_tokens_per_second: float = math.nan


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` found; NaN where it does not apply.

    Attributes:
        model: Of the model itself.
        against: Of the float model; None where none was given.
        count: How many tokens were predicted, or pairs of texts compared.
        kl_divergence: Mean over the tokens of the Kullback-Leibler divergence from the float
            model's distribution to the model's, in nats.
        top1_agreement: How often both models' first choice is the same token, 0 to 1.
        cosine: For encoders: mean cosine of the model's embeddings to the float model's.
    """

    model: ModelFigures
    against: ModelFigures | None
    count: int
    kl_divergence: float = math.nan
    top1_agreement: float = math.nan
    cosine: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON's types; those that do not apply as None."""

        def plain(item: Any) -> Any:
            if isinstance(item, dict):
                return {key: plain(value) for key, value in item.items()}
            return item if not isinstance(item, float) or math.isfinite(item) else None

        result: dict[str, Any] = plain(dataclasses.asdict(self))
        return result

    def to_json(self) -> str:
        """Return :meth:`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def evaluate(
    model: ModelSource,
    against: ModelSource | None = None,
    *,
    text: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    tokens: int = 4096,
    window: int = 512,
    pairs: int = 500,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    progress: Progress | None = None,
) -> Evaluation:
    """Judge a model on a text: a causal language model, or a sentence encoder.

    Both models run in plain onnxruntime, as it runs them by default, one row at a time: 4-bit
    weights of DequantizeLinear meet int8 activations then. Give a session for other settings.

    Args:
        model: A path, the path of a folder with one model, bytes, an object, what
            :func:`.optimize` returned, or a session, which is run with its own settings.
        against: The float model, in the same way; it may have other inputs.
        text: Path of a file, UTF-8.
        tokenizer: Path of a ``tokenizer.json``; by default the one beside the model.
        tokens: How much of the text a language model reads, from its start, in whole windows.
        window: Tokens of a window, the BOS token included where the tokenizer has one; all but
            the first are predicted. Windows do not overlap. A model of fixed length has its
            own.
        pairs: How many first sentences and rests of paragraphs an encoder gets, each cut at
            128 tokens; spread over the text.
        providers: Execution providers.
        progress: Called before each run: done, total, what.

    Returns:
        The figures.

    Raises:
        MissingFileError, ModelFileError: If a model or folder cannot be used, fails, or gives
            NaN.
        CalibrationError: If text or tokenizer cannot be used, the text is too short, or a
            token is not a row of the model's table.
        UsageError: If an argument is out of range, no tokenizer is given or found, or a
            package is missing.
    """
    for name, value in (("tokens", tokens), ("window", window), ("pairs", pairs)):
        if value < 2:
            raise UsageError(f"{name} is {value}: 2 or more is expected")
    if tokenizer is None:
        paths = [item for item in (model, against) if isinstance(item, str | os.PathLike)]
        tokenizer = next(filter(None, map(tokenizer_beside, paths)), None)
        if tokenizer is None:
            raise UsageError("no tokenizer.json beside the model: give its path")
    encoder = TextTokenizer(Path(tokenizer))
    with tempfile.TemporaryDirectory(
        prefix="ortplugins-", ignore_cleanup_errors=True
    ) as folder:
        models = [
            TextModel(GivenModel(given), Path(folder), providers)
            for item in (model, against)
            if item is not None
            for given in [model_in(item) if isinstance(item, str | os.PathLike) else item]
        ]
        if len({item.gives_logits for item in models}) > 1:
            raise ModelFileError(
                f"{models[0].name} and {models[1].name} cannot be compared: one gives logits, "
                "the other hidden states"
            )
        if models[0].gives_logits:
            return _language_model(models, encoder, Path(text), tokens, window, progress)
        return _encoder(models, encoder, Path(text), pairs, progress)


def _language_model(
    models: Sequence[TextModel],
    tokenizer: TextTokenizer,
    text: Path,
    tokens: int,
    window: int,
    progress: Progress | None,
) -> Evaluation:
    length = next((item.feeds.length for item in models if item.feeds.length), window)
    windows = tokenizer.windows(text, length, closed=False)
    whole = [ids for ids in windows if len(ids) == length][: max(1, tokens // length)]
    if not whole:
        raise CalibrationError(
            f"{text}: has {len(windows[0])} tokens, fewer than a window of {length}: give a "
            "longer text or a smaller window"
        )
    for item in models:
        item.feeds.check(whole, tokenizer)
    found, floats = read_windows(models[0], models[1] if models[1:] else None, whole, progress)
    figures = [
        ModelFigures(
            item.name,
            item.bytes,
            perplexity=prediction.perplexity,
            prefill_tokens_per_second=item.tokens_per_second,
            decode_tokens_per_second=item.decode_speed(whole[0]),
        )
        for item, prediction in zip(models, (found, floats), strict=False)
        if prediction is not None
    ]
    if floats is None:
        return Evaluation(figures[0], None, found.tokens)
    return Evaluation(
        figures[0],
        figures[1],
        found.tokens,
        kl_divergence=found.divergence / found.tokens,
        top1_agreement=found.agreed / found.tokens,
    )


def _encoder(
    models: Sequence[TextModel],
    tokenizer: TextTokenizer,
    text: Path,
    pairs: int,
    progress: Progress | None,
) -> Evaluation:
    found = _pairs_of(text, pairs)
    texts = [first for first, _ in found] + [rest for _, rest in found]
    vectors = [_embed(item, tokenizer, texts, progress) for item in models]
    figures = [
        ModelFigures(
            item.name,
            item.bytes,
            retrieval_accuracy=_retrieval_accuracy(rows),
            prefill_tokens_per_second=item.tokens_per_second,
        )
        for item, rows in zip(models, vectors, strict=True)
    ]
    if len(models) == 1:
        return Evaluation(figures[0], None, len(found))
    if vectors[0].shape != vectors[1].shape:
        raise ModelFileError(
            f"{models[0].name} has {vectors[0].shape[1]} numbers for a text, {models[1].name} "
            f"{vectors[1].shape[1]}: they are not the same encoder"
        )
    cosine = float((vectors[0] * vectors[1]).sum(1).mean())
    return Evaluation(figures[0], figures[1], len(found), cosine=cosine)


def _pairs_of(path: Path, count: int) -> list[tuple[str, str]]:
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


def _embed(
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


def _retrieval_accuracy(vectors: Embeddings) -> float:
    """Return how often a first text, of ``[2 * pairs, hidden]``, is nearest to its second."""
    first, second = np.split(vectors, 2)
    return float(((first @ second.T).argmax(1) == np.arange(len(first))).mean())
