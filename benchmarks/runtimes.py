# SPDX-License-Identifier: MIT
"""Time and accuracy beside onnxruntime and OpenVINO, on one net of each kind."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.minilm import feeds, float_minilm, sentences
from benchmarks.models.openvino_runs import beside_openvino, outputs_of_openvino
from benchmarks.models.real_nets import Net, held_out_nets, real_nets
from benchmarks.sessions.hints import tune
from ortplugins.measurement.measure import Candidate, measure
from ortplugins.quantization import quantize

_KINDS = {
    "MiniLM-L6-v2": "encoder",
    "ch_PP-OCRv4_rec_infer": "text recognition",
    "ch_PP-OCRv4_det_infer": "text detection",
    "layout_cdla": "page layout",
    "SmolLM2-135M, 128 tokens": "decoder, a prompt",
    "SmolLM2-135M, one after 512": "decoder, a token",
}
_PRECISIONS = {"float32": "f32", "default": ""}
_SETTINGS = {"intra_op_num_threads": 2}
_CALIBRATED = 64
_CPU = ["CPUExecutionProvider"]
_MS = 1e3


def measure_runtimes(folder: Path, rounds: int) -> list[Figure]:
    """Measure runs and errors of our hint ``latency`` and of both precisions of OpenVINO.

    Raises:
        RuntimeError: If OpenVINO is not installed, or a model can't be downloaded.
    """
    if importlib.util.find_spec("openvino") is None:
        raise RuntimeError("openvino is not installed: pip install '.[bench]'")
    nets = [net for found in (real_nets(), held_out_nets()) for net in found]
    figures: list[Figure] = []
    for net in sorted((net for net in nets if net.name in _KINDS), key=_order):
        for figure in _net(net, folder, rounds):
            print(figure.what, f"{figure.compared:.3g}", flush=True)
            figures.append(figure)
    return figures


def _order(net: Net) -> int:
    return [*_KINDS].index(net.name)


def _net(net: Net, folder: Path, rounds: int) -> Iterator[Figure]:
    feed = net.feeds()
    name = f"{_KINDS[net.name]}, {net.name.partition(',')[0]}"
    plain = Candidate(net.path, "onnxruntime", settings=_SETTINGS)
    tuned, _ = tune(net.name, net.path, feed, "latency", folder / "hints")
    candidates = {"ours": _with_threads(tuned)}
    if net.name == "MiniLM-L6-v2":
        candidates["encoder8"] = _in_8_bits(net, folder)
    exact = _outputs(plain, feed, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    for what, ours in candidates.items():
        pair = measure([ours, plain], feed, rounds=rounds, runs=20, seconds=1.0, lockstep=True)
        times = [_MS * item.run.median if item.run else math.nan for item in pair]
        yield Figure(f"{name}, {what}: run beside onnxruntime", *times, "ms")
        for precision, given in _PRECISIONS.items():
            both = beside_openvino(ours, net.path, feed, folder, rounds, given)
            yield Figure(f"{name}, {what}: run beside OpenVINO, {precision}", *both, "ms")
        yield Figure(f"{name}, {what}: error", _error(exact, _outputs(ours, feed)))
    for precision, given in _PRECISIONS.items():
        error = _error(exact, outputs_of_openvino(net.path, feed, given))
        yield Figure(f"{name}, OpenVINO, {precision}: error", error)


def _with_threads(ours: Candidate) -> Candidate:
    return dataclasses.replace(ours, name="ours", settings={**_SETTINGS, **ours.settings})


def _in_8_bits(net: Net, folder: Path) -> Candidate:
    _, tokenizer = float_minilm()
    samples = feeds(tokenizer, sentences("wiki_calib", _CALIBRATED))
    written = folder / "encoder8.onnx"
    quantize(
        net.path, written, recipe="encoder8", calibration_data_reader=samples, overwrite=True
    )
    return Candidate(written, "encoder8", settings=_SETTINGS)


def _outputs(
    candidate: Candidate,
    feed: Mapping[str, npt.NDArray[np.generic]],
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> list[npt.NDArray[np.generic]]:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    for key, value in candidate.settings.items():
        if "." in key:
            options.add_session_config_entry(key, str(value))
    session = ortplugins.InferenceSession(candidate.model, options, providers=_CPU)
    found: list[npt.NDArray[np.generic]] = session.run(None, dict(feed))
    return found


def _error(
    exact: Sequence[npt.NDArray[np.generic]], found: Sequence[npt.NDArray[np.generic]]
) -> float:
    """Return the greatest difference of the first outputs over their greatest magnitude."""
    wide = exact[0].astype(np.float64)
    return float(np.abs(wide - found[0]).max() / np.abs(wide).max())
