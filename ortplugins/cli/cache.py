# SPDX-License-Identifier: MIT
"""``ortplugins cache``: fill, show, check and empty the cache of sessions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.filesize import decimal

from ortplugins.cache.artifact import REPORT
from ortplugins.cache.folder import cache_folder
from ortplugins.cache.store import KEY_CHARACTERS, ArtifactCache
from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_table
from session_options import PrepackedWeights
from session_options.keys import parse_amount
from session_options.plan import HINT_KEY

if TYPE_CHECKING:
    from ortplugins.cache.store import Entry

cache = typer.Typer(
    help="Fill, show, check or empty the cache of sessions.",
    no_args_is_help=True,
    add_completion=False,
)

_WARM_PASSES = [*opt.DEFAULT_PASSES, PrepackedWeights.name]
_AGES = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_age(text: str) -> float:
    """Read an age as seconds: 45min, 12h, 30d, 2w."""
    if (age := parse_amount(text, _AGES)) is None:
        expected = "an age such as 45min, 12h, 30d or 2w is expected"
        raise typer.BadParameter(f"{text!r}: {expected}")
    return age


def _store(cache_dir: str = "") -> Any:
    return ArtifactCache(Path(cache_folder(cache_dir)))


def _session_start(
    context: typer.Context,
    passes: opt.Passes = _WARM_PASSES,
    settings: opt.Settings = None,
    session_entries: Annotated[list[str] | None, typer.Option("--session-entry")] = None,
    optimization_level: str = "all",
    cache_dir: str = "",
) -> Any:
    """Return what a start depends on besides its model, as ``warm`` takes it.

    Args:
        session_entries (KEY=VALUE): An entry of the sessions' SessionOptions; repeatable.
        optimization_level: Of the sessions: disable, basic, extended, layout or all.
    """
    entries = opt.parse_settings(session_entries, "--session-entry")
    if entries.get(HINT_KEY) and not opt.is_given(context, "passes"):
        passes = []
    return {
        "passes": passes,
        "options": opt.parse_settings(settings),
        "session_entries": entries,
        "optimization_level": optimization_level,
        "cache_dir": cache_dir or None,
    }


Store: TypeAlias = Annotated[Any, _store]
SessionStart: TypeAlias = Annotated[dict[str, Any], _session_start]


def _command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return lambda function: cache.command(name)(opt.with_groups(function))


@_command("dir")
def print_directory(store: Store) -> None:
    """Print the directory of the cache."""
    typer.echo(store.root)


@_command("list")
def list_entries(store: Store, format: opt.Format = "text") -> None:
    """List the optimised models, the newest first."""
    entries = store.entries()
    if format == "json":
        typer.echo(json.dumps([_as_json(entry) for entry in entries], indent=2))
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
    typer.echo(f"{len(entries)} in all, {size}, in {store.root}")


@_command("show")
def show_entry(store: Store, key: Annotated[str, typer.Argument()]) -> None:
    """Print everything the cache knows about an entry, as JSON.

    Args:
        key (KEY): Key of an entry, or its start.
    """
    found = [entry for entry in store.entries() if entry.key.startswith(key)]
    if len(found) != 1:
        number = f"{len(found)} entries" if found else "no entry"
        raise typer.BadParameter(f"{key!r}: {number} in {store.root}", param_hint="KEY")
    artifact = found[0].artifact
    fields = {name: getattr(artifact, name) for name in type(artifact).__slots__}
    content = {**_as_json(found[0]), "artifact": fields, "report": _report_of(found[0])}
    typer.echo(json.dumps(content, indent=2))


@_command("verify")
def verify_entries(store: Store) -> None:
    """Compare every file in the cache with its digest; exit with 1 if any is damaged."""
    from ortplugins.cache.store import verify

    number = damaged = 0
    for item, damage in verify(store):
        number += 1
        if not damage:
            continue
        damaged += 1
        what = "; ".join(f"{file}: {text}" for file, text in damage.items())
        typer.echo(f"damaged: {item}: {what}")
    typer.echo(f"{number} checked, {damaged} damaged, in {store.root}")
    if damaged:
        raise typer.Exit(1)


@_command("prune")
def prune_entries(
    store: Store,
    max_size: Annotated[int | None, typer.Option(parser=opt.parse_size)] = None,
    older_than: Annotated[float | None, typer.Option(parser=parse_age)] = None,
) -> None:
    """Remove entries that were not used for a time, and the oldest above a size.

    Args:
        max_size (SIZE): Remove the least recently used until the rest fits: 500MB, 10GB, 1GiB.
        older_than (AGE): Remove what was not used for this long: 12h, 30d, 2w.
    """
    if max_size is None and older_than is None:
        raise typer.BadParameter("give --max-size, --older-than or both")
    _prune(store, max_size=max_size, older_than=older_than)


@_command("clean")
def clean_cache(store: Store) -> None:
    """Remove everything from the cache."""
    _prune(store, everything=True)


def _prune(store: ArtifactCache, **what: Any) -> None:
    from ortplugins.cache.store import prune

    result = prune(store, **what)
    for item in result.removed:
        used = _since(item.last_used)
        typer.echo(f"removed: {item}, {decimal(item.size)}, last used {used} ago")
    for item, reason in result.left:
        typer.echo(f"left: {item}, {decimal(item.size)}: {reason}")
    if result.abandoned:
        size = decimal(result.abandoned)
        typer.echo(f"removed: what builders left that were killed, {size}")
    size = decimal(sum(item.size for item in result.removed))
    kept = f"{result.kept} remain, {decimal(result.size)}"
    typer.echo(f"removed {len(result.removed)}, {size}; {kept}, in {store.root}")


@_command("warm")
def warm(
    models: Annotated[list[Path], typer.Argument()],
    start: SessionStart,
) -> None:
    """Build the entries of CPU sessions ahead of time; exit with 1 if a model fails.

    For an image, --cache-dir is a directory that every user may read; sessions find it through
    ORTPLUGINS_CACHE_DIR.

    Args:
        models (MODEL): An .onnx file.
    """
    from ortplugins.session.warming import warm as build

    failed = False
    for model in models:
        (item,) = build([model], **start)
        if item.error:
            failed = True
            where = "" if item.error.startswith(item.model) else f"{item.model}: "
            typer.echo(f"error: {where}{item.error}", err=True)
        else:
            typer.echo(f"{item.model}: {item.report}; {decimal(item.size)} on disk")
    if failed:
        raise typer.Exit(1)


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
