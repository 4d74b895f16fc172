# SPDX-License-Identifier: MIT
"""Encoders by the recipe encoder8: time and accuracy, beside float and other 8 bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from tokenizers import Tokenizer

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import CACHE, read_text
from benchmarks.models.minilm import feeds, float_minilm, padded_batch, sentences
from benchmarks.models.openvino_runs import beside_openvino
from benchmarks.models.real_nets import real_nets
from ortplugins.evaluation import Evaluation, evaluate
from ortplugins.measurement.measure import Candidate, measure
from ortplugins.quantization import quantize
from session_options.plan import entries_of

_L3 = "paraphrase-MiniLM-L3-v2"
_CALIBRATED, _PAIRS = 64, 250
# Of float's time; of 1 - cosine and 1 - agreement; of float's time where padding is cut, too.
_TIME, _LOST, _RAGGED = 0.42, 0.002, 0.1
_SETTINGS = {"intra_op_num_threads": 2}
_MS = 1e3


def measure_encoder8(folder: Path, rounds: int) -> list[Figure]:
    """Quantise two encoders; measure a full batch and a ragged one, and judge a text."""
    path, tokenizer = float_minilm()
    whole = folder / "tokenizer.json"
    tokenizer.save(str(whole))
    net = next(net for net in real_nets() if net.name == _L3)
    return [
        figure
        for name, model in (("MiniLM-L6", path), ("MiniLM-L3", net.path))
        for figure in _encoder(name, model, tokenizer, whole, folder, rounds)
    ]


def _encoder(
    name: str, path: Path, tokenizer: Tokenizer, saved: Path, folder: Path, rounds: int
) -> Iterator[Figure]:
    inputs = {item.name for item in onnx.load(path, load_external_data=False).graph.input}
    samples = [
        {key: array for key, array in feed.items() if key in inputs}
        for feed in feeds(tokenizer, sentences("wiki_calib", _CALIBRATED))
    ]
    ours, dynamic = folder / f"{name}.encoder8.onnx", folder / f"{name}.dynamic.onnx"
    quantize(path, ours, recipe="encoder8", calibration_data_reader=samples, overwrite=True)
    quantize_dynamic(path, dynamic, per_channel=True, weight_type=QuantType.QInt8)
    for what, model, bound in (
        ("encoder8", ours, _LOST),
        ("quantize_dynamic", dynamic, float("nan")),
    ):
        found = _judged(model, path, saved)
        yield Figure(f"{name}, {what}: 1 - cosine", 1 - found.cosine, bound=bound)
        lost = 1 - found.ranking_agreement
        yield Figure(f"{name}, {what}: 1 - ranking agreement", lost, bound=bound)
    short = np.random.default_rng(17).integers(12, 25, 32)
    full, ragged = (
        {key: array for key, array in padded_batch(*batch).items() if key in inputs}
        for batch in (([128] * 8, 128), (short, 256))
    )
    trims = entries_of([ortplugins.TrimPadding.name], cache_dir=str(folder / "cache"))
    plain = Candidate(path, "float", settings=_SETTINGS)
    eight = Candidate(ours, "encoder8", settings=_SETTINGS)
    trimmed = Candidate(ours, "trimmed", settings={**_SETTINGS, **trims})
    other = Candidate(dynamic, "quantize_dynamic", settings=_SETTINGS)
    for what, one, feed, bound in (
        ("encoder8, 8 x 128 tokens: run", eight, full, _TIME),
        ("quantize_dynamic, 8 x 128 tokens: run", other, full, float("nan")),
        ("encoder8 and TrimPadding, 32 x 12 to 24 of 256: run", trimmed, ragged, _RAGGED),
    ):
        pair = measure([one, plain], feed, rounds=rounds, runs=10, lockstep=True)
        times = [_MS * item.run.median if item.run else float("nan") for item in pair]
        yield Figure(f"{name}, {what}", *times, "ms", bound)
    if importlib.util.find_spec("openvino") is not None:
        pair = beside_openvino(eight, path, full, folder, rounds, precision="")
        yield Figure(f"{name}, encoder8, 8 x 128 tokens: run beside OpenVINO", *pair, "ms")


def _judged(model: Path, floats: Path, tokenizer: Path) -> Evaluation:
    read_text("wiki_eval")
    text = CACHE / "wiki_eval.txt"
    return evaluate(model, floats, text=text, tokenizer=tokenizer, pairs=_PAIRS)
