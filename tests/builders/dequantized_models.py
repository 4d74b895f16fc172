# SPDX-License-Identifier: MIT
"""Small models around one dequantised weight, with the numbers that they must give."""

import dataclasses
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks

from .same_numbers import session
from .text_models import float64_outputs, quoted, text_model

CPU = ("CPUExecutionProvider",)
EXACT = FusionOptions(accuracy_level=0, slow_kernels="fuse")
STORAGE = {
    "int4": (4, True, ml_dtypes.int4),
    "uint4": (4, False, ml_dtypes.uint4),
    "int8": (8, True, np.int8),
    "uint8": (8, False, np.uint8),
}


def attribute_text(**given: object) -> str:
    """Attributes as text, without those that are None."""
    pairs = [f"{name} = {value}" for name, value in given.items() if value is not None]
    return f"<{', '.join(pairs)}>" if pairs else ""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A constant as DequantizeLinear reads it."""

    shape: tuple[int, ...]  # of the codes
    storage: str = "uint4"
    axis: int | None = 0  # None leaves the attribute out, which stands for 1
    block: int = 32
    # or "none", "zero", "default" (all 2**(bits-1), as unsigned), "one_other" (all but one)
    zero_points: str = "random"
    scaled: str = "blocks"  # or "channel", "tensor" (a scalar), "tensor1" (shape [1])
    scale_dtype: npt.DTypeLike = np.float32
    output_dtype: int = 0  # 0 leaves the attribute out
    names: tuple[str, ...] = ()  # by default w, w_scale, w_zero_point

    @property
    def scale_shape(self) -> tuple[int, ...]:
        axis = (1 if self.axis is None else self.axis) % len(self.shape)
        if self.scaled in ("tensor", "tensor1"):
            return (1,) if self.scaled == "tensor1" else ()
        if self.scaled == "channel":
            return (self.shape[axis],)
        blocks = -(-self.shape[axis] // self.block)
        return (*self.shape[:axis], blocks, *self.shape[axis + 1 :])

    @property
    def needs_zero_points(self) -> bool:
        """Whether MatMulNBits, whose default is ``2**(bits-1)``, needs them written."""
        signed = STORAGE[self.storage][1]
        return not (self.zero_points == "default" or (self.zero_points == "none" and signed))

    def node(self, name: str, scale: str | None = None) -> str:
        """Return DequantizeLinear as text; with the scales of another weight if given."""
        given = {"axis": self.axis, "output_dtype": self.output_dtype or None}
        if self.scaled == "blocks":
            given["block_size"] = self.block
        inputs = list(self._names(name))
        inputs[1] = scale or inputs[1]
        return f"DequantizeLinear {attribute_text(**given)} ({quoted(inputs)})"

    def _names(self, name: str) -> tuple[str, ...]:
        names = self.names or (name, f"{name}_scale", f"{name}_zero_point")
        return names[: 2 if self.zero_points == "none" else 3]

    def arrays(self, rng: np.random.Generator) -> tuple[npt.NDArray, ...]:
        """Draw codes, scales and zero points; scales such that the weights are about 1."""
        bits, signed, dtype = STORAGE[self.storage]
        low = -(1 << (bits - 1)) if signed else 0
        middle = low + (1 << (bits - 1))
        shape = self.scale_shape
        codes = rng.integers(low, low + (1 << bits), self.shape)
        scales = rng.uniform(0.5, 2.0, shape) * rng.choice([-1, 1], shape)
        scales = np.asarray(scales / (1 << (bits - 1))).astype(self.scale_dtype)
        points = np.full(shape, middle)
        if self.zero_points == "random":
            points = np.asarray(rng.integers(low, low + (1 << bits), shape))
        if self.zero_points == "zero":
            points = np.zeros(shape, np.int64)
        # Kernels take the middle where they get none, and pad with codes of 0.
        if self.zero_points in ("random", "one_other") and {*points.flat} <= {low, middle}:
            points.flat[-1] = low + 1
        offset = 0 if self.zero_points == "none" else points.flat[0]
        if codes.flat[0] == offset:  # a weight of nothing but 0 shows no error
            codes.flat[0] = low if offset != low else low + 1
        return codes.astype(dtype), scales, points.astype(dtype)

    def tensors(self, name: str, rng: np.random.Generator) -> list[onnx.TensorProto]:
        drawn = zip(self.arrays(rng), self._names(name), strict=False)
        return [numpy_helper.from_array(array, text) for array, text in drawn]


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
    zero_points: str = "none"
    scale_dtype: type = np.float32
    seed: int = 0

    def arrays(self) -> tuple[npt.NDArray, ...]:
        """Codes [K, N], scales and zero points [blocks, N]."""
        return self._quantized().arrays(np.random.default_rng(self.seed))

    def _quantized(self, transposed: bool = False) -> Quantized:
        shape = (self.n, self.k) if transposed else (self.k, self.n)
        return Quantized(
            shape, self.storage, int(transposed), self.block_size, self.zero_points,
            scale_dtype=self.scale_dtype,
        )  # fmt: skip

    def tensors(self, name: str = "w") -> list[onnx.TensorProto]:
        """Codes, scales and zero points as they are stored."""
        names = (name, f"{name}_scale", f"{name}_zero_point")
        arrays = self.arrays()[: 2 if self.zero_points == "none" else 3]
        if self.layout != "axis0":
            arrays = tuple(np.ascontiguousarray(array.T) for array in arrays)
        return list(map(numpy_helper.from_array, arrays, names))

    def dequantize(self, name: str = "w", node: str = "dq") -> str:
        """Return the nodes that make ``{node}_out``, W[K, N], as text."""
        if self.layout == "axis0":
            return f"[{node}] {node}_out = {self._quantized().node(name)}  "
        return f"""[{node}] {node}_rows = {self._quantized(transposed=True).node(name)}
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
            output_type=kind,
        )
        return ir.from_proto(proto)

    def feed(self, rows: int = 3) -> npt.NDArray:
        rng = np.random.default_rng(self.seed + 1)
        return rng.standard_normal((rows, self.k)).astype(self.scale_dtype)

    def reference(self, feed: npt.NDArray) -> npt.NDArray[np.float64]:
        return float64_outputs(ir.to_proto(self.model()), {"x": feed})[0]


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
