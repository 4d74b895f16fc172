# SPDX-License-Identifier: MIT
"""``ortplugins quantize`` and ``ortplugins quantize-static``."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from rich.filesize import decimal

from ortplugins.cli import options as opt
from ortplugins.cli.evaluate import print_coverage, print_evaluation
from ortplugins.cli.options import refuse_without_effect
from ortplugins.cli.terminal import console, print_table, progress_bar
from ortplugins.errors import CalibrationError, ModelFileError, QuantizationError
from ortplugins.quantization.weights.recipe import Recipe, Rule, read_recipe, read_yaml

if TYPE_CHECKING:
    from ortplugins.model_io.saving import Progress
    from ortplugins.quantization.weights.report import QuantizeReport
    from ortplugins.samples.text import TextSamples


# Of a text, what is evaluated on and not calibrated on, at least.
_HELD_BACK = 1 / 3


def _read_yaml(text: str) -> Any:
    """Read a value as a recipe's file has it."""
    try:
        return read_yaml(text)
    except QuantizationError as error:
        raise typer.BadParameter(str(error)) from None


def _read_rule(text: str) -> tuple[str, Any]:
    """Read ``PATTERN=SETTINGS``."""
    pattern, equals, settings = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(
            f"{text!r}: a pattern and its settings are expected, as in '*lm_head*=float' or "
            "'*down_proj*={bits: 8}'"
        )
    return pattern, _read_yaml(settings)


# How fields of a recipe that are not plain scalars are spelled.
_SPELLINGS = {
    "is_symmetric": Annotated[bool, typer.Option("--symmetric/--asymmetric")],
    "op_types": Annotated[list[str], typer.Option("--op-type")],
    "rules": Annotated[list[Any], typer.Option("--rule", parser=_read_rule)],
    "alphas": Annotated[list[float] | None, typer.Option("--alpha")],
    "clip_ratios": Annotated[list[float] | None, typer.Option("--clip-ratio")],
    "gptq": Annotated[Any, typer.Option(parser=_read_yaml)],
}
_METAVARS = {"op_types": "NAME", "rules": "PATTERN=SETTINGS", "gptq": "{damping: ...}"}


def _settings_of_a_recipe(context: typer.Context, **given: Any) -> dict[str, Any]:
    """Return the fields of a recipe that this call has."""
    chosen = {name: value for name, value in given.items() if opt.is_given(context, name)}
    if "rules" in chosen:
        chosen["rules"] = [Rule.of(*rule) for rule in chosen["rules"]]
    return chosen


def _as_options(recipe: type[Recipe]) -> None:
    """Give the function above the fields of a recipe as parameters, with their help."""
    parameters = [*inspect.signature(_settings_of_a_recipe).parameters.values()][:1]
    kinds, lines = get_type_hints(recipe), []
    described = inspect.getdoc(recipe) or ""
    for field in dataclasses.fields(recipe):
        kind = _SPELLINGS.get(field.name, kinds[field.name])
        if choices := field.metadata.get("choices"):
            kind = Literal[choices]
        default = [] if field.name == "rules" else field.default
        default = "{}" if field.name == "gptq" else default
        parameter = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )
        parameters.append(parameter)
        text = re.search(rf"    {field.name}: ((?:.|\n {{8}})+?\.)(?:\s|$)", described)
        metavar = f" ({_METAVARS[field.name]})" if field.name in _METAVARS else ""
        lines.append(f"    {field.name}{metavar}: {text[1] if text else ''}")
    _settings_of_a_recipe.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    _settings_of_a_recipe.__doc__ = "Settings.\n\nArgs:\n" + "\n".join(lines)


_as_options(Recipe)


