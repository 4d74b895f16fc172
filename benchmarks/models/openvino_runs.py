# SPDX-License-Identifier: MIT
"""Runs a net by OpenVINO in float32, by ``SessionProcess.call`` in a process of its own."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

_opened: dict[str, Any] = {}


def start(session: Any, model: str, feed: str) -> float:
    """Compile a model, read its inputs; return the seconds that compiling took."""
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    begin = time.perf_counter()
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    seconds = time.perf_counter() - begin
    with np.load(feed, allow_pickle=False) as file:
        names = json.loads(str(file["names"]))
        _opened["feed"] = {name: file[f"input{i}"] for i, name in enumerate(names)}
    _opened["request"] = compiled.create_infer_request()
    return seconds


def run(session: Any) -> float:
    """Run the model once, outputs copied as onnxruntime's are; return the seconds."""
    begin = time.perf_counter()
    found = _opened["request"].infer(_opened["feed"])
    for value in found.values():
        np.array(value)
    return time.perf_counter() - begin
