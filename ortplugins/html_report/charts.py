# SPDX-License-Identifier: MIT
"""Charts over the steps of a run, as SVG inside a page, in the page's colours.

:mod:`.live_memory_chart` draws files, which have no theme: this has classes for colours,
a dash for each line besides its colour, and as many points as can be told apart.
"""

from __future__ import annotations

__all__ = ["draw_errors", "draw_memory", "thinned"]

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 260, 64, 8, 10, 34
# Errors below the greatest by more than this are all the same to a reader.
_DECADES = 6
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


_Number = TypeVar("_Number", int, float)


def thinned(live: Sequence[_Number], points: int = _POINTS) -> list[_Number]:
    """Return the greatest value of each of at most ``points`` stretches: peaks stay."""
    count = min(points, len(live))
    edges = [len(live) * i // count for i in range(count + 1)] if count else []
    return [max(live[a:b]) for a, b in pairwise(edges)]


def draw_memory(curves: Sequence[Mapping[str, Any]]) -> str:
    """Return an <svg> of live memory; it holds numbers and nothing of a model's text.

    Args:
        curves: Each with ``peak`` and ``live`` (bytes) and ``steps``, that live stands for.
    """
    top = _round_up(max((curve["peak"] for curve in curves), default=0))
    steps = max((curve["steps"] for curve in curves), default=0) or 1
    scale, unit = next((item for item in _UNITS if top >= item[0]), _UNITS[-1])
    ticks = [(quarter / 4, f"{top * quarter / 4 / scale:.4g} {unit}") for quarter in range(5)]
    parts = _frame("Live memory over the steps of a run; a table below has the peaks", ticks)
    parts += _step_axis(steps)
    for number, curve in enumerate(curves):
        live = curve["live"]
        each = curve["steps"] / len(live) if live else 0
        points = "".join(
            f"V{_y(value / top)}H{_x((i + 1) * each / steps)}" for i, value in enumerate(live)
        )
        line = f"M{_LEFT} {_y(0)}{points}V{_y(0)}"
        parts.append(f'<path class="curve s{number % 4}" d="{line}"/>')
    return "\n".join([*parts, "</svg>"])


def draw_errors(errors: Sequence[Any]) -> str:
    """Return an <svg> of errors over the steps of a run, on a logarithmic scale.

    Args:
        errors: In the order of the steps; what is no finite number is left out.

    Returns:
        The picture; empty where no error is above 0.
    """
    finite = [item if isinstance(item, (int, float)) else 0 for item in errors]
    found = [item for item in finite if item > 0]
    if not found:
        return ""
    low, high = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
    low = max(low, high - _DECADES)
    high = max(high, low + 1)
    every = -(-(high - low) // 5)
    ticks = [((p - low) / (high - low), f"1e{p}") for p in range(high, low - 1, -every)]
    parts = _frame("Error over the steps of a run; a table below has the values", ticks)
    parts += _step_axis(len(errors))
    shown = thinned(finite)
    line, draws = "", False
    for number, error in enumerate(shown):
        # An error of 0 has no place on the scale: the line has a gap.
        if error > 0:
            height = _y(max(0.0, (math.log10(error) - low) / (high - low)))
            start = f"V{height}" if draws else f"M{_x(number / len(shown))} {height}"
            line += f"{start}H{_x((number + 1) / len(shown))}"
        draws = error > 0
    parts.append(f'<path class="curve s0" d="{line}"/>')
    return "\n".join([*parts, "</svg>"])


def _x(share: float) -> str:
    return f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) * share:.1f}"


def _y(share: float) -> str:
    return f"{_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share):.1f}"


def _frame(label: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
    size = f"0 0 {_WIDTH} {_HEIGHT}"
    parts = [f'<svg class="chart" viewBox="{size}" role="img" aria-label="{label}">']
    for share, text in ticks:
        place = f'x="{_LEFT - 8}" y="{_y(share)}" dy="4"'
        parts += [
            f'<path class="grid" d="M{_LEFT} {_y(share)}H{_WIDTH - _RIGHT}"/>',
            f'<text {place} text-anchor="end">{text}</text>',
        ]
    return parts


def _step_axis(steps: int) -> list[str]:
    parts = []
    for quarter in range(5) if steps >= 4 else (0, 4):
        anchor = {0: "start", 4: "end"}.get(quarter, "middle")
        text = "step 0" if quarter == 0 else f"{round(steps * quarter / 4):,}"
        place = f'x="{_x(quarter / 4)}" y="{_HEIGHT - 12}"'
        parts.append(f'<text {place} text-anchor="{anchor}">{text}</text>')
    return parts


def _round_up(value: int) -> float:
    """The next number that quarters well."""
    if value <= 0:
        return 4.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power
        for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
        if value <= step * power
    )
