# SPDX-License-Identifier: MIT
"""Charts as SVG: live memory, also as bars of text, and errors against promotions.

Inside a page an SVG has the page's colours, by its classes. With a title it is a file of its
own, with a style that can be read on light and dark backgrounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from ortplugins.static_qdq.search import CurvePoint

_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 260, 64, 8, 28, 34
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
# From nothing to full.
_BARS = " ▁▂▃▄▅▆▇█"
_COLORS = ("#0b7a75", "#d1495b", "#7d6b91", "#b8860b")
_FILE_STYLE = (
    "text{font:12px sans-serif;fill:#888}.grid{stroke:#888;stroke-opacity:.3}"
    ".curve{fill:none;stroke-width:1.5}"
    + "".join(
        f".s{i}{{stroke:{c}}}text.s{i},.p{i}{{fill:{c};stroke:none}}"
        for i, c in enumerate(_COLORS)
    )
)


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one order of the nodes holds in memory: live bytes in each step."""

    name: str
    live: Sequence[int]

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(self.live, default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as JSON."""
        return {"name": self.name, "peak": self.peak, "live": list(self.live)}


def thinned(live: Sequence[int], points: int = _POINTS) -> list[int]:
    """Return the greatest value of each of at most ``points`` stretches: peaks stay."""
    count = min(points, len(live))
    edges = [len(live) * i // count for i in range(count + 1)] if count else []
    return [max(live[a:b]) for a, b in pairwise(edges)]


def memory_bars(curves: Sequence[Curve], width: int = 72) -> list[str]:
    """Return a line for each curve: its name, its peak, and bars up to the greatest peak."""
    top = max((curve.peak for curve in curves), default=0)
    longest = max((len(curve.name) for curve in curves), default=0)
    lines, step = [], (top or 1) / (len(_BARS) - 1)
    for curve in curves:
        levels = (value / step for value in thinned(curve.live, width))
        bars = "".join(_BARS[math.ceil(level)] for level in levels)
        lines.append(f"{curve.name:{longest}}  {curve.peak / 1e6:9.1f} MB  {bars}")
    return lines


def memory_chart(curves: Sequence[Curve], title: str = "") -> str:
    """Return an <svg> of live memory over the steps of a run; with a title it names curves."""
    top = max((curve.peak for curve in curves), default=0) or 4
    steps = max((len(curve.live) for curve in curves), default=0) or 1
    scale, unit = next((item for item in _UNITS if top >= item[0]), _UNITS[-1])
    ticks = [(quarter / 4, f"{top * quarter / 4 / scale:.3g} {unit}") for quarter in range(5)]
    parts = _frame("Live memory over the steps of a run", ticks, steps, "step ", title)
    for number, curve in enumerate(curves):
        live = thinned(curve.live)
        each = len(curve.live) / len(live) / steps if live else 0
        points = "".join(f"V{_y(v / top)}H{_x((i + 1) * each)}" for i, v in enumerate(live))
        line = f"M{_LEFT} {_y(0)}{points}V{_y(0)}"
        parts.append(f'<path class="curve s{number % 4}" d="{line}"/>')
        if title:
            name = f"{escape(curve.name)}: {curve.peak / 1e6:.1f} MB"
            place = f'x="{_LEFT + 230 * number}" y="16"'
            parts.append(f'<text class="s{number % 4}" {place}>{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def promotion_chart(curve: Sequence[CurvePoint], what: str, title: str) -> str:
    """Return an <svg> of the error against the number of promoted tensors."""
    # Outputs that are not finite have no error that is a number.
    errors = [point.deviation.error for point in curve]
    top = max(filter(math.isfinite, errors), default=0.0) or 1.0
    most = max(1, curve[-1].promoted)
    ticks = [(quarter / 4, f"{top * quarter / 4:.3g}") for quarter in range(5)]
    parts = _frame("Error against promotions", ticks, most, "", title)
    parts.append(f'<text x="{_LEFT}" y="16">relative squared error of the outputs</text>')
    parts.append(_text(_x(1), str(_HEIGHT - 1), "end", what))
    places = [
        (_x(point.promoted / most), _y(min(error, top) / top))
        for point, error in zip(curve, errors, strict=True)
    ]
    line = "L".join(f"{x} {y}" for x, y in places)
    parts.append(f'<path class="curve s0" d="M{line}"/>')
    parts += [f'<circle class="p0" cx="{x}" cy="{y}" r="3"/>' for x, y in places]
    return "\n".join([*parts, "</svg>", ""])


def _x(share: float) -> str:
    return f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) * share:.1f}"


def _y(share: float) -> str:
    return f"{_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share):.1f}"


def _frame(
    label: str, ticks: Sequence[tuple[float, str]], steps: int, name: str, title: str = ""
) -> list[str]:
    """Return the beginning of a picture: its description, and both scales.

    ``ticks`` are places on the left, from 0 to 1, and their texts; the scale below goes from
    0, with ``name`` before it, to ``steps``.
    """
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    if title:
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
        parts += [f"<title>{escape(title)}</title>", f"<style>{_FILE_STYLE}</style>"]
    else:
        text = f"{label}; a table below has the values"
        parts = [f'<svg class="chart" {size} role="img" aria-label="{text}">']
    for share, text in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {_y(share)}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(str(_LEFT - 8), _y(share), "end", text, 'dy="4" '))
    for quarter in range(5) if steps >= 4 else (0, 4):
        anchor = {0: "start", 4: "end"}.get(quarter, "middle")
        text = f"{name}0" if quarter == 0 else f"{round(steps * quarter / 4):,}"
        parts.append(_text(_x(quarter / 4), str(_HEIGHT - 16), anchor, text))
    return parts


def _text(x: str, y: str, anchor: str, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}text-anchor="{anchor}">{escape(text)}</text>'
