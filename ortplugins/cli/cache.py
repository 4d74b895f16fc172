# SPDX-License-Identifier: MIT
"""``ortplugins cache``: fill, list and empty the cache of sessions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.filesize import decimal

from ortplugins.cache.artifact import REPORT
from ortplugins.cache.folder import cache_folder
from ortplugins.cache.store import KEY_CHARACTERS, ArtifactCache
from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_table, progress_bar
from ortplugins.errors import UsageError
from session_options import PrepackedWeights
from session_options.entries import HINT_KEY
from session_options.keys import parse_amount

if TYPE_CHECKING:
    from ortplugins.cache.store import Entry

cache = App(name="cache", help="Fill, list or empty the cache of sessions.")

_WARM_PASSES = (*opt.DEFAULT_PASSES, PrepackedWeights.name)
_AGES = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def age(_: type, tokens: Sequence[Any]) -> float:
    """Convert an age to seconds: 45min, 12h, 30d, 2w."""
    text = tokens[0].value
    if (seconds := parse_amount(text, _AGES)) is None:
        raise ValueError(f"{text!r}; expected an age such as 45min, 12h, 30d or 2w")
    return seconds


def _store(cache_dir: str) -> ArtifactCache:
    return ArtifactCache(Path(cache_folder(cache_dir)))


@cache.command(name="list")
def list_entries(*, cache_dir: opt.CacheDir = "", format: opt.Format = "text") -> None:
    """List the optimised models, the newest first."""
    store = _store(cache_dir)
    entries = store.entries()
    if format == "json":
        print(json.dumps([_as_json(entry) for entry in entries], indent=2))
        return
    rows = []
    for entry in entries:
        report = _report_of(entry)
        fired = f"{report.get('fired', '?')}/{report.get('refused', '?')}"
        age, used = _since(entry.created), f"{_since(entry.last_used)} ago"
        size = decimal(entry.size)
        key = entry.key[:KEY_CHARACTERS]
        rows.append((key, entry.model, size, age, used, fired))
    headings = ("Key", "Model", "Size", "Age", "Last use", "Fired/refused")
    print_table(headings, rows)
    size = decimal(sum(entry.size for entry in entries))
    print(f"{len(entries)} in all, {size}, in {store.root}")


@cache.command(name="prune")
def prune_entries(
    *,
    max_size: Annotated[int | None, Parameter(converter=opt.size)] = None,
    older_than: Annotated[float | None, Parameter(converter=age)] = None,
    cache_dir: opt.CacheDir = "",
) -> None:
    """Remove entries not used for a while, and the least recently used above a size.

    Args:
        max_size: Remove the least recently used until the rest fits: 500MB, 10GB, 1GiB.
        older_than: Remove what was not used for this long: 12h, 30d, 2w.
    """
    if max_size is None and older_than is None:
        raise UsageError("give --max-size, --older-than or both")
    _prune(_store(cache_dir), max_size=max_size, older_than=older_than)


@cache.command(name="clean")
def clean_cache(*, cache_dir: opt.CacheDir = "") -> None:
    """Remove everything from the cache."""
    _prune(_store(cache_dir), everything=True)


def _prune(store: ArtifactCache, **what: Any) -> None:
    from ortplugins.cache.store import prune

    result = prune(store, **what)
    for item in result.removed:
        used = _since(item.last_used)
        print(f"removed: {item}, {decimal(item.size)}, last used {used} ago")
    for item, reason in result.left:
        print(f"left: {item}, {decimal(item.size)}: {reason}")
    if result.abandoned:
        size = decimal(result.abandoned)
        print(f"removed: leftovers of builds that were killed, {size}")
    size = decimal(sum(item.size for item in result.removed))
    kept = f"{result.kept} remain, {decimal(result.size)}"
    print(f"removed {len(result.removed)}, {size}; {kept}, in {store.root}")


@cache.command(name="warm")
def warm(
    *models: opt.Model,
    passes: opt.Passes | None = None,
    settings: opt.Settings = (),
    session_entries: Annotated[tuple[str, ...], Parameter("--session-entry")] = (),
    optimization_level: str = "all",
    arena: Annotated[bool, Parameter(negative="--no-arena")] = True,
    cache_dir: opt.CacheDir = "",
) -> None:
    """Build the entries of CPU sessions ahead of time; exit with 1 if a model fails.

    For an image, --cache-dir is a directory that every user may read; sessions find it through
    ORTPLUGINS_CACHE_DIR.

    Args:
        session_entries: Entry of the sessions' SessionOptions, KEY=VALUE; repeatable.
        optimization_level: The sessions' level: disable, basic, extended, layout or all.
        arena: Whether the sessions have an arena for memory on the CPU.
    """
    from ortplugins.session.warming import warm as build

    if not models:
        raise UsageError("give one or more models")
    entries = opt.parse_settings(session_entries, "--session-entry")
    if passes is None:
        passes = () if entries.get(HINT_KEY) else _WARM_PASSES
    options = opt.parse_settings(settings)
    failed = False
    for model in models:
        with progress_bar():
            (item,) = build(
                [model],
                passes,
                options=options,
                cache_dir=cache_dir or None,
                session_entries=entries,
                optimization_level=optimization_level,
                arena=arena,
            )
        if item.error:
            failed = True
            where = "" if item.error.startswith(item.model) else f"{item.model}: "
            print(f"error: {where}{item.error}", file=sys.stderr)
        else:
            print(f"{item.model}: {item.report}; {decimal(item.size)} on disk")
    if failed:
        sys.exit(1)


def _report_of(entry: Entry) -> dict[str, Any]:
    """Return an entry's report; nothing where it cannot be read."""
    try:
        content: dict[str, Any] = json.loads((entry.folder / REPORT).read_bytes())
    except (OSError, ValueError):
        return {}
    return content


def _as_json(entry: Entry) -> dict[str, Any]:
    report = _report_of(entry)
    return {
        "key": entry.key,
        "folder": str(entry.folder),
        "model": entry.model,
        "size": entry.size,
        "created": entry.created,
        "last_used": min(entry.last_used, time.time()),
        "fired": report.get("fired"),
        "refused": report.get("refused"),
    }


def _since(moment: float) -> str:
    seconds = time.time() - moment
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
