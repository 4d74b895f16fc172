# SPDX-License-Identifier: MIT
"""Has Shape and Size read early: the analysis, then the rules, then why the others stay."""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.graph.nodes import all_nodes, label, sort_nodes
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.shape_size_reorder.size_readings import SizeReadings, equal_numbers
from rewrite_rules.shape_size_reorder.size_rules import ROOTS, merge_equal, read_better
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_FLOAT8 = frozenset(dtype for dtype in ir.DataType if dtype.name.startswith("FLOAT8"))


def simplify_shapes(model: ir.Model, context: PassContext) -> None:
    """Rewrite in place and sort; all numbers stay, whatever the sizes in a run."""
    if all(node.op_type not in ROOTS for node in all_nodes(model)):
        return
    try:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            sort_nodes(graph)  # what is earlier is only known then
    except ValueError as error:
        context.remarks.refused("model", Refusal("ORP402", f"it can't be sorted: {error}"))
        return
    with context.remarks.at("model"):
        facts = ProvedShapes(model)
        readings = SizeReadings(model, facts).better
    if readings:
        read_better(model, readings, context.remarks)
        _drop_saturate(model)
        with context.remarks.at("model"):
            facts = ProvedShapes(model)
    merge_equal(model, equal_numbers(model, facts), context.remarks)
    _explain_the_rest(model, facts, context)


def _drop_saturate(model: ir.Model) -> None:
    """Drop an attribute of Cast that says nothing, but for types of 8 bits.

    onnxruntime's kernel refuses it. Its optimisers merge such a Cast with the next one, unless
    they fold it first, behind what has become a constant.
    """
    for node in all_nodes(model):
        to = node.attributes.get("to") if node.op_type == "Cast" else None
        if to is not None and not to.is_ref() and to.value not in _FLOAT8:
            node.attributes.pop("saturate", None)


def _explain_the_rest(model: ir.Model, facts: ProvedShapes, context: PassContext) -> None:
    """Say why a Shape reads a computed tensor still."""
    for node in all_nodes(model):
        source = node.inputs[0] if node.op_type in ROOTS and node.inputs else None
        maker = None if source is None else source.producer()
        if source is None or maker is None or node.domain:
            continue  # nothing is earlier than an input
        unranked = isinstance(facts.shape(source), int)
        text = (
            f"{maker.op_type} {label(maker)!r} decides the "
            f"{'rank and the sizes' if unranked else 'sizes'} of {source.name!r}: nothing "
            "earlier has them in every run"
        )
        context.remarks.refused(label(node), Refusal("ORP401", text))
