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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import session_options
from ortplugins._version import __version__
from ortplugins.errors import ModelFileError, PassError, QuantizationError
from ortplugins.report import Report
from session_options.keys import PREFIX, Option, format_value, options_of
from session_options.plan import GENERAL_OPTIONS

try:
    import typer
    from rich.filesize import decimal
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in ("rich", "typer"):
        raise
    # Here and not in main(): the commands below cannot even be declared without typer.
    print("The command line needs: pip install 'ortplugins[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

from ortplugins.cli.check import check
from ortplugins.cli.compare import compare
from ortplugins.cli.plan_precision import plan_precision
from ortplugins.cli.quantize import quantize
from ortplugins.cli.quantize_static import quantize_static
from ortplugins.cli.report import check_page, write_report
from ortplugins.cli.report import report as report_page
from ortplugins.cli.run import Program, run
from ortplugins.cli.terminal import (
    REMARK_STYLES,
    console,
    parse_age,
    parse_settings,
    parse_size,
    print_table,
    progress_bar,
)

if TYPE_CHECKING:
    from ortplugins.artifacts.store import ArtifactCache


class ReportFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


class TableFormat(enum.StrEnum):
    TEXT = "text"
    MARKDOWN = "markdown"


app = typer.Typer(
    help="Graph work for ONNX Runtime, before the session exists.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(
    help="Show, check or empty the cache of sessions.", no_args_is_help=True
)
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
_WARM_PASSES = [*_DEFAULT_PASSES, session_options.PrepackedWeights.name]


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        app()
    except Program as chosen:
        program = chosen
    except (
        ModelFileError,
        session_options.OptionError,
        PassError,
        QuantizationError,
        OSError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    warnings.formatwarning = formatwarning
    program.start()  # here, where none of our handlers catches what it raises
    sys.exit()


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
    bake: Annotated[
        bool,
        typer.Option(
            "--bake",
            help="Run onnxruntime's own optimisers, too: for this machine, and for sessions "
            "that run none (ORT_DISABLE_ALL).",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    verbose: Verbose = False,
    format: Format = ReportFormat.TEXT,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Write a page about it, too, with sessions measured; see the command report.",
        ),
    ] = None,
) -> None:
    """Apply passes to a model and write the result; without --bake it runs everywhere."""
    from ortplugins.optimization.optimize import optimize

    options = parse_settings(settings)
    if page is not None:
        check_page([page], force)
        if output.exists() and output.samefile(model):
            raise typer.BadParameter(
                "the report needs the model as it was: give another --output",
                param_hint="--report",
            )
    try:
        with progress_bar() as bar:
            result = optimize(
                model,
                output,
                passes=passes,
                options=options,
                onnxruntime_version=onnxruntime,
                bake=bake,
                overwrite=force,
                progress=bar,
            )
    except FileExistsError:
        raise FileExistsError(f"{output}: exists; --force overwrites it") from None
    _print_report(result.report, format, verbose, model)
    written = [output]
    if page is not None:
        written += write_report(
            model, page, force=force, passes=passes, options=options, result=result
        )
    if format is ReportFormat.TEXT:
        for path in written:
            typer.echo(f"wrote {path}")


@app.command()
def inspect(
    model: Model,
    passes: Passes = _DEFAULT_PASSES,
    settings: Settings = None,
    onnxruntime: Version = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 on a refusal.")] = False,
    order: Annotated[
        bool,
        typer.Option(
            "--order",
            help="Show the live memory of a run instead, step by step, in each order; sizes "
            "by --set shape_size_reorder.dims=batch=1,seq=512.",
        ),
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --order: write a picture, too.")
    ] = None,
    verbose: Verbose = False,
    format: Format = ReportFormat.TEXT,
) -> None:
    """Tell what would fire on a model, what would not, and why; change nothing."""
    from ortplugins.optimization.optimize import optimize

    options = parse_settings(settings)
    if order:
        _show_order(model, options, svg)
        return
    report = optimize(
        model, passes=passes, options=options, onnxruntime_version=onnxruntime
    ).report
    _print_report(report, format, verbose, model)
    if check and report.refused:
        raise typer.Exit(1)


app.command()(quantize)
app.command()(quantize_static)
app.command()(plan_precision)
app.command()(report_page)
app.command()(compare)
app.command()(check)
app.command(context_settings={"allow_interspersed_args": False})(run)


def _show_order(model: Path, options: dict[str, str], svg: Path | None) -> None:
    """Print what the orders of a model hold, and draw it."""
    from ortplugins.html_report.charts import memory_bars, memory_chart
    from ortplugins.html_report.live_memory import order_of

    order = order_of(model, options)
    for line in memory_bars(order.curves):
        typer.echo(line)
    for note in order.notes:
        typer.echo(note)
    if svg is not None:
        svg.write_text(memory_chart(order.curves, str(model)), encoding="utf-8")
        typer.echo(f"wrote {svg}")


@app.command()
def passes(format: Annotated[TableFormat, typer.Option()] = TableFormat.TEXT) -> None:
    """List the passes and their options, as session keys."""
    headings = ("Session key", "Default", "What it does")
    if format is TableFormat.TEXT:
        print_table(headings, _key_rows())
        return
    typer.echo(f"| {' | '.join(headings)} |\n|---|---|---|")
    for key, default, text in _key_rows():
        shown = f"`{default}`" if default else ""
        typer.echo(f"| `{key}` | {shown} | {text.replace('|', '&#124;')} |")


@app.command()
def warm(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="An .onnx file.")],
    passes: Passes = _WARM_PASSES,
    settings: Settings = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="A cache directory that every user may read, for an image; sessions find it "
            "through ORTPLUGINS_CACHE_DIR. Else the cache that sessions here use.",
        ),
    ] = None,
    session_entries: Annotated[
        list[str] | None,
        typer.Option(
            "--session-entry",
            metavar="KEY=VALUE",
            help="An entry of the sessions' SessionOptions; repeatable.",
        ),
    ] = None,
    optimization_level: Annotated[
        str,
        typer.Option(help="Of the sessions: disable, basic, extended, layout or all."),
    ] = "all",
) -> None:
    """Build ahead what sessions on the CPU will look for in the cache."""
    from ortplugins.artifacts.warming import WarmResult, expected_bytes
    from ortplugins.artifacts.warming import warm as build

    def done(item: WarmResult) -> None:
        if item.error:
            where = "" if item.error.startswith(item.model) else f"{item.model}: "
            typer.echo(f"error: {where}{item.error}", err=True)
            return
        typer.echo(f"{item.model}: {item.report}; {decimal(item.size)} on disk")
        for note in item.notes:
            typer.echo(f"note: {note}", err=True)

    if session_options.PrepackedWeights.name in passes:
        for model in models:
            # What is wrong with a model is told when its turn comes.
            with suppress(ModelFileError, OSError):
                size = decimal(expected_bytes(model))
                typer.echo(f"{model}: may take {size} of disk with packed weights", err=True)
    results = build(
        models,
        passes,
        options=parse_settings(settings),
        output=output,
        session_entries=parse_settings(session_entries, "--session-entry"),
        optimization_level=optimization_level,
        done=done,
    )
    if any(item.error for item in results):
        raise typer.Exit(1)


