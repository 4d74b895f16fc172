# SPDX-License-Identifier: MIT
"""What exporters write fuses: their layouts, and onnxruntime's own quantizers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import relative_error, run
from builders.exporter_layouts import (
    LAYOUTS,
    Layout,
    float_branches,
    float_model,
    imported,
    quantise_dynamic,
    quantise_matmul_nbits,
    quantise_static,
)

from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks

EXACT = FusionOptions(accuracy_level=0, slow_kernels="fuse")
CPU = ("CPUExecutionProvider",)


def apply(model: ir.Model) -> list[Remark]:
    remarks = Remarks("dq_matmulnbits_fusion")
    fuse(model, EXACT, PassContext(remarks, CPU))
    return list(remarks)


def nodes(model: ir.Model) -> list[ir.Node]:
    return list(model.graph.all_nodes())


def counts(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in nodes(model))


def weights_left(model: ir.Model) -> set[str]:
    """The DequantizeLinear on constants."""
    return {
        str(node.name)
        for node in nodes(model)
        if node.op_type == "DequantizeLinear"
        and node.inputs[0] is not None
        and node.inputs[0].const_value is not None
    }


def bound(model: ir.Model) -> float:
    """2e-3 where numbers are rounded to float16 on the way, else 1e-5."""
    halves = any(
        value.dtype == ir.DataType.FLOAT16
        for node in nodes(model)
        for value in (*node.inputs, *node.outputs)
        if value is not None
    )
    return 2e-3 if halves else 1e-5


def check(layout: Layout) -> list[Remark]:
    """Fuse, and compare the node counts, the remarks and the numbers."""
    model = layout.model
    remarks = apply(model)
    found = counts(model)
    assert found["MatMulNBits"] == layout.matmulnbits, remarks
    assert found["GatherBlockQuantized"] == layout.gathers, remarks
    assert weights_left(model) == set(layout.left), remarks
    refused = [str(remark) for remark in remarks if remark.outcome == "refused"]
    for name, word in layout.left.items():
        assert any(name in text and word in text for text in refused), remarks
    onnx.checker.check_model(ir.to_proto(model))
    for actual, expected in zip(run(model, layout.feeds), layout.reference, strict=True):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) <= bound(model)
    return remarks


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_builders_write_what_onnxruntime_runs(name: str):
    layout = LAYOUTS[name]()
    onnx.checker.check_model(ir.to_proto(layout.model), full_check=True)
    for actual, expected in zip(
        run(layout.model, layout.feeds), layout.reference, strict=True
    ):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) <= bound(layout.model)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fuses(name: str):
    check(LAYOUTS[name]())


# onnxruntime.quantization.matmul_nbits_quantizer.


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("K", "N"), [(64, 48), (70, 33)])
@pytest.mark.parametrize("block_size", [16, 32, 128, 256, 512, "channel"])
def test_matmul_nbits_quantizer(
    K: int, N: int, block_size: int | str, dtype: type, symmetric: bool
):
    source, feeds = float_model(K, N, dtype)
    blocks = {"block_size": block_size}
    if block_size == "channel":
        blocks = {"channel_wised_quantize": True}
    proto = quantise_matmul_nbits(source, is_symmetric=symmetric, **blocks)
    assert Counter(node.op_type for node in proto.graph.node)["DequantizeLinear"] == 3
    check(imported(proto, feeds, matmulnbits=3))


def test_matmul_nbits_quantizer_blocks_of_8_have_no_kernel():
    source, feeds = float_model()
    proto = quantise_matmul_nbits(source, block_size=8, is_symmetric=True)
    names = [node.name for node in proto.graph.node if node.op_type == "DequantizeLinear"]
    check(imported(proto, feeds, 0, left=dict.fromkeys(names, "block_size 8")))


@pytest.mark.parametrize("symmetric", [False, True])
def test_matmul_nbits_quantizer_in_a_branch_with_the_weights_outside(symmetric: bool):
    source, feeds = float_branches()
    proto = quantise_matmul_nbits(source, block_size=32, is_symmetric=symmetric)
    layout = imported(proto, feeds, matmulnbits=2)
    assert weights_left(layout.model)
    check(layout)


def test_only_the_default_algorithm_writes_qdq():
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    for name in ("RTN", "KQuant", "GPTQ", "HQQ"):
        config = getattr(nbits, f"{name}WeightOnlyQuantConfig")
        with pytest.raises(AssertionError, match="QOperator"):
            config(quant_format=QuantFormat.QDQ)


@pytest.mark.parametrize(
    "options", [{"bits": 2}, {"op_types_to_quantize": ("MatMul", "Gather")}]
)
def test_matmul_nbits_quantizer_refuses(options: dict[str, Any]):
    source, _ = float_model()
    with pytest.raises(AssertionError):
        quantise_matmul_nbits(source, block_size=32, **options)


def test_matmul_nbits_quantizer_leaves_8_bits_as_float():
    source, _ = float_model()
    proto = quantise_matmul_nbits(source, block_size=32, bits=8)
    assert not any(node.op_type == "DequantizeLinear" for node in proto.graph.node)
    assert apply(ir.from_proto(proto)) == []


# onnxruntime.quantization.quantize_static and quantize_dynamic.


def parallel_model() -> tuple[onnx.ModelProto, dict[str, npt.NDArray]]:
    """MatMul [K, N] and Gemm(transB) [N, K] with bias on one input."""
    rng = np.random.default_rng(3)
    w, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 48), (24, 64)))
    bias = rng.standard_normal(24).astype(np.float32)
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], "matmul"),
            helper.make_node("Gemm", ["x", "v", "bias"], ["b"], "gemm", transB=1),
        ],
        "parallel",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 64])],
        [
            helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["rows", 48]),
            helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, ["rows", 24]),
        ],
        [
            numpy_helper.from_array(array, name)
            for name, array in (("w", w), ("v", v), ("bias", bias))
        ],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    return model, {"x": rng.standard_normal((5, 64)).astype(np.float32)}


# Without it each product is quantised again, and a difference of one rounding is a whole step.
FLOAT_OUTPUTS = {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]}


@pytest.mark.parametrize("outputs", [{}, FLOAT_OUTPUTS], ids=["quantised", "float"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
def test_static_8_bit_is_left_to_onnxruntime(
    kind: str, per_channel: bool, outputs: dict[str, Any], tmp_path: Path
):
    from onnxruntime.quantization import QuantType

    source, feeds = parallel_model()
    proto = quantise_static(
        source,
        feeds,
        tmp_path / "static.onnx",
        weight_type=QuantType[kind],
        per_channel=per_channel,
        extra_options=outputs,
    )
    model = ir.from_proto(proto)
    before = counts(model)
    left = weights_left(model)
    assert len(left) == 3  # two weights and the Gemm's bias
    remarks = apply(model)
    assert counts(model) == before
    assert not any(remark.outcome == "fired" for remark in remarks)
    text = "\n".join(map(str, remarks))
    for name in left:
        assert name in text
    for actual, expected in zip(run(model, feeds), run(proto, feeds), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt4", "QUInt4"])
def test_static_4_bit_fuses(kind: str, per_channel: bool, tmp_path: Path):
    from onnxruntime.quantization import QuantType

    source, feeds = parallel_model()
    proto = quantise_static(
        source,
        feeds,
        tmp_path / "static.onnx",
        weight_type=QuantType[kind],
        per_channel=per_channel,
        extra_options=FLOAT_OUTPUTS,
    )
    check(imported(proto, feeds, matmulnbits=2))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt8", "QInt4"])
def test_static_with_a_gather_and_a_batched_weight_keeps_its_numbers(
    kind: str, per_channel: bool, tmp_path: Path
):
    from onnxruntime.quantization import QuantType

    source, feeds = float_model()
    proto = quantise_static(
        source,
        feeds,
        tmp_path / "static.onnx",
        weight_type=QuantType[kind],
        per_channel=per_channel,
    )
    model = ir.from_proto(proto)
    remarks = apply(model)
    text = "\n".join(str(remark) for remark in remarks if remark.outcome != "fired")
    for name in weights_left(model):
        assert name in text
    if kind == "QInt8":
        assert counts(model)["MatMulNBits"] == 0
    (actual,), (expected,) = run(model, feeds), run(proto, feeds)
    # One step of the output's uint8: activations are rounded between the layers.
    assert relative_error(actual, expected) <= 2e-2


def test_dynamic_has_no_dequantized_constant(tmp_path: Path):
    source, feeds = float_model()
    proto = quantise_dynamic(source, tmp_path / "dynamic.onnx")
    model = ir.from_proto(proto)
    assert "MatMulInteger" in counts(model)
    assert weights_left(model) == set()
    assert apply(model) == []
    np.testing.assert_array_equal(run(model, feeds)[0], run(proto, feeds)[0])
