# SPDX-License-Identifier: MIT
"""``ortplugins plan-precision``: which activations are worth 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import console, print_table, progress_bar

if TYPE_CHECKING:
    from ortplugins.static_qdq.plan import CurvePoint, Unit

_SHOWN = 20


def _share(text: str) -> float:
    """Read 99.5% or 0.995."""
    try:
        number = float(text.removesuffix("%").strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number or a percentage") from None
    return number / 100 if text.endswith("%") else number


def _count(text: str) -> float:
    """Read 24 as a number and 25% as a share."""
    try:
        return _share(text) if text.endswith("%") else int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: a number, or a share such as 25%, is expected"
        ) from None


def plan_precision(
    model: Annotated[Path, typer.Argument()],
    source: opt.GivenSamples,
    budget: Annotated[float | None, typer.Option(parser=_share)] = None,
    max_16bit: Annotated[float | None, typer.Option("--max-16bit", parser=_count)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    mode: Literal["int16", "float"] = "int16",
    target: Literal["cpu", "qnn"] = "cpu",
    providers: opt.Providers = opt.CPU,
    force: bool = False,
) -> None:
    """Find the few activations of an 8-bit model that deserve 16 bits.

    Args:
        model (MODEL): An 8-bit QDQ .onnx file.
        budget (COSINE): Least cosine of the outputs to those with unquantised activations, for
            example 99.5%.
        max_16bit (N): Activations that may get 16 bits: a number, or a share such as 25%.
        output: File for the overrides that mixed_precision_boundaries.overrides takes;
            without it they are printed.
        mode: Measure promoted regions in 16 bits, or in float.
        target: What the model will run on.
    """
    if source is None:
        raise typer.BadParameter("give inputs, here or by --text", param_hint="--samples")
    if budget is None and max_16bit is None:
        raise typer.BadParameter("give --budget, --max-16bit or both", param_hint="--budget")
    from ortplugins.model_io.saving import check_absent
    from ortplugins.static_qdq import plan

    check_absent([] if output is None else [output], force)

    with progress_bar() as bar:
        found = plan.plan_precision(
            model,
            source,
            budget=budget,
            max_16bit=max_16bit,
            mode=mode,
            target=target,
            providers=providers,
            progress=bar,
        )
    _print(found.ranking, found.curve, frozenset(found.promoted), found.notes)
    before, after = found.before, found.after
    what = "activations in float" if mode == "float" else "activations at 16 bits"
    typer.echo(
        f"{len(found.promoted)} of {found.activations} {what}: error {before.error:.4g} -> "
        f"{after.error:.4g}, cosine {before.cosine:.6f} -> {after.cosine:.6f}, measured on "
        "the rewritten model"
    )
    if output is None:
        typer.echo(found.to_json())
    else:
        output.write_text(found.to_json() + "\n", encoding="utf-8")
        typer.echo(f"wrote {output}")


def _print(
    ranking: Sequence[Unit],
    curve: Sequence[CurvePoint],
    promoted: frozenset[str],
    notes: Sequence[str],
) -> None:
    """Print the ranking down to the last promoted one, then the curve."""
    steps = {name: point for point in curve for name in point.added}
    chosen = [not promoted.isdisjoint(unit.names) for unit in ranking]
    last = max((i for i, item in enumerate(chosen) if item), default=0)
    rows = []
    for number, unit in enumerate(ranking[: max(_SHOWN, last + 1)], 1):
        step = steps.get(unit.names[0]) if chosen[number - 1] else None
        then = step and step.deviation
        rows.append(
            (
                str(number),
                ", ".join(unit.names),
                unit.operator,
                f"{unit.error:.3g}",
                "yes" if chosen[number - 1] else "",
                f"{then.error:.3g}" if then else "",
                f"{then.cosine:.6f}" if then else "",
            )
        )
    print_table(
        ("", "Name", "Operator", "Its error alone", "Promoted", "Error then", "Cosine"), rows
    )
    for note in notes:
        console().print(f"note: {note}", soft_wrap=True)
