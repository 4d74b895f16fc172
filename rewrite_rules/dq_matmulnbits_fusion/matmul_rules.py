# SPDX-License-Identifier: MIT
"""Rules for multiplications by a dequantised constant -> MatMulNBits.

    MatMulByWeight      MatMul(x, W)                     -> MatMulNBits(x)
                        FusedMatMul(x, W, alpha)         -> alpha * MatMulNBits(x)
    GemmByWeight        Gemm(x, W, C, alpha, beta)       -> MatMulNBits(x, bias = beta * C)
    WeightOnTheLeft     MatMul(W, x)                     -> x and MatMulNBits(x) transposed
    WeightForEachGroup  MatMul(x[G,M,K], W[G,K,N])       -> G times MatMulNBits
    AddBias             Add(MatMulNBits(x), bias[N])     -> MatMulNBits(x, bias)
    Convolution         Conv(x, W), ConvTranspose(x, W)  -> with a float constant

with the same codes and scales. Where the CPU has no fast kernel for the bits, block and
accuracy level, W becomes a float constant (:class:`.FloatConstant`). Refused where the
activation is dequantised too, which onnxruntime has kernels of its own for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, RewriteRuleClassBase

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import (
    Emit,
    FloatConstant,
    FusionRun,
    OperandRule,
    OtherForm,
    check_type,
)
from rewrite_rules.dq_matmulnbits_fusion.kernels import (
    NoKernel,
    check_version,
    kernel_block_size,
    slow_kernel,
    takes_bias,
    write_matmulnbits,
)
from rewrite_rules.dq_matmulnbits_fusion.matmul_operands import (
    Product,
    read_column_bias,
    read_product,
    write_column_bias,
)
from rewrite_rules.dq_matmulnbits_fusion.native_fusion import (
    AccuracyLevel,
    choose_accuracy_level,
    computes_in_integers,
    native_block_size,
)
from rewrite_rules.graph.nodes import is_dequantize_linear, label, producer
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.weights.dequantized_operand import BlockQuantizedWeight as Weight
from rewrite_rules.weights.dequantized_operand import DequantizedOperand

# Batched weights of more groups would swell the graph more than they save.
_MAX_GROUPS = 64
# Operators that onnxruntime moves a DequantizeLinear past before it fuses QLinearMatMul.
_TRANSPARENT = frozenset(
    {"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)


class _Kernel(NamedTuple):
    """What the MatMulNBits nodes of one multiplication have in common."""

    block_size: int
    level: AccuracyLevel
    dtype: ir.DataType  # of activations and scales


class ProductRule(OperandRule):
    """Makes MatMulNBits of a product with W; subclasses say what stands around it."""

    def fits(self, product: Product, operand: DequantizedOperand) -> bool:
        """Whether the form is that of the rule, and not of one for more special ones."""
        return not _is_grouped(product, operand)

    def weights(self, product: Product, operand: DequantizedOperand) -> Sequence[Weight]:
        """Return the operand as one weight; refuse other ranks than 2."""
        rank, name = len(operand.shape), operand.codes.name
        if rank != 2:
            side = " on the left" if product.on_left else ""
            raise NoKernel(
                "ORP106",
                f"weight {name!r} has shape {list(operand.shape)}{side}: rank 2 fuses",
            )
        if product.transpose_x or product.on_left:
            self._check_rank(product, name)
        return [operand.matrix(product.k_axis)]

    def emit(
        self, op: Any, product: Product, weights: Sequence[Weight], kernel: _Kernel
    ) -> ir.Value:
        """Emit the nodes."""
        raise NotImplementedError

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        product = read_product(node, self.index)
        if not self.fits(product, operand):
            raise OtherForm("another rule is for a weight of this form")
        if operand.bits == 8 and _is_dequantized(product.x):
            raise Refusal(
                "ORP115",
                "its other operand is dequantised too: onnxruntime has kernels for that "
                "(QLinearMatMul, MatMulIntegerToFloat)",
            )
        check_type(operand)
        weights = self.weights(product, operand)
        kernel = _choose_kernel(product, chain, operand, weights[0], self._run)

        def emit(op: Any) -> tuple[ir.Value, str]:
            level, count = kernel.level, len(weights)
            self._run.levels.append((level.number, level.stock))
            times = f"{count} x " if count > 1 else ""
            outcome = f"MatMulNBits, block {kernel.block_size}, accuracy_level {level}"
            return self.emit(op, product, weights, kernel), times + outcome

        return emit

    def _check_rank(self, product: Product, name: str | None) -> None:
        facts = self._run.facts
        fused = product.node.op_type == "FusedMatMul"
        if fused and product.on_left and product.x_rank(facts) == 1:
            # onnxruntime 1.31 ignores transA then: what it computes is not worth keeping,
            # and not ours to change.
            raise NoKernel(
                "ORP107", f"weight {name!r} is on the left of a vector in FusedMatMul"
            )
        if product.x_rank(facts) is None:
            raise NoKernel(
                "ORP107",
                f"weight {name!r} is on the left, or its other operand transposed, and that "
                "one's rank is not proved: give the model's inputs a shape",
            )

    def _multiplied(
        self,
        op: Any,
        product: Product,
        weight: Weight,
        kernel: _Kernel,
        bias: ir.Value | None = None,
    ) -> ir.Value:
        """Emit ``alpha * MatMulNBits(x, bias)``, x with its axes in order."""
        x, own = product.x, weight.operand.dtype
        assert x is not None
        if product.transpose_x and (rank := product.x_rank(self._run.facts)) != 1:
            x = _swapped(op, x, rank)
        y = self._kernel(op, x, weight, kernel, bias=bias, name=product.node.name)
        return y if product.alpha == 1.0 else op.Mul(y, _scalar(op, product.alpha, own))

    def _biased(self, op: Any, product: Product, y: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Emit ``y + beta * bias`` of a Gemm; y of others."""
        bias = product.bias
        if bias is None:
            return y
        if product.beta != 1.0:
            bias = op.Mul(bias, _scalar(op, product.beta, dtype))
        return op.Add(y, bias)  # type: ignore[no-any-return]

    def _kernel(
        self,
        op: Any,
        x: ir.Value | None,
        weight: Weight,
        kernel: _Kernel,
        bias: ir.Value | None = None,
        name: str | None = None,
    ) -> ir.Value:
        """MatMulNBits, and Casts around it where it computes in another type."""
        own, dtype = weight.operand.dtype, kernel.dtype
        made = write_matmulnbits(self._run.initializers, weight, kernel.block_size, dtype)
        biased = [made.codes, made.scales, made.zero_points, None, bias]
        value: ir.Value = op.MatMulNBits(
            x if dtype == own else op.Cast(x, to=int(dtype)),
            *(made.inputs if bias is None else biased),
            **made.attributes,
            accuracy_level=kernel.level.number,
            _domain="com.microsoft",
            _name=name,
        )
        self._run.made.add(producer(value))
        return value if dtype == own else op.Cast(value, to=int(own))


