# SPDX-License-Identifier: MIT
"""Small models around one dequantised weight, with the numbers that they must give."""

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
from .text_models import text_model

CPU = ("CPUExecutionProvider",)
EXACT = FusionOptions(accuracy_level=0, slow_kernels="fuse")
STORAGE = {
    "int4": (4, True, ml_dtypes.int4),
    "uint4": (4, False, ml_dtypes.uint4),
    "int8": (8, True, np.int8),
    "uint8": (8, False, np.uint8),
    "int2": (2, True, ml_dtypes.int2),
    "uint2": (2, False, ml_dtypes.uint2),
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
        bits, signed, _ = STORAGE[self.storage]
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

    def tensors(self, name: str = "w") -> list[onnx.TensorProto]:
        """Codes, scales and zero points as they are stored."""
        dtype = STORAGE[self.storage][2]
        arrays = zip(self.arrays(), ("", "_scale", "_zero_point"), strict=True)
        return [
            onnx.numpy_helper.from_array(
                self._stored(array).astype(array.dtype if part == "_scale" else dtype),
                f"{name}{part}",
            )
            for array, part in arrays
            if array is not None
        ]

    def dequantize(self, name: str = "w", node: str = "dq") -> str:
        """Return the nodes that make ``{node}_out``, W[K, N], as text."""
        read = ", ".join(tensor.name for tensor in self.tensors(name))
        call = "DequantizeLinear <axis = {}, block_size = {}> ({})"
        if self.layout == "axis0":
            return f"[{node}] {node}_out = {call.format(0, self.block_size, read)}  "
        return f"""[{node}] {node}_rows = {call.format(1, self.block_size, read)}
            [{node}_transpose] {node}_out = Transpose <perm = [1, 0]> ({node}_rows)  """

    def model(self) -> ir.Model:
        return self.model_of("[matmul] y = MatMul (x, dq_out)")

    def model_of(
        self, nodes: str, outputs: Sequence[str] = ("y",), **inputs: tuple[int, list[str]]
    ) -> ir.Model:
        """Return the model of nodes behind the weight, with more inputs than x."""
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self.scale_dtype))
        proto = text_model(
            self.dequantize() + nodes,
            self.tensors(),
            {"x": (kind, ["rows", self.k]), **inputs},
            outputs,
            opset=25 if self.storage.endswith("2") else 21,
            output_type=kind,
        )
        return ir.from_proto(proto)

    def feed(self, rows: int = 3) -> npt.NDArray:
        rng = np.random.default_rng(self.seed + 1)
        return rng.standard_normal((rows, self.k)).astype(self.scale_dtype)

    def reference(self, feed: npt.NDArray) -> npt.NDArray[np.float64]:
        return feed.astype(np.float64) @ self.weight()

    def _stored(self, array: npt.NDArray) -> npt.NDArray:
        return np.ascontiguousarray(array if self.layout == "axis0" else array.T)


def run(
    model: ir.Model | onnx.ModelProto | str,
    feeds: Mapping[str, npt.NDArray],
    *,
    optimised: bool = False,
) -> list[npt.NDArray]:
    """Outputs by onnxruntime; without its optimisers, and so without its own fusions."""
    return session(model, optimised=optimised).run(None, dict(feeds))


def assert_same_outputs(
    actual: ir.Model | onnx.ModelProto,
    expected: ir.Model | onnx.ModelProto,
    feeds: Mapping[str, npt.NDArray],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Run both models unoptimised and compare all outputs; by default every number stays."""
    for a, b in zip(run(actual, feeds), run(expected, feeds), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


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
