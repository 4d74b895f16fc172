# SPDX-License-Identifier: MIT
"""Tokenizers of a few words."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers


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
