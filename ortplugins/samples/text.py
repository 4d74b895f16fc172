# SPDX-License-Identifier: MIT
"""Samples from a text: windows of tokens, fed as the model's inputs are called.

Tokens come from a Hugging Face ``tokenizer.json``. Each window begins and ends with the tokens
that the tokenizer puts around a text (BOS; [CLS] and [SEP]). Windows have one row and as many
tokens as there are, so nothing is padded; only a model whose length is fixed gets padding,
which its mask leaves out. Caches are empty.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortplugins.errors import CalibrationError, UsageError
from ortplugins.samples.made_up import Feed, MadeUpInputs, fed_inputs
from rewrite_rules.facts.input_roles import Kind, role_of, rows_below


@dataclasses.dataclass(frozen=True)
class TextSamples:
    """A source of samples: the windows of a text.

    Attributes:
        text: Path of a file, UTF-8.
        tokenizer: Path of a ``tokenizer.json``.
        window: Tokens in a feed, those around the text included.
        count: How many windows at most, spread over the text; None for all.
        held_back: Share of the text, its end, that no window is taken from, 0 to 1.
    """

    text: str | os.PathLike[str]
    tokenizer: str | os.PathLike[str]
    window: int = 256
    count: int | None = 128
    held_back: float = 0.0

    def feeds(self, graph: ir.Graph) -> Iterator[Feed]:
        """Return a feed for each window; the text is read at once."""
        feeds = TokenFeeds(graph)
        tokenizer = TextTokenizer(Path(self.tokenizer))
        text, _ = split_text(Path(self.text), self.held_back)
        windows = tokenizer.cut(text, feeds.length or self.window, str(self.text))
        if len(windows) > 1 and len(windows[-1]) < len(windows[0]):
            del windows[-1]  # a short rest would weigh as much as a full window
        count = len(windows) if self.count is None else min(self.count, len(windows))
        taken = [windows[int(place)] for place in np.linspace(0, len(windows) - 1, count)]
        feeds.check(taken, tokenizer)
        return (feeds.feed(ids) for ids in taken)


class TokenFeeds:
    """How a model is fed tokens: ``length`` of them, 0 for any, of a table of ``rows``."""

    def __init__(self, graph: ir.Graph) -> None:
        """Find the input that takes the tokens."""
        inputs = fed_inputs(graph)
        takers = [value for value in inputs if role_of(value).kind is Kind.IDS]
        if len(takers) != 1:
            named = ", ".join(repr(value.name) for value in inputs)
            raise CalibrationError(f"text is for a model that takes token ids, not {named}")
        shape = takers[0].shape
        last = shape[-1] if shape is not None and len(shape) else None
        self.length = last if isinstance(last, int) and last > 0 else 0
        self.rows = rows_below(takers[0])
        self._graph = graph
        self.roles = {value.name or "": role_of(value) for value in inputs}

    def check(self, windows: Sequence[Sequence[int]], tokenizer: TextTokenizer) -> None:
        """Check that every token is a row of the table."""
        largest = max(map(max, windows))
        if self.rows is not None and largest >= self.rows:
            raise CalibrationError(
                f"{tokenizer.path}: token {largest} is not a row of the model's "
                f"table of {self.rows}: it is the tokenizer of another model"
            )

    def feed(self, ids: Sequence[int]) -> Feed:
        """Return the feed of some tokens, padded at the end to :attr:`length`."""
        length = max(len(ids), self.length)
        known = {label for role in self.roles.values() for label in role.axes}
        dims = {"sequence": length} if "sequence" in known else {}
        feed = next(MadeUpInputs(self._graph, dims).feeds())
        for name, role in self.roles.items():
            array = feed[name]
            if role.kind is Kind.IDS:
                array[...] = 0
                array[..., : len(ids)] = ids
            elif role.kind is Kind.MASK:
                array[..., len(ids) :] = 0
        return feed


class TextTokenizer:
    """A tokenizer, and what it puts around a text."""

    def __init__(self, path: Path) -> None:
        """Read the file."""
        self.path = path
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise UsageError("text needs: pip install 'ortplugins[text]'") from None
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises Exception itself
            raise CalibrationError(
                f"{path}: cannot be read as tokenizer.json: {error}"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        encoded = self._tokenizer.encode("a")
        ids = encoded.ids
        own = [
            place for place, special in enumerate(encoded.special_tokens_mask) if not special
        ]
        self._before = ids[: own[0]] if own else ids
        self._after = ids[own[-1] + 1 :] if own else []

    def cut(
        self, text: str, length: int, what: str, *, closed: bool = True
    ) -> list[list[int]]:
        """Cut a text into windows of ``length`` tokens; the last one may be shorter.

        What the tokenizer puts around a text counts; windows that are not closed have no end.
        Errors call the text ``what``.
        """
        before, after = self._before, self._after if closed else []
        step = length - len(before) - len(after)
        if step < 1:
            raise UsageError(f"a window of {length} tokens has no room for text: give more")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise CalibrationError(f"{what}: has no text")
        parts = (ids[start : start + step] for start in range(0, len(ids), step))
        return [[*before, *part, *after] for part in parts]


def split_text(path: Path, share: float) -> tuple[str, str]:
    """Read a file as UTF-8; return all but a share of it, and that share, its end."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read as text: {error}") from None
    end = len(text) - int(share * len(text))
    return text[:end], text[end:]
