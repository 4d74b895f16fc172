# SPDX-License-Identifier: MIT
"""Rules for multiplications by a dequantised constant -> MatMulNBits.

    MatMulByWeight   MatMul(x, W)                     -> MatMulNBits(x)
                     FusedMatMul(x, W)                -> MatMulNBits(x)
    GemmByWeight     Gemm(x, W, C)                    -> MatMulNBits(x, bias = C)
    AddBias          Add(MatMulNBits(x), bias[N])     -> MatMulNBits(x, bias)
    Convolution      Conv(x, W), ConvTranspose(x, W)  -> with a float constant

with the same codes and scales. Where the CPU has no fast kernel for the bits, block and
accuracy level, W becomes a float constant. Refused where the
activation is dequantised too, which onnxruntime has kernels of its own for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, RewriteRuleClassBase

from rewrite_rules.dq_matmulnbits_fusion.accuracy import choose_accuracy_level
from rewrite_rules.dq_matmulnbits_fusion.fusion_run import (
    Emit,
    FusionRun,
    OperandRule,
    check_type,
)
from rewrite_rules.dq_matmulnbits_fusion.kernels import (
    check_version,
    kernel_block_size,
    slow_kernel,
    takes_bias,
    write_codes,
    write_scales,
    write_zero_points,
)
from rewrite_rules.dq_matmulnbits_fusion.matmul_operands import (
    Product,
    column_bias,
    read_product,
    write_column_bias,
)
from rewrite_rules.facts.integer_groups import computes_in_integers, dequantized
from rewrite_rules.graph.nodes import input_of, label, producer
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.weights.dequantized_operand import BlockQuantizedWeight as Weight
from rewrite_rules.weights.dequantized_operand import DequantizedOperand, NoKernel

_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)


class MatMulByWeight(OperandRule):
    """``MatMul(x, W)``, FusedMatMul -> ``MatMulNBits(x)``."""

    operators: Collection[str] = ("FusedMatMul", "MatMul")

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        product, run = read_product(node), self._run
        in_integers = operand.bits == 8 and _is_dequantized(product.x)
        if in_integers and operand.suits_integers(product.k_axis):
            raise Refusal(
                "ORP115",
                "its other operand is dequantised too: onnxruntime has kernels for that "
                "(QLinearMatMul, MatMulIntegerToFloat)",
            )
        check_type(operand)
        if product.transpose_x:
            raise NoKernel("ORP107", f"{node.op_type} transposes its other operand")
        if product.is_scaled:
            raise NoKernel("ORP107", f"{node.op_type} has a factor, alpha or beta")
        weight = operand.matrix(product.k_axis)
        level, reason = choose_accuracy_level(product, chain, operand, run)
        block_size = kernel_block_size(weight, level)
        # On the CPU it computes in float32 anyway. Between operators without a float16 kernel
        # onnxruntime puts Casts on the scales, which it then takes for run-time inputs; from
        # these it computes wrong numbers at accuracy_level 4 (measured, 1.22 to 1.31).
        as_float = run.context.cpu_only and level == 4
        dtype = ir.DataType.FLOAT if as_float else weight.lossless_dtype
        _check_kernel(node, weight, level, run)

        def emit(op: Any) -> tuple[ir.Value, str]:
            outcome = f"MatMulNBits, block {block_size}, accuracy_level {level}{reason}"
            return self.emit(op, product, weight, block_size, dtype, level), outcome

        return emit

    def emit(
        self,
        op: Any,
        product: Product,
        weight: Weight,
        block_size: int,
        dtype: ir.DataType,
        level: int,
    ) -> ir.Value:
        """Emit MatMulNBits, what is around it, and Casts where it has another ``dtype``."""
        node, own, made = product.node, weight.operand.dtype, self._run.initializers
        inputs = [
            write_codes(made, weight, block_size),
            write_scales(made, weight, block_size, dtype),
            write_zero_points(made, weight, block_size),
        ]
        added = product.bias
        in_kernel = takes_bias(self._run.context)
        if added is not None and in_kernel and column_bias(added, weight.N) is not None:
            inputs += [None, write_column_bias(made, added, weight.N, dtype)]
            added = None
        while inputs[-1] is None:
            inputs.pop()
        y: ir.Value = op.MatMulNBits(
            product.x if dtype == own else op.Cast(product.x, to=int(dtype)),
            *inputs,
            K=weight.K,
            N=weight.N,
            bits=weight.bits,
            block_size=block_size,
            accuracy_level=level,
            _domain="com.microsoft",
            _name=node.name,
        )
        self._run.made.add(producer(y))
        if dtype != own:
            y = op.Cast(y, to=int(own))
        return y if added is None else op.Add(y, added)


class GemmByWeight(MatMulByWeight):
    """``Gemm(x, W, C)`` -> ``MatMulNBits(x, C)``; other C than [N] are added."""

    operators = ("Gemm",)


class Convolution(OperandRule):
    """``Conv(x, W)``, ConvTranspose -> with a float constant: none takes codes and floats.

    Of int8 weights and float activations, 3 x 3 of 64 channels, onnxruntime 1.32 takes 1.85
    times as long: it unpacks the weight in each run, and packs nothing.
    """

    operators = ("Conv", "ConvTranspose")

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
        found = column_bias(bias, node.attributes["N"].as_int())
        if found is None or len(found.shape) < 2:
            return found is not None
        return len(found.shape) <= len(run.facts.dims(x) or ())

    def rewrite(self, op: Any, y: ir.Value, bias: ir.Value, **_: object) -> ir.Value:
        node, (use,), run = producer(y), y.uses(), self._run
        tensor, columns = constant(bias), node.attributes["N"].as_int()
        assert tensor is not None  # looked at by check
        run.context.remarks.note(label(use.node), f"bias of MatMulNBits {label(node)!r}")
        value: ir.Value = op.MatMulNBits(
            *[*node.inputs, None, None][:5],
            write_column_bias(run.initializers, bias, columns, tensor.dtype),
            _domain=node.domain,
            _name=node.name,
            **node.attributes,
        )
        return value


def _check_kernel(node: ir.Node, weight: Weight, level: int, run: FusionRun) -> None:
    """Refuse what no kernel takes, or only a slow one."""
    context, operand = run.context, weight.operand
    check_version(operand, level, node.graph, context)
    avoids_slow = context.cpu_only and run.options.slow_kernels != "fuse"
    if avoids_slow and (slow := slow_kernel(operand.bits, level)):
        raise NoKernel("ORP110", slow)
    if weight.N % 16 and (operand.bits, level) == (4, 0) and run.is_small(operand):
        # It multiplies with what happens to be in memory behind the last column. Small
        # integers and addresses are denormal floats there: 60 times slower (1.31, 1.32).
        raise NoKernel(
            "ORP111",
            f"N is {weight.N}: the kernel is slow where it is not a multiple of 16",
        )


def _is_dequantized(value: ir.Value | None) -> bool:
    """Whether a value is an activation that was quantised to 8 bits."""
    node = dequantized(value)
    codes = None if node is None else input_of(node, 0)
    if node is None or codes is None or constant(codes) is not None:
        return False
    zero_point = constant(input_of(node, 2))
    dtype = codes.dtype if zero_point is None else zero_point.dtype
    return dtype is None or dtype in _EIGHT_BITS