@cache_app.command("list")
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


@cache_app.command("verify")
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


@cache_app.command("gc")
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


@cache_app.command("clear")
def clear_cache(cache_dir: CacheDir = "") -> None:
    """Remove every optimised model from the cache."""
    from ortplugins.artifacts.maintenance import clear

    cache = _cache(cache_dir)
    number, size = clear(cache)
    typer.echo(f"removed {number}, {decimal(size)}, from {cache.root}")


@cache_app.command("path")
def print_cache_path(cache_dir: CacheDir = "") -> None:
    """Print the directory of the cache."""
    typer.echo(_cache(cache_dir).root)


def _cache(cache_dir: str) -> ArtifactCache:
    from ortplugins.artifacts.directory import cache_root
    from ortplugins.artifacts.store import ArtifactCache

    return ArtifactCache(cache_root(cache_dir))


def _short(key: str) -> str:
    return key[:12]


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


def _print_report(report: Report, format: ReportFormat, verbose: bool, model: Path) -> None:
    """Print counts, then the refusals, or all remarks if ``verbose``."""
    if format is ReportFormat.GITHUB:
        from ortplugins.cli.github_annotations import annotations_of

        for line in annotations_of(report, model):
            typer.echo(line)
        return
    if format is ReportFormat.JSON:
        typer.echo(report.to_json())
        return
    out = console()
    out.print(f"fired {len(report.fired)}, refused {len(report.refused)}", style="bold")
    for remark in report.remarks if verbose else report.refused:
        line = f"{remark.outcome.value:8}{remark.pass_name}: {remark}"
        out.print(line, style=REMARK_STYLES[remark.outcome], soft_wrap=True)
    for note in report.notes:
        out.print(note, soft_wrap=True)


def _since(moment: float) -> str:
    seconds = time.time() - moment
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
