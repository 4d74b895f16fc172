# SPDX-License-Identifier: MIT
"""``ortplugins cache``: fill, show, check and empty the cache of sessions."""

from __future__ import annotations

__all__ = ["app"]

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from ortplugins.cli.options import (
    CacheDir,
    Format,
    Model,
    Passes,
    Settings,
    parse_settings,
)
from ortplugins.cli.terminal import parse_age, parse_size, print_table
from ortplugins.errors import ModelFileError
from session_options import DqMatMulNBitsFusion, PrepackedWeights

if TYPE_CHECKING:
    from ortplugins.artifacts.manifest import Entry
    from ortplugins.artifacts.store import ArtifactCache

app = typer.Typer(
    help="Fill, show, check or empty the cache of sessions.",
    no_args_is_help=True,
    add_completion=False,
)

_WARM_PASSES = [DqMatMulNBitsFusion.name, PrepackedWeights.name]
_KEY_CHARACTERS = 12

SessionEntries = Annotated[
    list[str] | None,
    typer.Option(
        "--session-entry",
        metavar="KEY=VALUE",
        help="An entry of the sessions' SessionOptions; repeatable.",
    ),
]
Level = Annotated[
    str, typer.Option(help="Of the sessions: disable, basic, extended, layout or all.")
]


@app.command("dir")
def print_directory(cache_dir: CacheDir = "") -> None:
    """Print the directory of the cache."""
    typer.echo(_cache(cache_dir).root)


@app.command("list")
def list_entries(
    cache_dir: CacheDir = "",
    format: Annotated[Format, typer.Option("--format")] = Format.TEXT,
) -> None:
    """List the optimised models, the newest first."""
    cache = _cache(cache_dir)
    entries = cache.entries()
    if format is Format.JSON:
        typer.echo(json.dumps([_as_json(entry) for entry in entries], indent=2))
        return
    rows = []
    for entry in entries:
        report = entry.manifest["report"]
        fired = f"{report['fired']}/{report['refused']}"
        age, used = _since(entry.created), f"{_since(entry.last_used)} ago"
        sizes = decimal(entry.size), decimal(entry.linked_size)
        rows.append((_name(entry), entry.manifest["model"], *sizes, age, used, fired))
    headings = ("Key", "Model", "Size", "Linked", "Age", "Last use", "Fired/refused")
    print_table(headings, rows)
    size = decimal(sum(entry.size for entry in entries))
    linked = decimal(sum(entry.linked_size for entry in entries))
    typer.echo(f"{len(entries)} in all, {size}, and {linked} linked, in {cache.root}")


@app.command("show")
def show_entry(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of an entry, or its start.")],
    cache_dir: CacheDir = "",
) -> None:
    """Print all that the cache knows of an entry, as JSON."""
    cache = _cache(cache_dir)
    found = [entry for entry in cache.entries() if entry.folder.name.startswith(key)]
    if len(found) != 1:
        number = f"{len(found)} entries" if found else "no entry"
        raise typer.BadParameter(f"{key!r}: {number} in {cache.root}", param_hint="KEY")
    typer.echo(json.dumps({**_as_json(found[0]), "manifest": found[0].manifest}, indent=2))


@app.command("explain")
def explain_miss(
    model: Model,
    passes: Passes = _WARM_PASSES,
    settings: Settings = None,
    session_entries: SessionEntries = None,
    optimization_level: Level = "all",
    cache_dir: CacheDir = "",
) -> None:
    """Tell why a session on the CPU finds no entry: what of its key differs; exit with 1."""
    from ortplugins.artifacts.warming import explain_miss

    found = explain_miss(
        model,
        passes,
        options=parse_settings(settings),
        session_entries=parse_settings(session_entries, "--session-entry"),
        optimization_level=optimization_level,
        cache_dir=cache_dir or None,
    )
    if found.is_present:
        typer.echo(f"{model}: found as {found.key[:_KEY_CHARACTERS]}")
        return
    typer.echo(f"{model}: not found as {found.key[:_KEY_CHARACTERS]}")
    if found.nearest is None:
        typer.echo("the cache is empty")
    else:
        name, source = _name(found.nearest), found.nearest.manifest["model"]
        typer.echo(f"nearest: {name}, made from {source}")
        for part, here, there in found.differences:
            typer.echo(f"  {part}: {json.dumps(here)} here, {json.dumps(there)} there")
        if not found.differences:
            typer.echo("  its key is the same, but its files changed: see 'cache verify'")
    raise typer.Exit(1)


