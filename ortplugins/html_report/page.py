# SPDX-License-Identifier: MIT
"""Draws the facts of a model as one HTML file that needs nothing else.

Names and reasons come from models that nobody vouches for. Three walls stand before them:
Jinja2 escapes everything, a Content-Security-Policy runs no script but ours (by its digest),
and characters that a reader cannot see are written as their code points.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortplugins.html_report.charts import Curve, error_chart, memory_chart, thinned
from ortplugins.reasons import reasons

# What a page shows; the JSON has everything. With names as exporters make them, 700 KB.
_GROUPS, _NODES_PER_GROUP, _NODES, _ROWS, _NOTES, _INPUTS = 250, 100, 1500, 300, 50, 12
_NAMES = 5
_CHARACTERS = 400
_BYTES = ("B", "kB", "MB", "GB", "TB")
# Categories of characters that do not show, or move others: controls, format (bidi overrides
# among them), surrogates, private use, line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def write_page(
    facts: Mapping[str, Any], path: str | os.PathLike[str], json_name: str = ""
) -> None:
    """Write the page of facts.

    Args:
        facts: As :func:`.gather_facts` returns them.
        path: File to write.
        json_name: How the page calls the file that has all facts, where there is one.

    Raises:
        ModuleNotFoundError: If Jinja2 is not installed; says how to get it.
        OSError: If the file can't be written.
    """
    Path(path).write_text(render_page(facts, json_name), encoding="utf-8")


def render_page(facts: Mapping[str, Any], json_name: str = "") -> str:
    """Return the page of facts as text; see :func:`write_page`."""
    try:
        import jinja2
        from markupsafe import Markup
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "the page needs Jinja2: pip install 'ortplugins[report]'", name=missing.name
        ) from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ortplugins.html_report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page, cut = _page_facts(facts)
    environment.filters.update(
        shown=_shown, share=_share, change=_change, range=_range, tojson=json.dumps
    )
    environment.globals["fact"] = lambda path: _fact(page, path)
    script, style = (_source(environment, name) for name in ("report.js", "report.css"))
    layers = (facts["layers"] or {}).get("values", ())
    errors = [row["error"] for row in sorted(layers, key=lambda row: row["step"])]
    curves = [
        Curve("", curve["live"], curve["steps"]) for curve in page["memory"].get("curves", ())
    ]
    operators, weights = page["operators"], page["weights"]
    # A browser reads no end tag in it, and no comment's begin.
    embedded = json.dumps(page)
    for character in "<>&":
        embedded = embedded.replace(character, f"\\u{ord(character):04x}")
    return environment.get_template("report.html").render(
        facts=page,
        cut=cut,
        json_name=json_name,
        advice={reason.code: reason.advice for reason in reasons()},
        figures=(page["sessions"] or {}).get("figures", []),
        outcomes=list(dict.fromkeys(group["outcome"] for group in page["remarks"])),
        pass_names=list(dict.fromkeys(group["pass"] for group in page["remarks"])),
        most_nodes=_greatest(operators),
        most_bytes=_greatest(weights),
        chart=Markup(memory_chart(curves)),
        error_chart=Markup(error_chart(errors)),
        embedded=Markup(embedded),
        script=Markup(script),
        style=Markup(style),
        script_hash=_digest(script),
        style_hash=_digest(style),
    )


def _source(environment: Any, name: str) -> str:
    text: str = environment.loader.get_source(environment, name)[0]
    return text


def _digest(text: str) -> str:
    """As a Content-Security-Policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _page_facts(facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """What of the facts the page shows, and how many it leaves to the JSON.

    Lists are cut behind, so that a place in the page's is the place in the JSON's.
    """
    report, memory, nodes = facts["report"], dict(facts["memory"]), _NODES
    groups = []
    for group in facts["remarks"][:_GROUPS]:
        # Of each group some, whatever the others took.
        kept = group["remarks"][: max(1, min(_NODES_PER_GROUP, nodes))]
        nodes -= len(kept)
        kept = [{**remark, "names": _first_names(remark["names"])} for remark in kept]
        groups.append({**group, "remarks": kept})
    if "curves" in memory:
        curves = memory["curves"]
        memory["curves"] = [{**curve, "live": thinned(curve["live"])} for curve in curves]
    passes = [{"name": item["name"], "seconds": item["seconds"]} for item in report["passes"]]
    shown = {**report, "notes": report["notes"][:_NOTES], "passes": passes}
    page: Any = _readable({**facts, "report": shown, "remarks": groups, "memory": memory})
    cut = {
        "remarks": max(0, len(facts["remarks"]) - _GROUPS),
        "operators": _cut(page, "operators", _ROWS),
        "layers": _cut(page["layers"] or {}, "values", _ROWS),
        "inputs": _cut(page["sessions"] or {}, "inputs", _INPUTS),
        "notes": max(0, len(report["notes"]) - _NOTES),
    }
    return page, cut


def _first_names(names: list[str]) -> list[str]:
    more = len(names) - _NAMES
    return [*names[:_NAMES], f"and {more:,} more"] if more > 0 else names


def _cut(holder: dict[str, Any], key: str, most: int) -> int:
    rows = holder.get(key, [])
    holder[key] = rows[:most]
    return max(0, len(rows) - most)


def _readable(value: Any) -> Any:
    """Copy facts with text that shows what it is, and is not endless."""
    if isinstance(value, str):
        return _visible(value)
    if isinstance(value, Mapping):
        return {_visible(str(key)): _readable(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_readable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # no number in JSON
    return value


def _visible(text: str) -> str:
    if len(text) > _CHARACTERS:
        text = f"{text[:_CHARACTERS]}… ({len(text):,} characters)"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        f"⟨U+{ord(character):04X}⟩"
        if unicodedata.category(character) in _UNSEEN
        else character
        for character in text
    )


def _fact(page: Any, path: str) -> Any:
    for part in path.split("."):
        page = page[int(part)] if isinstance(page, list) else page[part]
    return page


def _greatest(rows: Sequence[Mapping[str, Any]]) -> int:
    return max((row[side] for row in rows for side in ("before", "after")), default=0)


def _share(value: int, top: int) -> str:
    """Length of a bar, of 100; what is there is seen."""
    return f"{max(100 * value / top, 0.7):.1f}" if value else "0"


def _change(value: int) -> str:
    return f"{value:+,}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _range(values: Sequence[float], unit: str) -> str:
    """Least to greatest; the unit once where both have it."""
    least, greatest = (_shown(value, unit) for value in (min(values), max(values)))
    if least == greatest:
        return least
    number, _, of = least.rpartition(" ")
    return f"{number if greatest.endswith(f' {of}') else least} to {greatest}"


def _shown(value: Any, unit: str) -> str:
    """Write a number for readers: three digits and a unit; counts in full."""
    if isinstance(value, str):  # what is not a number in JSON
        return value
    if unit == "count":
        return f"{value:,}"
    if unit == "ratio":
        return f"{_digits(value)} \N{MULTIPLICATION SIGN}"
    if unit == "error":
        return f"{value:.2e}" if value else "0"
    if unit == "cosine":
        return f"{value:.6f}"
    # Rounded before a unit is chosen: 999,999 B is not "1,000 kB".
    value = value if unit == "B" and value < 1000 else float(f"{value:.3g}")
    if unit == "s":
        scale, name = next(
            (item for item in ((1, "s"), (1e-3, "ms")) if value >= item[0]), (1e-6, "µs")
        )
        return f"{_digits(value / scale)} {name}"
    if value < 1000:
        return f"{value} B"
    power = min(int(math.log10(value)) // 3, len(_BYTES) - 1)
    return f"{_digits(value / 1000**power)} {_BYTES[power]}"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent where that is readable."""
    value = float(f"{value:.3g}")
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"
