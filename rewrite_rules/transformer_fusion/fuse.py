# SPDX-License-Identifier: MIT
"""Fuses what transformers are made of; each module of rules states its identities."""

from __future__ import annotations

__all__ = ["TransformerOptions", "fuse_transformer"]

import dataclasses

import onnx_ir as ir
import onnx_ir.passes.common

from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import PassContext
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.grouped_queries import GroupQueries
from rewrite_rules.transformer_fusion.norms import RmsNorm, SkipNorm

_NORMS = ("SimplifiedLayerNormalization", "LayerNormalization")
# Shape(x, start, end) stands in what grouped queries write.
_SHAPE_OPSET = 15


@dataclasses.dataclass(frozen=True)
class TransformerOptions:
    """Which parts to fuse.

    Attributes:
        norms: Normalisation, with the residual sum before it.
        grouped_queries: MatMuls of query heads that share key and value heads.
    """

    norms: bool = True
    grouped_queries: bool = True


def fuse_transformer(
    model: ir.Model, options: TransformerOptions, context: PassContext
) -> None:
    """Rewrite in place.

    Args:
        model: With inferred shapes and types, and constants as initializers.
        options: Which parts to fuse.
        context: Gets a remark for each node that is fused, or that a reason keeps as it is.
    """
    model.graph.sort()
    remarks = context.remarks
    opset = model.opset_imports.get("", 0)
    if options.grouped_queries and opset < _SHAPE_OPSET:
        reason = f"opset {opset} has no Shape of a part: convert the model to opset 15"
        remarks.refused("model", reason)
    elif options.grouped_queries:
        rule = GroupQueries.rule(ProvedShapes(model), remarks)
        DispatchingRuleSet([rule]).apply_to_model(model)
    if options.norms and context.cpu_only:
        rms = RmsNorm.rule(remarks).commute()
        skip = [SkipNorm.rule(operator, remarks) for operator in _NORMS]
        for rules in (rms, skip):
            DispatchingRuleSet(rules).apply_to_model(model)
    ir.passes.common.RemoveUnusedNodesPass()(model)
