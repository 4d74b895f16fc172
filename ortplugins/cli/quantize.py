# SPDX-License-Identifier: MIT
"""``ortplugins quantize``."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.filesize import decimal

from ortplugins.cli import options as opt
from ortplugins.cli.evaluate import print_evaluation
from ortplugins.cli.terminal import console, print_table, progress_bar
from ortplugins.errors import CalibrationError, ModelFileError, UsageError
from ortplugins.quantization.weights.recipe import read_recipe

if TYPE_CHECKING:
    from ortplugins.quantization import QuantizeReport, QuantizeResult

# Least share of a text that is evaluated on and not calibrated on.
_HELD_BACK = 1 / 3
_LEAST_SHARE = 0.001  # of all weights, for a line of its own
# What has a function of its own, and which settings.
_OTHERS = {
    "encoder8": ("quantize_encoder8", {"least_cosine", "rules"}),
    "kv-cache": ("quantize_kv_cache", set[str]()),
}


def _read_rule(text: str) -> tuple[str, Any]:
    """Read ``PATTERN=float``, or ``PATTERN=NAME:VALUE,NAME:VALUE``."""
    pattern, equals, settings = text.rpartition("=")
    if not equals:
        raise UsageError(
            f"--rule: {text!r}; expected a pattern and its settings, as in "
            "'*lm_head*=float' or '*down_proj*=bits:8'"
        )
    if settings == "float":
        return pattern, settings
    pairs = opt.parse_settings(settings.split(","), "--rule", ":").items()
    return pattern, {name: _read_value(value) for name, value in pairs}


def _read_value(text: str) -> Any:
    """Read JSON, or else a word as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ChosenRecipe:
    """A recipe by name, and changes to it.

    Attributes:
        recipe: small, balanced or best, changed by the options below; encoder8 (settings:
            least_cosine, rules PATTERN=float); kv-cache.
        method: rtn; with samples, awq_lite or gptq.
        bits: Bits of a code: 4 or 8.
        block_size: Weights that share a scale; -1 for a whole column.
        is_symmetric: Signed codes without zero points, or unsigned codes with zero points.
        rules: PATTERN=SETTINGS, for some of the nodes, such as `*lm_head*=float` or
            `*down_proj*=bits:8,method:rtn`; repeatable.
        settings: NAME=VALUE, another setting, such as share_of_8_bits=0.03; repeatable.
    """

    recipe: Literal["small", "balanced", "best", "encoder8", "kv-cache"] | None = None
    method: str | None = None
    bits: int | None = None
    block_size: int | None = None
    is_symmetric: Annotated[bool | None, Parameter("--symmetric", negative="--asymmetric")] = (
        None
    )
    rules: Annotated[tuple[str, ...], Parameter("--rule")] = ()
    settings: Annotated[tuple[str, ...], Parameter("--set")] = ()

    def changes(self) -> dict[str, Any]:
        """Return the settings that change the recipe."""
        given = {**vars(self), "rules": [*map(_read_rule, self.rules)] or None}
        settings = opt.parse_settings(given.pop("settings"))
        del given["recipe"]
        changes = {name: value for name, value in given.items() if value is not None}
        if twice := changes.keys() & settings:
            raise UsageError(f"--set {min(twice)}: given as an option of its own, too")
        return changes | {name: _read_value(text) for name, text in settings.items()}


def quantize(
    model: opt.ModelOrFolder,
    /,
    *,
    output: opt.Output | None = None,
    chosen: ChosenRecipe = ChosenRecipe(),
    given: opt.GivenSamples = opt.GivenSamples(),
    providers: Annotated[tuple[str, ...], Parameter("--provider")] = (),
    dry_run: bool = False,
    force: opt.Force = False,
    printing: opt.Printing = opt.Printing(),
) -> None:
    """Quantise a model's weights to 4 or 8 bits.

    The recipe encoder8 also quantises an encoder's activations, kv-cache a decoder's cache.

    Args:
        providers: Execution provider that runs samples; repeatable.
        dry_run: Print what would be quantised; write nothing.
    """
    from ortplugins import quantization

    printing.check()
    source: Any = given.read(model)
    if given.text is not None:
        source = dataclasses.replace(source, held_back=_HELD_BACK)
    if output is None and not dry_run:
        raise UsageError("give --output, or --dry-run")
    if dry_run:
        unused = {"output": output, "force": force, "provider": providers, **vars(given)}
        opt.refuse("with --dry-run", **unused)
    settings = chosen.changes()
    function, known = _OTHERS.get(chosen.recipe or "", ("quantize", None))
    if known is None:
        try:
            recipe = read_recipe(chosen.recipe).with_settings(settings)
        except TypeError as error:  # a setting that is not known
            raise UsageError(f"--set: {error}") from None
        if not recipe.needs_samples and source is None:
            opt.refuse("with --method rtn and without samples", provider=providers)
        settings |= {"recipe": chosen.recipe, "dry_run": dry_run}
    else:
        opt.refuse(f"with --recipe {chosen.recipe}", dry_run=dry_run)
        if others := settings.keys() - known:
            raise UsageError(f"--recipe {chosen.recipe} has no setting {min(others)!r}")
    with progress_bar() as bar:
        result = getattr(quantization, function)(
            model,
            output,
            calibration_data_reader=source,
            calibration_providers=providers or opt.CPU,
            overwrite=force,
            progress=bar,
            **settings,
        )
    # A cache in int8 takes none of the inputs that an evaluation feeds.
    judged_by = None if chosen.recipe == "kv-cache" else source
    _finish(result, model, judged_by, printing, dry_run)


def _finish(
    result: QuantizeResult,
    model: Path,
    source: object,
    printing: opt.Printing,
    all_nodes: bool = False,
) -> None:
    """Print what became of a model, and how good it is where there is a text."""
    if printing.format == "text":  # before the evaluation, which may be interrupted
        _print(result.report, printing.verbose or all_nodes)
        if result.path is not None:
            print(f"wrote {result.path}")
    judged = _evaluate(result.path, model, source)
    if printing.format == "json":
        evaluation = judged
        if judged is not None and not isinstance(judged, str):
            evaluation = judged.to_dict() | {"held_back": True}
        print(json.dumps({**result.report.to_dict(), "evaluation": evaluation}))
    elif isinstance(judged, str):
        console().print(f"not evaluated: {judged}", style="yellow", soft_wrap=True)
    elif judged is not None:
        print_evaluation(judged)
        print("evaluated on the part of the text that calibration did not read")


def _evaluate(path: Path | None, floats: Path, source: object) -> Any:
    """Return an Evaluation against the float model, on text that was held back, or why not.

    None where nothing was written, or calibrated on a text.
    """
    from ortplugins.samples.text import TextSamples

    if path is None or not isinstance(source, TextSamples):
        return None
    from ortplugins.evaluation import evaluate

    given: dict[str, Any] = {"text": source.text, "tokenizer": source.tokenizer}
    with progress_bar() as bar:
        try:
            return evaluate(path, floats, share=source.held_back, progress=bar, **given)
        except (CalibrationError, ModelFileError) as error:
            return str(error)  # the quantised model is written already


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
    for item in report.floats:
        if (share := item.elements / report.elements) >= _LEAST_SHARE:
            why = f": {item.reason}" if item.reason else ""
            out.print(
                f"float: {item.op_type}, {item.weights} weights, {share:.1%}{why}",
                soft_wrap=True,
            )
    for note in report.notes:
        out.print(f"note: {note}", soft_wrap=True)
    out.print(str(report), style="bold", soft_wrap=True)


def _percent(error: float) -> str:
    return "" if math.isnan(error) else f"{error:.2%}"
