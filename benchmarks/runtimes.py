# SPDX-License-Identifier: MIT
"""Time and accuracy against onnxruntime and OpenVINO, on one net of each kind."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.minilm import feeds, float_minilm, sentences
from benchmarks.models.openvino_runs import beside_openvino, outputs_of_openvino
from benchmarks.models.real_nets import Net, held_out_nets, real_nets
from benchmarks.sessions.conv_fusion import difference, exact_outputs
from benchmarks.sessions.passes import hinted
from ortplugins.measurement.measure import Candidate, measure
from ortplugins.quantization import quantize_encoder8

_KINDS = {
    "MiniLM-L6-v2": "encoder",
    "ch_PP-OCRv4_rec_infer": "recogniser",
    "ch_PP-OCRv4_det_infer": "detector",
    "layout_cdla": "page layout",
    "SmolLM2-135M, 128 tokens": "decoder, a prompt",
    "SmolLM2-135M, one after 512": "decoder, a token",
}
_PRECISIONS = {"float32": "f32", "default": ""}
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
    plain = Candidate(net.path, "onnxruntime")
    candidates = {"ours": hinted(net.path, "latency", folder / "hints")}
    if net.name == "MiniLM-L6-v2":
        candidates["encoder8"] = _in_8_bits(net, folder)
    exact = exact_outputs(net.path, feed)[0]
    for what, ours in candidates.items():
        pair = measure([ours, plain], feed, rounds=rounds, runs=20, seconds=1.0, lockstep=True)
        times = [_MS * item.run.median if item.run else math.nan for item in pair]
        yield Figure.versus(f"{name}, {what}: run vs. onnxruntime", times, "ms")
        for precision, given in _PRECISIONS.items():
            both = beside_openvino(ours, net.path, feed, folder, rounds, given)
            yield Figure.versus(f"{name}, {what}: run vs. OpenVINO, {precision}", both, "ms")
        yield Figure(f"{name}, {what}: error", difference(exact, _outputs(ours, feed)[0]))
    for precision, given in _PRECISIONS.items():
        error = difference(exact, outputs_of_openvino(net.path, feed, given)[0])
        yield Figure(f"{name}, OpenVINO, {precision}: error", error)


def _in_8_bits(net: Net, folder: Path) -> Candidate:
    _, tokenizer = float_minilm()
    samples = feeds(tokenizer, sentences("wiki_calib", _CALIBRATED))
    written = folder / "encoder8.onnx"
    quantize_encoder8(net.path, written, calibration_data_reader=samples, overwrite=True)
    return Candidate(written, "encoder8")


def _outputs(ours: Candidate, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    for key, value in ours.settings.items():
        if "." in key:
            options.add_session_config_entry(key, str(value))
    session = ortplugins.InferenceSession(ours.model, options, providers=_CPU)
    found: list[np.ndarray] = session.run(None, feed)
    return found
