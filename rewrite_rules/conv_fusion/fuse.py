# SPDX-License-Identifier: MIT
"""Folds what exporters leave around convolutions; each module of rules has its identities."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from rewrite_rules.conv_fusion.fold_rules import Folding, folding_rules, normalizing_rules
from rewrite_rules.conv_fusion.hard_swish import hard_swish_rules
from rewrite_rules.conv_fusion.integers import UnsignedWeight
from rewrite_rules.conv_fusion.one_axis import DepthwiseLine, FourierFrames
from rewrite_rules.facts.copies import drop_copies
from rewrite_rules.graph.nodes import (
    all_nodes,
    inline_functions,
    label,
    remove_unused,
    sort_nodes,
    walk,
)
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.graph.value_types import derive_types
from rewrite_rules.remarks import PassContext, Refusal

# What the rules end in, and what has to be there for any of them to gain.
_ANCHORS = frozenset({"Clip", "Conv", "ConvInteger", "ConvTranspose", "STFT"})
# Folds make room for others; chains are shorter.
_MAX_ROUNDS = 50
_MIN_OPSET = 7  # constants broadcast as they do in numpy


def fuse_convolutions(model: ir.Model, context: PassContext) -> None:
    """Rewrite a model with inferred shapes in place."""
    if _ANCHORS.isdisjoint(node.op_type for node in all_nodes(model)):
        return
    if (opset := model.opset_imports.get("", 0)) < _MIN_OPSET:
        reason = f"opset {opset} is too old: convert the model to opset {_MIN_OPSET} or newer"
        context.remarks.refused("model", Refusal("ORP502", reason))
        return
    for name, reason in inline_functions(model).items():
        context.remarks.refused(name, Refusal("ORP117", reason))
    sort_nodes(model.graph)
    derive_types(model)
    drop_copies(model)
    folding, graphs = Folding(model, context.remarks), {*model.graphs()}
    rules = [*hard_swish_rules(folding), *folding_rules(folding)]
    rules.append(UnsignedWeight.rule(folding))
    for _ in range(_MAX_ROUNDS):
        if not _apply(model, rules, graphs):
            break
    if context.cpu_only:
        forms = [each.rule(folding) for each in (DepthwiseLine, FourierFrames)]
        _apply(model, [*normalizing_rules(folding), *forms], graphs)
    remove_unused(model)
    present = {*walk(model.graph)}
    for node, refusal in folding.refused.items():
        if node in present:
            context.remarks.refused(label(node), refusal)


def _apply(model: ir.Model, rules: Iterable[RewriteRule], graphs: AbstractSet[object]) -> int:
    """Apply rules in the main graph and its subgraphs; return how often."""
    return DispatchingRuleSet([*rules], lambda node: node.graph in graphs).apply_to_model(
        model
    )
