# SPDX-License-Identifier: MIT
"""Which MatMul and Gemm nodes onnxruntime's own optimizer turns into MatMulNBits.

The conditions of ``DQMatMulNodeGroupSelector`` (onnxruntime/core/optimizer/qdq_transformer/
selectors_actions/qdq_selectors.cc), of what runs before it (constant folding moves a Transpose
into codes with one scale or one for each column; MatMul + Add becomes Gemm), and of the rule
that takes Relu and Clip for redundant. Checked against the models that onnxruntime 1.31 and
1.32 save, for each node of the matrix of layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import NATIVE_PROVIDERS, FusionOptions
from rewrite_rules.dq_matmulnbits_fusion.matmul_operands import Product
from rewrite_rules.graph.nodes import dequantizer, is_quantize_linear, owner
from rewrite_rules.graph.parameters import constant, source_of, type_attribute
from rewrite_rules.onnxruntime_version import Version
from rewrite_rules.remarks import PassContext
from rewrite_rules.weights.dequantized_operand import DequantizedOperand

# What onnxruntime cuts columns with a single scale into.
_ONE_SCALE_BLOCK = 32
_REDUNDANT = ("Clip", "Relu")


@dataclasses.dataclass(frozen=True)
class AccuracyLevel:
    """The ``accuracy_level`` of a node, why, and onnxruntime's own where it would fuse it."""

    number: int
    reason: str = ""
    stock: int | None = None

    def __str__(self) -> str:
        return f"{self.number} ({self.reason})" if self.reason else str(self.number)


def choose_accuracy_level(
    product: Product,
    chain: Sequence[ir.Node],
    operand: DequantizedOperand,
    options: FusionOptions,
    context: PassContext,
) -> AccuracyLevel:
    """Return the level that the options ask for, or onnxruntime's own for this node."""
    stock, reason = context.native_accuracy_level, "auto: as onnxruntime fuses it"
    if stock is None:
        reason = "auto: onnxruntime's optimizer is off"
    elif not NATIVE_PROVIDERS.issuperset(context.providers):
        stock, reason = None, "auto: onnxruntime does not fuse for these providers"
    elif why := why_not_native(product, chain, operand, context.onnxruntime):
        stock, reason = None, f"auto: onnxruntime would not fuse it, {why}"
    if options.accuracy_level is not None:
        return AccuracyLevel(options.accuracy_level, stock=stock)
    return AccuracyLevel(stock or 0, reason, stock)


def native_block_size(operand: DequantizedOperand, context: PassContext) -> int:
    """Return the block size of onnxruntime's MatMulNBits (``ComputeEffectiveBlockSize``)."""
    if size := operand.dequantize.attributes.get_int("block_size", 0):
        return size
    if context.native_block_size != -1:
        return context.native_block_size or _ONE_SCALE_BLOCK
    K = operand.shape[0]
    fitting = [16, *(size for size in (32, 64, 128, 256) if size <= K)]
    # What K is padded by; the largest of equal ones.
    return min(reversed(fitting), key=lambda size: -K % size)


def why_not_native(
    product: Product,
    chain: Sequence[ir.Node],
    operand: DequantizedOperand,
    version: Version | None,
) -> str | None:
    """Say why onnxruntime leaves a node; None if it fuses it."""
    node, recent = product.node, version is None or version >= (1, 27)
    blockwise = operand.dequantize.attributes.get_int("block_size", 0) > 0
    named = type_attribute(operand.dequantize, "output_dtype")
    refusals = (
        (node.op_type not in ("MatMul", "Gemm"), f"it leaves {node.op_type}"),
        (product.index == 0, "the weight is on the left"),
        (len(operand.shape) != 2, f"the weight has rank {len(operand.shape)}"),
        (len(set(operand.casts)) > 1, "the weight is cast"),
        (named not in (None, operand.scale_tensor.dtype), "its output_dtype is another type"),
        (not _reads_layout(chain, operand, version), "it reads no such layout"),
        (_is_shared(chain, operand, version), "the weight is shared"),
        (_is_captured(node, operand), "the weight is outside the subgraph"),
        (
            product.x is not None and dequantizer(source_of(product.x)) is not None,
            "the other operand is dequantised",
        ),
        (
            node.op_type == "Gemm" and not _is_plain_gemm(product, operand),
            "alpha, beta or bias",
        ),
        (_is_added_to_matrix(node), "its Add is not a bias [N]"),
        (_ends_in_activation(node), "Relu or Clip follows"),
        (operand.bits == 2 and operand.shape[1] % 4 != 0, "its numbers are wrong"),
        (not recent and not (blockwise and operand.bits == 4), "it is older than 1.27"),
        (not recent and node.op_type == "Gemm", "it is older than 1.27"),
        (not recent and operand.dtype is ir.DataType.FLOAT16, "it is older than 1.27"),
    )
    return next((reason for refused, reason in refusals if refused), None)


