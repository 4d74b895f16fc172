# SPDX-License-Identifier: MIT
"""What the nodes of a model hold in memory while they run, in three orders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ortplugins.errors import ModelFileError
from ortplugins.html_report.charts import Curve
from ortplugins.model_io.loading import load_path
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.samples.made_up import MadeUpInputs
from rewrite_rules.remarks import Refusal
from rewrite_rules.shape_size_reorder.search import SimulatedOrder, memory_order
from rewrite_rules.shapes.proved_shapes import DEFAULT_DIM, concrete_shapes


class OrderReport(NamedTuple):
    """The computed order, onnxruntime's default and its PRIORITY_BASED; what was guessed."""

    curves: list[Curve]
    notes: list[str]


def order_of(model: str | os.PathLike[str], dims: Mapping[str, int]) -> OrderReport:
    """Simulate the orders of a model as it is; onnxruntime's fusions change it first."""
    loaded = load_path(model).model
    infer_shapes(loaded)
    inputs = [v for v in loaded.graph.inputs if v.name not in loaded.graph.initializers]
    assumed = MadeUpInputs(inputs, dims, length=DEFAULT_DIM).sizes
    try:
        shapes = concrete_shapes(loaded, {**assumed, **dims})
        order = memory_order(loaded.graph, shapes)
    except Refusal as refusal:
        raise ModelFileError(f"{os.fspath(model)}: has no order: {refusal}") from refusal
    orders = {
        f"computed ({order.method})": order.ours,
        "onnxruntime's default": order.default,
        "PRIORITY_BASED": order.priority,
    }
    curves = [Curve(name, item.timeline.live.tolist()) for name, item in orders.items()]
    notes = [f"{name}: {_distance(item)}" for name, item in orders.items()]
    counted = {k: v for k, v in assumed.items() if k not in dims}
    counted |= dict.fromkeys(shapes.unknown_dims, DEFAULT_DIM)
    if counted:
        listed = ", ".join(f"{name}={size}" for name, size in counted.items())
        notes.append(f"dimensions without a number, counted as {listed}")
    return OrderReport(curves, notes)


def _distance(order: SimulatedOrder) -> str:
    if not order.distances:
        return "no Shape or Size reads a computed tensor"
    return (
        f"Shape and Size run {order.mean_distance:.1f} steps behind their producer, "
        f"{order.max_distance} at most"
    )
