# SPDX-License-Identifier: MIT
"""Draws the facts of a model as one HTML file that needs nothing else.

Names and reasons come from models that may be malicious: Jinja2 escapes everything, and a
Content-Security-Policy runs no script but ours (by its digest).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortplugins.errors import UsageError
from ortplugins.html_report.live_memory import memory_bars
from ortplugins.reasons import reasons

try:
    import jinja2
    from markupsafe import Markup
except ModuleNotFoundError:
    raise UsageError("the page needs: pip install 'ortplugins[report]'") from None

# Rows of a table that a page shows; the JSON has all.
_ROWS = 1000
_FORMATS = {"count": "{:,}", "ratio": "{:.3g} \N{MULTIPLICATION SIGN}"}


def write_page(
    facts: Mapping[str, Any], path: str | os.PathLike[str], json_name: str = ""
) -> None:
    """Write the page of what :func:`.gather_facts` returned.

    ``json_name`` is how the page calls the file that has all facts, where there is one.
    """
    Path(path).write_text(render_page(facts, json_name), encoding="utf-8")


def render_page(facts: Mapping[str, Any], json_name: str = "") -> str:
    """Return the page of facts as text; see :func:`write_page`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ortplugins.html_report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(shown=_shown, tojson=json.dumps)
    environment.globals["fact"] = lambda path: _fact(facts, path)
    assert environment.loader is not None
    script, style = (
        environment.loader.get_source(environment, name)[0]
        for name in ("report.js", "report.css")
    )
    return environment.get_template("report.html").render(
        facts=facts,
        rows=_ROWS,
        json_name=json_name or "the JSON that --json FILE writes",
        advice={reason.code: reason.advice for reason in reasons()},
        bars=memory_bars(facts["memory"].get("curves", ())),
        script=Markup(script),
        style=Markup(style),
        script_hash=_digest(script),
        style_hash=_digest(style),
    )


def _digest(text: str) -> str:
    """As a Content-Security-Policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _fact(facts: Any, path: str) -> Any:
    for part in path.split("."):
        facts = facts[int(part)] if isinstance(facts, list) else facts[part]
    return facts


def _shown(value: Any, unit: str) -> str:
    """Write a number for readers: three digits and a unit; counts in full."""
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    if unit == "B":
        return jinja2.filters.do_filesizeformat(value)
    return _FORMATS[unit].format(value)