@app.command("verify")
def verify_entries(
    cache_dir: CacheDir = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged ones.")] = False,
) -> None:
    """Compare every file in the cache with its digest; exit with 1 if any is damaged."""
    from ortplugins.artifacts.maintenance import verify

    cache = _cache(cache_dir)
    number = damaged = removed = 0
    for item in verify(cache):
        number += 1
        if not item.damage:
            continue
        damaged += 1
        name = f"{item.key[:_KEY_CHARACTERS]} {item.model}".rstrip()
        what = "; ".join(f"{file}: {text}" for file, text in item.damage.items())
        typer.echo(f"damaged: {name}: {what}")
        if remove:
            try:
                cache.discard(item.key, item.manifest)
                removed += 1
            except OSError as error:  # Windows keeps files that a process has open
                typer.echo(f"left: {name}: {error}")
    outcome = f", {removed} removed" if remove else ""
    typer.echo(f"{number} checked, {damaged} damaged{outcome}, in {cache.root}")
    if damaged:
        raise typer.Exit(1)


@app.command("prune")
def prune_entries(
    cache_dir: CacheDir = "",
    max_size: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Remove the least recently used above this: 500MB, 10GB, 1GiB.",
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=parse_age,
            metavar="AGE",
            help="Remove what was not used for this long: 12h, 30d, 2w.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would go; remove nothing.")
    ] = False,
) -> None:
    """Remove what was not used for long, and the least recently used above a size."""
    from ortplugins.artifacts.maintenance import EntryInfo, prune

    if max_size is None and older_than is None:
        raise typer.BadParameter("give --max-size, --older-than or both")
    cache = _cache(cache_dir)
    result = prune(cache, max_size, older_than, dry_run=dry_run)
    removed, remain = ("would remove", "would remain") if dry_run else ("removed", "remain")

    def described(item: EntryInfo) -> str:
        name = f"{item.key[:_KEY_CHARACTERS]} {item.model}".rstrip()
        return f"{name}, {decimal(item.size)}"

    for item in result.removed:
        typer.echo(f"{removed}: {described(item)}, last used {_since(item.last_used)} ago")
    for item, reason in result.left:
        typer.echo(f"left: {described(item)}: {reason}")
    if result.abandoned:
        size = decimal(result.abandoned)
        typer.echo(f"{removed}: what builders left that were killed, {size}")
    size = decimal(sum(item.size for item in result.removed))
    kept = f"{result.kept} {remain}, {decimal(result.size)}"
    typer.echo(f"{removed} {len(result.removed)}, {size}; {kept}, in {cache.root}")


@app.command("clean")
def clean_cache(cache_dir: CacheDir = "") -> None:
    """Remove everything from the cache."""
    from ortplugins.artifacts.maintenance import clean

    cache = _cache(cache_dir)
    number, size = clean(cache)
    typer.echo(f"removed {number}, {decimal(size)}, from {cache.root}")


@app.command("warm")
def warm(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="An .onnx file.")],
    passes: Passes = _WARM_PASSES,
    settings: Settings = None,
    cache_dir: Annotated[
        str,
        typer.Option(
            "--cache-dir",
            metavar="DIR",
            help="A cache directory that every user may read, for an image; sessions find it "
            "through ORTPLUGINS_CACHE_DIR. Default: the cache that sessions here use.",
        ),
    ] = "",
    session_entries: SessionEntries = None,
    optimization_level: Level = "all",
) -> None:
    """Build ahead what sessions on the CPU will look for; exit with 1 if a model fails."""
    from ortplugins.artifacts.warming import WarmResult, expected_bytes
    from ortplugins.artifacts.warming import warm as build

    def done(item: WarmResult) -> None:
        if item.error:
            where = "" if item.error.startswith(item.model) else f"{item.model}: "
            typer.echo(f"error: {where}{item.error}", err=True)
        else:
            typer.echo(f"{item.model}: {item.report}; {decimal(item.size)} on disk")

    if PrepackedWeights.name in passes:
        for model in models:
            # What is wrong with a model is reported when its turn comes.
            with suppress(ModelFileError, OSError):
                size = decimal(expected_bytes(model))
                typer.echo(f"{model}: may take {size} of disk with packed weights", err=True)
    results = build(
        models,
        passes,
        options=parse_settings(settings),
        cache_dir=cache_dir or None,
        session_entries=parse_settings(session_entries, "--session-entry"),
        optimization_level=optimization_level,
        done=done,
    )
    if any(item.error for item in results):
        raise typer.Exit(1)


def _cache(cache_dir: str) -> ArtifactCache:
    from ortplugins.artifacts.directory import cache_root
    from ortplugins.artifacts.store import ArtifactCache

    return ArtifactCache(cache_root(cache_dir))


def _as_json(entry: Entry) -> dict[str, Any]:
    report = entry.manifest["report"]
    return {
        "key": entry.folder.name,
        "model": entry.manifest["model"],
        "size": entry.size,
        "linked_size": entry.linked_size,
        "created": entry.created,
        "last_used": entry.last_used,
        "fired": report["fired"],
        "refused": report["refused"],
    }


def _name(entry: Entry) -> str:
    return entry.folder.name[:_KEY_CHARACTERS]


def _since(moment: float) -> str:
    seconds = time.time() - moment
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
