# SPDX-License-Identifier: MIT
"""Encoders by encoder8: time and accuracy, against float and other 8 bits."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxscript import TapeBuilder
from tokenizers import Tokenizer

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import CACHE, read_text
from benchmarks.models.minilm import (
    embeddings,
    feeds,
    float_minilm,
    padded_batch,
    sentences,
)
from benchmarks.models.openvino_runs import beside_openvino, outputs_of_openvino
from benchmarks.models.real_nets import real_nets
from ortplugins.evaluation import Evaluation, evaluate
from ortplugins.measurement.measure import Candidate, measure
from ortplugins.quantization import quantize_encoder8
from session_options.plan import entries_of

_L3 = "paraphrase-MiniLM-L3-v2"
_CALIBRATED, _TEXTS = 64, 250
# Of the classifier: eighths of a text, paragraphs of each that it learns and that it is asked.
_CLASSES, _LEARNT, _ASKED, _RIDGE = 8, 80, 40, 0.1
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
    found = [
        figure
        for name, model in (("MiniLM-L6", path), ("MiniLM-L3", net.path))
        for figure in _encoder(name, model, tokenizer, whole, folder, rounds)
    ]
    return [*found, *_classifier(path, tokenizer, folder)]


def _encoder(
    name: str, path: Path, tokenizer: Tokenizer, saved: Path, folder: Path, rounds: int
) -> Iterator[Figure]:
    inputs = {item.name for item in onnx.load(path, load_external_data=False).graph.input}
    samples = [
        {key: array for key, array in feed.items() if key in inputs}
        for feed in feeds(tokenizer, sentences("wiki_calib", _CALIBRATED))
    ]
    ours, dynamic = folder / f"{name}.encoder8.onnx", folder / f"{name}.dynamic.onnx"
    quantize_encoder8(path, ours, calibration_data_reader=samples, overwrite=True)
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
        ("encoder8, TrimPadding, 32 x 12-24 of 256: run", trimmed, ragged, _RAGGED),
    ):
        pair = measure([one, plain], feed, rounds=rounds, runs=10, lockstep=True)
        times = [_MS * item.run.median if item.run else float("nan") for item in pair]
        yield Figure.versus(f"{name}, {what}", times, "ms", bound)
    others = [("OpenVINO", path)] if importlib.util.find_spec("openvino") else []
    if others and importlib.util.find_spec("nncf"):
        others.append(("OpenVINO, int8 by nncf", _by_nncf(path, samples, folder)))
    for what, model in others:
        both = beside_openvino(eight, model, full, folder, rounds, precision="")
        what = f"{name}, encoder8, 8 x 128 tokens: run vs. {what}"
        yield Figure.versus(what, both, "ms")
    if len(others) > 1:
        lost = 1 - _cosine_to(path, others[1][1], samples[:16])
        yield Figure(f"{name}, int8 by nncf: 1 - cosine on calibrated texts", lost)


def _by_nncf(path: Path, samples: list[dict[str, Any]], folder: Path) -> Path:
    """Quantise a model for OpenVINO, on the samples that encoder8 has."""
    nncf, openvino = map(importlib.import_module, ("nncf", "openvino"))
    model = openvino.Core().read_model(path)
    kind = nncf.ModelType.TRANSFORMER
    found = nncf.quantize(
        model, nncf.Dataset(samples), model_type=kind, subset_size=len(samples)
    )
    output = folder / f"{path.stem}.nncf.xml"
    openvino.save_model(found, output)
    return output


def _cosine_to(path: Path, other: Path, samples: list[dict[str, Any]]) -> float:
    """Return the mean cosine of embeddings by OpenVINO to those of a float model."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    cosines = []
    for feed in samples:
        both = session.run(None, feed)[0], outputs_of_openvino(other, feed, "")[0]
        a, b = (each.reshape(-1, each.shape[-1]).mean(axis=0) for each in both)
        cosines.append(float(a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)))
    return float(np.mean(cosines))


