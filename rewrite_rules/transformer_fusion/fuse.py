# SPDX-License-Identifier: MIT
"""Fuses what transformers are made of; each module of rules states its identities."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from rewrite_rules.facts.copies import drop_copies
from rewrite_rules.graph.initializers import name_apart
from rewrite_rules.graph.nodes import all_nodes, remove_unused, sort_nodes, subgraphs, walk
from rewrite_rules.graph.opset_conversion import convert_opset
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.graph.value_types import derive_types
from rewrite_rules.remarks import Outcome, PassContext, Refusal, Remarks
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.activations import TanhGelu
from rewrite_rules.transformer_fusion.attention import (
    FuseAttention,
    multiplied_weights,
    name_caches,
    note_kernels,
    refuse_the_rest,
)
from rewrite_rules.transformer_fusion.equal_values import fold_scalars, share_nodes
from rewrite_rules.transformer_fusion.grouped_queries import GroupQueries
from rewrite_rules.transformer_fusion.norms import RmsNorm, SkipNorm
from rewrite_rules.transformer_fusion.projections import merge_projections
from rewrite_rules.transformer_fusion.rotary import Rotary
from rewrite_rules.transformer_fusion.shared_cache import SharedCache, cache_inputs

# Shape(x, start, end) stands in what grouped queries write.
_SHAPE_OPSET = 15
# From here on, no operator takes axes as an attribute.
_AXES_OPSET = 18
# Attention and RotaryEmbedding are standard operators.
_KERNEL_OPSET = 23
_SHARED = "shared"


def fuse_transformer(
    model: ir.Model, context: PassContext, kv_cache: str = "exported"
) -> None:
    """Rewrite a model with inferred shapes, and constants as initializers, in place."""
    sort_nodes(model.graph)
    remarks = context.remarks
    given = model.graph, dict(model.functions)
    _raise_opset(model, context)
    derive_types(model)
    drop_copies(model)
    # Looked at only as far as rules ask, and what they made as well.
    shapes, nonempty = (
        ProvedShapes(model, on_demand=True, nonempty=only) for only in (False, True)
    )
    nodes = _by_operator(model)
    opset = model.opset_imports.get("", 0)
    note_kernels(nodes, remarks)
    is_shared = kv_cache == _SHARED and bool(cache_inputs(model))
    if is_shared and not (context.cpu_only and opset >= _KERNEL_OPSET):
        raise ValueError(f"kv_cache=shared needs a CPU session and opset {_KERNEL_OPSET}")
    if context.cpu_only and opset >= _KERNEL_OPSET:
        graphs = [model.graph] if is_shared else [*_graphs(model.graph)]
        _normalise(model, graphs)
        shared = SharedCache(model) if is_shared else None
        _fuse_attention(model, graphs, shapes, nonempty, shared, remarks)
    if opset >= _SHAPE_OPSET:
        # Attention is fused already: what its clones of nodes repeat is no news.
        own, quiet = {*nodes["MatMul"]}, Remarks(remarks.pass_name)
        _apply(model, [GroupQueries.rule(shapes, nonempty, remarks)], own.__contains__)
        _apply(
            model, [GroupQueries.rule(shapes, nonempty, quiet)], lambda node: node not in own
        )
    if context.cpu_only:
        norms = RmsNorm.rule(shapes, remarks).commute()
        gelus = [TanhGelu.rule(remarks)] if nodes["Tanh"] else []
        _apply(model, [*norms, SkipNorm.rule(shapes, remarks), *gelus])
        merge_projections(model, remarks)
    remove_unused(model)
    if not any(remark.outcome is Outcome.FIRED for remark in remarks):
        model.graph, functions = given
        model.functions.update(functions)
        return
    for node in walk(model.graph):  # the engine does not look into branches
        model.opset_imports.setdefault(node.domain, 1)
    name_apart(model)


def _raise_opset(model: ir.Model, context: PassContext) -> None:
    """Convert a model with attention: rules meet one spelling, and may write kernels.

    Functions are inlined then, of a model of a newer opset as well.
    """
    opset = model.opset_imports.get("", 0)
    wanted = max(opset, _KERNEL_OPSET if context.cpu_only else _AXES_OPSET)
    softmaxes = (node for node in all_nodes(model) if node.op_type == "Softmax")
    if not multiplied_weights(softmaxes) or (opset == wanted and not model.functions):
        return
    if reason := convert_opset(model, wanted):
        text = f"opset {opset} was not converted to {wanted}: {reason}"
        refusal = Refusal("ORP607", text) if opset < wanted else Refusal("ORP117", reason)
        context.remarks.refused("model", refusal)


def _by_operator(model: ir.Model) -> Mapping[str, list[ir.Node]]:
    """The nodes of each operator, those of subgraphs too."""
    found = collections.defaultdict[str, list[ir.Node]](list)
    for node in walk(model.graph):
        found[node.op_type].append(node)
    return found


def _fuse_attention(
    model: ir.Model,
    graphs: Sequence[ir.Graph],
    shapes: ProvedShapes,
    nonempty: ProvedShapes,
    shared: SharedCache | None,
    remarks: Remarks,
) -> None:
    """Fuse rotary embeddings, then attention, in each graph."""
    caches = list[tuple[ir.Value, ir.Value]]()
    nodes = _by_operator(model)
    weighted = multiplied_weights(nodes["Softmax"])
    ends = {*nodes["Transpose"], *nodes["Add"]}
    for graph in graphs:
        own = {node for node in graph if node in ends}
        attention = FuseAttention.rule(shapes, nonempty, remarks, caches, shared)
        if own:
            rotary = Rotary.rule(shapes, remarks).commute()
            _apply(model, [*rotary, attention], own.__contains__)
    if shared is not None:
        shared.replace_sizes(whole for whole, _ in caches)
    name_caches(caches)
    remove_unused(model)
    sort_nodes(model.graph)
    refuse_the_rest(graphs, weighted, remarks)
    if shared is not None:
        refused = (remark.reason for remark in remarks if remark.outcome is Outcome.REFUSED)
        shared.check((made for _, made in caches), next(refused, "it is not attention"))


def _normalise(model: ir.Model, graphs: Sequence[ir.Graph]) -> None:
    """Let what is equal be one node, and heads have an axis."""
    # Not those of the rules, which find more once this is done.
    shapes = ProvedShapes(model, on_demand=True)
    for graph in graphs:
        share_nodes(graph)
    remove_unused(model)  # what computed their sizes
    fold_scalars(model, graphs, shapes)
    remove_unused(model)
    derive_types(model)
    sort_nodes(model.graph)


def _graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yield a graph and its subgraphs; what these read from outside is computed already."""
    yield graph
    for node in graph:
        for inner in () if node.domain else subgraphs(node):
            yield from _graphs(inner)


def _apply(
    model: ir.Model,
    rules: Sequence[RewriteRule],
    is_candidate: Callable[[ir.Node], bool] = lambda node: True,
) -> None:
    """Apply rules; unused nodes and equal names are left for the end."""
    rule_set = DispatchingRuleSet(rules, is_candidate)
    rule_set.cleans_up = False
    rule_set.apply_to_model(model)