class MatMulByWeight(ProductRule):
    """``MatMul(x, W)`` -> ``MatMulNBits(x)``; ``alpha * MatMulNBits(x)`` of FusedMatMul."""

    def emit(
        self, op: Any, product: Product, weights: Sequence[Weight], kernel: _Kernel
    ) -> ir.Value:
        return self._multiplied(op, product, weights[0], kernel)


class GemmByWeight(ProductRule):
    """``Gemm(x, W, C)`` -> ``MatMulNBits(x, beta * C)``; other C than [N] are added."""

    def emit(
        self, op: Any, product: Product, weights: Sequence[Weight], kernel: _Kernel
    ) -> ir.Value:
        (weight,), bias, run = weights, product.bias, self._run
        columns = None
        if bias is not None and product.alpha == 1.0 and takes_bias(run.context):
            columns = read_column_bias(bias, weight.N)
        if columns is None:
            y = self._multiplied(op, product, weight, kernel)
            return self._biased(op, product, y, weight.operand.dtype)
        if columns.dequantize is not None:
            run.folded(product.node, columns.dequantize, "bias of MatMulNBits")
        value = write_column_bias(run.initializers, columns, kernel.dtype, product.beta)
        return self._multiplied(op, product, weight, kernel, value)


class WeightOnTheLeft(ProductRule):
    """``MatMul(W, x)`` -> ``Transpose(MatMulNBits(Transpose(x)))``, of Gemm with its C."""

    index = 0

    def emit(
        self, op: Any, product: Product, weights: Sequence[Weight], kernel: _Kernel
    ) -> ir.Value:
        y = self._multiplied(op, product, weights[0], kernel)
        rank = product.x_rank(self._run.facts)
        if rank != 1:
            y = _swapped(op, y, rank)
        return self._biased(op, product, y, weights[0].operand.dtype)


