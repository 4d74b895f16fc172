# SPDX-License-Identifier: MIT
"""DequantizeLinear on a constant -> MatMulNBits, GatherBlockQuantized or a float constant.

The rules are in :mod:`rewrite_rules.product_rules` and :mod:`rewrite_rules.dq_gather`, the
layouts that they take in :mod:`rewrite_rules.dequantize_reader`. Each candidate that stays as
it is gets a remark that says why.
"""

from __future__ import annotations

__all__ = ["FusionOptions", "fuse"]

from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common
from onnxscript.rewriter import RewriteRule, RewriteRuleSet

from rewrite_rules.dequantize_audit import explain_the_rest
from rewrite_rules.dq_gather import GatherToGatherBlockQuantized
from rewrite_rules.product_rules import (
    AddBias,
    FusedMatMulToMatMulNBits,
    GemmToMatMulNBits,
    MatMulToMatMulNBits,
)
from rewrite_rules.remarks import PassContext
from rewrite_rules.weight_forms import FusionOptions, FusionRun

_RULES = {
    "MatMul": MatMulToMatMulNBits,
    "FusedMatMul": FusedMatMulToMatMulNBits,
    "Gemm": GemmToMatMulNBits,
    "Gather": GatherToGatherBlockQuantized,
}


def fuse(model: ir.Model, options: FusionOptions, context: PassContext) -> None:
    """Fuse in place; ``context.remarks`` tells the fate of every candidate.

    Raises:
        RewriteError: If a rule fails unexpectedly; earlier rewrites stay applied.
    """
    if "DequantizeLinear" not in _op_types(model):
        return
    if model.functions:
        # Whether a function's parameter is a constant shows only where it is called.
        onnx_ir.passes.common.InlinePass()(model)
    run = FusionRun(options, context)
    # Rules are built per call: they hold the match between check and rewrite. One that no
    # node can match costs time at each of them.
    present = _op_types(model)
    rules = [_built(rule, run) for op_type, rule in _RULES.items() if op_type in present]
    if rules:
        RewriteRuleSet(rules).apply_to_model(model)
    if {"Add", "MatMulNBits"} <= _op_types(model):
        sides = [_built(AddBias, run, bias_first=first) for first in (False, True)]
        RewriteRuleSet(sides).apply_to_model(model)
    explain_the_rest(model, run)


def _built(rule: Any, *args: object, **options: object) -> RewriteRule:
    built: RewriteRule = rule.rule(*args, **options)
    return built


def _op_types(model: ir.Model) -> set[str]:
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    return {node.op_type for graph in graphs for node in graph.all_nodes()}
