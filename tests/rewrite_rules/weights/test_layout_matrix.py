# SPDX-License-Identifier: MIT
"""Each layout of a weight is fused or refused as its table says, and right either way."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import (
    DequantizedMatMul,
    Quantized,
    fuse_weights,
    relative_error,
    run,
)
from builders.layout_matrix import LayoutCase, layout_cases, pairwise
from builders.quantized_files import nodes_of
from builders.same_numbers import holds_halves, session
from builders.samples import Reader
from builders.text_models import T, text_model
from onnxruntime import quantization
from onnxruntime.quantization import matmul_nbits_quantizer as nbits

import ortplugins
from rewrite_rules.remarks import Outcome, Remark

KERNEL_BLOCKS = {16, 32, 64, 128, 256}


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Nodes of the graph, of every body and of every function."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.graph.all_nodes()


def check_numbers(outputs: list[npt.NDArray], case: LayoutCase) -> None:
    for actual, expected in zip(outputs, case.reference, strict=True):
        assert 1e-3 < np.abs(expected).max() < 2e4, "too small or too large to compare"
        assert actual.shape == expected.shape
        assert np.isfinite(actual).all()
        assert relative_error(actual, expected) <= case.tolerance


def mentions(remark: Remark, name: str) -> bool:
    # Inlining a function may number the names inside it.
    return re.search(rf"{re.escape(name)}(_\d+)?(?!\w)", str(remark)) is not None


def check_fused(model: ir.Model, case: LayoutCase) -> None:
    """Counts of operators, and what only some cases say about the fused nodes."""
    found = Counter(node.op_type for node in all_nodes(model))
    assert {name: found[name] for name in case.expect} == case.expect
    nodes = [node for node in all_nodes(model) if node.op_type == "MatMulNBits"]
    sizes = {node.attributes["block_size"].as_int() for node in nodes}
    assert sizes <= KERNEL_BLOCKS
    if case.zero_points is not None:
        given = {len(node.inputs) > 3 and node.inputs[3] is not None for node in nodes}
        assert given == {case.zero_points}
    if case.stored_weights is not None:
        assert len({node.inputs[1] for node in nodes}) == case.stored_weights


def codes_are_constant(node: ir.Node) -> bool:
    codes = node.inputs[0].producer()
    return codes is None or codes.op_type != "QuantizeLinear"


CASES = pairwise(layout_cases(), lambda case: case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout(case: LayoutCase):
    model = case.build()
    before = ir.to_proto(model).SerializeToString()
    names = [
        node.name
        for node in all_nodes(model)
        if node.op_type == "DequantizeLinear" and codes_are_constant(node)
    ]
    check_numbers(run(model, case.feeds), case)

    remarks = fuse_weights(model)

    proto = ir.to_proto(model)
    refusals = [str(remark) for remark in remarks if remark.outcome is Outcome.REFUSED]
    if case.refusal is not None:
        assert any(case.refusal in text for text in refusals), refusals
    for name in names:
        assert any(mentions(remark, name) for remark in remarks), f"{name} has no remark"
    if proto.SerializeToString() == before:
        assert not case.expect, refusals
        return
    assert case.expect, "should have stayed as it is"
    check_fused(model, case)
    for optimised in (False, True):
        check_numbers(run(proto, case.feeds, optimised=optimised), case)


def test_matrix_is_whole():
    names = [case.name for case in layout_cases()]
    assert len(names) == len(set(names)) == 615


# Accuracy level ``auto``: onnxruntime's own where it is sure to fuse a node, 0 elsewhere.


NATIVE_FUSION = "QDQSelectorActionTransformer"
LEVEL = "session.qdq_matmulnbits_accuracy_level"


def fused_nodes(path: Path) -> list[onnx.NodeProto]:
    nodes = nodes_of(onnx.load(path, load_external_data=False))
    return [node for node in nodes if node.op_type == "MatMulNBits"]


def level_of(node: onnx.NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "accuracy_level"), 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_onnxruntime_decides(case, tmp_path):
    """Level 4 where onnxruntime has it only, and errors no larger than onnxruntime's.

    What quantisers write has level 4 wherever onnxruntime has it.
    """
    try:
        stock = session(case.build(), optimised=True, final=tmp_path / "stock.onnx")
    except Exception:  # onnxruntime breaks on some layouts: there is nothing to compare
        return
    theirs = stock.run(None, case.feeds)
    ortplugins.optimize(case.build(), tmp_path / "ours.onnx")
    ours = session(str(tmp_path / "ours.onnx"), optimised=True).run(None, case.feeds)
    for actual, stocks, expected in zip(ours, theirs, case.reference, strict=True):
        bound = max(relative_error(stocks, expected), case.tolerance) + 1e-5
        assert relative_error(actual, expected) <= bound or not np.isfinite(bound)
    level_4 = [node for node in fused_nodes(tmp_path / "ours.onnx") if level_of(node) == 4]
    native = fused_nodes(tmp_path / "stock.onnx")
    assert len(level_4) <= len(native)
    if re.match(r"axis0-\w+-block|(gemm|channels)-u?int\d-", case.name):
        assert len(level_4) == len(native) == case.expect["MatMulNBits"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_level_4_rounds_activations_and_nothing_else(case, tmp_path):
    level_4 = ortplugins.DqMatMulNBitsFusion("4", slow_kernels="fuse")
    ortplugins.optimize(case.build(), tmp_path / "ours.onnx", passes=[level_4])
    found = session(str(tmp_path / "ours.onnx")).run(None, case.feeds)
    for actual, expected in zip(found, case.reference, strict=True):
        assert relative_error(actual, expected) < 0.1


def session_level(
    folder: Path, attributes: dict[str, str], entries: dict[str, str], **arguments: object
) -> int:
    """The level of the one MatMulNBits node in a session through ortplugins."""
    path = folder / "model.onnx"
    ir.save(DequantizedMatMul(64, 16, 32, "uint4").model(), path)
    options = ort.SessionOptions()
    for name, value in attributes.items():
        setattr(options, name, getattr(ort.GraphOptimizationLevel, value))
    ortplugins.configure(options, cache_dir=str(folder / "cache"), bake=False)
    options.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")
    for key, text in entries.items():
        options.add_session_config_entry(key, text)
    made = ortplugins.InferenceSession(path, options, **arguments)
    (node,) = fused_nodes(Path(made.ortplugins_report.artifact))
    return level_of(node)


EXPLICIT = "ortplugins.dq_matmulnbits_fusion.accuracy_level"


@pytest.mark.parametrize(
    ("level", "entries", "expected"),
    [
        ("ORT_ENABLE_ALL", {}, 4),
        ("ORT_ENABLE_EXTENDED", {}, 4),
        ("ORT_ENABLE_BASIC", {}, 0),
        ("ORT_DISABLE_ALL", {}, 0),
        ("ORT_ENABLE_ALL", {LEVEL: "0"}, 0),
        ("ORT_ENABLE_ALL", {LEVEL: "1"}, 1),
        ("ORT_ENABLE_ALL", {"session.disable_quant_qdq": "1"}, 0),
        ("ORT_ENABLE_ALL", {"optimization.disable_specified_optimizers": NATIVE_FUSION}, 0),
        # An explicit level holds everywhere.
        ("ORT_ENABLE_ALL", {EXPLICIT: "0", LEVEL: "2"}, 0),
        ("ORT_DISABLE_ALL", {EXPLICIT: "4", LEVEL: "2"}, 4),
    ],
)
def test_options_of_the_session(level, entries, expected, tmp_path):
    attributes = {"graph_optimization_level": level}
    assert session_level(tmp_path, attributes, entries) == expected


def test_the_argument_disabled_optimizers(tmp_path):
    assert session_level(tmp_path, {}, {}, disabled_optimizers=[NATIVE_FUSION]) == 0


AS_FUSED, NOT = "4 (auto: as onnxruntime fuses it)", "0 (auto: onnxruntime may not fuse it, "
LEVELS = [
    ("y = MatMul (x, W)", "auto", AS_FUSED),
    ("y = MatMul (x, W)", "0", "accuracy_level 0"),
    ("y = Gemm (x, W)", "auto", AS_FUSED),
    ("y = Gemm (x, W, b)", "auto", AS_FUSED),
    ("m = MatMul (x, W)  y = Tanh (m)", "auto", AS_FUSED),
    ("m = MatMul (x, W)  y = Relu (m)", "auto", f"{NOT}Relu follows)"),
    ("m = MatMul (x, W)  a = Add (m, b)  y = Relu (a)", "auto", f"{NOT}Relu follows)"),
    ("m = MatMul (x, W)  y = Add (m, b)", "auto", AS_FUSED),
    ("m = MatMul (x, W)  y = Add (z, m)", "auto", f"{NOT}its Add is not a bias [N])"),
    ("y = MatMul (x, W)  n = MatMul (x, W)", "auto", f"{NOT}the weight is shared)"),
    ("V = DequantizeLinear (v, steps)  y = MatMul (x, V)", "auto", AS_FUSED),
]


@pytest.mark.parametrize(("text", "level", "reason"), LEVELS)
def test_remarks_name_the_level_and_why(text, level, reason):
    codes, steps = np.eye(64, 16, dtype=np.int8), np.ones(16, np.float32)
    constants = {"b": (16,), "v": codes, "steps": steps}
    more = {"constants": constants, "inputs": {"z": (3, 16)}}
    case = LayoutCase("levels", f"W = $w  {text}", Quantized((64, 16)), (3, 64), **more)
    fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=level)
    fired = ortplugins.optimize(case.build(), passes=[fusion]).report.fired
    assert fired[0].reason.endswith(reason)


# What onnxruntime's own quantizers write fuses; they are run, not imitated.


Arrays = dict[str, npt.NDArray]


def weights_left(model: ir.Model) -> set[str]:
    """The DequantizeLinear on constants."""
    return {
        str(node.name)
        for node in all_nodes(model)
        if node.op_type == "DequantizeLinear"
        and node.inputs[0] is not None
        and node.inputs[0].const_value is not None
    }


def check(proto: onnx.ModelProto, feeds: Arrays, matmulnbits: int, left: int = 0) -> None:
    """Fuse, and compare numbers and counts; of the weights left, each has a remark."""
    model = ir.from_proto(proto)
    remarks = fuse_weights(model)
    found = Counter(node.op_type for node in all_nodes(model))
    assert (found["MatMulNBits"], found["GatherBlockQuantized"]) == (matmulnbits, 0), remarks
    names = weights_left(model)
    reported = " ".join(str(remark) for remark in remarks if remark.outcome != "fired")
    assert [name in reported for name in names] == [True] * left, remarks
    for actual, expected in zip(run(model, feeds), run(proto, feeds), strict=True):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) <= (2e-3 if holds_halves(proto) else 1e-5)


def float_model(
    K: int = 64, N: int = 48, dtype: type = np.float32
) -> tuple[onnx.ModelProto, Arrays]:
    """Gather, MatMul + Relu, MatMul on a [1, K, N] weight, Gemm(transB)."""
    text = """[gather] embedded = Gather (embed, ids)
        [m1] a = MatMul (embedded, w1)  b = Relu (a)  [m2] c = MatMul (b, w2)  d = Tanh (c)
        [gemm] e = Gemm <transB = 1> (d, w3, c3)  f = Tanh (e)  [m4] logits = MatMul (f, w4)"""
    shapes = {"embed": (20, K), "w1": (K, N), "w2": (N, 40), "w3": (24, 40), "c3": (24,)}
    arrays = random(dtype, **shapes, w4=(1, 24, 20))
    kind = T.FLOAT if dtype is np.float32 else T.FLOAT16
    inputs = {"ids": (T.INT64, ["batch"])}
    model = text_model(text, arrays, inputs, ["logits"], output_type=kind)
    return model, {"ids": np.arange(8)}


def random(dtype: type, **shapes: tuple[int, ...]) -> Arrays:
    """Random arrays such that products stay near 1."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / shape[-2:][0] ** 0.5).astype(dtype)
        for name, shape in shapes.items()
    }


