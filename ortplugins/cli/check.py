# SPDX-License-Identifier: MIT
"""``ortplugins check``: a model through passes, in a temporary folder, against bounds."""

from __future__ import annotations

__all__ = ["app"]

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import session_options
from ortplugins.cli.options import (
    DEFAULT_PASSES,
    Chat,
    Count,
    Dims,
    Model,
    Passes,
    ReportFormat,
    Samples,
    Seed,
    Settings,
    Text,
    Tokenizer,
    parse_dims,
    parse_settings,
    sample_source,
)
from ortplugins.cli.terminal import console

if TYPE_CHECKING:
    from ortplugins.comparison.difference import Violation
    from ortplugins.report import Report


@dataclasses.dataclass(frozen=True)
class _Checked:
    """What was found.

    Attributes:
        report: What the passes did.
        unfused: Nodes that could take no weight, by what stands in the way.
        violations: Outputs that are too far away: the worst sample of each.
        lost: Outputs that the optimised model lacks or that have no arrays, and why.
    """

    report: Report
    unfused: Mapping[str, str]
    violations: Sequence[Violation]
    lost: Mapping[str, str]


app = typer.Typer(add_completion=False)


@app.command()
def check(
    context: typer.Context,
    model: Model,
    passes: Passes = DEFAULT_PASSES,
    settings: Settings = None,
    max_unfused: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Nodes that may keep a dequantised weight; without it, any number.",
            min=0,
        ),
    ] = None,
    rtol: Annotated[float, typer.Option(help="Relative tolerance of outputs.", min=0)] = 1e-3,
    atol: Annotated[
        float | None,
        typer.Option(
            help="Absolute tolerance; else --rtol times the output's greatest magnitude.",
            min=0,
        ),
    ] = None,
    samples: Samples = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    chat: Chat = False,
    dims: Dims = "",
    count: Count = 1,
    seed: Seed = 0,
    format: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.TEXT,
) -> None:
    """Hold an optimised model to bounds: exit with 1 if it is beyond them.

    The passes write to a temporary folder. The outputs of the plain and the optimised model,
    both without onnxruntime's own optimisers, may differ by atol + rtol * |plain|.
    """
    source = sample_source(context)
    found = _check(
        model,
        passes,
        parse_settings(settings),
        (rtol, atol),
        {"inputs": source, "dims": parse_dims(dims), "samples": count, "seed": seed},
    )
    failures = _failures(found, max_unfused)
    if format is ReportFormat.JSON:
        typer.echo(_as_json(found, failures))
    elif format is ReportFormat.GITHUB:
        _print_github(found, failures, model)
    else:
        out = console()
        out.print(f"fired {len(found.report.fired)}, unfused {len(found.unfused)}")
        for node, reason in found.unfused.items():
            out.print(f"unfused {node}: {reason}", soft_wrap=True, style="yellow")
        for failure in failures:
            out.print(f"failed: {failure}", soft_wrap=True, style="red")
        if not failures:
            out.print("ok", style="green")
    if failures:
        raise typer.Exit(1)


def _check(
    model: Path,
    passes: Sequence[str],
    options: Mapping[str, str],
    tolerance: tuple[float, float | None],
    inputs: Mapping[str, Any],
) -> _Checked:
    from ortplugins.comparison.difference import find_violation
    from ortplugins.comparison.given_model import GivenModel
    from ortplugins.comparison.model_pair import ModelPair
    from ortplugins.comparison.unfused_weights import unfused_in
    from ortplugins.optimization.optimize import optimize

    with tempfile.TemporaryDirectory(
        prefix="ortplugins-", ignore_cleanup_errors=True
    ) as folder:
        scratch = Path(folder)
        result = optimize(model, scratch / "optimised.onnx", passes=passes, options=options)
        optimised = GivenModel(result)
        pair = ModelPair(GivenModel(model), optimised, scratch=scratch, **inputs)
        worst: dict[str, Violation] = {}
        for sample, name, a, b in pair.run():
            item = find_violation(name, sample, a, b, *tolerance)
            if item is not None and (name not in worst or item.count > worst[name].count):
                worst[name] = item
        unfused = unfused_in(optimised, _fusion_of(passes, options))
        return _Checked(result.report, unfused, tuple(worst.values()), pair.not_compared)


def _fusion_of(
    passes: Sequence[str], options: Mapping[str, str]
) -> session_options.DqMatMulNBitsFusion:
    """Return the fusion as the settings have it; its defaults where it is not among them."""
    from session_options.plan import plan_from_settings

    name = session_options.DqMatMulNBitsFusion.name
    if name not in passes:
        return session_options.DqMatMulNBitsFusion()
    chosen = plan_from_settings(list(passes), dict(options)).passes
    found = next(item for item in chosen if item.name == name)
    assert isinstance(found, session_options.DqMatMulNBitsFusion)
    return found


def _failures(found: _Checked, max_unfused: int | None) -> list[str]:
    failures = []
    if max_unfused is not None and len(found.unfused) > max_unfused:
        failures.append(
            f"{len(found.unfused)} nodes keep a dequantised weight, {max_unfused} may: "
            + ", ".join(found.unfused)
        )
    failures += [str(item) for item in found.violations]
    failures += [
        f"output {name!r} cannot be checked: {why}" for name, why in found.lost.items()
    ]
    return failures


def _as_json(found: _Checked, failures: Sequence[str]) -> str:
    from ortplugins.comparison.compare import plain

    content = {
        "ok": not failures,
        "failures": list(failures),
        "unfused": dict(found.unfused),
        "violations": [dataclasses.asdict(item) for item in found.violations],
        "report": found.report.to_dict(),
    }
    return json.dumps(plain(content), indent=1, allow_nan=False)


def _print_github(found: _Checked, failures: Sequence[str], model: Path) -> None:
    from ortplugins.cli.github_annotations import annotation

    for text in failures:
        typer.echo(annotation("error", text, model, "ortplugins check"))
    for node, reason in found.unfused.items():
        typer.echo(annotation("warning", reason, model, f"unfused: {node}"))
    if not failures:
        fired = len(found.report.fired)
        text = f"fired {fired}, unfused {len(found.unfused)}, outputs within bounds"
        typer.echo(annotation("notice", text, model, "ortplugins check"))
