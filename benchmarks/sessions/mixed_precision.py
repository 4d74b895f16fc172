# SPDX-License-Identifier: MIT
"""What planned precision makes of two 8-bit QDQ models, with a quarter of the activations.

Both are made here by onnxruntime's static quantiser, from float nets on PyPI: MiniLM-L6, a
sentence encoder, and the text direction classifier of PP-OCR, a conv net. Planned on samples
that calibration saw, measured on others, against the float net.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import version_converter
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import fetch_wheel
from benchmarks.models.minilm import feeds, float_minilm, sentences
from ortplugins.static_qdq.plan import PrecisionPlan
from rewrite_rules.mixed_precision_boundaries.place import place_boundaries
from rewrite_rules.remarks import PassContext, Remarks

Feed = dict[str, npt.NDArray[Any]]

_CLASSIFIER = "rapidocr-onnxruntime==1.4.4"  # Apache-2.0
_MEMBER = "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
_SHARE = 0.25
_SEEDS = 5
_RUNS = 15


def measure_mixed_precision(folder: Path, rounds: int) -> list[Figure]:
    """Plan both models; the bounds are those that the planner was built for."""
    # onnxruntime's quantiser logs every tensor that it leaves out.
    logging.getLogger().setLevel(logging.ERROR)
    figures = [*_measure_minilm(folder, rounds), *_measure_classifier(folder)]
    return [*figures, _measure_rewrite(rounds)]


def int8_minilm(folder: Path) -> Path:
    """Quantise MiniLM-L6 to 8-bit QDQ in a folder; return the file."""
    path, tokenizer = float_minilm()
    prepared, quantized = folder / "minilm-pre.onnx", folder / "minilm.int8.onnx"
    whole = folder / "minilm.onnx"
    onnx.save(onnx.load(path), whole)  # the quantiser's preparation finds no external data
    quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(quantized),
        _Reader(feeds(tokenizer, sentences("wiki_calib", 32))),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        op_types_to_quantize=["MatMul"],
    )
    return quantized


def _plan(quantized: Path, samples: list[Feed]) -> PrecisionPlan:
    result = ortplugins.quantize_static_mixed(quantized, None, samples, max_16bit=_SHARE)
    assert result.plan is not None
    return result.plan


def _measure_minilm(folder: Path, rounds: int) -> list[Figure]:
    path, tokenizer = float_minilm()
    samples = feeds(tokenizer, sentences("wiki_calib", 32))
    quantized = int8_minilm(folder)
    net = _Net(path, quantized, feeds(tokenizer, sentences("wiki_eval", 24)))
    figures = []
    start = time.perf_counter()
    plan = _plan(quantized, samples[:8])
    seconds = time.perf_counter() - start
    before, after = (
        net.loss(_run(_session(net.rewritten(names)), net.feeds))
        for names in (frozenset[str](), frozenset(plan.promoted))
    )
    name = f"MiniLM-L6, {len(plan.promoted)} of {plan.activations}"
    figures.append(Figure(f"{name}: 1 - cosine of embeddings, 16 bits", after, bound=0.005))
    figures.append(Figure(f"{name}: the same vs. all u8", after, before))
    figures += _beside_random(name, net, plan)
    figures.append(Figure(f"{name}: time to plan, 8 samples", seconds, unit="s", bound=60))
    item = ortplugins.MixedPrecisionBoundaries(promote=",".join(plan.promoted), mode="float")
    mixed, fused = folder / "minilm.float.onnx", folder / "minilm.fused.onnx"
    ortplugins.optimize(quantized, mixed, passes=[item])
    fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=4, slow_kernels="fuse")
    ortplugins.optimize(quantized, fused, passes=[item, fusion])
    for path, how, bound in (
        (mixed, "in float", 1.6),
        (fused, "in float, level 4", 1.6),
    ):
        loss = net.loss(_run(_session(path, optimised=True), net.feeds))
        figures.append(Figure(f"{name} {how}: 1 - cosine of embeddings", loss, bound=0.005))
        ours, theirs = _interleaved(path, net.quantized, net.feeds[:8], rounds)
        figures.append(Figure(f"{name} {how}: time vs. u8", ours, theirs, "ms", bound))
    return figures


def _measure_classifier(folder: Path) -> list[Figure]:
    path, prepared = folder / "cls.onnx", folder / "cls-pre.onnx"
    with zipfile.ZipFile(fetch_wheel(_CLASSIFIER)) as wheel:
        net = onnx.load_from_string(wheel.read(_MEMBER))
    shape = onnx.helper.make_tensor_type_proto(1, ["n", 3, 48, 192]).tensor_type.shape
    net.graph.input[0].type.tensor_type.shape.CopyFrom(shape)
    onnx.save(version_converter.convert_version(net, 17), str(path))
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    rng = np.random.default_rng(0)
    samples = [_noise(rng) for _ in range(8)]
    quantized = folder / "cls.int8.onnx"
    quantize_static(
        str(prepared),
        str(quantized),
        _Reader(samples),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
    )
    classifier = _Net(path, quantized, [_noise(rng) for _ in range(24)])
    plan = _plan(quantized, samples)
    name = f"PP-OCR cls, {len(plan.promoted)} of {plan.activations}"
    before = classifier.error(frozenset())
    after = classifier.error(frozenset(plan.promoted))
    return [
        Figure(f"{name}: error vs. all i8", after, before, bound=0.5),
        *_beside_random(name, classifier, plan),
    ]


def _measure_rewrite(rounds: int) -> Figure:
    """Seconds that 5,000 nodes take, one operator in five promoted."""
    count = 1667
    text = _long_chain(count)
    promoted = frozenset(f"op{index}" for index in range(0, count, 5))
    times = []
    for _ in range(rounds):
        model = ir.from_proto(text)
        context = PassContext(Remarks("mixed_precision_boundaries"))
        start = time.perf_counter()
        place_boundaries(model, context, promote=promoted)
        times.append(time.perf_counter() - start)
    nodes = len(text.graph.node)
    return Figure(
        f"{nodes} QDQ nodes, {len(promoted)} of {count} operators promoted",
        statistics.median(times),
        unit="s",
        bound=1,
    )


def _long_chain(count: int) -> onnx.ModelProto:
    """Sums of two of the last ten values, each with a grid of its own."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    nodes, tensors, values = [], [], []

    def pair(value: str) -> None:
        grid = [f"{value}_scale", f"{value}_zero"]
        scale = np.float32(rng.uniform(0.01, 0.1))
        tensors.append(onnx.numpy_helper.from_array(scale, grid[0]))
        zero = np.uint8(rng.integers(100, 150))
        tensors.append(onnx.numpy_helper.from_array(zero, grid[1]))
        nodes.append(helper.make_node("QuantizeLinear", [value, *grid], [f"{value}_q"]))
        made = helper.make_node("DequantizeLinear", [f"{value}_q", *grid], [f"{value}_dq"])
        nodes.append(made)
        values.append(f"{value}_dq")

    pair("x")
    for index in range(count):
        read = [values[-1], values[-int(rng.integers(1, min(len(values), 10) + 1))]]
        nodes.append(helper.make_node("Add", read, [f"v{index}"], name=f"op{index}"))
        pair(f"v{index}")
    info = [helper.make_tensor_value_info(name, 1, ["n"]) for name in ("x", values[-1])]
    graph = helper.make_graph(nodes, "chain", info[:1], info[1:], tensors)
    opset = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


