# SPDX-License-Identifier: MIT
"""The matrix of weight layouts with default options, beside onnxruntime: errors and times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

import ortplugins
from benchmarks.figures.bounds import Figure
from tests.builders.dequantized_models import relative_error
from tests.builders.layout_matrix import LayoutCase, layout_cases

Feeds = Mapping[str, npt.NDArray[Any]]

ROWS = (1, 64)
BOUND = 1.03
_TURNS = 25
# Of the runs of a turn, at least: reading the clock costs little beside it.
_TURN_SECONDS = 3e-4


def measure_layout_times(folder: Path, rounds: int) -> list[Figure]:
    """Time every layout that plain onnxruntime runs; slower ones once more, at length."""
    del folder  # models are opened as bytes
    ratios: dict[int, dict[str, float]] = {rows: {} for rows in ROWS}
    less_exact = compared = 0
    for case in layout_cases():
        sessions = _sessions(case)
        if sessions is None:
            continue
        compared += 1
        less_exact += _is_less_exact(case, *sessions)
        for rows in ROWS:
            feeds = _with_rows(case.feeds, rows)
            if _runs(sessions, feeds):
                ratio = _ratio(*sessions, feeds, rounds)
                ratios[rows][case.name] = (
                    ratio if ratio <= BOUND else _ratio(*sessions, feeds, 10 * rounds)
                )
    figures = [
        Figure(
            f"of {compared} layouts: error above onnxruntime's and the type's rounding",
            float(less_exact),
            unit="layouts",
            bound=0,
        )
    ]
    for rows, found in ratios.items():
        slower = sorted(name for name, ratio in found.items() if ratio > BOUND)
        print(f"M = {rows}:", *(f"{name} {found[name]:.2f}" for name in slower))
        what = f"M = {rows}, {len(found)} layouts"
        mean = statistics.geometric_mean(found.values())
        figures += [
            Figure(
                f"{what}: time of a run beside onnxruntime's, geometric mean", mean, unit="x"
            ),
            Figure(f"{what}: above {BOUND} x", float(len(slower)), unit="layouts", bound=0),
        ]
    return figures


def _sessions(
    case: LayoutCase,
) -> tuple[ort.InferenceSession, ort.InferenceSession] | None:
    """Sessions after ours and without; None where plain onnxruntime does not run the case."""
    try:
        stock = _session(case.build())
        stock.run(None, dict(case.feeds))
    except Exception:  # whatever it is, there is nothing to compare with
        return None
    return _session(ortplugins.optimize(case.build()).model), stock


def _session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    content = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _is_less_exact(
    case: LayoutCase, ours: ort.InferenceSession, stock: ort.InferenceSession
) -> bool:
    outputs = zip(
        ours.run(None, dict(case.feeds)),
        stock.run(None, dict(case.feeds)),
        case.reference,
        strict=True,
    )
    return any(
        relative_error(actual, expected)
        > max(relative_error(theirs, expected), case.tolerance) + 1e-5
        for actual, theirs, expected in outputs
    )


def _with_rows(feeds: Feeds, rows: int) -> Feeds:
    """The same inputs with as many rows, repeated; [M, K] or [..., M, K]."""
    return {
        name: np.resize(feed, (*feed.shape[:-2], rows, feed.shape[-1]))
        if feed.ndim >= 2
        else feed
        for name, feed in feeds.items()
    }


def _runs(sessions: Sequence[ort.InferenceSession], feeds: Feeds) -> bool:
    try:
        for session in sessions:
            session.run(None, dict(feeds))
    except Exception:  # its rows are fixed, or mean something else
        return False
    return True


def _ratio(
    ours: ort.InferenceSession, stock: ort.InferenceSession, feeds: Feeds, rounds: int
) -> float:
    """Return the median time of one session as a multiple of the other's, run in turns."""
    names = [item.name for item in stock.get_outputs()]
    runs = max(1, round(_TURN_SECONDS / _seconds(stock, names, feeds, 3)))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(_TURNS * rounds):
        # Another one first in each.
        for index in (0, 1) if turn % 2 else (1, 0):
            times[index].append(_seconds((ours, stock)[index], names, feeds, runs))
    return statistics.median(times[0]) / statistics.median(times[1])


def _seconds(
    session: ort.InferenceSession, names: Sequence[str], feeds: Feeds, runs: int
) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        session.run(names, feeds)
    return (time.perf_counter() - start) / runs
