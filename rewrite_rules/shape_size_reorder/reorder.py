# SPDX-License-Identifier: MIT
"""Has Shape and Size read early and small; puts the nodes into an order of low peak memory.

First the rules of :mod:`.simplify`; then the order of :mod:`.memory_order`, which is kept only
if it holds less at its peak than what onnxruntime would run by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from rewrite_rules.graph.nodes import all_nodes, is_custom, label, walk
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.shape_size_reorder.memory_order import GraphOrder, SimulatedOrder
from rewrite_rules.shape_size_reorder.simplify import simplify_shapes
from rewrite_rules.shape_size_reorder.size_rules import move_behind_makers
from rewrite_rules.shapes.proved_shapes import DEFAULT_DIM, ProvedShapes

# What makes a session run the nodes in the order of the file.
_IN_FILE_ORDER = {"execution_order": "PRIORITY_BASED"}
_NO_PATTERN = {"enable_mem_pattern": "0"}
_NO_REUSE = {"enable_mem_reuse": "0"}
_GRAPH, _SESSION = "graph", "session"
# Below that, a model's activations are nothing compared with the session itself.
_LEAN_BYTES = 1 << 20


def reorder(model: ir.Model, context: PassContext, *, dims: Mapping[str, int]) -> None:
    """Simplify shapes and reorder in place; remarks tell the peaks of all three orders."""
    custom = [node for node in all_nodes(model) if is_custom(node, model)]
    called = {node for each in model.functions.values() for node in walk(each.graph)}
    if len(custom) > 1 or not called.isdisjoint(custom):
        # A Shape that reads another value moves the walk that onnxruntime's default order is.
        context.remarks.refused(
            _GRAPH,
            Refusal(
                "ORP401",
                f"several custom operators, {custom[0].op_type} {label(custom[0])!r} first, "
                "may hold state: the pass could change the order in which they run",
            ),
        )
        return
    simplify_shapes(model, context)
    shapes = ProvedShapes(model, dims)
    order = GraphOrder(model.graph, shapes)
    _run_in_file_order(model, order, context)
    if context.cpu_only and order.default.peak >= _LEAN_BYTES:
        context.session_settings.update(_NO_REUSE)
        reasons = ["buffers are not reused, which would hold them in between"]
        if context.cpu_arena:
            context.session_settings.update(_NO_PATTERN)
            reasons.append(
                "memory patterns are off: their block would add to what the first run left in "
                f"the arena, {_mb(order.ours)} at least"
            )
        context.remarks.fired(_SESSION, "; ".join(reasons))
    if shapes.guessed:
        context.remarks.note(
            _GRAPH,
            f"dimensions without a number counted as {DEFAULT_DIM}: "
            f"{_first_of(sorted(shapes.guessed))}; set them with dims",
        )
    if order.unknown_values:
        context.remarks.note(
            _GRAPH,
            "tensors of unknown size counted as the largest input of their node: "
            + _first_of(order.unknown_values),
        )


def _first_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"


def put_in_order(model: ir.Model, order: GraphOrder) -> None:
    """Put the nodes into the planned order, each Shape and Size by its rule."""
    move_behind_makers(model, order.apply())


def _run_in_file_order(model: ir.Model, order: GraphOrder, context: PassContext) -> None:
    if order.ours.peak < order.default.peak or (
        context.final_graph and order.default.peak >= _LEAN_BYTES
    ):
        # A session that makes the final graph itself gives its nodes other places than the
        # file has: what that one's default order would be, nobody knows.
        put_in_order(model, order)
        context.session_settings.update(_IN_FILE_ORDER)
        context.remarks.fired(_GRAPH, _peaks(order))
    else:
        text = f"left in its order, which is as good as any that was found; {_peaks(order)}"
        context.remarks.refused(_GRAPH, Refusal("ORP401", text))


def _peaks(order: GraphOrder) -> str:
    orders = {
        "computed": order.ours,
        "onnxruntime's default": order.default,
        "its PRIORITY_BASED": order.priority,
    }
    peaks = ", ".join(f"{name} {_mb(item)}" for name, item in orders.items())
    return f"peak of live bytes: {peaks}"


def _mb(order: SimulatedOrder) -> str:
    return f"{order.peak / 1e6:.1f} MB"
