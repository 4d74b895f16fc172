# SPDX-License-Identifier: MIT
"""DequantizeLinear on a constant -> MatMulNBits, GatherBlockQuantized or a float constant.

The rules are in :mod:`.matmul_rules` and :mod:`.gather_rule`, the
layouts that they take in :mod:`.dequantized_operand`. Each candidate that stays as
it is gets a remark that says why.
"""

from __future__ import annotations

__all__ = ["FusionOptions", "fuse"]

from collections.abc import Callable

import onnx_ir as ir
import onnx_ir.passes.common
from onnxscript.rewriter import RewriteRule

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import FusionOptions, FusionRun
from rewrite_rules.dq_matmulnbits_fusion.gather_rule import GatherToGatherBlockQuantized
from rewrite_rules.dq_matmulnbits_fusion.matmul_rules import (
    AddBias,
    LeftOperand,
    RightOperand,
)
from rewrite_rules.dq_matmulnbits_fusion.unfused_remarks import remark_unfused
from rewrite_rules.graph.functions import check_inlined_size
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import PassContext

# One sweep is enough: an Add comes after its MatMul, which is a MatMulNBits by then.
_RULES: dict[str, Callable[[FusionRun], list[RewriteRule]]] = {
    "Gather": lambda run: [GatherToGatherBlockQuantized.rule(run)],
    "Add": lambda run: AddBias.rule(run).commute(),
    **{
        op_type: lambda run, op_type=op_type: [  # type: ignore[misc]
            RightOperand.rule(run, op_type),
            LeftOperand.rule(run, op_type),
        ]
        for op_type in ("MatMul", "FusedMatMul", "Gemm")
    },
}


def fuse(model: ir.Model, options: FusionOptions, context: PassContext) -> None:
    """Fuse in place; ``context.remarks`` reports every candidate.

    Raises:
        RewriteError: If a rule fails unexpectedly; earlier rewrites stay applied.
    """
    present = _op_types(model)
    if "DequantizeLinear" not in present:
        return
    if "" not in model.opset_imports:
        context.remarks.refused("model", "it imports no opset of the default domain")
        return
    if model.functions:
        with context.remarks.at("functions"):
            check_inlined_size(model)
            # Whether a function's parameter is a constant shows only where it is called.
            onnx_ir.passes.common.InlinePass()(model)
    run = FusionRun(model, options, context)
    # Rules are built per call: they hold the match between check and rewrite.
    rules = [
        rule for op_type, build in _RULES.items() if op_type in present for rule in build(run)
    ]
    if rules:
        DispatchingRuleSet(rules).apply_to_model(model)
    remark_unfused(model, run)
    run.compare_with_stock()


def _op_types(model: ir.Model) -> set[str]:
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    return {node.op_type for graph in graphs for node in graph.all_nodes()}
