# SPDX-License-Identifier: MIT
"""``ortplugins plan-precision``: what of a model is worth more bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.options import refuse_without_effect
from ortplugins.cli.terminal import console, print_table, progress_bar

if TYPE_CHECKING:
    from ortplugins.static_qdq.search import CurvePoint, Unit

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
    context: typer.Context,
    model: Annotated[Path, typer.Argument()],
    source: opt.GivenSamples,
    budget: Annotated[float | None, typer.Option(parser=_share)] = None,
    max_16bit: Annotated[float | None, typer.Option("--max-16bit", parser=_count)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    svg: Path | None = None,
    mode: Literal["int16", "float"] = "int16",
    target: Literal["cpu", "qnn"] = "cpu",
    reference: Path | None = None,
    weights: bool = False,
    max_8bit: Annotated[float | None, typer.Option("--max-8bit", parser=_count)] = None,
    method: str = "rtn",
    block_size: int = 32,
    max_calibration_memory: Annotated[Any, typer.Option(parser=opt.parse_size)] = "1GiB",
    providers: opt.Providers = opt.CPU,
    work_dir: Path | None = None,
    force: bool = False,
) -> None:
    """Find the few activations of an 8-bit model that deserve 16 bits.

    With --weights: find the nodes of a float model whose weights deserve 8 bits instead of 4.

    Args:
        model (MODEL): An 8-bit QDQ .onnx file.
        budget (COSINE): Of the outputs to the reference's, to be reached: 99.5%.
        max_16bit (N): Activations that may get 16 bits: a number, or a share such as 25%.
        output: File for the result: overrides for mixed_precision_boundaries.overrides, or a
            node_config for quantize; else it is printed.
        mode: What is measured: 16-bit regions, or regions in float.
        target: What runs the model.
        reference (FLOAT_MODEL): What outputs are compared with; else MODEL without its
            activations' grids.
        weights: MODEL is a float one: which nodes' weights get 8 bits, not 4.
        max_8bit (N): With --weights: nodes (a number) or weights (a share) that may get 8
            bits.
        method: With --weights: as for quantize.
        block_size: With --weights: as for quantize.
        max_calibration_memory (SIZE): What is kept of weights in float.
    """
    if weights:
        refuse_without_effect(
            context, "with --weights", "max_16bit", "reference", "mode", "target"
        )
    else:
        refuse_without_effect(context, "without --weights", "max_8bit", "method", "block_size")
    if source is None:
        raise typer.BadParameter("give inputs to measure with", param_hint="--samples")
    if budget is None and (max_8bit if weights else max_16bit) is None:
        name = "--max-8bit" if weights else "--max-16bit"
        raise typer.BadParameter(f"give --budget, {name} or both", param_hint="--budget")
    opt.check_absent(output, svg, force=force)
    with progress_bar() as bar:
        shared: dict[str, Any] = {
            "budget": budget,
            "max_calibration_memory": max_calibration_memory,
            "providers": providers,
            "work_dir": work_dir,
            "progress": bar,
        }
        if weights:
            from ortplugins.static_qdq.plan_bits import plan_bits

            bits = plan_bits(
                model,
                source,
                max_8bit=max_8bit,
                method=method,
                block_size=block_size,
                **shared,
            )
            found: Any = bits
            promoted, count, what = bits.node_config, bits.nodes, "nodes at 8 bits"
            result, drawn = json.dumps(bits.node_config), "nodes with weights of 8 bits"
        else:
            from ortplugins.static_qdq import plan

            found = plan.plan_precision(
                model,
                source,
                max_16bit=max_16bit,
                mode=mode,
                target=target,
                reference=reference,
                **shared,
            )
            promoted, count, result = found.promoted, found.activations, found.to_json()
            what = "activations in float" if mode == "float" else "activations at 16 bits"
            drawn = what
    _print(found.ranking, found.curve, frozenset(promoted), found.notes)
    before, after = found.before, found.after
    typer.echo(
        f"{len(promoted)} of {count} {what}: error {before.error:.4g} -> {after.error:.4g}, "
        f"cosine {before.cosine:.6f} -> {after.cosine:.6f}, measured on the rewritten model"
    )
    if output is None:
        typer.echo(result)
    else:
        output.write_text(result + "\n", encoding="utf-8")
        typer.echo(f"wrote {output}")
    if svg is not None:
        from ortplugins.html_report.charts import promotion_chart

        svg.write_text(promotion_chart(found.curve, drawn, str(model)), encoding="utf-8")
        typer.echo(f"wrote {svg}")


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
