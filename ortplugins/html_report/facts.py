# SPDX-License-Identifier: MIT
"""Everything that the page about a model says, as one dict of plain JSON."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from ortplugins.comparison.compare import compare, plain
from ortplugins.comparison.models import Inputs, comparison_feeds, operator_counts
from ortplugins.errors import ModelFileError
from ortplugins.html_report.charts import Curve
from ortplugins.measurement.measure import Candidate, measure, side_by_side
from ortplugins.model_io.loading import initializer_tensors, load_model, stored_bytes
from ortplugins.model_io.saving import identity_of
from ortplugins.optimization.optimize import OptimizeResult, optimize
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.runtime.machine import machine, versions
from ortplugins.runtime.stock_session import open_model
from ortplugins.samples.made_up import MadeUpInputs, sizes_of
from ortplugins.samples.sources import KeptSamples
from rewrite_rules.graph.nodes import all_nodes
from rewrite_rules.shape_size_reorder.search import SimulatedOrder, memory_order
from rewrite_rules.shapes.proved_shapes import DEFAULT_DIM, concrete_shapes
from session_options import DqMatMulNBitsFusion, ShapeSizeReorder
from session_options.keys import format_value, options_of
from session_options.plan import entries_of, plan_from_settings

_KINDS = "quantised codes", "scales and zero points", "float constants", "other constants"
_CODES, _SCALES, _FLOATS, _OTHERS = _KINDS

# Inputs that are codes, and those that are scales and zero points.
_ROLES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "DequantizeLinear": ((0,), (1, 2)),
    "QuantizeLinear": ((), (1, 2)),
    "MatMulNBits": ((1,), (2, 3)),
    "GatherBlockQuantized": ((0,), (2, 3)),
    "QLinearMatMul": ((0, 3), (1, 2, 4, 5, 6, 7)),
    "QLinearConv": ((0, 3, 8), (1, 2, 4, 5, 6, 7)),
    "MatMulInteger": ((0, 1), (2, 3)),
    "ConvInteger": ((0, 1), (2, 3)),
}
_SMALL_INTEGERS = frozenset({
    ir.DataType.INT2, ir.DataType.UINT2, ir.DataType.INT4, ir.DataType.UINT4,
    ir.DataType.INT8, ir.DataType.UINT8,
})  # fmt: skip


def gather_facts(
    model: str | os.PathLike[str],
    *,
    passes: Sequence[str] = (DqMatMulNBitsFusion.name,),
    options: Mapping[str, str] | None = None,
    inputs: Inputs = None,
    dims: Mapping[str, int] | None = None,
    samples: int = 1,
    seed: int = 0,
    measure: bool = True,
    layers: bool = False,
    rounds: int = 5,
    result: OptimizeResult | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Look at a model before and after passes, and measure sessions on it.

    What is not known of this model (it has no order, random inputs do not run) is in its
    place as ``{"failed": reason}``. ``docs/report.md`` describes the facts.

    ``measure`` says whether to start and run sessions on the largest sample, in ``rounds``
    processes of each kind; ``layers``, whether to compare the values of both models on all
    samples. ``result`` is what :func:`.optimize` made with these passes, if it did already;
    ``command`` what the user typed. Other arguments, and errors, are those of
    :func:`.compare`.
    """
    path = Path(model)
    plan = plan_from_settings(list(passes), options or {})
    before = load_model(path)
    graph = before.model.graph
    sizes = MadeUpInputs(graph.inputs, dims).sizes
    if result is None:
        result = optimize(path, passes=passes, options=options)
    sessions = compared = None
    if measure or layers:
        with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
            try:
                feeds = comparison_feeds(
                    open_model(path, "disable"),
                    Path(folder),
                    inputs=inputs,
                    dims=dims,
                    samples=samples,
                    seed=seed,
                )
                feed = feeds.largest()
            except ModelFileError as error:
                failed = {"failed": str(error)}
                sessions, compared = failed if measure else None, failed if layers else None
            else:
                sizes = sizes_of(graph.inputs, {name: feed[name].shape for name in feed})
                if measure:
                    sessions = _sessions(path, passes, options or {}, feed, rounds)
                if layers:
                    compared = _layers(path, result, feeds)
    report = _with_passes_on_files(result.report.to_dict(), sessions)
    operators = _operators(before.model, result.model)
    files = [path, *before.data_files.values()]
    return {
        "model": {
            "name": path.name,
            "path": str(path),
            "bytes": sum(file.stat().st_size for file in files),
            "opset": graph.opset_imports.get("", None),
            "output": str(result.path or ""),
        },
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "passes": list(passes),
        "options": {
            f"{item.name}.{spec.name}": format_value(getattr(item, spec.name))
            for item in plan.passes
            for spec in options_of(type(item))
        },
        "report": report,
        "remarks": _remarks(report),
        "nodes": {side: sum(row[side] for row in operators) for side in ("before", "after")},
        "operators": operators,
        "weights": _weights(before.model, result.model, sessions),
        "inputs": "made up" if inputs is None else "given",
        "sizes": sizes,
        "memory": _memory(path, result, sizes, passes),
        "sessions": sessions,
        "layers": compared,
    }


