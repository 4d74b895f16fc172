# SPDX-License-Identifier: MIT
"""Live memory of a run, step by step, as a line of text and as an SVG picture."""

from __future__ import annotations

__all__ = ["Curve", "as_svg", "as_text"]

import dataclasses
import itertools
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ortplugins.html_report.svg_frame import HEIGHT, LEFT, LEVELS, WIDTH, framed, height_of

_COLORS = ("#0b7a75", "#d1495b", "#7d6b91")


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one order holds.

    Attributes:
        name: Of the order.
        live: Bytes that are live in each step.
    """

    name: str
    live: Sequence[int]

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(self.live, default=0)


def as_text(curves: Sequence[Curve], width: int = 72) -> list[str]:
    """Return a line for each curve: its name, its peak, and bars up to the greatest peak."""
    top = max((curve.peak for curve in curves), default=0) or 1
    longest = max((len(curve.name) for curve in curves), default=0)
    lines = []
    for curve in curves:
        bars = "".join(
            LEVELS[-(-value * (len(LEVELS) - 1) // top)]
            for value in _buckets(curve.live, width)
        )
        lines.append(f"{curve.name:{longest}}  {curve.peak / 1e6:9.1f} MB  {bars}")
    return lines


def _buckets(live: Sequence[int], width: int) -> list[int]:
    """The greatest of each of at most ``width`` stretches."""
    count = min(width, len(live))
    edges = [len(live) * i // count for i in range(count + 1)] if count else [0]
    return [max(live[a:b]) for a, b in itertools.pairwise(edges)]


def as_svg(curves: Sequence[Curve], title: str) -> str:
    """Return a picture of all curves over their steps; readable on light and dark grounds."""
    top = max((curve.peak for curve in curves), default=0) or 1
    steps = max((len(curve.live) for curve in curves), default=1) or 1

    def x(step: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 10) * step / steps:.1f}"

    def y(value: float) -> str:
        return height_of(value, top)

    parts = framed(title, top, 10, lambda value: f"{value / 1e6:.4g} MB")
    parts.append(
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 12}" text-anchor="end">{steps} steps</text>'
    )
    for number, curve in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        points = f"M{x(0)} {y(0)}" + "".join(
            f"V{y(value)}H{x(step + 1)}" for step, value in enumerate(curve.live)
        )
        parts.append(f'<path d="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{LEFT + 300 * number}" y="18" fill="{color}">'
            f"{escape(curve.name)}: {curve.peak / 1e6:.1f} MB</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
