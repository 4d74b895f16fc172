# SPDX-License-Identifier: MIT
"""A model that reads tokens, as it is evaluated: one row at a time, its runs timed."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.comparison.given_model import GivenModel
from ortplugins.comparison.model_pair import fetch
from ortplugins.errors import ModelFileError
from ortplugins.model_io.loading import load_path
from ortplugins.runtime.stock_session import NUMPY_TYPES, open_model, type_of
from ortplugins.samples.made_up import next_step
from ortplugins.samples.text import TokenFeeds

_PROMPT = 256
_STEPS = 32


class TextModel:
    """A session on a model of tokens."""

    def __init__(self, model: GivenModel, scratch: Path, providers: Sequence[Any]) -> None:
        """Open the model."""
        path = model.file(scratch)
        loaded = load_path(path)
        graph = loaded.model.graph
        self.name = model.name
        self.bytes = sum(map(os.path.getsize, {path, *loaded.data_files.values()}))
        self.feeds = TokenFeeds([v for v in graph.inputs if v.name not in graph.initializers])
        self._session = model.session or open_model(path, "all", providers, model.settings)
        self.output, self.gives_logits = self._find_output()
        self._tokens = [0, 0]  # of the first run, of the others
        self._seconds = [0.0, 0.0]

    def run(self, ids: Sequence[int], what: str) -> npt.NDArray[np.float32]:
        """Return the output for some tokens, ``[tokens, size]``."""
        feed = self.feeds.feed(ids)
        start = time.perf_counter()
        (output,) = fetch(self._session, [self.output], feed, f"{self.name}, {what}")
        seconds = time.perf_counter() - start
        counted = bool(self._tokens[0])  # the first run allocates
        self._tokens[counted] += len(ids)
        self._seconds[counted] += seconds
        if output.ndim != 3 or output.shape[1] < len(ids):
            raise ModelFileError(
                f"{self.name}: output {self.output!r} is {list(output.shape)} for {len(ids)} "
                "tokens: a row for each token is expected"
            )
        rows = output[0, : len(ids)].astype(np.float32, copy=False)
        if np.isnan(rows).any():
            raise ModelFileError(f"{self.name}: output {self.output!r} has NaN for {what}")
        return rows

    @property
    def tokens_per_second(self) -> float:
        """Of all runs so far but the first, if there were others."""
        counted = bool(self._tokens[1])
        return self._tokens[counted] / self._seconds[counted]

    def decode_speed(self, ids: Sequence[int]) -> float:
        """Return tokens per second, one by one after a prompt; NaN without a cache."""
        names = [o.name for o in self._session.get_outputs() if type_of(o) in NUMPY_TYPES]
        rng = np.random.default_rng(0)
        feed, seconds = self.feeds.feed(ids[:_PROMPT]), []
        for _ in range(_STEPS + 1):
            start = time.perf_counter()
            arrays = fetch(self._session, names, feed, f"{self.name}, decoding")
            seconds.append(time.perf_counter() - start)
            outputs = dict(zip(names, arrays, strict=True))
            step = next_step(feed, outputs, self.feeds.roles, rng)
            if step is None or self.feeds.length:
                return math.nan
            feed = step
        return 1 / statistics.median(seconds[1:])

    def _find_output(self) -> tuple[str, bool]:
        """Return the name of the output, and whether it holds logits."""
        sizes = {
            item.name: item.shape[-1]
            for item in self._session.get_outputs()
            if type_of(item) in ("float", "float16") and len(item.shape) == 3
        }
        logits = [n for n, size in sizes.items() if "logits" in n or size == self.feeds.rows]
        if sizes:
            return (logits or list(sizes))[0], bool(logits)
        found = ", ".join(
            f"{item.name!r} {item.shape}" for item in self._session.get_outputs()
        )
        raise ModelFileError(
            f"{self.name}: has no float output [batch, sequence, vocabulary] or [batch, "
            f"sequence, hidden]: its outputs are {found}"
        )
