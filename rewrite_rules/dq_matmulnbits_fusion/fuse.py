# SPDX-License-Identifier: MIT
"""DequantizeLinear on a constant -> MatMulNBits, GatherBlockQuantized or a float constant.

Rules: :mod:`.matmul_rules`, :mod:`.gather_rule`. Layouts: :mod:`.dequantized_operand`.
"""

from __future__ import annotations

__all__ = ["FusionOptions", "fuse"]

from collections.abc import Collection, Iterator

import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import FusionOptions, FusionRun
from rewrite_rules.dq_matmulnbits_fusion.gather_rule import GatherToGatherBlockQuantized
from rewrite_rules.dq_matmulnbits_fusion.matmul_rules import (
    AddBias,
    Convolution,
    GemmByWeight,
    MatMulByWeight,
)
from rewrite_rules.facts.integer_groups import computes_in_integers
from rewrite_rules.graph.nodes import (
    all_nodes,
    inline_functions,
    input_of,
    is_dequantize_linear,
    label,
    walk,
)
from rewrite_rules.graph.parameters import constant, source_of
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.weights.dequantized_operand import (
    dequantize_chain,
    is_layout_op,
    renamed_values,
)


def fuse(
    model: ir.Model,
    options: FusionOptions,
    context: PassContext,
    only: Collection[ir.Node] | None = None,
) -> None:
    """Fuse constants of all DequantizeLinear nodes, or of some; remarks report each."""
    if not any(node.op_type == "DequantizeLinear" for node in all_nodes(model)):
        return
    if "" not in model.opset_imports:
        text = "it imports no opset of the default domain"
        context.remarks.refused("model", Refusal("ORP204", text))
        return
    with context.remarks.at("functions"):
        # Whether a function's parameter is a constant shows only where it is called.
        for name, reason in inline_functions(model).items():
            context.remarks.refused(name, Refusal("ORP117", reason))
    run = FusionRun(model, options, context, only)
    # One sweep is enough: an Add comes after its MatMul, which is a MatMulNBits by then.
    # Rules are built per call: they hold the match between check and rewrite.
    laws = (GatherToGatherBlockQuantized, MatMulByWeight, GemmByWeight, Convolution)
    rules = [*AddBias.rule(run).commute(), *(law.rule(run) for law in laws)]
    left = {node for function in model.functions.values() for node in walk(function.graph)}

    def may_fuse(node: ir.Node) -> bool:
        values = [value for value in node.inputs[:2] if value is not None]
        reads_codes = any(map(dequantize_chain, values)) or node.op_type == "Add"
        return reads_codes and node not in left

    DispatchingRuleSet(rules, may_fuse).apply_to_model(model)
    _remark_unfused(model, run)


def _remark_unfused(model: ir.Model, run: FusionRun) -> None:
    """Give every use of a dequantised constant that no rule spoke of its remark.

    Codes of 4 or 8 bits are refused: they are weights, unpacked at every inference. Others
    (32-bit biases, 16-bit tables) are noted.
    """
    remarks = run.context.remarks
    for node in walk(model.graph):  # functions that are left have a remark
        if not is_dequantize_linear(node) or len(node.outputs) != 1:
            continue
        if run.only is not None and node not in run.only:
            continue
        with remarks.at(label(node)):
            codes = input_of(node, 0)
            codes = None if codes is None else source_of(codes)
            quantize = None if codes is None else codes.producer()
            if quantize is not None and _quantizes_constant(quantize):
                remarks.refused(
                    label(node),
                    Refusal(
                        "ORP102",
                        f"its codes are made by QuantizeLinear {label(quantize)!r} from a "
                        "constant at every inference: fold constants first",
                    ),
                )
            elif codes is not None and dequantize_chain(node.outputs[0]) is not None:
                tensor = ir.convenience.get_const_tensor(codes)
                is_code = tensor is None or (
                    tensor.dtype.is_integer() and tensor.dtype.bitwidth <= 8
                )
                for reason in _uses(node, run):
                    if is_code:
                        text = f"{reason}; it runs at every inference"
                        remarks.refused(label(node), Refusal(reason.code, text))
                    else:
                        remarks.note(label(node), str(reason))


def _quantizes_constant(node: ir.Node) -> bool:
    """Whether a node is a QuantizeLinear of a constant, as some quantizers write it."""
    return node.op_type == "QuantizeLinear" and constant(node.inputs[0]) is not None


def _uses(node: ir.Node, run: FusionRun) -> Iterator[Refusal]:
    """Yield what the output feeds, through renaming nodes, unless the rules reported it."""
    for value in renamed_values(node.outputs[0]):
        if value.is_graph_output():
            yield Refusal("ORP116", f"output {value.name!r} is a graph output")
        for reader, index in value.uses():
            renames = index == 0 and is_layout_op(reader)
            if not renames and not run.was_reported(reader, node):
                what = f"it feeds input {index} of {reader.op_type} {label(reader)!r}"
                if computes_in_integers(reader):
                    run.context.remarks.note(label(node), f"{what}, in integers")
                else:
                    text = f"{what}: weights of MatMul, Gemm, Gather and Conv fuse"
                    yield Refusal("ORP116", text)
