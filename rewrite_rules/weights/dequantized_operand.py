# SPDX-License-Identifier: MIT
"""Reads the constant weight behind an operand: DequantizeLinear, and what only renames it.

    DequantizeLinear(codes, scales, zero_points?)           per tensor, per axis or in blocks
        -> (Identity | Cast | Transpose | Reshape | Squeeze | Unsqueeze) x any number
        -> an operand of MatMul, Gemm, Gather ...

The codes may have any rank; what counts is where the scales of ``W[K, N]`` lie beside them. So
``[K, N]`` blocked on axis 0, ``[N, K]`` blocked on axis 1 with a Transpose, and ``[N, blocks,
block_size]`` blocked on axis 2 with Reshape and Transpose are one layout to the writers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.lazy_tensors import packed_bytes
from rewrite_rules.graph.nodes import is_dequantize_linear, made_by
from rewrite_rules.graph.parameters import (
    axis_of,
    constant_ints,
    int_attribute,
    ints_attribute,
    require_constant,
    source_of,
    type_attribute,
)
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Shape, number
from rewrite_rules.shapes.evaluator import ArrayFacts
from rewrite_rules.shapes.node_facts import Site
from rewrite_rules.shapes.operator_shapes import output_shapes
from rewrite_rules.weights.bit_packing import unpack

# What weights are stored as, and biases besides.
_CODE_TYPES = frozenset({
    ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT32, ir.DataType.UINT4,
    ir.DataType.UINT8,
})  # fmt: skip
_RENAMING = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze"})
_CHUNK_ELEMENTS = 1 << 20
_MAX_RANK = 8  # numpy has 64 at most
# More nodes in a row rename nothing that a fewer could not; and a cycle must end.
_LONGEST_TRAIL = 64


class Run(NamedTuple):
    """An axis: element ``i`` has its scale ``(i // block) * step`` behind the first one."""

    size: int
    step: int = 0
    block: int = 1

    @property
    def has_one_scale(self) -> bool:
        return self.step == 0 or self.size <= self.block

    def joined(self, inner: Run) -> Run | None:
        """Return one run for two axes, this the outer one; None where steps are uneven."""
        size = self.size * inner.size
        if inner.has_one_scale:
            return Run(size, self.step, self.block * inner.size)
        if self.size == 1:
            return inner
        even = self.block == 1 and self.step * inner.block == inner.size * inner.step
        return Run(size, inner.step, inner.block) if even else None


class NoKernel(Refusal):
    """No kernel computes on these codes as they are stored; a float constant might do."""


@dataclasses.dataclass(frozen=True, eq=False)
class DequantizedOperand:
    """A dequantised constant as its consumer sees it.

    Attributes:
        codes: Of 4 or 8 bits, or int32.
        scales: float32 or float16.
        zero_points: Shape of ``scales``, type of ``codes``; None stands for 0.
        runs: The axes before the quantised one, it, and those behind it, as one each.
        layout: The stored layout in a few words.
        trail: The nodes that rename it.
        casts: Types that its numbers pass through, DequantizeLinear's own first.
        shape: That of the operand.
        is_turned: Whether that is a matrix whose transpose is stored; None where the order of
            its elements is another.
    """

    dequantize: ir.Node
    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    code_tensor: ir.TensorProtocol
    scale_tensor: ir.TensorProtocol
    zero_point_tensor: ir.TensorProtocol | None
    runs: tuple[Run, Run, Run]
    layout: str
    trail: tuple[ir.Node, ...]
    casts: tuple[ir.DataType, ...]
    shape: tuple[int, ...]
    is_turned: bool | None = False

    @property
    def bits(self) -> int:
        return self.code_tensor.dtype.bitwidth

    @property
    def signed(self) -> bool:
        """Whether codes and zero points are in two's complement."""
        return self.code_tensor.dtype.is_signed()

    @property
    def dtype(self) -> ir.DataType:
        return self.casts[-1]

    def matrix(self, k_axis: int) -> BlockQuantizedWeight:
        """Describe the operand as ``W[K, N]``; refuse others than matrices stored in order.

        ``k_axis`` is the one of its axes that is reduced.
        """
        name, shape = self.codes.name, self.shape
        if len(shape) != 2:
            raise NoKernel("ORP106", f"weight {name!r} has shape {list(shape)}: rank 2 fuses")
        if self.is_turned is None:
            raise NoKernel(
                "ORP103", f"weight {name!r} is stored neither as [K, N] nor as [N, K]"
            )
        runs = _cut(self.runs, shape[0 if self.is_turned else 1])
        if runs is None:
            raise NoKernel(
                "ORP103",
                f"weight {name!r} of shape {list(shape)} is cut in the middle of blocks",
            )
        k_stored = k_axis ^ self.is_turned
        return BlockQuantizedWeight(self, runs[k_stored], runs[1 - k_stored], k_stored)

    def suits_integers(self, k_axis: int) -> bool:
        """Whether the right one of two codes may have its scales: one, or one for a column.

        onnxruntime looks at no scales before it takes MatMulIntegerToFloat or QGemm.
        """
        if len(self.shape) != 2:
            outer, quantised, inner = self.runs
            columns = inner.size == 1 and quantised.block == 1 and outer.has_one_scale
            return self.scale_tensor.size == 1 or (columns and not self.trail)
        weight = self.matrix(k_axis)
        return weight.one_block and (weight.n.block == 1 or weight.n.has_one_scale)

    def stored_scales(self) -> npt.NDArray[Any]:
        """The scales, flat, as they are stored."""
        return packed_bytes(self.scale_tensor).view(self.scale_tensor.dtype.numpy())

    def may_exceed(self, limit: float) -> bool:
        """Whether its greatest scale takes a code far from the zero point beyond a limit."""
        scales = self.stored_scales()
        step = max(abs(float(scales.max())), abs(float(scales.min())))
        return step * ((1 << self.bits) - 1) > limit

    def stored_zero_points(self) -> npt.NDArray[np.uint8]:
        """The zero points, flat, a byte each, not yet signed; there must be some."""
        assert self.zero_point_tensor is not None
        every = np.arange(self.zero_point_tensor.size)
        return unpack(packed_bytes(self.zero_point_tensor), self.bits, every)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield DequantizeLinear's own numbers, flat: a float32 product, rounded once."""
        scales = self.stored_scales()
        zero_points = None
        if self.zero_point_tensor is not None:
            every = np.arange(self.zero_point_tensor.size)
            zero_points = _integers(self.zero_point_tensor, every)
        outer, quantised, inner = self.runs
        for start in range(0, self.code_tensor.size, _CHUNK_ELEMENTS):
            at = np.arange(start, min(start + _CHUNK_ELEMENTS, self.code_tensor.size))
            scale_at = at % inner.size * inner.step
            scale_at += at // inner.size % quantised.size // quantised.block * quantised.step
            scale_at += at // (inner.size * quantised.size) * outer.step
            steps = _integers(self.code_tensor, at)
            if zero_points is not None:
                steps -= zero_points[scale_at]
            with np.errstate(over="ignore"):
                product = steps.astype(np.float32) * scales[scale_at].astype(np.float32)
                yield product.astype(self.casts[0].numpy())


@dataclasses.dataclass(frozen=True, eq=False)
class BlockQuantizedWeight:
    """A constant weight ``W[K, N]`` in blocks along K; tensors by reference, never unpacked.

        W[k, n] = (codes[k, n] - zero_points[k // block_size, n]) * scales[k // block_size, n]

    One scale for a whole column, or for the whole weight, is a block as long as K.

    Attributes:
        operand: The dequantised operand that it is: codes, scales, types.
        k, n: Where scales of neighbours along K and along N lie.
        k_axis: 0 when the codes lie as ``[K, N]``, row-major; 1 when as ``[N, K]``.
    """

    operand: DequantizedOperand
    k: Run
    n: Run
    k_axis: int

    @property
    def bits(self) -> int:
        return self.operand.bits

    @property
    def K(self) -> int:
        return self.k.size

    @property
    def N(self) -> int:
        return self.n.size

    @property
    def block_size(self) -> int:
        """Neighbours along K that share one scale; K where a column has only one."""
        return self.K if self.k.has_one_scale else self.k.block

    @property
    def grid(self) -> tuple[int, ...]:
        """Where its scales lie."""
        return self.k.step, self.n.step, self.n.block

    @property
    def lossless_dtype(self) -> ir.DataType:
        """The wider type of the consumer's and the scales': no scale loses bits in it."""
        types = (self.operand.dtype, self.operand.scale_tensor.dtype)
        return max(types, key=lambda dtype: dtype.bitwidth)

    @property
    def one_block(self) -> bool:
        """Whether each column has a single scale, so that any block size fits."""
        return self.block_size >= self.K

    def blocks(self, block_size: int) -> int:
        """Blocks per column, ``ceil(K / block_size)``; the last one may be short."""
        return -(-self.K // block_size)

    def cuts(self, block_size: int) -> int:
        """How many blocks of ``block_size``, a divisor, each stored block is cut into."""
        return self.blocks(block_size) if self.one_block else self.block_size // block_size

    def grid_rows(
        self, stored: npt.NDArray[Any], block_size: int
    ) -> Iterator[npt.NDArray[Any]]:
        """Yield scales or zero points ``[columns, blocks]`` of successive columns."""
        block = np.arange(self.blocks(block_size)) // self.cuts(block_size) * self.k.step
        column = np.arange(self.N) // self.n.block * self.n.step
        step = max(1, _CHUNK_ELEMENTS // 4 // block.size)
        for start in range(0, self.N, step):
            yield stored[column[start : start + step, None] + block]


def dequantize_chain(value: ir.Value | None) -> list[ir.Node] | None:
    """Return the nodes from a DQ of a candidate constant to ``value``; else None."""
    trail: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None:
        if len(node.outputs) != 1 or len(trail) >= _LONGEST_TRAIL:
            return None
        trail.append(node)
        if is_dequantize_linear(node):
            codes = node.inputs[0] if node.inputs else None
            if codes is None:
                return None
            codes = source_of(codes)
            # An overridable initializer is a candidate: its refusal tells how to fix it.
            return trail[::-1] if ir.convenience.get_const_tensor(codes) is not None else None
        if not is_layout_op(node):
            return None
        value = node.inputs[0] if node.inputs else None
    return None


def is_layout_op(node: ir.Node) -> bool:
    """Whether a node keeps the numbers of its first input, under other axes or types."""
    return node.op_type in _RENAMING and node.domain == ""


def renamed_values(value: ir.Value) -> list[ir.Value]:
    """Return a value, and what nodes that only lay it out otherwise make of it."""
    found, seen = [value], {value}  # a damaged graph may have a cycle
    for each in found:  # grows
        for node, index in each.uses():
            if index == 0 and is_layout_op(node):
                found += [out for out in node.outputs if out not in seen]
                seen.update(node.outputs)
    return found


def read_operand(trail: list[ir.Node]) -> DequantizedOperand:
    """Read what :func:`dequantize_chain` found.

    Refused: what a caller can change, or is malformed.
    """
    operand = _read_dequantize(trail[0])
    for node in trail[1:]:
        renamed = _renamed(operand, node)
        operand = dataclasses.replace(renamed, trail=(*operand.trail, node))
    return operand


def _cut(runs: Sequence[Run], columns: int) -> tuple[Run, Run] | None:
    """Make two axes, the second of ``columns``, of three; None where a block is cut."""
    parts, second = [run for run in runs if run.size > 1], Run(1)
    while second.size < columns:
        run, size = parts.pop(), columns // second.size
        if run.size > size:
            if run.size % size or (size % run.block and run.block % size):
                return None
            count, blocks = run.size // size, max(1, size // run.block)
            parts.append(Run(count, blocks * run.step, max(1, run.block // size)))
            run = Run(size, run.step, run.block)
        joined = run.joined(second) if size % run.size == 0 else None
        if joined is None:
            return None
        second = joined
    first = Run(1)
    for run in reversed(parts):
        if (joined := run.joined(first)) is None:
            return None
        first = joined
    return first, second


def _read_dequantize(dq: ir.Node) -> DequantizedOperand:
    inputs = [*dq.inputs, None, None, None]
    codes, code_tensor = require_constant(inputs[0], "weight")
    scales, scale_type = inputs[1], None
    cast = None if scales is None else made_by(source_of(scales), "Cast")
    if cast is not None:
        # Stored in fewer bits than they are used in; onnxruntime folds it at the start.
        scales, scale_type = cast.inputs[0], type_attribute(cast, "to")
    scales, scale_tensor = require_constant(scales, "scale")
    if scale_type is not None and scale_type.bitwidth < scale_tensor.dtype.bitwidth:
        raise Refusal("ORP105", f"scale {scales.name!r} is rounded by a Cast")
    if code_tensor.dtype not in _CODE_TYPES:
        raise Refusal(
            "ORP201",
            f"weight {codes.name!r} is {code_tensor.dtype.name.lower()}: codes of 4 or 8 bits "
            "fuse",
        )
    shape = tuple(code_tensor.shape.numpy())
    if 0 in shape:
        raise Refusal("ORP202", f"weight {codes.name!r} of shape {list(shape)} is empty")
    if len(shape) > _MAX_RANK:
        raise Refusal(
            "ORP202", f"weight {codes.name!r} has rank {len(shape)}: {_MAX_RANK} at most fuse"
        )
    if scale_tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise Refusal(
            "ORP201",
            f"scale {scales.name!r} is {scale_tensor.dtype.name.lower()}: float32 or float16 "
            "scales fuse",
        )
    dtype = type_attribute(dq, "output_dtype") or scale_type or scale_tensor.dtype
    runs, blocks = _runs(dq, codes, shape, scales, tuple(scale_tensor.shape.numpy()))
    zero_points, zero_point_tensor = None, None
    if inputs[2] is not None:
        zero_points, zero_point_tensor = require_constant(inputs[2], "zero point")
    zero = "" if zero_points is None else ", zero points"
    operand = DequantizedOperand(
        dequantize=dq,
        codes=codes,
        scales=scales,
        zero_points=zero_points,
        code_tensor=code_tensor,
        scale_tensor=scale_tensor,
        zero_point_tensor=zero_point_tensor,
        runs=runs,
        layout=f"{code_tensor.dtype.name.lower()} {list(shape)}, {blocks}{zero}",
        trail=(),
        casts=(dtype,),
        shape=shape,
    )
    _check_zero_points(operand)
    _check_scales(operand)
    return operand


def _runs(
    dq: ir.Node,
    codes: ir.Value,
    shape: tuple[int, ...],
    scales: ir.Value,
    scale_shape: tuple[int, ...],
) -> tuple[tuple[Run, Run, Run], str]:
    """Where the scales lie, and how the codes are quantised in a few words."""
    block_size = int_attribute(dq, "block_size")
    if block_size < 0:
        raise Refusal("ORP103", f"block_size {block_size} is negative")
    if block_size == 0 and math.prod(scale_shape) == 1 and len(scale_shape) <= 1:
        return (Run(1), Run(math.prod(shape)), Run(1)), "one scale"

    axis = axis_of(int_attribute(dq, "axis", 1), len(shape))
    size = shape[axis]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if block_size == 0:
        if scale_shape != (size,):
            raise Refusal(
                "ORP202",
                f"scale {scales.name!r} has shape {list(scale_shape)}: weight {codes.name!r} "
                f"of shape {list(shape)} needs [], [1] or, for axis {axis}, [{size}]",
            )
        runs = (Run(outer), Run(size, 1), Run(inner))
        return runs, f"a scale for each index of axis {axis}"

    # A single block may have any size: onnxruntime's quantizer writes K for whole columns.
    if block_size & (block_size - 1) and block_size < size:
        raise Refusal(
            "ORP103", f"block_size {block_size} of weight {codes.name!r} is not a power of 2"
        )
    blocks = -(-size // block_size)
    expected = [*shape[:axis], blocks, *shape[axis + 1 :]]
    if list(scale_shape) != expected:
        raise Refusal(
            "ORP202",
            f"scale {scales.name!r} has shape {list(scale_shape)}: weight {codes.name!r} of "
            f"shape {list(shape)} in blocks of {block_size} on axis {axis} needs {expected}",
        )
    runs = (Run(outer, blocks * inner), Run(size, inner, block_size), Run(inner, 1))
    return runs, f"axis {axis}, block {block_size}"


def _renamed(operand: DequantizedOperand, node: ir.Node) -> DequantizedOperand:
    """Follow the operand through one node that keeps its numbers."""
    label, shape = f"{node.op_type} {node.name or node.outputs[0].name!r}", operand.shape
    if node.op_type == "Identity":
        return operand
    if node.op_type == "Cast":
        dtype = type_attribute(node, "to") or ir.DataType.UNDEFINED
        return dataclasses.replace(operand, casts=(*operand.casts, dtype))
    perm, order = ints_attribute(node, "perm"), list(range(len(shape)))
    if node.op_type == "Transpose" and perm is not None and sorted(perm) != order:
        raise Refusal("ORP202", f"{label} has perm {perm}: the weight has rank {len(order)}")
    renamed = _shape_after(node, shape)
    if renamed is None or math.prod(renamed) != math.prod(shape):
        raise Refusal("ORP102", f"{label} does not give {list(shape)} a constant shape")
    turned = operand.is_turned
    if node.op_type != "Transpose":
        turned = None if turned and renamed != shape else turned
    elif perm != order:
        turned = None if turned is None or len(order) != 2 else not turned
    return dataclasses.replace(operand, shape=renamed, is_turned=turned)


def _shape_after(node: ir.Node, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return what a node makes of the shape of its first input; None where a run decides."""
    source, *others = node.inputs
    arrays = {source: np.broadcast_to(np.float32(0), shape)} if source else {}
    for value in others:
        ints = constant_ints(value)
        if value is None or ints is None:
            return None
        arrays[value] = np.array(ints, np.int64)
    made: Shape | None = None
    with contextlib.suppress(Refusal):
        made = next(iter(output_shapes(Site(node, ArrayFacts(arrays), None))), None)
    sizes = [number(dim) or 0 for dim in made] if isinstance(made, tuple) else [0]
    return tuple(sizes) if min(sizes, default=1) > 0 else None


def _check_zero_points(operand: DequantizedOperand) -> None:
    """Refuse those of another type than the codes, or another shape than the scales."""
    if operand.zero_points is None or (tensor := operand.zero_point_tensor) is None:
        return
    name, codes = f"zero point {operand.zero_points.name!r}", operand.code_tensor
    if tensor.dtype != codes.dtype:
        weight = f"weight {operand.codes.name!r} is {codes.dtype.name.lower()}"
        raise Refusal("ORP202", f"{name} is {tensor.dtype.name.lower()} but {weight}")
    found, expected = (list(each.shape.numpy()) for each in (tensor, operand.scale_tensor))
    # [] and [1] both stand for a single one.
    if found != expected and found + expected != [1]:
        raise Refusal("ORP202", f"{name} has shape {found}: {expected} is needed")
    if codes.dtype is ir.DataType.INT32 and tensor.numpy().any():
        raise Refusal("ORP309", f"{name} of int32 codes is not 0")


def _check_scales(operand: DequantizedOperand) -> None:
    """Refuse scales that are not numbers."""
    scales = operand.stored_scales()
    for start in range(0, scales.size, _CHUNK_ELEMENTS):
        finite = np.isfinite(chunk := scales[start : start + _CHUNK_ELEMENTS])
        if not finite.all():
            at = int(np.argmin(finite))
            raise Refusal(
                "ORP203",
                f"scale {operand.scales.name!r} holds {chunk[at]} (element {start + at})",
            )


def _integers(
    tensor: ir.TensorProtocol, at: npt.NDArray[np.int64]
) -> npt.NDArray[np.int16 | np.int32]:
    """The codes at flat positions, as integers wide enough for their differences."""
    bits = tensor.dtype.bitwidth
    if bits > 8:
        return packed_bytes(tensor).view(np.int32)[at]
    values = unpack(packed_bytes(tensor), bits, at).astype(np.int16)
    if tensor.dtype.is_signed():
        values -= (values >> (bits - 1)) << bits
    return values
