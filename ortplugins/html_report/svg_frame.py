# SPDX-License-Identifier: MIT
"""What the pictures of curves share: their size, their beginning, a scale on the left."""

from __future__ import annotations

__all__ = ["BOTTOM", "HEIGHT", "LEFT", "LEVELS", "TOP", "WIDTH", "framed", "height_of"]

from collections.abc import Callable
from xml.sax.saxutils import escape

# Bars of text, from nothing to full.
LEVELS = " ▁▂▃▄▅▆▇█"
# Of the picture, and the space around the curves.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 320, 70, 40, 30


def height_of(value: float, top: float) -> str:
    """Where a value is drawn; ``top`` is the greatest one."""
    return f"{TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top):.1f}"


def framed(title: str, top: float, right: int, told: Callable[[float], str]) -> list[str]:
    """Return the beginning of a picture that is readable on light and dark grounds.

    Args:
        title: For readers that see no pictures.
        top: The greatest value.
        right: Space on the right.
        told: What the scale says of a value.
    """
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = 'font-family="sans-serif" font-size="13" fill="#888"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f"<title>{escape(title)}</title>",
    ]
    for part in range(5):
        value = top * part / 4
        y = height_of(value, top)
        parts.append(
            f'<path d="M{LEFT} {y}H{WIDTH - right}" stroke="#888" stroke-opacity=".3"/>'
            f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{told(value)}</text>'
        )
    return parts