class WeightForEachGroup(ProductRule):
    """``MatMul(x[G, M, K], W[G, K, N])`` -> G times MatMulNBits, between Split and Concat."""

    def fits(self, product: Product, operand: DequantizedOperand) -> bool:
        """Whether the weight has a matrix for each group, and nothing else is asked."""
        return _is_grouped(product, operand)

    def weights(self, product: Product, operand: DequantizedOperand) -> Sequence[Weight]:
        """Return the weight of each group; refuse too many, or groups of x that may differ."""
        run, name, groups = self._run, operand.codes.name, operand.shape[0]
        x_rank = product.x_rank(run.facts)
        if run.opset is not None and run.opset < 13 and (groups > 1 or (x_rank or 3) < 3):
            # Split and Unsqueeze have attributes before.
            raise NoKernel(
                "ORP106", f"a weight of rank 3 fuses from opset 13 on, not at {run.opset}"
            )
        if groups == 1 and x_rank is not None:
            return [operand.matrix(product.k_axis)]
        if run.facts.match(product.x, f"{groups} M K") is None:
            raise NoKernel(
                "ORP106",
                f"weight {name!r} has {groups} groups: they fuse where the other operand has "
                f"shape [{groups}, M, K], {groups} being known",
            )
        if groups > _MAX_GROUPS:
            raise NoKernel(
                "ORP106", f"weight {name!r} has {groups} groups: up to {_MAX_GROUPS} fuse"
            )
        return [operand.matrix(product.k_axis, group) for group in range(groups)]

    def emit(
        self, op: Any, product: Product, weights: Sequence[Weight], kernel: _Kernel
    ) -> ir.Value:
        if len(weights) == 1:
            y = self._multiplied(op, product, weights[0], kernel)
            rank = product.x_rank(self._run.facts)
            return y if rank is None or rank >= 3 else op.Unsqueeze(y, _ints(op, [0]))
        count = len(weights)
        parts = op.Split(product.x, _ints(op, [1] * count), axis=0, _outputs=count)
        outputs = [
            self._kernel(op, part, weight, kernel)
            for part, weight in zip(parts, weights, strict=True)
        ]
        return op.Concat(*outputs, axis=0)  # type: ignore[no-any-return]


class Convolution(FloatConstant):
    """``Conv(x, W)``, ConvTranspose -> with a float constant: none takes codes and floats.

    Of int8 weights and float activations, 3 x 3 of 64 channels, onnxruntime 1.32 takes 1.85
    times as long: it unpacks the weight in each run, and packs nothing.
    """

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        if computes_in_integers(node):
            raise Refusal(
                "ORP115",
                "its input and result are quantised, too: onnxruntime computes it in integers",
            )
        check_type(operand)
        raise NoKernel("ORP116", f"{node.op_type} has no kernel for codes and float inputs")


