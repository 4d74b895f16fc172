# SPDX-License-Identifier: MIT
"""The quantised layouts that exporters write, node for node, in tiny.

Each builder names the exporter, its version and its options. Names, attributes, shapes and
types are theirs, the numbers are random. onnxruntime's own quantizers are run, not imitated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from .dequantized_models import STORAGE, make_model, run

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
Arrays = dict[str, npt.NDArray]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A model as its exporter writes it, and what must become of it.

    ``left`` names the DequantizeLinear on constants that stay, each with a word of its remark.
    """

    model: ir.Model
    feeds: Arrays
    reference: list[npt.NDArray]
    matmulnbits: int = 0
    gathers: int = 0
    left: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for value, expected in zip(self.model.graph.outputs, self.reference, strict=True):
            value.shape = ir.Shape(expected.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """Codes, scales and zero points as plain numbers, in the shapes of DequantizeLinear."""

    codes: npt.NDArray
    scales: npt.NDArray
    zero_points: npt.NDArray | None
    storage: str
    axis: int = 1
    block_size: int = 0

    def weight(self) -> npt.NDArray[np.float64]:
        """The numbers, by DequantizeLinear's formula."""
        scales = self._spread(self.scales.astype(np.float64))
        return (
            self.codes - (0 if self.zero_points is None else self._spread(self.zero_points))
        ) * scales

    def _spread(self, array: npt.NDArray) -> npt.NDArray:
        axis = self.axis % self.codes.ndim
        if self.block_size:
            whole = np.repeat(array, self.block_size, axis)
            return np.take(whole, np.arange(self.codes.shape[axis]), axis)
        if array.size == 1:
            return array.reshape(())
        shape = [1] * self.codes.ndim
        shape[axis] = -1
        return array.reshape(shape)


def quantised(
    shape: tuple[int, ...],
    storage: str = "int4",
    *,
    axis: int = 0,
    block_size: int = 0,
    scales: str = "blocks",
    zero_points: str = "none",
    dtype: type = np.float32,
    seed: int = 0,
) -> Codes:
    """Random codes with scales per ``"blocks"``, ``"channel"``, ``"scalar"`` or ``"one"``."""
    rng = np.random.default_rng([seed, *shape])
    bits, signed, _, _ = STORAGE[storage]
    low = -(1 << (bits - 1)) if signed else 0
    codes = rng.integers(low, low + (1 << bits), shape)
    blocked = list(shape)
    blocked[axis] = -(-shape[axis] // max(block_size, 1))
    scale_shape = {
        "blocks": tuple(blocked),
        "channel": (shape[axis],),
        "scalar": (),
        "one": (1,),
    }[scales]
    size = rng.uniform(0.5, 2.0, scale_shape) / (1 << bits) / shape[0] ** 0.5
    sign = rng.choice([-1, 1], scale_shape) if scales == "blocks" else 1
    points = {
        "none": None,
        "random": rng.integers(low, low + (1 << bits), scale_shape),
        "zero": np.zeros(scale_shape, np.int64),
        "middle": np.full(scale_shape, low + (1 << (bits - 1))),
    }[zero_points]
    values = np.asarray(size * sign, dtype)
    return Codes(codes, values, points, storage, axis, block_size if scales == "blocks" else 0)


class Graph:
    """Collects nodes and initializers under the exporter's own names."""

    def __init__(self, dtype: ir.DataType = FLOAT):
        self.dtype = dtype
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []

    @property
    def float(self) -> npt.DTypeLike:
        return self.dtype.numpy()

    def input(
        self, name: str, *shape: int | str, dtype: ir.DataType | None = None
    ) -> ir.Value:
        self.inputs.append(ir.val(name, dtype or self.dtype, list(shape)))
        return self.inputs[-1]

    def constant(
        self, name: str, array: npt.NDArray, dtype: ir.DataType | None = None
    ) -> ir.Value:
        tensor = ir.Tensor(array, dtype=dtype, name=name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=kind, const_value=tensor)
        self.initializers.append(value)
        return value

    def codes(self, codes: Codes, *names: str) -> list[ir.Value]:
        _, _, dtype, numpy_dtype = STORAGE[codes.storage]
        arrays = [codes.codes, codes.scales, codes.zero_points]
        return [
            self.constant(name, array)
            if array is codes.scales
            else self.constant(name, array.astype(numpy_dtype), dtype)
            for name, array in zip(names, arrays, strict=False)
            if array is not None
        ]

    def add(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: dict[str, Any] | None = None,
        name: str = "",
        output: str | None = None,
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or {}, name=name or None)
        self.nodes.append(node)
        node.outputs[0].name = output or f"{name}_out"
        return node.outputs[0]

    def model(self, *outputs: ir.Value, opset: int | None = None) -> ir.Model:
        for value in outputs:
            value.dtype = value.dtype or self.dtype
        named = {str(value.name): value for value in outputs}
        return make_model(self.inputs, self.nodes, self.initializers, named, opset)


def _feed(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


def _vector(size: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray:
    return np.random.default_rng(8).standard_normal(size).astype(dtype)


# onnxruntime.quantization 1.31: run, not imitated.


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(before)


def float_model(
    K: int = 64, N: int = 48, dtype: type = np.float32
) -> tuple[onnx.ModelProto, Arrays]:
    """Gather, MatMul + Relu, MatMul on a [1, K, N] weight, Gemm(transB); opset 21."""
    rng = np.random.default_rng(0)
    graph = Graph(ir.DataType.from_numpy(np.dtype(dtype)))

    def weight(name: str, *shape: int) -> ir.Value:
        array = rng.standard_normal(shape) / shape[-2 if len(shape) > 1 else 0] ** 0.5
        return graph.constant(name, array.astype(dtype))

    ids = graph.input("ids", "batch", dtype=ir.DataType.INT64)
    embed = graph.add("Gather", [weight("embed", 20, K), ids], name="gather")
    hidden = graph.add("MatMul", [embed, weight("w1", K, N)], name="m1")
    hidden = graph.add("Relu", [hidden], name="relu1")
    hidden = graph.add("MatMul", [hidden, weight("w2", N, 40)], name="m2")
    hidden = graph.add("Tanh", [hidden], name="tanh")
    inputs: list[ir.Value | None] = [hidden, weight("w3", 24, 40), weight("c3", 24)]
    hidden = graph.add("Gemm", inputs, {"transB": 1}, name="gemm")
    hidden = graph.add("Tanh", [hidden], name="tanh2")
    logits = graph.add("MatMul", [hidden, weight("w4", 1, 24, 20)], name="m4", output="logits")
    proto = ir.to_proto(graph.model(logits))
    # With the shapes of initializers, which quantize_dynamic transposes, it fails.
    del proto.graph.value_info[:]
    return proto, {"ids": np.arange(8)}


def float_branches(K: int = 64, N: int = 48) -> tuple[onnx.ModelProto, Arrays]:
    """A MatMul in each branch of an If, the weights in the outer graph."""
    graph = Graph()
    x = graph.input("x", "batch", K)
    condition = graph.input("condition", dtype=ir.DataType.BOOL)
    branches = {}
    for name in ("then", "else"):
        weight = graph.constant(
            f"w_{name}", _feed((K, N)) if name == "then" else -_feed((K, N))
        )
        node = ir.node("MatMul", [x, weight], name=f"matmul_{name}")
        node.outputs[0].name, node.outputs[0].dtype = f"y_{name}", FLOAT
        branches[f"{name}_branch"] = ir.Graph([], node.outputs, nodes=[node], name=name)
    y = graph.add("If", [condition], branches, name="if", output="y")
    return ir.to_proto(graph.model(y)), {"x": _feed((3, K)), "condition": np.array(True)}


def quantise_matmul_nbits(source: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """MatMulNBitsQuantizer, QuantFormat.QDQ, algorithm "default".

    Writes DQ(axis=0, block_size) + MatMul; int4 when symmetric, else uint4 with zero points
    of the scales' shape. ``channel_wised_quantize`` writes one block of K, which need be no
    power of two: symmetric as [N, K], scales [N, 1], axis 1 and a Transpose, else as [K, N],
    scales [1, N]. A weight [1, K, N] is squeezed and the output reshaped. Gemm stays
    float, and so do 8-bit weights; Gather and 2 bits fail an assertion.
    """
    with _silence():
        from onnxruntime.quantization import QuantFormat
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits

        config = nbits.DefaultWeightOnlyQuantConfig(quant_format=QuantFormat.QDQ, **options)
        quantizer = nbits.MatMulNBitsQuantizer(source, algo_config=config)
        quantizer.process()
    return quantizer.model.model


def quantise_static(
    source: onnx.ModelProto, feeds: Arrays, path: Path, **options: Any
) -> onnx.ModelProto:
    """quantize_static, QuantFormat.QDQ, activations uint8.

    Weights: per tensor with scale and zero point of rank 0, or per channel with [N] on the
    output axis (1 for MatMul, 0 for Gemm transB=1; 1 also for a weight [1, K, N], where it is
    K). Zero points are always written. The Gemm's bias is int32, scale [1] with a zero point
    of rank 0, or both [N]. Gather's table is uint8 with the scale of its output.
    """
    with _silence():
        from onnxruntime import quantization

        class Reader(quantization.CalibrationDataReader):
            def __init__(self) -> None:
                self._left = [feeds]

            def get_next(self) -> Arrays | None:
                return self._left.pop() if self._left else None

        quantization.quantize_static(
            source,
            path,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            **options,
        )
    return onnx.load(path)


def quantise_dynamic(source: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """quantize_dynamic: MatMulInteger and Gather on codes, no DequantizeLinear."""
    with _silence():
        from onnxruntime import quantization

        quantization.quantize_dynamic(source, path)
    return onnx.load(path)


# onnxruntime-genai 0.18, model builder, use_qdq.


def genai(
    storage: str = "int4",
    zero_points: str = "none",
    dtype: ir.DataType = FLOAT,
    block_size: int = 32,
) -> Layout:
    """A checkpoint that is quantised already (AWQ, GPTQ, ...) with ``use_qdq``.

    DQ on [N, K] with axis -1, scales [N, K / block], Transpose(perm=[1, 0]), MatMul and
    Add(product, bias). A checkpoint in float goes through `quantise_matmul_nbits`, symmetric,
    in blocks of 32.
    """
    K, N = 4 * block_size, 24
    graph = Graph(dtype)
    x = graph.input("hidden_states", "batch_size", "sequence_length", K)
    value = x
    feed = _feed((2, 3, K), graph.float)
    expected = feed.astype(np.float64)
    for seed, (name, k, n) in enumerate(
        [("/model/layers.0/attn/qkv_proj", K, N + K), ("/lm_head", N + K, 37)]
    ):
        k = k // block_size * block_size  # the builder writes whole blocks only
        codes = quantised(
            (n, k),
            storage,
            axis=-1,
            block_size=block_size,
            zero_points=zero_points,
            dtype=graph.float,  # type: ignore[arg-type]
            seed=seed,
        )
        if value is not x:
            bounds = [graph.constant(f"c{i}", np.array([i])) for i in (0, k, 2)]
            value = graph.add("Slice", [value, *bounds], name="/model/slice")
        value = _genai_matmul(graph, f"{name}/MatMul", value, codes)
        expected = expected[..., :k] @ codes.weight().T
        if seed == 0:
            bias = graph.constant(
                "model.layers.0.attn.qkv_proj.Add.bias", _vector(n, graph.float)
            )
            value = graph.add("Add", [value, bias], name="/model/layers.0/attn/qkv_proj/Add")
            expected = expected + _vector(n, graph.float)
            value = graph.add("Tanh", [value], name="/model/tanh")
            expected = np.tanh(expected)
    value.name = "logits"
    return Layout(graph.model(value), {"hidden_states": feed}, [expected], matmulnbits=2)


def _genai_matmul(graph: Graph, name: str, x: ir.Value, codes: Codes) -> ir.Value:
    dq = f"{name}/DequantizeLinear"
    prefix = dq[1:].replace("/", ".")
    names = [f"{prefix}.{part}" for part in ("qweight", "scales", "qzeros")]
    attributes = {"axis": -1, "block_size": codes.block_size}
    weight = graph.add(
        "DequantizeLinear", graph.codes(codes, *names), attributes, dq, f"{dq}/output_0"
    )
    transpose = f"{name}/Transpose"
    weight = graph.add(
        "Transpose", [weight], {"perm": [1, 0]}, transpose, f"{transpose}/output_0"
    )
    return graph.add("MatMul", [x, weight], {}, name, f"{name}/output_0")


# Olive 0.13, MatMulNBitsToQDQ.


def olive(
    K: int = 64,
    N: int = 24,
    bits: int = 4,
    block_size: int = 32,
    *,
    use_transpose_op: bool = False,
    use_signed_int: bool = False,
    add_zero_point: bool = False,
    asymmetric: bool = False,
    bias: bool = False,
    dtype: ir.DataType = FLOAT,
) -> Layout:
    """What the pass makes of one MatMulNBits.

    [K, N] and axis 0, or [N, K], axis 1 and a Transpose. One block of K or less becomes per
    channel: scales [N], the other axis, no block_size. Unsigned codes always have zero points
    (uniformly 2^(bits-1) when symmetric), signed ones when asymmetric or ``add_zero_point``.
    ``use_int4`` is ``use_signed_int`` for 4 bits only. 2 bits make it opset 25.
    """
    graph = Graph(dtype)
    storage = f"{'' if use_signed_int else 'u'}int{bits}"
    zero_points = "none"
    if asymmetric:
        zero_points = "random"
    elif not use_signed_int or add_zero_point:
        zero_points = "middle"
    per_channel = block_size >= K
    k_axis = 1 if use_transpose_op else 0
    codes = quantised(
        (N, K) if use_transpose_op else (K, N),
        storage,
        axis=1 - k_axis if per_channel else k_axis,
        block_size=block_size,
        scales="channel" if per_channel else "blocks",
        zero_points=zero_points,
        dtype=graph.float,  # type: ignore[arg-type]
    )
    weight = codes.weight()
    base = "/model/layers.0/attn/q_proj"
    dq = f"{base}/DequantizeLinear"
    attributes = {"axis": codes.axis}
    if not per_channel:
        attributes["block_size"] = block_size
    names = [f"{dq}.{part}" for part in ("qweight", "scales", "qzeros")]
    x = graph.input("x", "rows", K)
    value = graph.add(
        "DequantizeLinear", graph.codes(codes, *names), attributes, dq, f"{dq}/output_0"
    )
    if use_transpose_op:
        name = f"{base}/Transpose"
        value = graph.add("Transpose", [value], {"perm": [1, 0]}, name, f"{name}/output_0")
        weight = weight.T
    value = graph.add("MatMul", [x, value], {}, f"{base}/MatMul", f"{base}/MatMul/output_0")
    feed = _feed((3, K), graph.float)
    expected = feed.astype(np.float64) @ weight
    if bias:
        constant = graph.constant(
            "model.layers.0.attn.q_proj.MatMul.bias", _vector(N, graph.float)
        )
        value = graph.add("Add", [value, constant], {}, f"{base}/Add", f"{base}/Add/output_0")
        expected = expected + _vector(N, graph.float)
    value.name = "y"
    return Layout(graph.model(value), {"x": feed}, [expected], matmulnbits=1)


# NVIDIA ModelOpt 0.47, modelopt.onnx.quantization.int4 (rtn_dq, awq_lite, awq_clip).


def _modelopt_dequantize(graph: Graph, name: str, codes: Codes) -> ir.Value:
    names = [f"{name}_i4", f"{name}_scale", f"{name}_zp"]
    attributes = {"axis": codes.axis}
    if codes.block_size:
        attributes["block_size"] = codes.block_size
    dq = f"{name}_DequantizeLinear"
    return graph.add(
        "DequantizeLinear", graph.codes(codes, *names), attributes, dq, f"{dq}_Output"
    )


def _modelopt_weight(
    graph: Graph, name: str, codes: Codes, *, column_major: bool = False
) -> tuple[ir.Value, npt.NDArray[np.float64]]:
    value, weight = _modelopt_dequantize(graph, name, codes), codes.weight()
    if column_major:
        dq = f"{name}_DequantizeLinear"
        value = graph.add(
            "Transpose",
            [value],
            {"perm": [1, 0]},
            f"{dq}_transpose_back",
            f"{dq}_transposed_back",
        )
        weight = weight.T
    return value, weight


def modelopt(
    *,
    column_major: bool = False,
    zero_point: bool = False,
    pre_scale: bool = False,
    dtype: ir.DataType = FLOAT,
    K: int = 64,
    block_size: int = 16,
) -> Layout:
    """MatMul -> Relu -> MatMul; int4, with ``use_zero_point`` uint4.

    [K, N] with axis 0, or with ``use_column_major`` [N, K], axis 1 and a Transpose. AWQ puts
    Mul(x, [1, K]) in front, one for every weight. K need be no multiple of the block.
    """
    graph = Graph(dtype)
    x = value = graph.input("x", "batch", "sequence", K)
    feed = _feed((2, 3, K), graph.float)
    expected = feed.astype(np.float64)
    for name, k, n in (("fc1.weight", K, 48), ("fc2.weight", 48, 40)):
        codes = quantised(
            (n, k) if column_major else (k, n),
            "uint4" if zero_point else "int4",
            axis=1 if column_major else 0,
            block_size=block_size,
            zero_points="random" if zero_point else "none",
            dtype=graph.float,  # type: ignore[arg-type]
        )
        weight, numbers = _modelopt_weight(graph, name, codes, column_major=column_major)
        if pre_scale:
            scale = (np.abs(_vector(k)) + 0.5).astype(graph.float)[None]
            constant = graph.constant(f"{name}_awq_scale", scale)
            value = graph.add(
                "Mul", [value, constant], {}, f"{name}_PQS", f"{name}_PQS_Tensor"
            )
            expected = expected * scale
        value = graph.add("MatMul", [value, weight], {}, f"/{name[:3]}/MatMul")
        expected = expected @ numbers
        if n == 48:
            value = graph.add("Relu", [value], {}, "/relu")
            expected = np.maximum(expected, 0)
    del x  # Unused
    value.name = "y"
    return Layout(graph.model(value), {"x": feed}, [expected], matmulnbits=2)


def modelopt_per_channel(storage: str, *, zero_point: bool = False) -> Layout:
    """``block_size=-1`` (int4) or a layer of ``layers_8bit`` (int8): [K, N], axis 1, [N]."""
    graph = Graph()
    x = graph.input("x", "rows", 64)
    zero_points = "random" if zero_point else "none"
    codes = quantised((64, 48), storage, axis=1, scales="channel", zero_points=zero_points)
    weight, numbers = _modelopt_weight(graph, "fc.weight", codes)
    y = graph.add("MatMul", [x, weight], {}, "/fc/MatMul", "y")
    feed = _feed((3, 64))
    return Layout(graph.model(y), {"x": feed}, [feed @ numbers], matmulnbits=1)


def modelopt_column_major_8bit() -> Layout:
    """A layer of ``layers_8bit`` with ``use_column_major``: the axis stays 1, which is K.

    So it runs only where N == K, and then each input feature has a scale: no MatMulNBits.
    """
    graph = Graph()
    x = graph.input("x", "rows", 32)
    codes = quantised((32, 32), "int8", axis=1, scales="channel")
    weight, numbers = _modelopt_weight(graph, "fc.weight", codes, column_major=True)
    y = graph.add("MatMul", [x, weight], {}, "/fc/MatMul", "y")
    feed = _feed((3, 32))
    left = {"fc.weight_DequantizeLinear": "a scale for each index of K"}
    return Layout(graph.model(y), {"x": feed}, [feed @ numbers], left=left)


def modelopt_gemm(*, column_major: bool = False, transposed: bool = False) -> Layout:
    """Gemm with a bias; blocks always run along the stored weight's first axis.

    That is K where transB is 0. Where transB is 1 it is N, so the blocks run across the output
    columns; column-major then stores [K, N] with axis 1, blocks along N too, and transB=0.
    """
    K, N = 40, 24
    graph = Graph()
    x = graph.input("x", "rows", K)
    shape = (N, K) if transposed else (K, N)
    if column_major:
        shape = shape[::-1]
    codes = quantised(shape, "int4", axis=1 if column_major else 0, block_size=16)
    weight, numbers = _modelopt_weight(
        graph, "gemm.weight", codes, column_major=column_major and not transposed
    )
    # For transB=1 the column-major form drops the flag instead of adding a Transpose.
    flag = int(transposed and not column_major)
    attributes = {"transB": flag} if transposed else {}
    bias = graph.constant("gemm.bias", _vector(N))
    y = graph.add("Gemm", [x, weight, bias], attributes, "/gemm/Gemm", "y")
    feed = _feed((3, K))
    expected = feed @ (numbers.T if flag else numbers) + _vector(N)
    left = (
        {"gemm.weight_DequantizeLinear": "a scale for each index of K"} if transposed else {}
    )
    matmulnbits = 0 if transposed else 1
    return Layout(graph.model(y), {"x": feed}, [expected], matmulnbits, left=left)


def modelopt_gemm_per_channel() -> Layout:
    """Gemm(transB=1), ``block_size=-1``: [N, K], axis 1: a scale per input feature."""
    K, N = 40, 24
    graph = Graph()
    x = graph.input("x", "rows", K)
    codes = quantised((N, K), "int4", axis=1, scales="channel")
    weight, numbers = _modelopt_weight(graph, "gemm.weight", codes)
    bias = graph.constant("gemm.bias", _vector(N))
    y = graph.add("Gemm", [x, weight, bias], {"transB": 1}, "/gemm/Gemm", "y")
    feed = _feed((3, K))
    left = {"gemm.weight_DequantizeLinear": "a scale for each index of K"}
    return Layout(graph.model(y), {"x": feed}, [feed @ numbers.T + _vector(N)], left=left)


def modelopt_gather(quantize_axis: int, *, zero_point: bool = False, rows: int = 20) -> Layout:
    """``gather_quantize_axis`` 0 (along the vocabulary) or 1, ``gather_block_size=32``."""
    graph = Graph()
    ids = graph.input("input_ids", "batch", "sequence", dtype=ir.DataType.INT64)
    codes = quantised(
        (rows, 64),
        "uint4" if zero_point else "int4",
        axis=quantize_axis,
        block_size=32,
        zero_points="random" if zero_point else "none",
    )
    table = _modelopt_dequantize(graph, "model.embed_tokens.weight", codes)
    y = graph.add("Gather", [table, ids], {}, "/model/embed_tokens/Gather", "y")
    feed = np.array([[0, rows - 1, 3], [7, 7, rows // 2]])
    expected = codes.weight()[feed]
    return Layout(graph.model(y), {"input_ids": feed}, [expected], gathers=1)


def modelopt_tied(*, column_major: bool = False) -> Layout:
    """A table that Gather reads as [V, H] and the head, Gemm(transB=1), as its transpose."""
    V, H = 48, 64
    graph = Graph()
    ids = graph.input("input_ids", "rows", dtype=ir.DataType.INT64)
    codes = quantised((V, H), "int4", axis=1, block_size=32)
    table = _modelopt_dequantize(graph, "embed.weight", codes)
    hidden = graph.add("Gather", [table, ids], {}, "/embed/Gather")
    hidden = graph.add("Tanh", [hidden], {}, "/tanh")
    if column_major:
        head = graph.add("Transpose", [table], {"perm": [1, 0]}, "/head/Transpose")
        y = graph.add("MatMul", [hidden, head], {}, "/head/MatMul", "logits")
    else:
        y = graph.add("Gemm", [hidden, table], {"transB": 1}, "/head/Gemm", "logits")
    feed, numbers = np.array([0, 47, 13]), codes.weight()
    expected = np.tanh(numbers[feed]) @ numbers.T
    return Layout(graph.model(y), {"input_ids": feed}, [expected], matmulnbits=1, gathers=1)


def modelopt_quantize_in_graph() -> Layout:
    """Float weights through Quantize- and DequantizeLinear (``rtn``; AddQDQPairToWeight).

    int8 per tensor here, as ModelOpt's own two-dimensional scales have no block_size and fail.
    The codes are not stored, so nothing is there to fuse.
    """
    graph = Graph()
    x = graph.input("x", "rows", 64)
    weight = graph.constant("w", _feed((64, 48)))
    scale = graph.constant("w_scale", np.float32(0.03125).reshape(()))
    zero_point = graph.constant("w_zp", np.zeros((), np.int8))
    value = graph.add("QuantizeLinear", [weight, scale, zero_point], {}, "w_QuantizeLinear")
    value = graph.add("DequantizeLinear", [value, scale, zero_point], {}, "w_DequantizeLinear")
    y = graph.add("MatMul", [x, value], {}, "/fc/MatMul", "y")
    codes = np.clip(np.rint(_feed((64, 48)) / np.float32(0.03125)), -128, 127)
    feed = _feed((3, 64))
    expected = feed.astype(np.float64) @ (codes * 0.03125)
    return Layout(graph.model(y), {"x": feed}, [expected])


# ModelOpt's torch export, and what onnxruntime's DQMatMulNBitsFusion was written for.


def three_dimensional(
    *,
    cast: str = "none",
    zero_points: str = "none",
    storage: str = "uint4",
    gemm: bool = False,
    target: tuple[int, int] | None = None,
    constant_node: bool = False,
) -> Layout:
    """DQ [N, blocks, block], scales [N, blocks, 1], axis 2 -> Reshape [N, K] -> Transpose.

    ``cast``: ``"before"`` or ``"after"`` the Transpose, from float16 scales to float32.
    ``target`` is the Reshape's shape ([N, -1] and [-1, K] occur), ``constant_node`` its form.
    """
    N, blocks, block = 24, 3, 32
    K = blocks * block
    graph = Graph()
    x = graph.input("x", "rows", K)
    codes = quantised(
        (N, blocks, block),
        storage,
        axis=2,
        block_size=block,
        zero_points=zero_points,
        dtype=np.float32 if cast == "none" else np.float16,
    )
    prefix = "/model/q_proj/weight_quantizer"
    names = [f"model.q_proj.{part}" for part in ("weight", "scale", "zero_point")]
    value = graph.add(
        "DequantizeLinear",
        graph.codes(codes, *names),
        {"axis": 2, "block_size": block},
        f"{prefix}/DequantizeLinear",
    )
    shape = np.array(target or (N, K), np.int64)
    if constant_node:
        tensor = ir.tensor(shape, name=f"{prefix}/Constant_output_0")
        shaped = graph.add("Constant", [], {"value": tensor}, f"{prefix}/Constant")
    else:
        shaped = graph.constant(f"{prefix}/shape", shape)
    value = graph.add("Reshape", [value, shaped], {}, f"{prefix}/Reshape")
    to_float = {"to": FLOAT.value}
    if cast == "before":
        value = graph.add("Cast", [value], to_float, f"{prefix}/Cast")
    value = graph.add("Transpose", [value], {"perm": [1, 0]}, "/model/q_proj/Transpose")
    if cast == "after":
        value = graph.add("Cast", [value], to_float, f"{prefix}/Cast")
    feed = _feed((3, K))
    expected = feed @ codes.weight().reshape(N, K).T
    if gemm:
        bias = graph.constant("model.q_proj.bias", _vector(N))
        y = graph.add("Gemm", [x, value, bias], {}, "/model/q_proj/Gemm", "y")
        expected = expected + _vector(N)
    else:
        y = graph.add("MatMul", [x, value], {}, "/model/q_proj/MatMul", "y")
    return Layout(graph.model(y), {"x": feed}, [expected], matmulnbits=1)


# torch.onnx, optimum, neural-compressor: weights only, no quantised activation.


def _torch_dequantize(graph: Graph, name: str, codes: Codes) -> ir.Value:
    names = [f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"]
    attributes = {} if codes.scales.size == 1 else {"axis": codes.axis}
    dq = f"{name}_DequantizeLinear"
    return graph.add(
        "DequantizeLinear", graph.codes(codes, *names), attributes, dq, f"{dq}_Output"
    )


def torch_linear(
    form: str,
    storage: str = "int8",
    *,
    scales: str = "channel",
    zero_points: str = "zero",
    opset: int = 21,
) -> Layout:
    """nn.Linear with a dequantised weight.

    ``form``: ``"gemm"`` Gemm(transB=1) on [N, K], channels on axis 0; ``"transpose"`` the same
    through a Transpose, MatMul and Add(bias, product), bias first; ``"matmul"`` [K, N],
    channels on axis 1, as the TorchScript exporter's constant folding leaves it.
    """
    K, N = 40, 24
    graph = Graph()
    x = graph.input("x", "rows", K)
    rows = form != "matmul"
    codes = quantised(
        (N, K) if rows else (K, N),
        storage,
        axis=0 if rows else 1,
        scales=scales,
        zero_points=zero_points,
    )
    value = _torch_dequantize(graph, "fc.weight", codes)
    bias = graph.constant("fc.bias", _vector(N))
    if form == "gemm":
        attributes: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "transB": 1}
        y = graph.add("Gemm", [x, value, bias], attributes, "/fc/Gemm", "y")
    else:
        if rows:
            value = graph.add("Transpose", [value], {"perm": [1, 0]}, "/fc/Transpose")
        value = graph.add("MatMul", [x, value], {}, "/fc/MatMul", "/fc/MatMul_output_0")
        y = graph.add("Add", [bias, value], {}, "/fc/Add", "y")
    feed = _feed((3, K))
    expected = feed @ (codes.weight().T if rows else codes.weight()) + _vector(N)
    return Layout(graph.model(y, opset=opset), {"x": feed}, [expected], matmulnbits=1)


def dequantized_bias(scale: str = "one") -> Layout:
    """Gemm whose bias is int32, as quantize_static writes it, on an activation in float.

    ``scale``: ``"one"`` ([1] with a zero point of rank 0) or ``"channel"`` (both [N]).
    """
    K, N = 40, 24
    graph = Graph()
    x = graph.input("x", "rows", K)
    codes = quantised((N, K), "int4", axis=0, scales="channel", zero_points="zero")
    weight = _torch_dequantize(graph, "fc.weight", codes)
    numbers = np.arange(-N // 2, N - N // 2, dtype=np.int32) * 17
    channel = scale == "channel"
    steps = (
        np.linspace(0.001, 0.002, N).astype(np.float32) if channel else np.float32([0.0015])
    )
    inputs: list[ir.Value | None] = [
        graph.constant("fc.bias_quantized", numbers),
        graph.constant("fc.bias_quantized_scale", steps),
        graph.constant(
            "fc.bias_quantized_zero_point", np.zeros(N if channel else (), np.int32)
        ),
    ]
    attributes = {"axis": 0} if channel else {}
    bias = graph.add(
        "DequantizeLinear", inputs, attributes, "fc.bias_DequantizeLinear", "fc.bias"
    )
    y = graph.add("Gemm", [x, weight, bias], {"transB": 1}, "/fc/Gemm", "y")
    feed = _feed((3, K))
    expected = feed @ codes.weight().T + numbers * steps.astype(np.float64)
    return Layout(graph.model(y), {"x": feed}, [expected], matmulnbits=1)


def embedding(storage: str, scales: str = "channel", zero_points: str = "zero") -> Layout:
    """DQ [V, H] -> Gather: a scale for every row, or one for all."""
    V, H = 20, 64
    graph = Graph()
    ids = graph.input("input_ids", "rows", dtype=ir.DataType.INT64)
    codes = quantised((V, H), storage, axis=0, scales=scales, zero_points=zero_points)
    table = _torch_dequantize(graph, "embed.weight", codes)
    y = graph.add("Gather", [table, ids], {"axis": 0}, "/embed/Gather", "y")
    feed = np.array([0, 19, 4, 4])
    expected = codes.weight()[feed]
    return Layout(graph.model(y), {"input_ids": feed}, [expected], gathers=1)


def imported(proto: onnx.ModelProto, feeds: Arrays, matmulnbits: int, **fate: Any) -> Layout:
    """A model that a real exporter wrote; its reference is onnxruntime without optimisers."""
    return Layout(ir.from_proto(proto), feeds, run(proto, feeds), matmulnbits, **fate)


def _grid() -> Iterator[tuple[str, Callable[[], Layout]]]:
    def case(name: str, builder: Callable[..., Layout], *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        return name, lambda: builder(*args, **kwargs)

    for storage in ("int4", "uint4"):
        for points in ("none", "random", "middle"):
            yield case(f"genai-{storage}-{points}", genai, storage, points)
    yield case("genai-float16", genai, dtype=FLOAT16)
    yield case("genai-float16-zp", genai, "uint4", "random", FLOAT16)
    yield case("genai-block128", genai, block_size=128)

    for bits in (4, 8, 2):
        for transposed in (False, True):
            for signed in (False, True):
                for points in ("symmetric", "asymmetric", "add"):
                    options = {
                        "use_transpose_op": transposed,
                        "use_signed_int": signed,
                        "asymmetric": points == "asymmetric",
                        "add_zero_point": points == "add",
                    }
                    name = f"olive-{bits}-{'NK' if transposed else 'KN'}"
                    name += f"-{'s' if signed else 'u'}-{points}"
                    yield case(name, olive, bits=bits, **options)
                    yield case(f"{name}-channel", olive, K=24, bits=bits, **options)
            yield case(
                f"olive-{bits}-{transposed}-ragged",
                olive,
                K=70,
                N=33,
                bits=bits,
                use_transpose_op=transposed,
                asymmetric=True,
            )
    yield case("olive-bias", olive, bias=True)
    yield case("olive-bias-channel", olive, K=32, bias=True, use_signed_int=True)
    yield case("olive-float16", olive, dtype=FLOAT16, bias=True)
    yield case("olive-float16-NK", olive, dtype=FLOAT16, use_transpose_op=True)

    for column in (False, True):
        name = f"modelopt-{'NK' if column else 'KN'}"
        yield case(name, modelopt, column_major=column)
        yield case(f"{name}-ragged", modelopt, column_major=column, K=70)
        yield case(f"{name}-awq", modelopt, column_major=column, pre_scale=True)
        yield case(f"{name}-float16", modelopt, column_major=column, dtype=FLOAT16)
        yield case(f"{name}-block128", modelopt, column_major=column, block_size=128)
        yield case(f"{name}-gemm", modelopt_gemm, column_major=column)
        yield case(f"{name}-gemm-transB", modelopt_gemm, column_major=column, transposed=True)
        yield case(f"{name}-tied", modelopt_tied, column_major=column)
    yield case("modelopt-awq-zp", modelopt, pre_scale=True, zero_point=True)
    yield case("modelopt-channel-int4", modelopt_per_channel, "int4")
    yield case("modelopt-channel-int8", modelopt_per_channel, "int8")
    yield case("modelopt-channel-uint8-zp", modelopt_per_channel, "uint8", zero_point=True)
    yield case("modelopt-column-major-8bit", modelopt_column_major_8bit)
    yield case("modelopt-gemm-per-channel", modelopt_gemm_per_channel)
    yield case("modelopt-quantize-in-graph", modelopt_quantize_in_graph)
    for axis in (0, 1):
        yield case(f"modelopt-gather{axis}", modelopt_gather, axis)
        yield case(
            f"modelopt-gather{axis}-zp", modelopt_gather, axis, zero_point=True, rows=70
        )

    for cast in ("none", "before", "after"):
        for points in ("none", "random", "middle"):
            yield case(f"3d-{cast}-{points}", three_dimensional, cast=cast, zero_points=points)
    yield case("3d-int4", three_dimensional, storage="int4")
    yield case("3d-gemm", three_dimensional, gemm=True, zero_points="random")
    yield case("3d-minus-one", three_dimensional, target=(24, -1))
    yield case("3d-minus-one-first", three_dimensional, target=(-1, 96))
    yield case("3d-keep", three_dimensional, target=(0, -1))
    yield case("3d-constant-node", three_dimensional, constant_node=True)

    for form in ("gemm", "transpose", "matmul"):
        for storage in ("int8", "uint8", "int4", "uint4"):
            for scales in ("channel", "scalar", "one"):
                points = "zero" if storage.startswith("i") else "random"
                yield case(
                    f"torch-{form}-{storage}-{scales}",
                    torch_linear,
                    form,
                    storage,
                    scales=scales,
                    zero_points=points,
                )
        yield case(f"torch-{form}-no-zp", torch_linear, form, zero_points="none")
        yield case(f"torch-{form}-opset13", torch_linear, form, opset=13)
    yield case("bias-one", dequantized_bias)
    yield case("bias-channel", dequantized_bias, "channel")

    for storage in ("int8", "uint8", "int4", "uint4"):
        points = "zero" if storage.startswith("i") else "random"
        for scales in ("channel", "scalar", "one"):
            yield case(f"embedding-{storage}-{scales}", embedding, storage, scales, points)


LAYOUTS = dict(_grid())