def _noise(rng: np.random.Generator) -> Feed:
    """A picture of noise."""
    return {"x": rng.uniform(-1, 1, (1, 3, 48, 192)).astype(np.float32)}


def _beside_random(name: str, net: _Net, plan: PrecisionPlan) -> list[Figure]:
    names = [name for effect in plan.ranking for name in effect.names]
    errors = []
    for seed in range(_SEEDS):
        rng = np.random.default_rng(seed)
        chosen = rng.choice(len(names), len(plan.promoted), replace=False)
        errors.append(net.error(frozenset(names[i] for i in chosen)))
    ours = net.error(frozenset(plan.promoted))
    return [
        Figure(
            f"{name}: error vs. {_SEEDS} random choices",
            ours,
            statistics.mean(errors),
            bound=1.0,
        ),
        Figure(f"{name}: vs. the best of these", ours, min(errors), bound=1.0),
    ]


class _Reader(CalibrationDataReader):
    def __init__(self, samples: Sequence[Feed]) -> None:
        self._samples = iter(samples)

    def get_next(self) -> Feed | None:
        return next(self._samples, None)


@dataclasses.dataclass
class _Net:
    """A float net, its QDQ model, and what both are measured on."""

    path: Path
    quantized: Path
    feeds: list[Feed]

    def __post_init__(self) -> None:
        self._wanted = _run(_session(self.path), self.feeds)

    def rewritten(self, names: frozenset[str], mode: str = "int16") -> Path:
        """Promote tensors; return the model."""
        model = ir.load(self.quantized)
        remarks = Remarks("benchmark")
        in_float = mode == "float"
        place_boundaries(model, PassContext(remarks), promote=names, in_float=in_float)
        if refused := [str(remark) for remark in remarks if remark.outcome == "refused"]:
            raise RuntimeError(f"the rewrite refused {refused}")
        path = self.quantized.with_suffix(f".{mode}.onnx")
        ir.save(model, path)
        return path

    def error(self, names: frozenset[str], mode: str = "int16") -> float:
        """Squared error relative to the float net's energy."""
        found = _run(_session(self.rewritten(names, mode)), self.feeds)
        pairs = list(zip(found, self._wanted, strict=True))
        energy = sum(float(np.square(wanted).sum()) for _, wanted in pairs)
        return sum(float(np.square(x - wanted).sum()) for x, wanted in pairs) / energy

    def loss(self, found: Sequence[npt.NDArray[Any]]) -> float:
        """1 - cosine of the mean over the tokens to the float net's, the mean over texts."""
        cosines = []
        for x, wanted in zip(found, self._wanted, strict=True):
            a, b = x[0].mean(axis=0), wanted[0].mean(axis=0)
            cosines.append(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
        return 1 - statistics.mean(cosines)


def _session(path: Path, *, optimised: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: ort.InferenceSession, samples: Sequence[Feed]) -> list[npt.NDArray[Any]]:
    return [session.run(None, feed)[0] for feed in samples]


def _interleaved(
    first: Path, second: Path, samples: Sequence[Feed], rounds: int
) -> tuple[float, float]:
    """Milliseconds of all samples in each, medians; one after the other, 2 threads."""
    sessions = [_session(path, optimised=True) for path in (first, second)]
    times: list[list[float]] = [[], []]
    for number in range(2 + _RUNS * max(1, rounds // 5)):
        for session, seconds in zip(sessions, times, strict=True):
            start = time.perf_counter()
            _run(session, samples)
            if number >= 2:
                seconds.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    import tempfile

    from benchmarks.figures.bounds import table

    with tempfile.TemporaryDirectory() as work:
        result = measure_mixed_precision(Path(work), 5)
    print(table(result))
    sys.exit(not all(figure.holds for figure in result))
