# SPDX-License-Identifier: MIT
"""Draws a table of ratios: a dot for each, on a logarithmic axis, and its bound as a tick."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from benchmarks.figures.bounds import Figure

_WIDTH, _LABEL, _ROW, _TOP = 760, 430, 18, 30
# Ratios beyond are drawn at the edge, with their number as all others.
_LEAST, _MOST = 1 / 64, 8.0
# Seen on light and dark grounds; blue and orange differ for every kind of eyesight.
_STYLE = """text{font:11px system-ui,sans-serif;fill:#444}.r{text-anchor:end}
.kept{fill:#1f77b4}.missed{fill:#d95f02}.axis{stroke:#888;stroke-width:.5}
.one{stroke:#888}.bound{stroke:#d95f02;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#ccc}.kept{fill:#6db3ec}}"""


def ratio_plot(figures: Sequence[Figure], title: str) -> str | None:
    """Return an SVG picture of the figures that are ratios; None if none is.

    Args:
        figures: A table's.
        title: Text for readers who see no pictures.
    """
    rows = [f for f in figures if _is_ratio(f) and 0 < f.compared < math.inf]
    if not rows:
        return None
    height = _TOP + _ROW * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
    ]
    for ratio in (1 / 64, 1 / 16, 1 / 4, 1, 4):
        x = _place(ratio)
        name = f"1/{round(1 / ratio)}" if ratio < 1 else f"{ratio:g}"
        kind = "axis one" if ratio == 1 else "axis"
        parts.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{height}"/>')
        parts.append(f'<text x="{x}" y="14" text-anchor="middle">{name} x</text>')
    for index, figure in enumerate(rows):
        y = _TOP + _ROW * index + _ROW / 2
        label = html.escape(_shortened(figure.what))
        parts.append(f'<text class="r" x="{_LABEL}" y="{y + 4}">{label}</text>')
        if not math.isnan(figure.bound):
            x = _place(figure.bound)
            parts.append(f'<line class="bound" x1="{x}" x2="{x}" y1="{y - 6}" y2="{y + 6}"/>')
        kind = "kept" if figure.holds else "missed"
        x = _place(figure.compared)
        parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/>')
        number = f"{figure.compared:.3g}"
        parts.append(f'<text class="r" x="{_WIDTH - 6}" y="{y + 4}">{number}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _is_ratio(figure: Figure) -> bool:
    return not figure.difference and not math.isnan(figure.theirs)


def _place(ratio: float) -> float:
    share = math.log(min(max(ratio, _LEAST), _MOST) / _LEAST) / math.log(_MOST / _LEAST)
    return round(_LABEL + 14 + share * (_WIDTH - _LABEL - 60), 1)


def _shortened(text: str, most: int = 72) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
