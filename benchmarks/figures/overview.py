# SPDX-License-Identifier: MIT
"""Draws the README's picture: what plain onnxruntime takes, and below it what ours does."""

from __future__ import annotations

import html
import re

# Section of the page of figures, figure in it, what the picture calls it.
ROWS = (
    ("prepacked", "SmolLM2: start from the cache", "start of a session, SmolLM2 int4"),
    ("smollm2", "[N,K] + Transpose: ms per token", "time of a token, SmolLM2 int4"),
    (
        "prepacked",
        "SmolLM2: PSS of 4 workers after 20 tokens",
        "memory of 4 workers, SmolLM2 int4",
    ),
    (
        "trim_padding",
        "MiniLM-L6, 32 texts of 12 to 24 tokens, padded to 256",
        "32 short texts padded to 256, MiniLM",
    ),
)
# As wide as a phone, where it is shown at its own size.
_WIDTH, _BAR, _ROW = 380, 300, 62
_STYLE = """text{font:13px system-ui,sans-serif;fill:#333}.v{font-size:12px;fill:#555}
.theirs{fill:#9aa0a6}.ours{fill:#1f77b4}
@media(prefers-color-scheme:dark){text{fill:#ddd}.v{fill:#bbb}.ours{fill:#6db3ec}}"""


def overview(page: str) -> str:
    """Return an SVG picture of figures.

    Args:
        page: The page that has them in its tables, docs/benchmarks.md.

    Raises:
        ValueError: If one is missing.
    """
    found = [(label, *_read(page, section, what)) for section, what, label in ROWS]
    height = _ROW * len(found) + 26
    title = "Plain onnxruntime vs. ortplugins: start, time and memory"
    size = f'width="{_WIDTH}" viewBox="0 0 {_WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        '<rect class="theirs" x="0" y="4" width="12" height="12"/>',
        '<text x="18" y="15">onnxruntime</text>',
        '<rect class="ours" x="116" y="4" width="12" height="12"/>',
        '<text x="134" y="15">ortplugins</text>',
    ]
    for index, (label, ours, theirs, unit) in enumerate(found):
        y = 26 + _ROW * index
        parts.append(f'<text x="0" y="{y + 14}">{html.escape(label)}</text>')
        longest = max(ours, theirs)
        for offset, kind, value in ((20, "theirs", theirs), (36, "ours", ours)):
            width, text = max(1.0, round(_BAR * value / longest, 1)), f"{value:g} {unit}"
            parts += [
                f'<rect class="{kind}" x="0" y="{y + offset}" width="{width}" height="13"/>',
                f'<text class="v" x="{width + 6}" y="{y + offset + 11}">{text}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _read(page: str, section: str, what: str) -> tuple[float, float, str]:
    """Return a figure, what it is compared with, and their unit."""
    _, _, rest = page.partition(f"<!-- {section} -->")
    body, _, _ = rest.partition(f"<!-- end of {section} -->")
    number = r"([0-9.e+]+) (\w+)"
    row = re.search(rf"\| {re.escape(what)} \|[^|]*\| {number} \| {number} \|", body)
    if row is None:
        raise ValueError(f"section {section!r} has no figure {what!r}")
    (ours, unit), (theirs, _) = (
        _in_small_units(row[1], row[2]),
        _in_small_units(row[3], row[4]),
    )
    return ours, theirs, unit


def _in_small_units(number: str, unit: str) -> tuple[float, str]:
    """Return milliseconds and megabytes, whichever unit the page has."""
    smaller = {"s": "ms", "GB": "MB"}
    return float(number) * (1000 if unit in smaller else 1), smaller.get(unit, unit)
