# SPDX-License-Identifier: MIT
"""``ortplugins cache``: what sessions left in the cache."""

from __future__ import annotations

__all__ = ["app"]

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from ortplugins.cli.options import CacheDir
from ortplugins.cli.terminal import parse_age, parse_size, print_table

if TYPE_CHECKING:
    from ortplugins.artifacts.store import ArtifactCache

app = typer.Typer(
    help="Show, check or empty the cache of sessions.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("list")
def list_cache(cache_dir: CacheDir = "") -> None:
    """List the optimised models, the newest first."""
    cache = _cache(cache_dir)
    entries = cache.entries()
    rows = []
    for entry in entries:
        report = entry.manifest["report"]
        fate = f"{report['fired']}/{report['refused']}"
        age, used = _since(entry.created), f"{_since(entry.last_used)} ago"
        row = (_short(entry.folder.name), entry.manifest["model"], decimal(entry.size))
        rows.append((*row, age, used, fate))
    print_table(("Key", "Model", "Size", "Age", "Last use", "Fired/refused"), rows)
    size = decimal(sum(entry.size for entry in entries))
    typer.echo(f"{len(entries)} in all, {size}, in {cache.root}")


@app.command("verify")
def verify_cache(
    cache_dir: CacheDir = "",
    remove: Annotated[bool, typer.Option("--remove", help="Take damaged ones out.")] = False,
) -> None:
    """Compare every file in the cache with its digest; exit with 1 if any is damaged."""
    from ortplugins.artifacts.maintenance import verify

    cache = _cache(cache_dir)
    number = damaged = removed = 0
    for item in verify(cache):
        number += 1
        name = f"{_short(item.key)} {item.model}".rstrip()
        if not item.damage:
            continue
        damaged += 1
        what = "; ".join(f"{file}: {text}" for file, text in item.damage.items())
        typer.echo(f"damaged: {name}: {what}")
        if remove:
            try:
                cache.discard(item.key, item.manifest)
                removed += 1
            except OSError as error:  # Windows keeps files that a process has open
                typer.echo(f"left: {name}: {error}")
    fate = f", {removed} removed" if remove else ""
    typer.echo(f"{number} checked, {damaged} damaged{fate}, in {cache.root}")
    if damaged:
        raise typer.Exit(1)


@app.command("gc")
def collect_cache(
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
        bool, typer.Option("--dry-run", help="Tell what would go; remove nothing.")
    ] = False,
) -> None:
    """Remove what was not used for long, and the least recently used above a size."""
    if max_size is None and older_than is None:
        raise typer.BadParameter("give --max-size, --older-than or both")
    from ortplugins.artifacts.maintenance import collect

    cache = _cache(cache_dir)
    result = collect(cache, max_size, older_than, dry_run=dry_run)
    removed, remain = ("would remove", "would remain") if dry_run else ("removed", "remain")
    for item in result.removed:
        name = f"{_short(item.key)} {item.model}".rstrip()
        used = _since(item.last_used)
        typer.echo(f"{removed}: {name}, {decimal(item.size)}, last used {used} ago")
    for item, reason in result.left:
        name = f"{_short(item.key)} {item.model}".rstrip()
        typer.echo(f"left: {name}, {decimal(item.size)}: {reason}")
    if result.abandoned:
        size = decimal(result.abandoned)
        typer.echo(f"{removed}: what builders left that were killed, {size}")
    size = decimal(sum(item.size for item in result.removed))
    kept = f"{result.kept} {remain}, {decimal(result.size)}"
    typer.echo(f"{removed} {len(result.removed)}, {size}; {kept}, in {cache.root}")


@app.command("clear")
def clear_cache(cache_dir: CacheDir = "") -> None:
    """Remove every optimised model from the cache."""
    from ortplugins.artifacts.maintenance import clear

    cache = _cache(cache_dir)
    number, size = clear(cache)
    typer.echo(f"removed {number}, {decimal(size)}, from {cache.root}")


@app.command("path")
def print_cache_path(cache_dir: CacheDir = "") -> None:
    """Print the directory of the cache."""
    typer.echo(_cache(cache_dir).root)


def _cache(cache_dir: str) -> ArtifactCache:
    from ortplugins.artifacts.directory import cache_root
    from ortplugins.artifacts.store import ArtifactCache

    return ArtifactCache(cache_root(cache_dir))


def _short(key: str) -> str:
    return key[:12]


def _since(moment: float) -> str:
    seconds = time.time() - moment
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
