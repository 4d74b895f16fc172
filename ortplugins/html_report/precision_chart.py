# SPDX-License-Identifier: MIT
"""Error against the number of promoted tensors, as lines of text and as an SVG picture."""

from __future__ import annotations

__all__ = ["as_svg", "as_text"]

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ortplugins.html_report.svg_frame import HEIGHT, LEFT, LEVELS, WIDTH, framed, height_of
from ortplugins.quantization.planner.search import CurvePoint

_COLOR = "#0b7a75"


def _top(curve: Sequence[CurvePoint]) -> float:
    """The greatest error that is a number; outputs that are not finite have none."""
    errors = [point.deviation.error for point in curve]
    return max((error for error in errors if math.isfinite(error)), default=0.0) or 1.0


def as_text(curve: Sequence[CurvePoint]) -> list[str]:
    """Return bars of the error, one for each step, and what the first and last one are."""
    errors = [point.deviation.error for point in curve]
    top = _top(curve)
    most = len(LEVELS) - 1
    bars = "".join(LEVELS[math.ceil(min(error, top) / top * most)] for error in errors)
    last = curve[-1].promoted
    return [f"error  {errors[0]:.4g}  {bars}  {errors[-1]:.4g}  with 0 to {last} promoted"]


def as_svg(curve: Sequence[CurvePoint], what: str, title: str) -> str:
    """Return a picture of the curve; readable on light and dark grounds.

    Args:
        curve: The points; each has a tooltip that says what was added.
        what: Is promoted: "tensors with 16 bits".
        title: Of the picture.
    """
    top = _top(curve)
    most = max(1, curve[-1].promoted)

    def x(promoted: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 20) * promoted / most:.1f}"

    def y(error: float) -> str:
        return height_of(min(error, top), top)

    parts = framed(title, top, 20, lambda error: f"{error:.3g}")
    parts.append(f'<text x="{LEFT}" y="18">relative squared error of the outputs</text>')
    parts.extend(
        f'<text x="{x(mark)}" y="{HEIGHT - 22}" text-anchor="middle">{mark}</text>'
        for mark in sorted({round(most * part / 4) for part in range(5)})
    )
    parts.append(
        f'<text x="{WIDTH - 20}" y="{HEIGHT - 5}" text-anchor="end">{escape(what)}</text>'
    )
    line = "L".join(f"{x(point.promoted)} {y(point.deviation.error)}" for point in curve)
    parts.append(f'<path d="M{line}" fill="none" stroke="{_COLOR}" stroke-width="1.5"/>')
    for point in curve:
        told = (
            f"{point.promoted}: error {point.deviation.error:.4g}, "
            f"cosine {point.deviation.cosine:.6g} {', '.join(point.added)}"
        )
        parts.append(
            f'<circle cx="{x(point.promoted)}" cy="{y(point.deviation.error)}" r="3" '
            f'fill="{_COLOR}"><title>{escape(told)}</title></circle>'
        )
    return "\n".join([*parts, "</svg>", ""])