def quantise_matmul_nbits(source: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """MatMulNBitsQuantizer, QuantFormat.QDQ, algorithm "default".

    Writes DQ(axis=0, block_size) + MatMul; int4 when symmetric, else uint4 with zero points
    of the scales' shape. ``channel_wised_quantize`` writes one block of K, which need be no
    power of two: symmetric as [N, K], scales [N, 1], axis 1 and a Transpose, else as [K, N],
    scales [1, N]. A weight [1, K, N] is squeezed and the output reshaped. Gemm stays
    float, and so do 8-bit weights; Gather and 2 bits fail an assertion.
    """
    config = nbits.DefaultWeightOnlyQuantConfig(
        quant_format=quantization.QuantFormat.QDQ, **options
    )
    quantizer = nbits.MatMulNBitsQuantizer(source, algo_config=config)
    quantizer.process()
    return quantizer.model.model


def quantise_static(kind: str, path: Path, **options: Any) -> tuple[onnx.ModelProto, Arrays]:
    """quantize_static, QuantFormat.QDQ, activations uint8.

    Weights: per tensor with scale and zero point of rank 0, or per channel with [N] on the
    output axis (1 for MatMul, 0 for Gemm transB=1; 1 also for a weight [1, K, N], where it is
    K). Zero points are always written. The Gemm's bias is int32, scale [1] with a zero point
    of rank 0, or both [N]. Gather's table is uint8 with the scale of its output.
    """
    text = "a = MatMul (x, w)  b = Gemm <transB = 1> (x, v, bias)"  # of one input
    arrays = random(np.float32, w=(64, 48), v=(24, 64), bias=(24,))
    source, feeds = text_model(text, arrays, outputs=["a", "b"]), random(np.float32, x=(5, 64))
    quantization.quantize_static(
        source,
        path,
        Reader([feeds]),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType[kind],
        **options,
    )
    return onnx.load(path), feeds


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("K", "N"), [(64, 48), (70, 33)])
@pytest.mark.parametrize("block_size", [16, 32, 128, 256, 512, "channel"])
def test_matmul_nbits_quantizer(K, N, block_size, dtype, symmetric):
    source, feeds = float_model(K, N, dtype)
    blocks = {"block_size": block_size}
    if block_size == "channel":
        blocks = {"channel_wised_quantize": True}
    proto = quantise_matmul_nbits(source, is_symmetric=symmetric, **blocks)
    assert Counter(node.op_type for node in proto.graph.node)["DequantizeLinear"] == 3
    check(proto, feeds, matmulnbits=3)


# Without it each product is quantised again, and a difference of one rounding is a whole step.
FLOAT_OUTPUTS = {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]}


@pytest.mark.parametrize("outputs", [{}, FLOAT_OUTPUTS], ids=["quantised", "float"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt8", "QUInt8", "QInt4", "QUInt4"])
def test_static_quantisation_fuses_at_4_bits(kind, per_channel, outputs, tmp_path):
    """8 bits are left to onnxruntime, the Gemm's bias too."""
    options = {"per_channel": per_channel, "extra_options": outputs}
    proto, feeds = quantise_static(kind, tmp_path / "static.onnx", **options)
    if kind.endswith("8"):
        check(proto, feeds, 0, left=3)
    elif outputs:
        check(proto, feeds, 2, left=1)  # the Gemm's bias is added
