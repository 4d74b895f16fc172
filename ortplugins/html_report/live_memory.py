# SPDX-License-Identifier: MIT
"""Live memory of a run, step by step, in each execution order; drawn as bars of text."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ortplugins.model_io.loading import load_model
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.samples.made_up import MadeUpInputs
from rewrite_rules.shape_size_reorder.search import SimulatedOrder, memory_order
from rewrite_rules.shapes.proved_shapes import DEFAULT_DIM, concrete_shapes

# From nothing to full.
_BARS = " ▁▂▃▄▅▆▇█"


def curve(name: str, live: Sequence[int]) -> dict[str, Any]:
    """Return what one order of the nodes holds in memory: live bytes in each step."""
    return {"name": name, "peak": max(live, default=0), "live": list(live)}


def memory_bars(curves: Sequence[Mapping[str, Any]], width: int = 72) -> list[str]:
    """Return a line for each curve: its name, its peak, and bars up to the greatest peak."""
    top = max((item["peak"] for item in curves), default=0)
    longest = max((len(item["name"]) for item in curves), default=0)
    lines, step = [], (top or 1) / (len(_BARS) - 1)
    for item in curves:
        levels = (value / step for value in _thinned(item["live"], width))
        bars = "".join(_BARS[math.ceil(level)] for level in levels)
        lines.append(f"{item['name']:{longest}}  {item['peak'] / 1e6:9.1f} MB  {bars}")
    return lines


def order_of(
    model: str | os.PathLike[str], dims: Mapping[str, int]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Simulate the orders of a model as it is: onnxruntime's fusions change it first.

    Return the curves of the computed order, onnxruntime's default and its PRIORITY_BASED; and
    notes, on what was guessed for one.
    """
    loaded = load_model(model).model
    infer_shapes(loaded)
    assumed = MadeUpInputs(loaded.graph.inputs, dims, length=DEFAULT_DIM).sizes
    shapes = concrete_shapes(loaded, {**assumed, **dims})
    order = memory_order(loaded.graph, shapes)
    orders = {
        "computed": order.ours,
        "onnxruntime's default": order.default,
        "PRIORITY_BASED": order.priority,
    }
    curves = [curve(name, item.live.tolist()) for name, item in orders.items()]
    notes = [f"{name}: {_distance(item)}" for name, item in orders.items()]
    counted = {k: v for k, v in assumed.items() if k not in dims}
    counted |= dict.fromkeys(shapes.unknown_dims, DEFAULT_DIM)
    if counted:
        listed = ", ".join(f"{name}={size}" for name, size in counted.items())
        notes.append(f"dimensions without a number, counted as {listed}")
    return curves, notes


def _distance(order: SimulatedOrder) -> str:
    if not order.distances:
        return "no Shape or Size reads a computed tensor"
    return (
        f"Shape and Size run {order.mean_distance:.1f} steps behind their producer, "
        f"{order.max_distance} at most"
    )


def _thinned(live: Sequence[int], points: int) -> list[int]:
    """Return the greatest value of each of at most ``points`` stretches: peaks stay."""
    count = min(points, len(live))
    edges = [len(live) * i // count for i in range(count + 1)] if count else []
    return [max(live[a:b]) for a, b in pairwise(edges)]
