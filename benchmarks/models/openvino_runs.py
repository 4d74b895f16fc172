# SPDX-License-Identifier: MIT
"""Runs a net by OpenVINO in a process of its own, in turns with ours."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.measurement.measure import Candidate, SessionProcess, write_feed

_RUNS = 10
_MS = 1e3
_opened: dict[str, Any] = {}


def beside_openvino(
    ours: Candidate,
    model: Path,
    feed: Mapping[str, Any],
    folder: Path,
    rounds: int,
    precision: str = "f32",
) -> tuple[float, float]:
    """Return the medians of runs in turns, ours and OpenVINO's, in milliseconds.

    ``precision`` is OpenVINO's hint; empty for what it takes by default.
    """
    written = write_feed(feed, folder / "openvino.npz")
    mine, theirs = list[float](), list[float]()
    for _ in range(rounds):
        with SessionProcess("ours") as first, SessionProcess("OpenVINO") as second:
            first.open(ours)
            where = {"model": str(model), "feed": str(written), "precision": precision}
            second.call(f"{__name__}:start", **where)
            for number in range(_RUNS):
                turns = first.run(written), second.call(f"{__name__}:run")
                second.rest()
                if number:  # the first ones allocate
                    mine.append(_MS * turns[0])
                    theirs.append(_MS * turns[1])
    return statistics.median(mine), statistics.median(theirs)


def start(session: Any, model: str, feed: str, precision: str) -> float:
    """Compile a model, read its inputs; return the seconds that compiling took."""
    begin = time.perf_counter()
    compiled = _compiled(model, precision)
    seconds = time.perf_counter() - begin
    with np.load(feed, allow_pickle=False) as file:
        names = json.loads(str(file["names"]))
        _opened["feed"] = {name: file[f"input{i}"] for i, name in enumerate(names)}
    _opened["request"] = compiled.create_infer_request()
    return seconds


def outputs_of_openvino(
    model: Path, feed: Mapping[str, Any], precision: str
) -> list[npt.NDArray[Any]]:
    """Return what OpenVINO computes, output by output."""
    found = _compiled(str(model), precision).create_infer_request().infer(dict(feed))
    return [np.array(value) for value in found.values()]


def _compiled(model: str, precision: str) -> Any:
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY"}
    if precision:
        settings["INFERENCE_PRECISION_HINT"] = precision
    return openvino.Core().compile_model(model, "CPU", settings)


def run(session: Any) -> float:
    """Run the model once, outputs copied as onnxruntime's are; return the seconds."""
    begin = time.perf_counter()
    found = _opened["request"].infer(_opened["feed"])
    for value in found.values():
        np.array(value)
    return time.perf_counter() - begin
