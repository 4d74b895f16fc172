# SPDX-License-Identifier: MIT
"""Small models around one dequantised weight, with the numbers that they must give."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks

from .same_numbers import session

CPU = ("CPUExecutionProvider",)
EXACT = FusionOptions(accuracy_level=0, slow_kernels="fuse")
STORAGE = {
    "int4": (4, True, ir.DataType.INT4, ml_dtypes.int4),
    "uint4": (4, False, ir.DataType.UINT4, ml_dtypes.uint4),
    "int8": (8, True, ir.DataType.INT8, np.int8),
    "uint8": (8, False, ir.DataType.UINT8, np.uint8),
    "int2": (2, True, ir.DataType.INT2, ml_dtypes.int2),
    "uint2": (2, False, ir.DataType.UINT2, ml_dtypes.uint2),
}


@dataclasses.dataclass(frozen=True, eq=False)
class DequantizedMatMul:
    """``y = x @ W`` with ``W[K, N]`` in blocks along K.

    ``layout`` is ``"axis0"`` (codes [K, N]) or ``"transposed"`` (codes [N, K] + Transpose).
    """

    k: int
    n: int
    block_size: int
    storage: str = "int4"
    layout: str = "axis0"
    zero_points: str = "none"  # none, random, or default: all 2**(bits-1), as unsigned
    scale_dtype: type = np.float32
    seed: int = 0

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block_size)

    def arrays(self) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray | None]:
        """codes [K, N], scales [blocks, N], zero points [blocks, N], as plain numbers."""
        bits, signed, _, _ = STORAGE[self.storage]
        low = -(1 << (bits - 1)) if signed else 0
        rng = np.random.default_rng(self.seed)
        codes = rng.integers(low, low + (1 << bits), (self.k, self.n))
        shape = (self.blocks, self.n)
        scales = (rng.uniform(0.5, 2.0, shape) * rng.choice([-1, 1], shape)).astype(
            self.scale_dtype
        )
        zero_points = None
        if self.zero_points == "random":
            zero_points = rng.integers(low, low + (1 << bits), shape)
        elif self.zero_points == "default":
            zero_points = np.full(shape, low + (1 << (bits - 1)))
        return codes, scales, zero_points

    def weight(self) -> npt.NDArray[np.float64]:
        """W[K, N] in float64, by DequantizeLinear's formula."""
        codes, scales, zero_points = self.arrays()
        block = np.arange(self.k) // self.block_size
        offset = 0 if zero_points is None else zero_points[block]
        return (codes - offset) * scales.astype(np.float64)[block]

    def initializers(self, prefix: str = "w") -> list[ir.Value]:
        codes, scales, zero_points = self.arrays()
        _, _, dtype, numpy_dtype = STORAGE[self.storage]
        values = [
            _initializer(f"{prefix}", self._stored(codes).astype(numpy_dtype), dtype),
            _initializer(f"{prefix}_scale", self._stored(scales)),
        ]
        if zero_points is not None:
            stored = self._stored(zero_points).astype(numpy_dtype)
            values.append(_initializer(f"{prefix}_zero_point", stored, dtype))
        return values

    def dequantize(self, values: list[ir.Value], name: str = "dq") -> list[ir.Node]:
        """DequantizeLinear, and Transpose where the layout has one."""
        axis = 0 if self.layout == "axis0" else 1
        attributes = {"axis": axis, "block_size": self.block_size}
        nodes = [ir.node("DequantizeLinear", values, attributes, name=name)]
        if self.layout == "transposed":
            nodes.append(
                ir.node(
                    "Transpose", nodes[-1].outputs, {"perm": [1, 0]}, name=f"{name}_transpose"
                )
            )
        nodes[-1].outputs[0].name = f"{name}_out"
        return nodes

    def model(self) -> ir.Model:
        values = self.initializers()
        x = self.input()
        nodes = self.dequantize(values)
        nodes.append(ir.node("MatMul", [x, nodes[-1].outputs[0]], name="matmul"))
        return make_model([x], nodes, values, {"y": nodes[-1].outputs[0]})

    def input(self) -> ir.Value:
        dtype = ir.DataType.from_numpy(np.dtype(self.scale_dtype))
        return ir.val("x", dtype, ["rows", self.k])

    def feed(self, rows: int = 3) -> npt.NDArray:
        rng = np.random.default_rng(self.seed + 1)
        return rng.standard_normal((rows, self.k)).astype(self.scale_dtype)

    def reference(self, feed: npt.NDArray) -> npt.NDArray[np.float64]:
        return feed.astype(np.float64) @ self.weight()

    def _stored(self, array: npt.NDArray) -> npt.NDArray:
        return np.ascontiguousarray(array if self.layout == "axis0" else array.T)


def _initializer(name: str, array: npt.NDArray, dtype: ir.DataType | None = None) -> ir.Value:
    tensor = ir.Tensor(array, dtype=dtype, name=name)
    return ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )


def make_model(
    inputs: list[ir.Value],
    nodes: list[ir.Node],
    initializers: list[ir.Value],
    outputs: dict[str, ir.Value],
    opset: int | None = None,
) -> ir.Model:
    """A checked model; 2-bit types need opset 25."""
    if opset is None:
        two_bit = any(
            value.dtype in (ir.DataType.INT2, ir.DataType.UINT2) for value in initializers
        )
        opset = 25 if two_bit else 21
    for name, value in outputs.items():
        value.name = name
        if value.dtype is None:
            value.dtype = inputs[0].dtype
    graph = ir.Graph(
        inputs,
        list(outputs.values()),
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": opset},
        name="test",
    )
    return ir.Model(graph, ir_version=13 if opset == 25 else 10)


def run(
    model: ir.Model | onnx.ModelProto | str,
    feeds: Mapping[str, npt.NDArray],
    *,
    optimised: bool = False,
) -> list[npt.NDArray]:
    """Outputs by onnxruntime; without its optimisers, and so without its own fusions."""
    return session(model, optimised=optimised).run(None, dict(feeds))


def relative_error(actual: npt.NDArray, expected: npt.NDArray) -> float:
    """Greatest difference over the greatest expected magnitude."""
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max()
    return float(difference / max(np.abs(expected).max(), 1e-30))


def fuse_weights(
    model: ir.Model, options: FusionOptions = EXACT, providers: Sequence[str] = CPU
) -> list[Remark]:
    """Fuse in place; return the remarks, but for those on the model as a whole."""
    remarks = Remarks("dq_matmulnbits_fusion")
    fuse(model, options, PassContext(remarks, providers))
    return [remark for remark in remarks if remark.node != "model"]


def op_types(model: ir.Model) -> list[str]:
    return sorted(node.op_type for node in model.graph)