def quantize(
    context: typer.Context,
    model: opt.ModelOrFolder,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    recipe: str | None = None,
    settings: Annotated[dict[str, Any], _settings_of_a_recipe],
    source: opt.GivenSamples,
    providers: opt.Providers = opt.CPU,
    max_calibration_memory: Annotated[Any, typer.Option(parser=opt.parse_size)] = "1GiB",
    scheduler: str = "",
    work_dir: Path | None = None,
    run_folder: Path | None = None,
    dry_run: bool = False,
    force: bool = False,
    verbose: opt.Verbose = False,
    format: opt.Format = "text",
) -> None:
    """Quantise a model's weights to 4, 8 or 2 bits.

    Args:
        output: File to write; for a folder, a folder.
        recipe (NAME|FILE): small, balanced, best, encoder8, or a YAML file; the options below
            change it.
        max_calibration_memory (SIZE): What activations and their statistics may take at once.
        scheduler (tcp://HOST:PORT): A Dask scheduler whose workers do the work; they have to
            see the output's folder, or --work-dir.
        run_folder (DIR): Keeps statistics and codes: an interrupted run goes on, another
            method finds the statistics.
        dry_run: Print what would be quantised; write nothing.
    """
    from ortplugins.quantization import quantize
    from ortplugins.samples.text import TextSamples

    if isinstance(source, TextSamples):
        source = dataclasses.replace(source, held_back=_HELD_BACK)
    if output is None and not dry_run:
        raise typer.BadParameter("give --output, or --dry-run", param_hint="--output")
    chosen = read_recipe(recipe).with_settings(settings)
    _refuse_ignored(context, needs_samples=chosen.needs_statistics)
    with progress_bar() as bar, _executor(scheduler) as executor:
        result = quantize(
            model,
            output,
            recipe=chosen,
            calibration_data_reader=source,
            calibration_providers=providers,
            max_calibration_memory=max_calibration_memory,
            overwrite=force,
            executor=executor,
            work_dir=work_dir,
            run_folder=run_folder,
            dry_run=dry_run,
            progress=bar,
        )
    if format == "text":  # before the evaluation, which may be interrupted
        _print(result.report, verbose or dry_run)
        if result.path is not None:
            typer.echo(f"wrote {result.path}")
    judged = None
    if result.path is not None and isinstance(source, TextSamples):
        with progress_bar() as bar:
            judged = _evaluate(result.path, model, source, bar)
    if format == "json":
        evaluation = judged
        if judged is not None and not isinstance(judged, str):
            evaluation = judged.to_dict() | {"held_back": True}
        typer.echo(json.dumps({**result.report.to_dict(), "evaluation": evaluation}))
    elif isinstance(judged, str):
        console().print(f"not evaluated: {judged}", style="yellow", soft_wrap=True)
    elif judged is not None:
        print_evaluation(judged)
        typer.echo(f"evaluated on the part of {source.text} that calibration did not read")


def _evaluate(path: Path, floats: Path, source: TextSamples, progress: Progress) -> Any:
    """Return an Evaluation beside the float model, on text that was held back, or why not."""
    from ortplugins.evaluation import evaluate
    from ortplugins.model_io.loading import load_model
    from ortplugins.model_io.model_folder import model_in

    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        rest = Path(folder, "rest.txt")
        try:
            inputs = load_model(model_in(floats)).model.graph.inputs
            rest.write_text(source.rest(inputs), encoding="utf-8")
            return evaluate(
                path, floats, text=rest, tokenizer=source.tokenizer, progress=progress
            )
        except (CalibrationError, ModelFileError) as error:
            # The quantised model is written already.
            return str(error).replace(str(rest), f"what calibration left of {source.text}")


def _refuse_ignored(context: typer.Context, *, needs_samples: bool) -> None:
    """Refuse options that have no effect beside others of this call."""
    given = context.params
    if given["dry_run"]:
        unused = ("output", "force", "scheduler", "work_dir", "run_folder", "verbose")
        refuse_without_effect(context, "with --dry-run", *unused)
    if given["format"] == "json":
        refuse_without_effect(context, "with --format json", "verbose")
    samples = given["samples"] or given["text"]
    if not needs_samples and not samples:
        why = "with --method rtn and without samples"
        refuse_without_effect(context, why, "providers", "max_calibration_memory")


@contextlib.contextmanager
def _executor(scheduler: str) -> Iterator[Executor | None]:
    """Connect to a Dask scheduler; None for threads of this process."""
    if not scheduler:
        yield None
        return
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise typer.BadParameter(
            "needs: pip install 'ortplugins[dask]'", param_hint="--scheduler"
        ) from None
    try:
        client = Client(scheduler, timeout=10)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise OSError(f"{scheduler}: no scheduler answers: {error}") from error
    with client, client.get_executor() as executor:  # type: ignore[no-untyped-call]
        yield executor


def _print(report: QuantizeReport, all_nodes: bool) -> None:
    """Print the sum, then what was refused, or every node."""
    out = console()
    if all_nodes:
        rows = [
            (
                node.node,
                f"{node.K} x {node.N}" if node.K else "",
                f"{node.bits} bit / {node.block_size}" if node.quantized else "float",
                _percent(node.weight_error),
                _percent(node.output_error),
                f"{decimal(node.bytes_before)} -> {decimal(node.bytes_after)}",
                " ".join(filter(None, (node.method, node.folded, node.reason))),
            )
            for node in report.nodes
        ]
        headings = ("Node", "K x N", "Codes", "Weight error", "Output error", "Size", "How")
        print_table(headings, rows)
    else:
        for node in report.refused:
            out.print(f"refused {node.node}: {node.reason}", style="yellow", soft_wrap=True)
    print_coverage(report.coverage)
    for note in report.notes:
        out.print(f"note: {note}", soft_wrap=True)
    out.print(str(report), style="bold", soft_wrap=True)


def _percent(error: float) -> str:
    return "" if math.isnan(error) else f"{error:.2%}"
