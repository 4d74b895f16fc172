# SPDX-License-Identifier: MIT
"""``ortplugins compare``: two models side by side, and bounds for CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import console, print_table

if TYPE_CHECKING:
    from ortplugins.measurement.compare import Comparison
    from ortplugins.measurement.difference import Difference
    from ortplugins.measurement.measure import Cost, Spread


def compare(
    context: typer.Context,
    model: Annotated[Path, typer.Argument()],
    inputs: opt.Inputs,
    other: Annotated[Path | None, typer.Argument()] = None,
    passes: opt.Passes = [],  # noqa: B006  typer copies it
    settings: opt.Settings = None,
    runs: Annotated[int, typer.Option(min=0)] = 10,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    providers: opt.Providers = opt.CPU,
    rtol: Annotated[float | None, typer.Option(min=0)] = None,
    atol: Annotated[float | None, typer.Option(min=0)] = None,
    max_unfused: Annotated[int | None, typer.Option(min=0)] = None,
    format: opt.Format = "text",
) -> None:
    """Run two models on the same inputs: errors, speed and memory.

    Exit with 1 if B exceeds a bound: --rtol, --atol, --max-unfused.

    Args:
        model (A): The reference, an .onnx file.
        other ([B]): The model to compare; without it, A after --pass.
        runs (N): Timed runs of each process; 0 for none.
        rounds (N): Processes of each model; the models take turns.
        rtol: Outputs may differ by atol + rtol * |a|.
        atol: The same; default: --rtol times the output's greatest magnitude.
        max_unfused (N): Nodes of B that may keep a dequantised weight.
    """
    from ortplugins.measurement.compare import compare

    if other is not None and passes:
        raise typer.BadParameter("has no effect beside B", param_hint="--pass")
    if other is None and not passes:
        raise typer.BadParameter("give a second model, or --pass NAME", param_hint="B")
    if not passes:
        opt.refuse_without_effect(context, "without --pass", "settings")
    if not runs:
        opt.refuse_without_effect(context, "with --runs 0", "rounds")
    found = compare(
        model,
        other,
        passes=passes,
        options=opt.parse_settings(settings),
        runs=runs,
        rounds=rounds,
        providers=providers,
        rtol=rtol,
        atol=atol,
        max_unfused=max_unfused,
        **inputs,
    )
    if format == "json":
        typer.echo(found.to_json())
    else:
        _print(found)
    if found.failures:
        raise typer.Exit(1)


def _print(found: Comparison) -> None:
    out = console()
    out.print(f"a: {found.a}", soft_wrap=True)
    out.print(f"b: {found.b}", soft_wrap=True)
    if found.report is not None:
        out.print(str(found.report), soft_wrap=True)
    print_table(
        ("Output", "Max abs", "Relative RMS", "Cosine", ""),
        [(d.name, *_figures(d)) for d in found.outputs],
    )
    for name, why in found.not_compared.items():
        out.print(f"output {name!r} not compared: {why}", soft_wrap=True)
    if found.costs:
        rows = [
            (cost.what, _spread(cost.a, cost.unit), _spread(cost.b, cost.unit), _verdict(cost))
            for cost in found.costs
        ]
        print_table(("median (range)", "a", "b", "a / b"), rows)
    for failure in found.failures:
        out.print(f"failed: {failure}", soft_wrap=True, style="red")


def _spread(spread: Spread, unit: str) -> str:
    scale, name = (1e3, "ms") if unit == "s" else (1e-6, "MB")
    median, least, most = (
        f"{scale * value:.4g}"
        for value in (spread.median, min(spread.values), max(spread.values))
    )
    return f"{median} {name} ({least} to {most})"


def _verdict(cost: Cost) -> str:
    """Return the ratio, where the runs of the models differ by 1 % or more."""
    ratio = "" if cost.ratio is None else f"{cost.ratio:.2f}"
    return "no difference" if cost.differs is False or ratio == "1.00" else ratio


def _figures(d: Difference) -> tuple[str, ...]:
    return f"{d.max_abs:.3g}", f"{d.relative_rms:.3g}", f"{d.cosine:.7f}", d.mismatch
