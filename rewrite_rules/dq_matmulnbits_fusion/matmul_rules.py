# SPDX-License-Identifier: MIT
"""Rules for multiplications by a dequantised constant -> MatMulNBits.

    MatMul(x, W)                     -> MatMulNBits(x)
    FusedMatMul(x, W, alpha)         -> MatMulNBits(x), alpha in the scales
    Gemm(x, W, C, alpha, beta)       -> MatMulNBits(x, bias = beta * C)
    MatMul(W, x)                     -> Transpose(MatMulNBits(Transpose(x)))
    MatMul(x[G,M,K], W[G,K,N])       -> G times MatMulNBits, between Split and Concat
    Add(MatMulNBits(x), bias[N])     -> MatMulNBits(x, bias)

where W is a dequantised constant in whatever layout :mod:`.dequantized_operand`
reads: the same codes and the same scales, so that with ``accuracy_level`` 0 the numbers stay.
Where the CPU has no fast kernel for the bits, block and accuracy level, or no kernel at all, W
becomes a float constant, unpacked once instead of at every inference:

    MatMul(x, W)                     -> MatMul(x, constant)

Every match is refused by name when the weight, its scales or its zero points are not constant
(an initializer that is also a graph input is not), when they are malformed, and when the
activation is dequantised too, which onnxruntime has kernels of its own for.
"""

from __future__ import annotations

__all__ = ["AddBias", "FusedMatMulToMatMulNBits", "GemmToMatMulNBits", "MatMulToMatMulNBits"]

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.dq_matmulnbits_fusion.column_bias import (
    ColumnBias,
    read_column_bias,
    write_column_bias,
)
from rewrite_rules.dq_matmulnbits_fusion.fusion_run import FusionRun, check_type
from rewrite_rules.dq_matmulnbits_fusion.kernel_support import (
    NoKernel,
    matmulnbits_unsupported,
    takes_bias,
)
from rewrite_rules.dq_matmulnbits_fusion.matmul_operands import Product, read_product
from rewrite_rules.dq_matmulnbits_fusion.matmulnbits_inputs import (
    fold_into_scales,
    kernel_block_size,
    slow_kernel,
    write_matmulnbits,
)
from rewrite_rules.dq_matmulnbits_fusion.native_fusion import (
    AccuracyLevel,
    choose_accuracy_level,
    native_block_size,
)
from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.constants import constant
from rewrite_rules.graph.nodes import label, owner, producer
from rewrite_rules.graph.quantize_linear import is_dequantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.weights.block_quantized_weight import BlockQuantizedWeight, Unrepresentable
from rewrite_rules.weights.dequantized_operand import (
    DequantizedOperand,
    dequantize_chain,
    read_operand,
)

