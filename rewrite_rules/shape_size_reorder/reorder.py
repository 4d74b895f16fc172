# SPDX-License-Identifier: MIT
"""Has Shape and Size read early and small; puts the nodes into an order of low peak memory.

First the rules of :mod:`.simplify`; then the order that :mod:`.search` computes is compared
with what onnxruntime would run by itself, and kept only if it holds less at its peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from rewrite_rules.graph.nodes import all_nodes, is_custom, label, walk
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.shape_size_reorder.search import (
    GraphOrder,
    SimulatedOrder,
    memory_order,
)
from rewrite_rules.shape_size_reorder.simplify import simplify_shapes
from rewrite_rules.shape_size_reorder.size_rules import move_behind_makers
from rewrite_rules.shapes.proved_shapes import DEFAULT_DIM, ConcreteShapes, concrete_shapes

# What makes a session run the nodes in the order of the file.
_IN_FILE_ORDER = {"execution_order": "PRIORITY_BASED"}
_NO_PATTERN = {"enable_mem_pattern": "0"}
_NO_REUSE = {"enable_mem_reuse": "0"}
_GRAPH, _SESSION = "graph", "session"
# Below that, a model's activations are nothing beside the session itself.
_LEAN_BYTES = 1 << 20
# Up to that share of the bytes with reuse, going without is worth the time it may take.
_WORTH_NO_REUSE = 0.95
# Without a memory pattern a run touches that much of the arena beside its peak, at most.
# PP-OCRv4 recognition touches 1.7 times its peak, and takes 3 % longer.
_MAX_SPREAD = 1.5


def reorder(
    model: ir.Model,
    context: PassContext,
    *,
    dims: Mapping[str, int],
    for_default_order: bool = False,
) -> None:
    """Simplify shapes and reorder in place; remarks tell the peaks of all three orders.

    ``for_default_order``: sessions take no order, so that the file has to be one whose default
    order is good.
    """
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
    shapes = concrete_shapes(model, dims)
    order = memory_order(model.graph, shapes)
    if for_default_order:
        _write_default_order(model, order, shapes, context)
    else:
        if context.cpu_only:
            other = memory_order(model.graph, shapes, reuse=False)
            order = _without_reuse(order, other, context)
        _run_in_file_order(model, order, context)
        with_arena = context.cpu_only and context.cpu_arena
        if with_arena and order.default.peak >= _LEAN_BYTES:
            _without_pattern(order, context)
    if shapes.unknown_dims:
        context.remarks.note(
            _GRAPH,
            f"dimensions without a number counted as {DEFAULT_DIM}: "
            f"{_first_of(shapes.unknown_dims)}; give them by dims",
        )
    if order.unknown_values:
        context.remarks.note(
            _GRAPH,
            "tensors of unknown size counted as the largest input of their node: "
            + _first_of(order.unknown_values),
        )


def _first_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"


def _without_pattern(order: GraphOrder, context: PassContext) -> None:
    """Switch memory patterns off, unless that spreads tensors over much of the arena."""
    spread = order.arena_bytes()
    if spread > _MAX_SPREAD * order.ours.peak:
        context.remarks.refused(
            _SESSION,
            Refusal(
                "ORP401",
                "memory patterns stay on: without them tensors would lie on "
                f"{spread / 1e6:.1f} MB for a peak of {_mb(order.ours)}, which takes longer",
            ),
        )
        return
    context.session_settings.update(_NO_PATTERN)
    context.remarks.fired(
        _SESSION,
        "memory patterns are off: their block would lie in the arena beside what "
        f"the first run left there, {_mb(order.ours)} at least",
    )


def _without_reuse(order: GraphOrder, without: GraphOrder, context: PassContext) -> GraphOrder:
    """Choose reuse of buffers, which holds them in between, or none, which takes some time."""
    with_bytes, bytes_without = (
        item.arena_bytes() if context.cpu_arena else item.ours.peak
        for item in (order, without)
    )
    if bytes_without > _WORTH_NO_REUSE * with_bytes or not without.worthwhile:
        return order
    context.session_settings.update(_NO_REUSE)
    where = "the arena" if context.cpu_arena else "tensors"
    context.remarks.fired(
        _SESSION,
        f"reuse of buffers is off: with it, {where} would take {with_bytes / 1e6:.1f} MB "
        f"instead of {bytes_without / 1e6:.1f}",
    )
    return without


def _write_default_order(
    model: ir.Model, order: GraphOrder, shapes: ConcreteShapes, context: PassContext
) -> None:
    file = memory_order(model.graph, shapes, for_default_order=True)
    if file.ours.peak < order.default.peak:
        file.apply()
        context.remarks.fired(
            _GRAPH, f"by default it now runs with a peak of {_mb(file.ours)}; {_peaks(order)}"
        )
    else:
        text = f"no file runs better by default than it does; {_peaks(order)}"
        context.remarks.refused(_GRAPH, Refusal("ORP401", text))


def put_in_order(model: ir.Model, order: GraphOrder) -> None:
    """Put the nodes into the planned order, each Shape and Size by its rule."""
    move_behind_makers(model, order.apply(shapes_in_front=True))


def _run_in_file_order(model: ir.Model, order: GraphOrder, context: PassContext) -> None:
    if not order.worthwhile:
        text = (
            "left in its order: onnxruntime's default runs a Shape late, and holds less so; "
        )
        context.remarks.refused(_GRAPH, Refusal("ORP401", text + _peaks(order)))
    elif order.ours.peak < order.default.peak or (
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
