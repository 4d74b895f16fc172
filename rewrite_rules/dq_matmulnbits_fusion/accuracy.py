# SPDX-License-Identifier: MIT
"""The accuracy level of a node: onnxruntime's own where it is sure to fuse it, 0 elsewhere.

"Sure" are the forms that quantisers write, MatMul or Gemm by ``[K, N]`` in blocks along K,
with a scale for each column, or with one, which ``DQMatMulNodeGroupSelector`` takes
(onnxruntime/core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc; before 1.27
blocks of 4 bits alone), and behind which no optimiser that runs before it looks: those make
Gemm of MatMul and Add, and take a Relu or Clip before QuantizeLinear for redundant. Of other
forms the result is more exact than onnxruntime's, never less.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import NATIVE_PROVIDERS, FusionRun
from rewrite_rules.dq_matmulnbits_fusion.matmul_operands import Product
from rewrite_rules.graph.nodes import dequantizer, owner
from rewrite_rules.graph.parameters import constant, source_of
from rewrite_rules.weights.dequantized_operand import DequantizedOperand

_NATIVE_BLOCKS = (16, 32, 64, 128, 256)
_REDUNDANT = ("Clip", "QuantizeLinear", "Relu")


def choose_accuracy_level(
    product: Product, chain: Sequence[ir.Node], operand: DequantizedOperand, run: FusionRun
) -> tuple[int, str]:
    """Return the level that the options ask for, or onnxruntime's own, and why."""
    native, asked = run.context.native_accuracy_level, run.options.accuracy_level
    if asked is not None:
        return asked, ""
    if native is None:
        return 0, " (auto: onnxruntime's optimizer is off)"
    if not NATIVE_PROVIDERS.issuperset(run.context.providers):
        return 0, " (auto: onnxruntime does not fuse for these providers)"
    if why := _why_not_native(product, chain, operand, run):
        return 0, f" (auto: onnxruntime may not fuse it, {why})"
    return native, " (auto: as onnxruntime fuses it)"


def _why_not_native(
    product: Product, chain: Sequence[ir.Node], operand: DequantizedOperand, run: FusionRun
) -> str:
    node, x, dequantize = product.node, product.x, operand.dequantize
    in_blocks = dequantize.attributes.get_int("block_size", 0) > 0
    read = (operand.codes, operand.scales, dequantize.outputs[0])
    stored = [value for value in (*read[:2], operand.zero_points) if value is not None]
    version, is_float = run.context.onnxruntime, operand.dtype is ir.DataType.FLOAT
    first = in_blocks and operand.bits == 4 and node.op_type == "MatMul" and is_float
    refusals = (
        (node.op_type not in ("MatMul", "Gemm"), f"it is a {node.op_type}"),
        (not _is_plain(product, operand.shape[1]), "its attributes or its bias"),
        (len(chain) > 1 or not _reads_layout(operand), "it reads other layouts"),
        (operand.dtype != operand.scale_tensor.dtype, "the weight is of another type"),
        (version is not None and version < (1, 27) and not first, "it is older than 1.27"),
        (any(len(value.uses()) > 1 for value in read), "the weight is shared"),
        (read[-1].is_graph_output(), "the weight is an output"),
        (
            {dequantize.graph, *map(owner, stored)} != {node.graph},
            "the weight is outside the subgraph",
        ),
        (x is not None and dequantizer(source_of(x)) is not None, "x is dequantised"),
    )
    found = next((reason for refused, reason in refusals if refused), "")
    return found or _what_follows(node, run)


def _is_plain(product: Product, columns: int) -> bool:
    """Whether a MatMul or Gemm is ``x W``, and a bias for each column."""
    tensor = constant(product.bias)
    fits = product.bias is None or (
        tensor is not None and tuple(tensor.shape.numpy()) == (columns,)
    )
    return not product.transpose_x and product.k_axis == 0 and fits


def _reads_layout(operand: DequantizedOperand) -> bool:
    """Whether onnxruntime reads the scales of codes ``[K, N]``."""
    attributes, scales = operand.dequantize.attributes, operand.scale_tensor.shape.numpy()
    axis, block_size = attributes.get_int("axis", 1), attributes.get_int("block_size", 0)
    if block_size:
        return axis == 0 and block_size in _NATIVE_BLOCKS
    return not scales or (axis == 1 and tuple(scales) == (operand.shape[1],))


def _what_follows(node: ir.Node, run: FusionRun) -> str:
    """Say which node behind a MatMul another optimiser may merge with it."""
    out = node.outputs[0]
    while len(readers := out.uses()) == 1 and not out.is_graph_output():
        (use,) = readers
        if use.node.op_type in _REDUNDANT:
            return f"{use.node.op_type} follows"
        if use.node.op_type != "Add":
            break
        bias, x = constant(use.node.inputs[1 - use.idx]), run.facts.dims(node.inputs[0])
        if (bias is None or len(bias.shape) != 1) and (x is None or len(x) == 2):
            return "its Add is not a bias [N]"
        out = use.node.outputs[0]
    return ""
