# SPDX-License-Identifier: MIT
"""The command line: ``ortplugins``, and ``python -m ortplugins``.

Exit codes: 0 done, 1 a check failed, 2 wrong usage or input that cannot be used.
"""

from __future__ import annotations

__all__ = ["main"]

import enum
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import session_options
from ortplugins._version import __version__
from ortplugins.errors import ModelFileError, PassError
from ortplugins.report import Report
from rewrite_rules.remarks import Outcome
from session_options.keys import PREFIX, Option, format_value, options_of
from session_options.plan import GENERAL_OPTIONS

try:
    import typer
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in ("rich", "typer"):
        raise
    # Here and not in main(): the commands below cannot even be declared without typer.
    print("The command line needs: pip install 'ortplugins[cli]'", file=sys.stderr)
    raise SystemExit(2) from None


class ReportFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class TableFormat(enum.StrEnum):
    TEXT = "text"
    MARKDOWN = "markdown"


app = typer.Typer(
    help="Graph work for ONNX Runtime, before the session exists.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="Show or empty the cache of sessions.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write.")]
Passes = Annotated[
    list[str], typer.Option("--pass", metavar="NAME", help="A pass to run; repeatable.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Key: <pass>.<option>; repeatable."),
]
Version = Annotated[
    str | None,
    typer.Option(
        "--onnxruntime",
        metavar="VERSION",
        help="Oldest onnxruntime to run on, 1.24 for instance; else the installed one.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all remarks.")]
Format = Annotated[ReportFormat, typer.Option("--format", help="Format of the report.")]
CacheDir = Annotated[
    str, typer.Option("--cache-dir", help="Else ORTPLUGINS_CACHE_DIR, else the user's own.")
]
_DEFAULT_PASSES = [session_options.DqMatMulNBitsFusion.name]


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        app()
    except (ModelFileError, session_options.OptionError, PassError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ortplugins {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[bool, typer.Option("--version", callback=_print_version)] = False,
) -> None:
    pass


@app.command()
def optimize(
    model: Model,
    output: Output,
    passes: Passes = _DEFAULT_PASSES,
    settings: Settings = None,
    onnxruntime: Version = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    verbose: Verbose = False,
    format: Format = ReportFormat.TEXT,
) -> None:
    """Apply passes to a model and write the result, which runs on every machine."""
    from ortplugins.optimization import optimize

    options = _parse_settings(settings)
    try:
        with _progress_bar() as bar:
            result = optimize(
                model,
                output,
                passes=passes,
                options=options,
                onnxruntime_version=onnxruntime,
                overwrite=force,
                progress=bar,
            )
    except FileExistsError:
        raise FileExistsError(f"{output}: exists; --force overwrites it") from None
    _print_report(result.report, format, verbose)
    if format is ReportFormat.TEXT:
        typer.echo(f"wrote {output}")


@app.command()
def inspect(
    model: Model,
    passes: Passes = _DEFAULT_PASSES,
    settings: Settings = None,
    onnxruntime: Version = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 on a refusal.")] = False,
    verbose: Verbose = False,
    format: Format = ReportFormat.TEXT,
) -> None:
    """Tell what would fire on a model, what would not, and why; write nothing."""
    from ortplugins.optimization import optimize

    options = _parse_settings(settings)
    report = optimize(
        model, passes=passes, options=options, onnxruntime_version=onnxruntime
    ).report
    _print_report(report, format, verbose)
    if check and report.refused:
        raise typer.Exit(1)


@app.command()
def passes(format: Annotated[TableFormat, typer.Option()] = TableFormat.TEXT) -> None:
    """List the passes and their options, as session keys."""
    headings = ("Session key", "Default", "What it does")
    if format is TableFormat.TEXT:
        _print_table(headings, _key_rows())
        return
    typer.echo(f"| {' | '.join(headings)} |\n|---|---|---|")
    for key, default, text in _key_rows():
        shown = f"`{default}`" if default else ""
        typer.echo(f"| `{key}` | {shown} | {text.replace('|', '&#124;')} |")


@cache_app.command("list")
def list_cache(cache_dir: CacheDir = "") -> None:
    """List the optimised models, the newest first."""
    from ortplugins.artifact_cache import ArtifactCache, cache_root

    cache = ArtifactCache(cache_root(cache_dir))
    entries = cache.entries()
    rows = []
    for entry in entries:
        report = entry.manifest["report"]
        fate = f"{report['fired']}/{report['refused']}"
        size, age = decimal(entry.size), _age(time.time() - entry.created)
        rows.append((entry.folder.name[:12], entry.manifest["model"], size, age, fate))
    _print_table(("Key", "Model", "Size", "Age", "Fired/refused"), rows)
    size = decimal(sum(entry.size for entry in entries))
    typer.echo(f"{len(entries)} in all, {size}, in {cache.root}")


@cache_app.command("clear")
def clear_cache(cache_dir: CacheDir = "") -> None:
    """Remove every optimised model from the cache."""
    from ortplugins.artifact_cache import ArtifactCache, cache_root

    cache = ArtifactCache(cache_root(cache_dir))
    number, size = cache.clear()
    typer.echo(f"removed {number}, {decimal(size)}, from {cache.root}")


@cache_app.command("path")
def print_cache_path(cache_dir: CacheDir = "") -> None:
    """Print the directory of the cache."""
    from ortplugins.artifact_cache import cache_root

    typer.echo(cache_root(cache_dir))


def _parse_settings(settings: list[str] | None) -> dict[str, str]:
    pairs = {}
    for item in settings or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--set")
        pairs[key] = value
    return pairs


def _key_rows() -> Iterator[tuple[str, str, str]]:
    """Yield every session key of ours with its default and its help."""
    for name, cls in session_options.registered_passes().items():
        yield session_options.enable_key(name), "0", f"Pass {name}: {cls.summary}."
        for spec in options_of(cls):
            yield _key_row(session_options.option_key(name, spec.name), spec)
    for spec in GENERAL_OPTIONS:
        yield _key_row(f"{PREFIX}.{spec.name}", spec)


def _key_row(key: str, spec: Option) -> tuple[str, str, str]:
    text = spec.help
    if spec.choices:
        text += f" One of: {', '.join(map(format_value, spec.choices))}."
    if spec.onnxruntime_key:
        text += f" When unset: as {spec.onnxruntime_key}."
    return key, format_value(spec.default), text


def _console(*, stderr: bool = False) -> Console:
    # Names of nodes and tensors hold brackets and colons, which rich would take for markup.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _print_table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    console = _console()
    if not console.is_terminal:  # for other programs: nothing wrapped or padded
        for row in (headings, *rows):
            typer.echo("\t".join(row))
        return
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_report(report: Report, format: ReportFormat, verbose: bool) -> None:
    """Print counts, then the refusals, or all remarks if ``verbose``."""
    if format is ReportFormat.JSON:
        typer.echo(report.to_json())
        return
    console = _console()
    styles = {Outcome.FIRED: "green", Outcome.REFUSED: "yellow", Outcome.NOTE: "dim"}
    console.print(f"fired {len(report.fired)}, refused {len(report.refused)}", style="bold")
    for remark in report.remarks if verbose else report.refused:
        line = f"{remark.outcome.value:8}{remark.pass_name}: {remark}"
        console.print(line, style=styles[remark.outcome], soft_wrap=True)
    for note in report.notes:
        console.print(note, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on stderr, gone afterwards and absent from pipes; yields its callback."""
    console = _console(stderr=True)
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None, what="reading and rewriting")
        yield lambda done, total, name: progress.update(
            task, completed=done, total=total, what=name
        )


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
