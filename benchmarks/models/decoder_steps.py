# SPDX-License-Identifier: MIT
"""Runs decoders as generation does, by ``SessionProcess.call`` in the session's process."""

from __future__ import annotations

import collections
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int64]
# Heads of keys, and size of a head, in SmolLM2-135M: not all graphs declare them.
_HEADS, _SIZE = 3, 64
# Tokens that every decoder here has.
MIN_VOCABULARY = 32_768


class _Text:
    """One sequence; its cache goes round as OrtValues, so that nothing is copied.

    With ``capacity`` for so many tokens, new keys and values are appended in place.
    """

    def __init__(self, session: Any, capacity: int = 0) -> None:
        import onnxruntime

        self._value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._session = session
        inputs = {value.name: value.shape for value in session.get_inputs()}
        kinds = {"tensor(int8)": np.int8}
        self._types = {v.name: kinds.get(v.type, np.float32) for v in session.get_inputs()}
        self._own = inputs.keys() & {"attention_mask", "position_ids"}
        past = [name for name in inputs if name.startswith("past_key_values")]
        present = [name.replace("past_key_values", "present") for name in past]
        self._names, self._outputs = past, ["logits", *present]
        self._length, self._in_place = 0, capacity > 0
        self._cache = []
        for name in past:
            heads, size = (
                declared if isinstance(declared, int) else otherwise
                for declared, otherwise in zip(
                    inputs[name][1::2], (_HEADS, _SIZE), strict=True
                )
            )
            empty = np.zeros((1, heads, capacity, size), self._types[name])
            self._cache.append(self._value(empty))

    def append(self, ids: _Ids) -> tuple[Any, float]:
        """Run tokens ``[S]`` after those before; return logits, and the seconds."""
        total = self._length + len(ids)
        arrays = {
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(self._length, total)[None],
        }
        arrays = {name: arrays[name] for name in self._own} | {"input_ids": ids[None]}
        feeds = {name: self._value(array) for name, array in arrays.items()}
        feeds |= zip(self._names, self._cache, strict=True)
        self._length = total
        start = time.perf_counter()
        if not self._in_place:
            logits, *self._cache = self._session.run_with_ort_values(self._outputs, feeds)
            return logits, time.perf_counter() - start
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(self._outputs[0])
        for name, value in zip(self._outputs[1:], self._cache, strict=True):
            binding.bind_ortvalue_output(name, value)
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()[0], time.perf_counter() - start


def time_tokens(
    session: Any, context: int, tokens: int, in_place: bool = False
) -> dict[str, Any]:
    """Run a prompt, then token after token.

    Returns:
        ``prompt``: seconds; ``tokens``: seconds of each.
    """
    ids = np.random.default_rng(0).integers(100, MIN_VOCABULARY, context + tokens)
    text = _Text(session, len(ids) * in_place)
    prompt = text.append(ids[:context])[1]
    times = [text.append(ids[place : place + 1])[1] for place in range(context, len(ids))]
    return {"prompt": prompt, "tokens": times}


def greedy(session: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return the likeliest tokens after a prompt."""
    text, found, ids = _Text(session), list[int](), np.array(prompt, np.int64)
    for _ in range(tokens):
        logits, _ = text.append(ids)
        found.append(int(logits.numpy()[0, -1].argmax()))
        ids = np.array(found[-1:], np.int64)
    return found


def last_logits(session: Any, prompt: list[int]) -> list[float]:
    """Return the logits after a prompt."""
    logits, _ = _Text(session).append(np.array(prompt, np.int64))
    return [float(one) for one in logits.numpy()[0, -1]]


def executed_nodes(session: Any, context: int) -> int:
    """Return how many nodes one token takes; the session was opened with a profile."""
    time_tokens(session, context, 2)
    path = Path(session.end_profiling())
    events = json.loads(path.read_text())
    path.unlink()
    runs: collections.Counter[int] = collections.Counter()
    ends = [event["ts"] for event in events if event["name"] == "model_run"]
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[sum(event["ts"] > end for end in ends)] += 1
    return runs[len(ends) - 1]