def _reads_layout(
    chain: Sequence[ir.Node], operand: DequantizedOperand, version: Version | None
) -> bool:
    attributes = operand.dequantize.attributes
    size, axis = attributes.get_int("block_size", 0), attributes.get_int("axis", 1)
    between = {item.op_type for item in chain[1:]} - {"Identity", "Cast"}
    if size > 0:
        # 1.32 has larger blocks too, but of 2 bits.
        any_size = operand.bits > 2 and (version is None or version >= (1, 32))
        fits = size >= 16 and not size & (size - 1) and (size <= 256 or any_size)
        return not between and axis == 0 and fits
    if between == {"Transpose"}:
        # Folded into codes of 8 bits only, and into any that have zero points.
        if operand.bits < 8 and operand.zero_points is None:
            return False
    elif between:
        return False
    scale_shape, columns = tuple(operand.scale_tensor.shape.numpy()), operand.shape[1]
    if not scale_shape:
        return True
    along_columns = columns == 1 or any(run.scales for run in operand.axes[1])
    return scale_shape == (columns,) and along_columns and axis >= 0


def _is_shared(
    chain: Sequence[ir.Node], operand: DequantizedOperand, version: Version | None
) -> bool:
    """Whether anything else reads the codes, the scales or what is dequantised."""
    if any(
        len(item.outputs[0].uses()) > 1 or item.outputs[0].is_graph_output() for item in chain
    ):
        return True
    recent = version is None or version >= (1, 29)
    return recent and any(len(value.uses()) > 1 for value in (operand.codes, operand.scales))


def computes_in_integers(node: ir.Node) -> bool:
    """Whether all that a node reads is dequantised, and all that reads it quantises.

    onnxruntime makes one operator of integers of it; a Relu or Clip behind it disappears.
    """
    result, last = node.outputs[0], list(node.outputs[0].consumers())
    if len(last) == 1 and last[0].op_type in ("Clip", "Relu") and not result.is_graph_output():
        result, last = last[0].outputs[0], list(last[0].outputs[0].consumers())
    # A bias is quantised by onnxruntime, if it is not yet.
    read = [value for value in node.inputs if value is not None and constant(value) is None]
    makers = [dequantizer(source_of(value)) for value in read]
    codes = [maker.inputs[0] for maker in makers if maker is not None]
    return (
        bool(last)
        and all(map(is_quantize_linear, last))
        and not result.is_graph_output()
        and len(codes) == len(read)
        and any(constant(value) is None for value in codes)
    )


def _is_captured(node: ir.Node, operand: DequantizedOperand) -> bool:
    values = (operand.codes, operand.scales, operand.zero_points)
    if operand.dequantize.graph is not node.graph:
        return True
    return any(value is not None and owner(value) is not node.graph for value in values)


def _is_plain_gemm(product: Product, operand: DequantizedOperand) -> bool:
    if abs(product.alpha - 1) > 1e-6 or product.transpose_x or product.k_axis != 0:
        return False
    inputs = product.node.inputs
    if len(inputs) < 3 or inputs[2] is None:
        return True
    return product.beta == 1 and _shape(inputs[2]) == (operand.shape[1],)


def _is_added_to_matrix(node: ir.Node) -> bool:
    """Whether MatMul + Add becomes a Gemm whose bias is a matrix."""
    out = node.outputs[0]
    if node.op_type != "MatMul" or out.is_graph_output() or len(out.uses()) != 1:
        return False
    (use,) = out.uses()
    if use.node.op_type != "Add" or use.node.domain or len(use.node.inputs) != 2:
        return False
    other = use.node.inputs[1 - use.idx]
    shape = None if other is None else _shape(other)
    x = None if node.inputs[0] is None else _shape(node.inputs[0])
    if shape is None or x is None or len(shape) != 2 or len(x) != 2:
        return False
    if shape[0] not in (1, x[0]):
        return False
    # Of two MatMul nodes it takes the second.
    maker = other.producer() if other is not None else None
    return use.idx == 1 or maker is None or maker.op_type != "MatMul"


def _shape(value: ir.Value) -> tuple[object, ...] | None:
    """The shape of a value, or of the codes that it is dequantised from."""
    node = dequantizer(value)
    if node is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    tensor = constant(value)
    if tensor is not None:
        return tuple(tensor.shape.numpy())
    return None if value.shape is None else tuple(value.shape)


def _ends_in_activation(node: ir.Node) -> bool:
    """Whether a Relu or Clip follows, perhaps after Add, that one node reads."""
    out = node.outputs[0]
    if out.is_graph_output() or len(out.uses()) != 1:
        return False
    (use,) = out.uses()
    reader = use.node
    if reader.op_type == "Add" and any(
        constant(value) is not None for value in reader.inputs if value is not out
    ):
        return _ends_in_activation(reader)
    if reader.op_type == "QuantizeLinear":
        return True
    if reader.op_type not in _REDUNDANT or reader.domain:
        return False
    end = reader.outputs[0]
    return not end.is_graph_output() and len(end.uses()) == 1
