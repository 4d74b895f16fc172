# SPDX-License-Identifier: MIT
"""What onnxruntime's own quantizers write fuses; they are run, not imitated."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import fuse_weights, relative_error, run
from builders.samples import Reader
from builders.text_models import T, text_model
from onnxruntime import quantization
from onnxruntime.quantization import matmul_nbits_quantizer as nbits

Arrays = dict[str, npt.NDArray]


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


def check(
    proto: onnx.ModelProto,
    feeds: Arrays,
    matmulnbits: int,
    left: Mapping[str, str] | None = None,
) -> None:
    """Fuse, and compare the node counts, the remarks and the numbers.

    ``left`` names the DequantizeLinear on constants that stay, each with a word of its remark.
    """
    model, left = ir.from_proto(proto), left or {}
    remarks = fuse_weights(model)
    found = counts(model)
    assert (found["MatMulNBits"], found["GatherBlockQuantized"]) == (matmulnbits, 0), remarks
    assert weights_left(model) == set(left), remarks
    refused = [str(remark) for remark in remarks if remark.outcome == "refused"]
    for name, word in left.items():
        assert any(name in text and word in text for text in refused), remarks
    for actual, expected in zip(run(model, feeds), run(proto, feeds), strict=True):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) <= bound(model)


def weights(dtype: type, **shapes: tuple[int, ...]) -> Arrays:
    """Random weights such that products stay near 1."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / shape[-2 if len(shape) > 1 else 0] ** 0.5).astype(
            dtype
        )
        for name, shape in shapes.items()
    }


def float_model(
    K: int = 64, N: int = 48, dtype: type = np.float32
) -> tuple[onnx.ModelProto, Arrays]:
    """Gather, MatMul + Relu, MatMul on a [1, K, N] weight, Gemm(transB)."""
    text = """[gather] embedded = Gather (embed, ids)
        [m1] a = MatMul (embedded, w1)  b = Relu (a)  [m2] c = MatMul (b, w2)  d = Tanh (c)
        [gemm] e = Gemm <transB = 1> (d, w3, c3)  f = Tanh (e)  [m4] logits = MatMul (f, w4)"""
    shapes = {"embed": (20, K), "w1": (K, N), "w2": (N, 40), "w3": (24, 40), "c3": (24,)}
    arrays = weights(dtype, **shapes, w4=(1, 24, 20))
    kind = T.FLOAT if dtype is np.float32 else T.FLOAT16
    inputs = {"ids": (T.INT64, ["batch"])}
    model = text_model(text, arrays, inputs, ["logits"], output_type=kind)
    return model, {"ids": np.arange(8)}


def feed(*shape: int) -> npt.NDArray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def parallel_model() -> tuple[onnx.ModelProto, Arrays]:
    """MatMul [K, N] and Gemm(transB) [N, K] with bias on one input."""
    text = "a = MatMul (x, w)  b = Gemm <transB = 1> (x, v, bias)"
    arrays = weights(np.float32, w=(64, 48), v=(24, 64), bias=(24,))
    return text_model(text, arrays, outputs=["a", "b"]), {"x": feed(5, 64)}


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
    source, feeds = parallel_model()
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


def test_matmul_nbits_quantizer_blocks_of_8_have_no_kernel():
    source, feeds = float_model()
    proto = quantise_matmul_nbits(source, block_size=8, is_symmetric=True)
    names = [node.name for node in proto.graph.node if node.op_type == "DequantizeLinear"]
    check(proto, feeds, 0, left=dict.fromkeys(names, "block_size 8"))


# Without it each product is quantised again, and a difference of one rounding is a whole step.
FLOAT_OUTPUTS = {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]}


@pytest.mark.parametrize("outputs", [{}, FLOAT_OUTPUTS], ids=["quantised", "float"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
def test_static_8_bit_is_left_to_onnxruntime(kind, per_channel, outputs, tmp_path):
    options = {"per_channel": per_channel, "extra_options": outputs}
    proto, feeds = quantise_static(kind, tmp_path / "static.onnx", **options)
    model = ir.from_proto(proto)
    before = counts(model)
    left = weights_left(model)
    assert len(left) == 3  # two weights and the Gemm's bias
    remarks = fuse_weights(model)
    assert counts(model) == before
    assert not any(remark.outcome == "fired" for remark in remarks)
    text = "\n".join(map(str, remarks))
    for name in left:
        assert name in text
    for actual, expected in zip(run(model, feeds), run(proto, feeds), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt4", "QUInt4"])
def test_static_4_bit_fuses(kind, per_channel, tmp_path):
    options = {"per_channel": per_channel, "extra_options": FLOAT_OUTPUTS}
    proto, feeds = quantise_static(kind, tmp_path / "static.onnx", **options)
    check(proto, feeds, matmulnbits=2)
