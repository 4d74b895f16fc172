# SPDX-License-Identifier: MIT
"""What a session of plain onnxruntime and one of ours cost, side by side, in own processes."""

from __future__ import annotations

__all__ = ["MeasureError", "example_feed", "measure_sessions"]

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.comparison.inputs import with_sizes
from ortplugins.html_report.weight_bytes import packed_bytes
from ortplugins.runtime.child_process import child_environment
from ortplugins.samples.random import random_feeds
from session_options import OptionError

_SCRIPT = Path(__file__).with_name("measured_session.py")
_INTERVAL_SECONDS = 0.002
_TIMEOUT_SECONDS = 900
_FIGURES = (
    ("run", "run_seconds", "s"),
    ("start", "start_seconds", "s"),
    ("peak of private memory", "peak_private_bytes", "B"),
    ("private memory after the start", "started_private_bytes", "B"),
)


class MeasureError(RuntimeError):
    """A session could not be opened or run; says whose, and what it said."""


def example_feed(
    model: ir.Model, dims: Mapping[str, int]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, int]]:
    """Make an input for each input of a model, random where that makes sense.

    Args:
        model: The model.
        dims: Sizes of symbolic dimensions; others are guessed as
            :mod:`.random` says.

    Returns:
        The arrays, and the size that each named dimension got.

    Raises:
        OptionError: If no input has a dimension of ``dims``.
        MeasureError: If an input is no tensor.
    """
    inputs = []
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue  # may be left out
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise MeasureError(f"input {value.name!r} is a {type(value.type).__name__}")
        inputs.append(value)
    try:
        sized = with_sizes(inputs, dims)
    except ValueError as error:
        raise OptionError(str(error)) from None
    feed = next(iter(random_feeds(sized, count=1)))
    sizes = {
        dim.value: size
        for value in inputs
        for dim, size in zip(value.shape or (), feed[value.name or ""].shape, strict=False)
        if isinstance(dim, ir.SymbolicDim) and dim.value
    }
    return feed, sizes


def measure_sessions(
    model: Path,
    passes: Sequence[str],
    settings: Mapping[str, str],
    feed: Mapping[str, npt.NDArray[Any]],
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure sessions on a model, plain ones and ours taking turns.

    Ours come from a cache that a session before them filled, whose start is told beside.

    Args:
        model: The .onnx file.
        passes: Names of passes, at least one.
        settings: ``{"<pass>.<option>": value}``.
        feed: An array for each input.
        rounds: How many processes of each.

    Returns:
        Medians, ratios (ours over plain) and everything measured, as plain JSON.

    Raises:
        MeasureError: If a session fails.
    """
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        feeds = Path(folder, "feeds.npz")
        arrays = {f"input{index}": array for index, array in enumerate(feed.values())}
        np.savez(feeds, allow_pickle=False, names=json.dumps(list(feed)), **arrays)
        plain = {
            "model": str(model.absolute()),
            "feeds": str(feeds),
            "passes": [],
            "run": True,
        }
        cache = {"settings": dict(settings), "cache_dir": str(Path(folder, "cache"))}
        ours = {**plain, "passes": list(passes), **cache}
        first = _run({**ours, "run": False})
        artifact = first["report"]["artifact"]
        packed = packed_bytes(artifact) if artifact else (0, 0)
        measured: dict[str, list[dict[str, Any]]] = {"plain": [], "ours": []}
        for number in range(rounds):
            # Whoever comes second finds the disk's pages warm: they take turns in that, too.
            jobs = [("plain", plain), ("ours", ours)]
            for name, job in jobs if number % 2 == 0 else reversed(jobs):
                measured[name].append(_run(job))
    report = measured["ours"][-1].pop("report")
    for result in measured["ours"]:
        result.pop("report", None)
    return {
        "rounds": rounds,
        "inputs": [
            {"name": name, "type": str(array.dtype), "shape": list(array.shape)}
            for name, array in feed.items()
        ],
        "figures": [
            _figure(what, key, unit, measured)
            for what, key, unit in _FIGURES
            if all(
                result.get(key) is not None for each in measured.values() for result in each
            )
        ],
        "first_start_seconds": first["start_seconds"],
        "packed": {"tensors": packed[0], "bytes": packed[1]},
        "report": {**report, "artifact": ""},  # gone by now
    }


def _figure(
    what: str, key: str, unit: str, measured: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    every = {name: [result[key] for result in results] for name, results in measured.items()}
    ours, plain = statistics.median(every["ours"]), statistics.median(every["plain"])
    return {
        "what": what,
        "unit": unit,
        "ratio": ours / plain if plain else None,
        "ours": ours,
        "plain": plain,
        "all": every,
        "distinct": _distinct(every["ours"], every["plain"]),
    }


def _distinct(ours: Sequence[float], plain: Sequence[float]) -> bool | None:
    """Whether the ranges are apart, so that chance is no likely reason; None of one run."""
    if len(ours) < 2:
        return None
    return max(ours) < min(plain) or max(plain) < min(ours)


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the script; its result, and the peak of its private memory."""
    whose = "ortplugins" if job["passes"] else "plain onnxruntime"
    if not sys.executable:
        raise MeasureError("there is no Python interpreter to start a process with")
    # -P: the script's own folder has modules of common names.
    child = subprocess.Popen(
        [sys.executable, "-P", str(_SCRIPT), json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
    )
    peaks: list[int] = []
    watcher = threading.Thread(target=_watch, args=(child, peaks), daemon=True)
    watcher.start()
    try:
        out, err = child.communicate(timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise MeasureError(f"{whose} took more than {_TIMEOUT_SECONDS} s") from None
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
        watcher.join()
    if child.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        said = lines[-1] if lines else f"it ended with code {child.returncode}"
        raise MeasureError(f"{whose}: {said}")
    result: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return {**result, "peak_private_bytes": max(peaks, default=None)}


def _watch(child: subprocess.Popen[bytes], peaks: list[int]) -> None:
    """Note each new peak of a child's private memory, where /proc tells it."""
    peak = 0
    while child.poll() is None:
        try:
            with open(f"/proc/{child.pid}/status", encoding="ascii") as lines:
                for line in lines:
                    if line.startswith("RssAnon:") and (seen := int(line.split()[1])) > peak:
                        peak = seen
                        peaks.append(seen * 1024)
        except OSError:
            return
        time.sleep(_INTERVAL_SECONDS)