def _classifier(path: Path, tokenizer: Tokenizer, folder: Path) -> Iterator[Figure]:
    """Yield what 8 bits change of a classifier on MiniLM-L6: which eighth of a text is this?

    Its head is a ridge regression on the means of tokens; paragraphs that it has not seen are
    classified by the whole model, the head included, in float and in 8 bits.
    """
    paragraphs = [text for text in read_text("wiki_eval").split("\n\n") if len(text) > 200]
    size = len(paragraphs) // _CLASSES
    each = np.linspace(0, size - 1, _LEARNT + _ASKED).astype(int)
    places = each + size * np.arange(_CLASSES)[:, None]
    held_out = np.arange(len(each)) % ((_LEARNT + _ASKED) // _ASKED) == 1
    learnt, asked = (
        feeds(tokenizer, [paragraphs[place] for place in some.reshape(-1)])
        for some in (places[:, ~held_out], places[:, held_out])
    )
    means = embeddings(path, learnt).astype(np.float64)
    wanted = np.eye(_CLASSES).repeat(_LEARNT, axis=0)
    squares = means.T @ means + _RIDGE * np.eye(means.shape[1])
    head = np.linalg.solve(squares, means.T @ (wanted - wanted.mean()))
    model, ours, dynamic = (folder / f"classifier{i}.onnx" for i in range(3))
    _with_head(path, head.astype(np.float32), model)
    samples = feeds(tokenizer, sentences("wiki_calib", _CALIBRATED))
    quantize_encoder8(model, ours, calibration_data_reader=samples, overwrite=True)
    quantize_dynamic(model, dynamic, per_channel=True, weight_type=QuantType.QInt8)
    labels = np.arange(_CLASSES).repeat(_ASKED)
    exact = _logits(model, asked)
    right = float((exact.argmax(axis=1) == labels).mean())
    for what, file in (("encoder8", ours), ("quantize_dynamic", dynamic)):
        name, found = f"classifier on MiniLM-L6, {what}", _logits(file, asked)
        other = float((found.argmax(axis=1) != exact.argmax(axis=1)).mean())
        yield Figure(f"{name}: labels that differ from float's", other)
        error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        yield Figure(f"{name}: relative error of logits", error)
        share = float((found.argmax(axis=1) == labels).mean())
        yield Figure(f"{name}: right labels", share, right)


def _with_head(path: Path, head: npt.NDArray[np.float32], output: Path) -> None:
    """Write an encoder with the mean of tokens, of length 1, and a product behind it."""
    model, op = ir.load(path), TapeBuilder()
    (hidden,) = model.graph.outputs
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")

    def constant(numbers: npt.ArrayLike) -> ir.Value:
        made: ir.Value = op.Constant(value=ir.tensor(np.asarray(numbers)))
        return made

    real = op.Unsqueeze(op.Cast(mask, to=ir.DataType.FLOAT), constant([-1]))
    total = op.ReduceSum(op.Mul(hidden, real), constant([1]), keepdims=0)
    logits = op.MatMul(op.LpNormalization(total, axis=-1, p=2), constant(head))
    logits.name, logits.dtype = "logits", ir.DataType.FLOAT
    logits.shape = ir.Shape(["batch", head.shape[1]])
    model.graph.extend(op.nodes)
    model.graph.outputs[:] = [logits]
    ir.save(model, output, external_data=f"{output.name}.data")


def _logits(path: Path, asked: list[dict[str, npt.NDArray[np.int64]]]) -> npt.NDArray[Any]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, feed)[0] for feed in asked])


def _judged(model: Path, floats: Path, tokenizer: Path) -> Evaluation:
    read_text("wiki_eval")
    text = CACHE / "wiki_eval.txt"
    return evaluate(model, floats, text=text, tokenizer=tokenizer, texts=_TEXTS)
