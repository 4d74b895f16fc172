# SPDX-License-Identifier: MIT
"""What it costs to run MiniLM-L6 on padded batches, with and without TrimPadding."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.minilm import float_minilm, padded_batch
from ortplugins.measurement.measure import Candidate, measure
from ortplugins.quantization import quantize
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.trim_padding.trim import trim_padding
from session_options.plan import entries_of

Feed = dict[str, npt.NDArray[np.int64]]

_BATCH, _PADDED = 32, 256
_FILLS = (16, 64, 128, 192)
_LEVEL = {"session.qdq_matmulnbits_accuracy_level": "4"}
_MS = 1e3


def measure_trim_padding(folder: Path, rounds: int) -> list[Figure]:
    """Measure short texts, filled ones and those between; float and int4."""
    path, _ = float_minilm()
    rng = np.random.default_rng(17)
    short = padded_batch(rng.integers(12, 25, _BATCH), _PADDED)
    int4 = folder / "minilm.int4.onnx"
    quantize(path, int4)
    figures = [
        _beside(
            "32 texts of 12 to 24 tokens, padded to 256", path, short, folder, rounds, 0.1
        ),
        _beside("the same, int4 at level 4", int4, short, folder, rounds, 0.12, int4=True),
        _beside(
            "1 text of 16 tokens, padded to 256",
            path,
            padded_batch([16], _PADDED),
            folder,
            rounds,
        ),
        _beside(
            "8 texts of 128 tokens, not padded",
            path,
            padded_batch([128] * 8, 128),
            folder,
            rounds,
            1.01,
        ),
    ]
    mixed = padded_batch(rng.integers(8, 129, _BATCH), 128)
    what = "32 texts of 8 to 128 of 128 tokens"
    figures += [
        _beside(what, path, mixed, folder, rounds),
        _beside(f"{what}, packed", path, mixed, folder, rounds, 0.7, pack=True),
    ]
    for longest in _FILLS:
        feed = padded_batch([longest] * 8, _PADDED)
        what = f"8 texts of {longest} tokens, padded to 256"
        figures.append(_beside(what, path, feed, folder, rounds))
    return [*figures, _real_difference(path, short), _cost_of_the_pass(path, rounds)]


def _beside(
    what: str,
    path: Path,
    feed: Feed,
    folder: Path,
    rounds: int,
    bound: float = math.nan,
    int4: bool = False,
    pack: bool = False,
) -> Figure:
    settings = {"intra_op_num_threads": 2, **(_LEVEL if int4 else {})}
    fusion = [ortplugins.DqMatMulNBitsFusion.name] if int4 else []
    passes, packs = [ortplugins.TrimPadding.name, *fusion], str(int(pack))
    entries = entries_of(passes, {"trim_padding.pack": packs}, cache_dir=str(folder / "cache"))
    candidates = [
        Candidate(path, "plain", settings=settings),
        Candidate(path, "trimmed", settings={**settings, **entries}),
    ]
    plain, trimmed = (
        _MS * item.run.median if item.run is not None else math.nan
        for item in measure(candidates, feed, rounds=rounds, runs=3, lockstep=True)
    )
    return Figure(f"MiniLM-L6, {what}", trimmed, plain, "ms", bound)


def _real_difference(path: Path, feed: Feed) -> Figure:
    trimmed = ortplugins.optimize(path, passes=[ortplugins.TrimPadding()]).model
    whole = ir.load(path)
    real = feed["attention_mask"].astype(bool)
    a, b = (_run(model, feed)[real] for model in (whole, trimmed))
    share = float(np.abs(a - b).max() / np.abs(a).max())
    return Figure("MiniLM-L6: greatest difference at real positions", share, bound=1e-6)


def _run(model: ir.Model, feed: Feed) -> npt.NDArray[np.float32]:
    ir.external_data.load_to_model(model)
    content = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    found: npt.NDArray[np.float32] = session.run(None, feed)[0]
    return found


def _cost_of_the_pass(path: Path, rounds: int) -> Figure:
    seconds = []
    for _ in range(rounds):
        model = ir.load(path)
        _lengthen(model, 5000)
        start = time.perf_counter()
        trim_padding(model, PassContext(Remarks("trim_padding")))
        seconds.append(time.perf_counter() - start)
    return Figure("the pass on 5,000 nodes", float(np.median(seconds)), unit="s", bound=1)


def _lengthen(model: ir.Model, nodes: int) -> None:
    """Repeat the last layer's normalisation until the graph has so many nodes."""
    last = model.graph.outputs[0].producer()
    assert last is not None
    scale, bias = last.inputs[1:3]
    value = model.graph.outputs[0]
    while len(model.graph) < nodes:
        doubled = ir.node("Add", [value, value])
        normal = ir.node("LayerNormalization", [doubled.outputs[0], scale, bias])
        for node in (doubled, normal):
            node.outputs[0].name = f"repeated{len(model.graph)}"
            model.graph.append(node)
        value = normal.outputs[0]
    value.type, value.shape = model.graph.outputs[0].type, model.graph.outputs[0].shape
    model.graph.outputs[0] = value
