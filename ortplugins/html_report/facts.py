# SPDX-License-Identifier: MIT
"""Everything that the page about a model says, as one dict of plain JSON."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import ModelFileError
from ortplugins.html_report.live_memory import curve, order_of
from ortplugins.measurement.measure import Candidate, measure, side_by_side
from ortplugins.measurement.models import Inputs, comparison_feeds, operator_counts
from ortplugins.model_io.loading import initializer_tensors, load_model, stored_bytes
from ortplugins.model_io.saving import identity_of
from ortplugins.optimization.optimize import OptimizeResult, optimize
from ortplugins.runtime.machine import machine, versions
from ortplugins.runtime.stock_session import open_model
from ortplugins.samples.made_up import MadeUpInputs, sizes_of
from rewrite_rules.graph.nodes import all_nodes
from rewrite_rules.shape_size_reorder.search import memory_order
from rewrite_rules.shapes.proved_shapes import concrete_shapes
from session_options import DqMatMulNBitsFusion, ShapeSizeReorder
from session_options.keys import format_value, options_of
from session_options.plan import entries_of, plan_from_settings


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
    rounds: int = 5,
    command: str = "",
) -> dict[str, Any]:
    """Look at a model before and after passes, and measure sessions on it.

    What is not known of this model (it has no order, random inputs do not run) is in its
    place as ``{"failed": reason}``. ``docs/report.md`` describes the facts.

    ``measure`` says whether to start and run sessions on the largest sample, in ``rounds``
    processes of each kind; ``command`` is what the user typed. Other arguments, and errors,
    are those of :func:`.compare`.
    """
    path = Path(model)
    plan = plan_from_settings(list(passes), options or {})
    before = load_model(path)
    graph = before.model.graph
    sizes = MadeUpInputs(graph.inputs, dims).sizes
    result = optimize(path, passes=passes, options=options)
    sessions = None
    if measure:
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
                sessions = {"failed": str(error)}
            else:
                sizes = sizes_of(graph.inputs, {name: feed[name].shape for name in feed})
                sessions = _sessions(path, passes, options or {}, feed, rounds)
    report = _with_passes_on_files(result.report.to_dict(), sessions)
    operators = _operators(before.model, result.model)
    files = [path, *before.data_files.values()]
    return {
        "model": {
            "name": path.name,
            "path": str(path),
            "bytes": sum(file.stat().st_size for file in files),
            "opset": graph.opset_imports.get("", None),
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
        "weights": _weights(before.model, result.model),
        "inputs": "made up" if inputs is None else "given",
        "sizes": sizes,
        "memory": _memory(path, result, sizes, passes),
        "sessions": sessions,
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


def _weights(before: ir.Model, after: ir.Model) -> list[dict[str, Any]]:
    counts = [weight_bytes(model) for model in (before, after)]
    rows = []
    for kind in counts[0] | counts[1]:
        (number, size), (number_after, size_after) = (x.get(kind, (0, 0)) for x in counts)
        tensors = {"tensors_before": number, "tensors_after": number_after}
        rows.append({"kind": kind, **tensors, "before": size, "after": size_after})
    return rows


def weight_bytes(model: ir.Model) -> dict[str, tuple[int, int]]:
    """Return number and bytes of constants by their type; no tensor is read.

    Bytes that two initializers share are counted once, for the first.
    """
    counts: dict[str, tuple[int, int]] = {}
    seen: set[object] = set()
    tensors = [tensor for _, tensor in initializer_tensors(model)]
    tensors += [
        node.attributes["value"].as_tensor()
        for node in all_nodes(model)
        if node.op_type == "Constant" and "value" in node.attributes
    ]
    for tensor in tensors:
        place = identity_of(tensor)
        size = 0 if place in seen else stored_bytes(tensor)
        seen.add(place)
        number, total = counts.get(kind := tensor.dtype.name.lower(), (0, 0))
        counts[kind] = number + 1, total + size
    return counts


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
    curves.insert(0, curve(f"rewritten, {name}", live.tolist()))
    return {"curves": curves, "notes": notes}
