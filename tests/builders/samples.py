# SPDX-License-Identifier: MIT
"""Samples as users bring them: a reader of onnxruntime's kind, a tokenizer of a few words."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy.typing as npt
import tokenizers


class Reader:
    """Gives samples one by one and counts the calls."""

    def __init__(self, feeds: Iterable[Mapping[str, npt.NDArray]]) -> None:
        self.feeds, self.pulls = feeds, 0
        self.left = iter(feeds)

    def get_next(self) -> Mapping[str, npt.NDArray] | None:
        self.pulls += 1
        return next(self.left, None)


def write_tokenizer(path: Path, words: Sequence[str]) -> None:
    """Write a tokenizer that puts the first two words around a text; the third is [UNK]."""
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token=words[2])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{words[0]} $A {words[1]}", special_tokens=[(words[0], 0), (words[1], 1)]
    )
    tokenizer.save(str(path))