class AddBias(RewriteRuleClassBase):
    """Add(MatMulNBits(x), bias[N]) -> MatMulNBits(x, bias), for the nodes of this run.

    Refused, without a remark: a kernel that takes no bias, or has one already; a bias that is
    not constant, has neither one number nor N, or more axes than x; and by the engine, where
    others read the MatMulNBits.
    """

    def __init__(self, run: FusionRun) -> None:
        super().__init__()
        self._run = run

    def pattern(self, op, x, bias):  # type: ignore[no-untyped-def]
        options = {"_domain": "com.microsoft", "_outputs": ["y"]}
        return op.Add(op.MatMulNBits(x, _allow_other_inputs=True, **options), bias)

    def check(  # type: ignore[override]
        self, context: MatchContext, x: ir.Value, y: ir.Value, bias: ir.Value
    ) -> bool:
        node, run = producer(y), self._run
        if node not in run.made or not takes_bias(run.context) or len(node.inputs) >= 6:
            return False
        self._bias = found = read_column_bias(bias, node.attributes["N"].as_int())
        if found is None or found.rank < 2:
            return found is not None
        return found.rank <= len(run.facts.dims(x) or ())

    def rewrite(self, op: Any, y: ir.Value, **_: object) -> ir.Value:
        node, (use,), bias = producer(y), y.uses(), self._bias
        assert bias is not None  # looked at by check
        self._run.folded(use.node, bias.dequantize, f"bias of MatMulNBits {label(node)!r}")
        value: ir.Value = op.MatMulNBits(
            *[*node.inputs, None, None][:5],
            write_column_bias(self._run.initializers, bias, bias.dtype),
            _domain=node.domain,
            _name=node.name,
            **node.attributes,
        )
        return value


def _is_grouped(product: Product, operand: DequantizedOperand) -> bool:
    """Whether a product is a plain MatMul by a matrix for each group."""
    plain = product.node.op_type != "Gemm" and not product.transpose_x and not product.on_left
    return len(operand.shape) == 3 and plain and product.alpha == 1.0


def _choose_kernel(
    product: Product,
    chain: Sequence[ir.Node],
    operand: DequantizedOperand,
    weight: Weight,
    run: FusionRun,
) -> _Kernel:
    """Choose what the nodes compute in; refuse what no kernel takes, or only a slow one."""
    context = run.context
    level = choose_accuracy_level(product, chain, operand, run.options, context)
    block_size = kernel_block_size(weight)
    if level.number == level.stock == 4:
        # Activations are rounded in these blocks: others would change the error.
        block_size = native_block_size(operand, context)
    # On the CPU it computes in float32 anyway. Between operators without a float16 kernel
    # onnxruntime puts Casts on the scales, which it then takes for run-time inputs; from these
    # it computes wrong numbers at accuracy_level 4 (measured, 1.22 to 1.31).
    as_float = context.cpu_only and level.number == 4
    dtype = ir.DataType.FLOAT if as_float else weight.lossless_dtype
    check_version(operand, level.number, dtype, product.node.graph, context)
    avoids_slow = context.cpu_only and run.options.slow_kernels != "fuse"
    if avoids_slow and (slow := slow_kernel(operand.bits, block_size, level.number)):
        raise NoKernel("ORP110", slow)
    if weight.N % 16 and (operand.bits, level.number) == (4, 0) and run.is_small(operand):
        # It multiplies with what happens to be in memory behind the last column. Small
        # integers and addresses are denormal floats there: 60 times slower (1.31, 1.32).
        raise NoKernel(
            "ORP111",
            f"N is {weight.N}: the kernel is slow where it is not a multiple of 16",
        )
    return _Kernel(block_size, level, dtype)


def _swapped(op: Any, x: ir.Value, rank: int | None) -> ir.Value:
    """Swap the last two axes."""
    assert rank is not None
    perm = [*range(rank - 2), rank - 1, rank - 2]
    value: ir.Value = op.Transpose(x, perm=perm)
    return value


def _scalar(op: Any, number: float, dtype: ir.DataType) -> ir.Value:
    value: ir.Value = op.Constant(value=ir.tensor(np.array(number, dtype.numpy())))
    return value


def _ints(op: Any, numbers: list[int]) -> ir.Value:
    value: ir.Value = op.Constant(value=ir.tensor(np.array(numbers, np.int64)))
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