# Batched weights of more groups would swell the graph more than they save.
_MAX_GROUPS = 64
# Operators that onnxruntime moves a DequantizeLinear past before it fuses QLinearMatMul.
_TRANSPARENT = frozenset(
    {"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)

_EXACT = AccuracyLevel(0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """What becomes of a product: MatMulNBits for each weight, or a float constant."""

    product: Product
    operand: DequantizedOperand
    weights: tuple[BlockQuantizedWeight, ...] = ()
    block_size: int = 0
    level: AccuracyLevel = _EXACT
    to_float: str = ""  # the reason


class _ProductToMatMulNBits(RewriteRuleClassBase):
    """A multiplication by a dequantised constant; subclasses say which node."""

    def __init__(self, run: FusionRun) -> None:
        # The DequantizeLinear may have other consumers, which keep it.
        super().__init__(remove_nodes=False)
        self._run = run
        self._plan: _Plan | None = None

    def check(self, context: MatchContext, out: ir.Value, **_: object) -> MatchResult:  # type: ignore[override]
        """Read the weight and decide its form; every refusal is a remark."""
        del context  # Unused
        result = MatchResult()
        node = producer(out)
        for index in (1, 0):
            chain = dequantize_chain(node.inputs[index])
            if chain is None:
                continue
            with self._run.context.remarks.at(label(node)):
                try:
                    self._plan = self._decide(read_product(node, index), chain)
                except Refusal as refusal:
                    self._run.refused(node, chain[0], refusal)
                    return result.fail(str(refusal), node)
            return result
        return result.fail("no operand is a dequantised constant", node)

    def _decide(self, product: Product, chain: list[ir.Node]) -> _Plan:
        """Return what the product becomes, or raise the first refusal that applies."""
        run, options = self._run, self._run.options
        run.check_providers()
        operand = read_operand(chain)
        if operand.bits == 8 and _is_dequantized(product.x):
            raise Refusal(
                "its other operand is dequantised too: onnxruntime has kernels for that "
                "(QLinearMatMul, MatMulIntegerToFloat)"
            )
        try:
            check_type(operand)
            weights = _weights(product, operand)
            self._check_opset(product, operand)
            level = choose_accuracy_level(product, chain, operand, options, run.context)
            block_size = kernel_block_size(weights[0])
            if level.native and level.number == 4:
                # Activations are rounded in these blocks: others would change the error.
                block_size = native_block_size(operand)
            matmulnbits_unsupported(
                run.context,
                bits=operand.bits,
                accuracy_level=level.number,
                float16=self._kernel_dtype(weights[0], level) is ir.DataType.FLOAT16,
                captured_codes=_is_captured(operand.codes, product.node),
                captured_zero_points=_has_captured_zero_points(product.node, operand),
            )
            slow = None
            if run.context.cpu_only:
                slow = slow_kernel(operand.bits, block_size, level.number)
        except (NoKernel, Unrepresentable) as refusal:
            run.float_fits(operand, str(refusal))
            return _Plan(product, operand, to_float=str(refusal))
        if slow is not None and options.slow_kernels != "fuse":
            run.float_fits(operand, slow)
            return _Plan(product, operand, to_float=slow)
        return _Plan(product, operand, weights, block_size, level)

    def _check_opset(self, product: Product, operand: DequantizedOperand) -> None:
        """Refuse forms that need Split or Unsqueeze as opset 13 has them."""
        old = self._run.opset is not None and self._run.opset < 13
        if (
            old
            and len(operand.shape) == 3
            and (operand.shape[0] > 1 or (_rank(product) or 3) < 3)
        ):
            raise NoKernel(
                f"a weight of rank 3 fuses from opset 13 on, not at {self._run.opset}"
            )

    def rewrite(self, op: Any, **_: object) -> ir.Value:
        """Emit MatMulNBits, or the node itself with a float constant."""
        plan, self._plan = self._plan, None
        assert plan is not None
        node, run = plan.product.node, self._run
        with run.context.remarks.at(label(node)):
            if plan.to_float:
                inputs = list(node.inputs)
                inputs[plan.product.index] = constant = run.write_float(plan.operand)
                value: ir.Value = getattr(op, node.op_type)(
                    *inputs, _domain=node.domain, _name=node.name, **node.attributes
                )
                assert constant.const_value is not None
                size = constant.const_value.nbytes / 1e6
                fate = f"float constant ({size:.1f} MB): {plan.to_float}"
            elif len(plan.weights) > 1:
                value = self._emit_groups(op, plan)
                fate = f"{len(plan.weights)} x MatMulNBits"
            else:
                value = self._emit(op, plan)
                fate = "MatMulNBits"
            if plan.weights:
                fate += f", block {plan.block_size}, accuracy_level {plan.level}"
            run.fired(node, plan.operand.dequantize, f"{plan.operand.layout} -> {fate}")
        return value

    def _emit(self, op: Any, plan: _Plan) -> ir.Value:
        """One MatMulNBits, and what stands around it."""
        product, (weight,) = plan.product, plan.weights
        x, bias = product.x, product.bias
        assert x is not None
        alpha, rank = product.alpha, _rank(product)
        dtype = self._kernel_dtype(weight, plan.level)
        in_scales = alpha == 1.0 or fold_into_scales(weight, dtype, alpha)
        columns = None
        if (
            bias is not None
            and in_scales
            and not product.transpose_y
            and takes_bias(self._run.context)
        ):
            columns = _column_bias(bias, weight.N)
        if product.transpose_x and rank != 1:
            x = _swapped(op, x, rank)
        y = self._emit_kernel(op, x, plan, weight, alpha if in_scales else 1.0, columns)
        if not in_scales:
            y = op.Mul(y, _scalar(op, alpha, weight.dtype))
        if product.transpose_y and rank != 1:
            y = _swapped(op, y, rank)
        if len(plan.operand.shape) == 3 and rank is not None and rank < 3:
            y = op.Unsqueeze(y, op.Constant(value=ir.tensor(np.array([0], np.int64))))
        if bias is not None and columns is None:
            if product.beta != 1.0:
                bias = op.Mul(bias, _scalar(op, product.beta, weight.dtype))
            y = op.Add(y, bias)
        return y

    def _kernel_dtype(self, weight: BlockQuantizedWeight, level: AccuracyLevel) -> ir.DataType:
        """Type of the kernel's activations and scales.

        On the CPU it computes in float32 anyway. Between operators without a float16 kernel
        onnxruntime puts Casts on the scales, which it then takes for run-time inputs; from
        these it computes wrong numbers at accuracy_level 4 (measured, 1.22 to 1.31).
        """
        if self._run.context.cpu_only and level.number == 4:
            return ir.DataType.FLOAT
        return weight.lossless_dtype

    def _emit_kernel(
        self,
        op: Any,
        x: ir.Value,
        plan: _Plan,
        weight: BlockQuantizedWeight,
        factor: float = 1.0,
        columns: ColumnBias | None = None,
    ) -> ir.Value:
        node, beta = plan.product.node, plan.product.beta
        dtype = self._kernel_dtype(weight, plan.level)
        if dtype != weight.dtype:
            x = op.Cast(x, to=int(dtype))
        inputs = write_matmulnbits(
            self._run.initializers, weight, plan.block_size, dtype, factor
        )
        optional: list[ir.Value | None] = [inputs.zero_points, None, None]
        if columns is not None:
            optional[2] = write_column_bias(self._run.initializers, columns, beta, dtype)
            if columns.dequantize is not None:
                self._run.folded(node, columns.dequantize, "bias of MatMulNBits")
        while optional and optional[-1] is None:
            optional.pop()
        value: ir.Value = op.MatMulNBits(
            x,
            inputs.codes,
            inputs.scales,
            *optional,
            **inputs.attributes,
            accuracy_level=plan.level.number,
            _domain="com.microsoft",
            _name=node.name if len(plan.weights) == 1 else None,
        )
        return value if dtype == weight.dtype else op.Cast(value, to=int(weight.dtype))

    def _emit_groups(self, op: Any, plan: _Plan) -> ir.Value:
        """A MatMulNBits for each group of a batched weight."""
        count = len(plan.weights)
        sizes = op.Constant(value=ir.tensor(np.ones(count, np.int64)))
        parts = op.Split(plan.product.x, sizes, axis=0, _outputs=count)
        outputs = [
            self._emit_kernel(op, part, plan, weight)
            for part, weight in zip(parts, plan.weights, strict=True)
        ]
        value: ir.Value = op.Concat(*outputs, axis=0)
        return value


class MatMulToMatMulNBits(_ProductToMatMulNBits):
    """MatMul(x, W) -> MatMulNBits(x)."""

    def pattern(self, op, a, b):  # type: ignore[no-untyped-def]
        return op.MatMul(a, b, _outputs=["out"])


class FusedMatMulToMatMulNBits(_ProductToMatMulNBits):
    """FusedMatMul(x, W) -> MatMulNBits(x)."""

    def pattern(self, op, a, b):  # type: ignore[no-untyped-def]
        return op.FusedMatMul(a, b, _domain="com.microsoft", _outputs=["out"])


class GemmToMatMulNBits(_ProductToMatMulNBits):
    """Gemm(x, W, C) -> MatMulNBits(x, bias)."""

    def pattern(self, op, a, b):  # type: ignore[no-untyped-def]
        return op.Gemm(a, b, _allow_other_inputs=True, _outputs=["out"])


class AddBias(RewriteRuleClassBase):
    """Add(MatMulNBits(x), bias[N]) -> MatMulNBits(x, bias)."""

    def __init__(self, run: FusionRun) -> None:
        super().__init__(remove_nodes=False)
        self._run = run

    def pattern(self, op, x, codes, scales, bias):  # type: ignore[no-untyped-def]
        product = op.MatMulNBits(
            x,
            codes,
            scales,
            _allow_other_inputs=True,
            _domain="com.microsoft",
            _outputs=["product"],
        )
        return op.Add(product, bias, _outputs=["out"])

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        x: ir.Value,
        product: ir.Value,
        bias: ir.Value,
        **_: object,
    ) -> MatchResult:
        """The product must have no other use, and the bias be constant over its rows."""
        del context  # Unused
        result, node = MatchResult(), producer(product)
        if len(product.uses()) != 1 or product.is_graph_output():
            return result.fail("the product has another use", node)
        if not takes_bias(self._run.context):
            return result.fail("the kernel takes no bias", node)
        if len(node.inputs) > 5 and node.inputs[5] is not None:
            return result.fail("there is a bias already", node)
        if constant(node.inputs[2]) is None:
            return result.fail("the scales are no constant", node)
        try:
            columns = int_attribute(node, "N", 0)
            self._columns = read_column_bias(bias, columns)
        except Refusal as refusal:
            return result.fail(str(refusal), node)
        if self._columns is None:
            return result.fail("the bias is no constant of the columns", node)
        if self._columns.rank > (1 if x.shape is None else len(x.shape)):
            return result.fail("the bias adds an axis", node)
        return result

    def rewrite(self, op: Any, product: ir.Value, out: ir.Value, **_: object) -> ir.Value:
        """Emit the same MatMulNBits with the bias."""
        node, add, columns = producer(product), producer(out), self._columns
        assert columns is not None
        with self._run.context.remarks.at(label(add)):
            scales = constant(node.inputs[2])
            assert scales is not None  # looked at by check
            what = f"bias of MatMulNBits {label(node)!r}"
            if columns.dequantize is not None:
                self._run.folded(add, columns.dequantize, what)
            else:
                self._run.context.remarks.note(label(add), what)
            optional = [*node.inputs[3:5], None, None][:2]
            value: ir.Value = op.MatMulNBits(
                *node.inputs[:3],
                *optional,
                write_column_bias(self._run.initializers, columns, 1.0, scales.dtype),
                _domain=node.domain,
                _name=node.name,
                **node.attributes,
            )
        return value


def _weights(
    product: Product, operand: DequantizedOperand
) -> tuple[BlockQuantizedWeight, ...]:
    """The operand as one weight, or as one for each group.

    Raises:
        NoKernel: If it can't be used so.
    """
    rank, x = len(operand.shape), product.x
    shape = None if x is None else x.shape
    name = operand.codes.name
    if rank == 2:
        fused = product.node.op_type == "FusedMatMul"
        if fused and product.transpose_y and _rank(product) == 1:
            # onnxruntime 1.31 ignores transA then: what it computes is not worth keeping,
            # and not ours to change.
            raise NoKernel(f"weight {name!r} is on the left of a vector in FusedMatMul")
        if (product.transpose_x or product.transpose_y) and _rank(product) is None:
            raise NoKernel(
                f"weight {name!r} is on the left, or its other operand transposed, and that "
                "one's rank is unknown: infer shapes first"
            )
        return (operand.matrix(product.k_axis),)
    plain = product.batched and not product.transpose_x and not product.transpose_y
    if rank != 3 or not plain or product.alpha != 1.0:
        side = " on the left" if product.transpose_y else ""
        raise NoKernel(f"weight {name!r} has shape {list(operand.shape)}{side}: rank 2 fuses")
    groups = operand.shape[0]
    if groups == 1 and shape is not None:
        return (operand.matrix(product.k_axis, 0),)
    if shape is None or len(shape) != 3 or shape[0] != groups:
        raise NoKernel(
            f"weight {name!r} has {groups} groups: they fuse where the other operand has "
            f"shape [{groups}, M, K], {groups} being known"
        )
    if groups > _MAX_GROUPS:
        raise NoKernel(f"weight {name!r} has {groups} groups: up to {_MAX_GROUPS} fuse")
    return tuple(operand.matrix(product.k_axis, group) for group in range(groups))


def _has_captured_zero_points(node: ir.Node, operand: DequantizedOperand) -> bool:
    """Whether a node lies in a body and its zero points in a graph around it.

    Unsigned codes without zero points get some, beside the codes.
    """
    if operand.zero_points is not None:
        return _is_captured(operand.zero_points, node)
    return not operand.signed and _is_captured(operand.codes, node)


def _is_captured(value: ir.Value, node: ir.Node) -> bool:
    """Whether a constant belongs to another graph than the node that reads it."""
    return node.graph is not owner(value)


def _column_bias(bias: ir.Value, columns: int) -> ColumnBias | None:
    """Read a bias; None where it is none of the columns, or damaged, and stays as it is."""
    try:
        return read_column_bias(bias, columns)
    except Refusal:
        return None


def _rank(product: Product) -> int | None:
    """Rank of the operand that is not the weight; None where it isn't known."""
    if not product.batched:
        return 2
    shape = None if product.x is None else product.x.shape
    return None if shape is None else len(shape)


def _swapped(op: Any, x: ir.Value, rank: int | None) -> ir.Value:
    """Swap the last two axes."""
    assert rank is not None
    perm = [*range(rank - 2), rank - 1, rank - 2]
    value: ir.Value = op.Transpose(x, perm=perm)
    return value


def _scalar(op: Any, number: float, dtype: ir.DataType) -> ir.Value:
    value: ir.Value = op.Constant(value=ir.tensor(np.array(number, dtype.numpy())))
    return value


def _is_dequantized(value: ir.Value | None) -> bool:
    """Whether a value is an activation that was quantised to 8 bits."""
    seen = set()
    while value is not None and (node := value.producer()) is not None and node not in seen:
        seen.add(node)
        if is_dequantize_linear(node):
            codes, *rest = [*node.inputs, None]
            if codes is None or constant(codes) is not None:
                return False
            zero_point = constant(rest[1]) if len(rest) > 1 else None
            dtype = codes.dtype if zero_point is None else zero_point.dtype
            return dtype is None or dtype in _EIGHT_BITS
        if node.op_type not in _TRANSPARENT or not node.inputs:
            return False
        value = node.inputs[0]
    return False
