# SPDX-License-Identifier: MIT
"""DequantizeLinear on a constant -> MatMulNBits, GatherBlockQuantized or a float constant.

The rules are in :mod:`.matmul_rules` and :mod:`.gather_rule`, the
layouts that they take in :mod:`.dequantized_operand`. Each candidate that stays as
it is gets a remark that says why.
"""

from __future__ import annotations

__all__ = ["FusionOptions", "fuse"]

from collections.abc import Collection, Iterator

import onnx_ir as ir
import onnx_ir.passes.common

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import FusionOptions, FusionRun
from rewrite_rules.dq_matmulnbits_fusion.gather_rule import GatherToGatherBlockQuantized
from rewrite_rules.dq_matmulnbits_fusion.matmul_rules import AddBias, LeftOperand, RightOperand
from rewrite_rules.graph.constants import constant, source_of
from rewrite_rules.graph.functions import check_inlined_size
from rewrite_rules.graph.nodes import is_dequantize_linear, label
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import PassContext
from rewrite_rules.weights.dequantized_operand import dequantize_chain, is_layout_op


def fuse(
    model: ir.Model,
    options: FusionOptions,
    context: PassContext,
    only: Collection[ir.Node] | None = None,
) -> None:
    """Fuse in place, constants of some DequantizeLinear nodes only or of all (None).

    ``context.remarks`` reports every candidate.
    """
    if not any(node.op_type == "DequantizeLinear" for node in _all_nodes(model)):
        return
    if "" not in model.opset_imports:
        context.remarks.refused("model", "it imports no opset of the default domain")
        return
    if model.functions:
        with context.remarks.at("functions"):
            check_inlined_size(model)
            # Whether a function's parameter is a constant shows only where it is called.
            onnx_ir.passes.common.InlinePass()(model)
    run = FusionRun(model, options, context, only)
    # One sweep is enough: an Add comes after its MatMul, which is a MatMulNBits by then.
    # Rules are built per call: they hold the match between check and rewrite.
    rules = [GatherToGatherBlockQuantized.rule(run), *AddBias.rule(run).commute()]
    for op_type in ("MatMul", "FusedMatMul", "Gemm"):
        rules += [RightOperand.rule(run, op_type), LeftOperand.rule(run, op_type)]
    DispatchingRuleSet(rules).apply_to_model(model)
    _remark_unfused(model, run)
    run.compare_with_stock()


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from graph.all_nodes()


def _remark_unfused(model: ir.Model, run: FusionRun) -> None:
    """Give every use of a dequantised constant that no rule spoke of its remark.

    Codes of 2, 4 or 8 bits are refused: they are weights, unpacked at every inference. Others
    (32-bit biases, 16-bit tables) are noted.
    """
    for node in _all_nodes(model):
        if not is_dequantize_linear(node) or len(node.outputs) != 1:
            continue
        if run.only is not None and node not in run.only:
            continue
        with run.context.remarks.at(label(node)):
            if (quantize := _quantized_in_the_graph(node)) is not None:
                run.context.remarks.refused(
                    label(node),
                    f"its codes are made by QuantizeLinear {label(quantize)!r} from a "
                    "constant at every inference: fold constants first",
                )
            elif dequantize_chain(node.outputs[0]) is not None:
                _explain(node, run)


def _quantized_in_the_graph(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear on a constant that makes the codes, as some quantizers write it."""
    codes = source_of(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    quantize = None if codes is None else codes.producer()
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return None
    return quantize if constant(quantize.inputs[0]) is not None else None


def _explain(node: ir.Node, run: FusionRun) -> None:
    codes = source_of(node.inputs[0]) if node.inputs[0] is not None else None
    tensor = None if codes is None else ir.convenience.get_const_tensor(codes)
    is_weight = tensor is None or (tensor.dtype.is_integer() and tensor.dtype.bitwidth <= 8)
    for reason in _uses(node, run):
        if is_weight:
            run.context.remarks.refused(label(node), f"{reason}; it runs at every inference")
        else:
            run.context.remarks.note(label(node), reason)


def _uses(node: ir.Node, run: FusionRun) -> Iterator[str]:
    """Yield what the output feeds, through renaming nodes, unless the rules reported it."""
    pending = [node.outputs[0]]
    followed = set(pending)
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            yield f"output {value.name!r} is a graph output"
        for use in value.uses():
            consumer = use.node
            if run.was_reported(consumer, node):
                continue
            if is_layout_op(consumer) and use.idx == 0 and len(consumer.outputs) == 1:
                if consumer.outputs[0] not in followed:
                    followed.add(consumer.outputs[0])
                    pending.append(consumer.outputs[0])
                continue
            what = f"it feeds input {use.idx} of {consumer.op_type} {label(consumer)!r}"
            yield f"{what}: weights of MatMul, Gemm and Gather fuse"