def _remarks(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the remarks of all passes, refusals first."""
    order = ["refused", "fired", "note"]
    rows = [
        {"pass": item["name"], **remark}
        for item in report["passes"]
        for remark in item["remarks"]
    ]
    return sorted(rows, key=lambda row: order.index(row["outcome"]))


def _sessions(
    model: Path,
    passes: Sequence[str],
    settings: Mapping[str, str],
    feed: Mapping[str, npt.NDArray[Any]],
    rounds: int,
) -> dict[str, Any]:
    """Measure plain sessions and ours, which come from a cache that a first start fills."""
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as cache:
        entries = entries_of(passes, settings, cache_dir=cache)
        candidates = [
            Candidate(model, "plain onnxruntime"),
            Candidate(model, "ortplugins", settings=entries),
        ]
        plain, ours = measure(candidates, feed, rounds=rounds, runs=50, seconds=1.0)
        if failed := plain.failed or ours.failed:
            return {"failed": failed}
        assert ours.report is not None
        artifact = ours.report["artifact"]
        packed = _packed_bytes(artifact) if artifact else (0, 0)
    return {
        "rounds": rounds,
        "inputs": [
            {"name": name, "type": str(array.dtype), "shape": list(array.shape)}
            for name, array in feed.items()
        ],
        "figures": [
            {
                "what": cost.what,
                "unit": cost.unit,
                "ratio": cost.ratio,
                "ours": cost.a.median,
                "plain": cost.b.median,
                "all": {"ours": list(cost.a.values), "plain": list(cost.b.values)},
                "distinct": cost.differs,
            }
            for cost in side_by_side(ours, plain)
        ],
        "first_start_seconds": ours.first_start,
        "packed": {"tensors": packed[0], "bytes": packed[1]},
        "report": {**ours.report, "artifact": ""},  # gone by now
    }


def _with_passes_on_files(
    report: dict[str, Any], sessions: dict[str, Any] | None
) -> dict[str, Any]:
    """Add the passes that have nothing to do before there is a file, which a session has."""
    measured = sessions.pop("report", None) if sessions else None
    named = {item["name"] for item in report["passes"]}
    for item in measured["passes"] if measured else ():
        if item["name"] not in named:
            report["passes"].append(item)
    outcomes = Counter(r["outcome"] for item in report["passes"] for r in item["remarks"])
    return {**report, "fired": outcomes["fired"], "refused": outcomes["refused"]}


def _operators(before: ir.Model, after: ir.Model) -> list[dict[str, Any]]:
    counts = [operator_counts(model) for model in (before, after)]
    rows = [
        {"operator": name, "domain": domain, "before": counts[0][key], "after": counts[1][key]}
        for key in counts[0] | counts[1]
        for domain, name in [key]
    ]
    # What changed stands in front.
    return sorted(
        rows,
        key=lambda row: (
            row["before"] == row["after"],
            -max(row["before"], row["after"]),
            row["operator"],
        ),
    )


def _weights(
    before: ir.Model, after: ir.Model, sessions: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    counts = [weight_bytes(model) for model in (before, after)]
    rows = [
        {
            "kind": kind,
            "tensors_before": counts[0][kind][0],
            "tensors_after": counts[1][kind][0],
            "before": counts[0][kind][1],
            "after": counts[1][kind][1],
        }
        for kind in _KINDS
    ]
    packed = (sessions or {}).get("packed")
    if packed and packed["tensors"]:
        counted = {"tensors_before": 0, "tensors_after": packed["tensors"]}
        sizes = {"before": 0, "after": packed["bytes"]}
        rows.append({"kind": "packed for kernels", **counted, **sizes})
    return rows


def weight_bytes(model: ir.Model) -> dict[str, tuple[int, int]]:
    """Return number and bytes of constants by what they are for; no tensor is read.

    Bytes that two initializers share are counted once, for the first.
    """
    counts = dict.fromkeys(_KINDS, (0, 0))
    seen: set[object] = set()
    held = [
        (node.outputs[0], node.attributes["value"].as_tensor())
        for node in all_nodes(model)
        if node.op_type == "Constant" and "value" in node.attributes
    ]
    for value, tensor in (*initializer_tensors(model), *held):
        place = identity_of(tensor)
        size = 0 if place in seen else stored_bytes(tensor)
        seen.add(place)
        kind = _kind(value, tensor)
        counts[kind] = counts[kind][0] + 1, counts[kind][1] + size
    return counts


def _packed_bytes(model_path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return how many initializers of a file have packed forms, and the bytes of these."""
    import onnx

    from rewrite_rules.prepacked_weights.records import read_records

    found = read_records(onnx.load(model_path, load_external_data=False))
    blobs = {
        (offset, length)
        for records in found.values()
        for record in records
        for offset, length, _ in record.blobs
    }
    return len(found), sum(length for _, length in blobs)


def _kind(value: ir.Value, tensor: ir.TensorProtocol) -> str:
    for node, index in value.uses():
        codes, scales = _ROLES.get(node.op_type, ((), ()))
        if index in codes:
            return _CODES
        if index in scales:
            return _SCALES
    if tensor.dtype.is_floating_point():
        return _FLOATS
    return _CODES if tensor.dtype in _SMALL_INTEGERS else _OTHERS


def _memory(
    path: Path, result: OptimizeResult, sizes: Mapping[str, int], passes: Sequence[str]
) -> dict[str, Any]:
    try:
        curves, notes = order_of(path, sizes)
    except ModelFileError as error:
        return {"failed": str(error)}
    after = memory_order(result.model.graph, concrete_shapes(result.model, sizes))
    reordered = ShapeSizeReorder.name in passes
    name = "PRIORITY_BASED" if reordered else "onnxruntime's default"
    live = (after.priority if reordered else after.default).live
    curves.insert(0, Curve(f"rewritten, {name}", live.tolist()))
    return {"curves": [curve.to_dict() for curve in curves], "notes": notes}


def order_of(
    model: str | os.PathLike[str], dims: Mapping[str, int]
) -> tuple[list[Curve], list[str]]:
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
    curves = [Curve(name, item.live.tolist()) for name, item in orders.items()]
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


def _layers(path: Path, result: OptimizeResult, feeds: KeptSamples) -> dict[str, Any]:
    try:
        found = compare(path, result, inputs=feeds, layers=True).layers
    except ModelFileError as error:
        return {"failed": str(error)}
    assert found is not None
    rows = [
        {"step": step, **dataclasses.asdict(layer)}
        for step, layer in enumerate(found.layers, 1)
    ]
    rows.sort(key=lambda row: -row["difference"]["relative_rms"])
    return {
        "values": plain(rows),  # an infinite error is not a number in JSON
        "only_before": len(found.only_a),
        "only_after": len(found.only_b),
        "not_compared": len(found.not_compared),
    }
