# SPDX-License-Identifier: MIT
"""Has Shape and Size read early and small; puts the nodes into an order of low peak memory.

First the rules of :mod:`rewrite_rules.shape_sources`; then the order that
:mod:`rewrite_rules.memory_order` computes is compared with what onnxruntime would run by
itself, and kept only if it holds less at its peak, or runs a Shape sooner and holds no more.
"""

from __future__ import annotations

__all__ = ["reorder"]

from collections.abc import Mapping

import onnx_ir as ir

from rewrite_rules.concrete_shapes import DEFAULT_DIM, concrete_shapes
from rewrite_rules.constants import Refusal
from rewrite_rules.memory_order import (
    GraphOrder,
    SimulatedOrder,
    closest_default_order,
    memory_order,
)
from rewrite_rules.remarks import PassContext
from rewrite_rules.shape_sources import simplify_shapes

# What a session has to be told to run the nodes in the order of the file.
_IN_FILE_ORDER = {"execution_order": "PRIORITY_BASED"}
_GRAPH = "graph"


def reorder(
    model: ir.Model, dims: Mapping[str, int], for_default_order: bool, context: PassContext
) -> None:
    """Simplify shapes and reorder in place; remarks tell the peaks of all three orders.

    Args:
        model: The graph that will run, after all other rewrites.
        dims: Numbers for symbolic dimensions.
        for_default_order: Whether sessions can't be told an order, so that the file has to be
            one whose default order is good.
        context: Gets remarks, and what the session has to be set to.
    """
    simplify_shapes(model, context)
    try:
        shapes = concrete_shapes(model, dims)
        order = memory_order(model.graph, dims, shapes=shapes)
        if not for_default_order:
            _run_in_file_order(order, context)
        else:
            file = closest_default_order(model.graph, order.ours.order, dims, shapes=shapes)
            if file.runs.peak < order.default.peak:
                file.apply()
                context.remarks.fired(
                    _GRAPH,
                    f"by default it now runs {file.closeness:.1%} of all pairs of nodes in "
                    f"the computed order, peak {_mb(file.runs)}; {_peaks(order)}",
                )
            else:
                context.remarks.refused(
                    _GRAPH, f"no file runs better by default than it does; {_peaks(order)}"
                )
    except Refusal as refusal:
        context.remarks.refused(_GRAPH, f"left in its order: {refusal}")
        return
    if order.unknown_dims:
        names = ", ".join(map(str, order.unknown_dims[:5]))
        context.remarks.note(
            _GRAPH,
            f"dimensions without a number counted as {DEFAULT_DIM}: {names}"
            f"{' and others' if len(order.unknown_dims) > 5 else ''}; give them by dims",
        )


def _run_in_file_order(order: GraphOrder, context: PassContext) -> None:
    if not order.worthwhile:
        context.remarks.refused(
            _GRAPH,
            "left in its order: onnxruntime's default runs a Shape late, and holds less so; "
            + _peaks(order),
        )
    elif _is_better(order):
        order.apply()
        context.session_settings.update(_IN_FILE_ORDER)
        context.remarks.fired(_GRAPH, f"{_peaks(order)}, found by {order.method!r}")
    else:
        context.remarks.refused(
            _GRAPH,
            f"left in its order, which is as good as any that was found; {_peaks(order)}",
        )


def _is_better(order: GraphOrder) -> bool:
    """Whether the computed order of a graph or a body holds less, or runs a Shape sooner.

    Sooner, the few bytes of a Shape's numbers may lie on top of the peak.
    """
    ours, default = order.ours, order.default
    if ours.peak < default.peak:
        return True
    if ours.peak > default.peak + order.chain_bytes:
        return False
    return sum(ours.distances) < sum(default.distances) or any(map(_is_better, order.bodies))


def _peaks(order: GraphOrder) -> str:
    orders = {
        "computed": order.ours,
        "onnxruntime's default": order.default,
        "its PRIORITY_BASED": order.priority,
    }
    told = ", ".join(
        f"{name} {_mb(item)} (Shape {item.mean_distance:.1f} steps behind its producer)"
        for name, item in orders.items()
    )
    return f"peak of live bytes: {told}"


def _mb(order: SimulatedOrder) -> str:
    return f"{order.peak / 1e6:.1f} MB"
