# SPDX-License-Identifier: MIT
"""``ortplugins plan-precision``: what of a model is worth more bits."""

from __future__ import annotations

__all__ = ["app"]

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortplugins.cli.options import (
    Chat,
    Count,
    Force,
    Mode,
    Providers,
    Samples,
    SvgFile,
    Target,
    Text,
    Tokenizer,
    WorkDir,
    check_absent,
    refuse_without_effect,
    sample_source,
)
from ortplugins.cli.terminal import console, parse_size, print_table, progress_bar

if TYPE_CHECKING:
    from ortplugins.quantization.planner.deviation import Deviation
    from ortplugins.quantization.planner.search import CurvePoint, Effect

_SHOWN = 20


app = typer.Typer(add_completion=False)


@app.command()
def plan_precision(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An 8-bit QDQ .onnx file.")],
    samples: Samples = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    chat: Chat = False,
    count: Count = 32,
    budget: Annotated[
        str,
        typer.Option(
            metavar="COSINE", help="Of the outputs to the reference's, to be reached: 99.5%."
        ),
    ] = "",
    max_16bit: Annotated[
        str,
        typer.Option(
            "--max-16bit",
            metavar="N",
            help="Activations that may get 16 bits: a number, or a share such as 25%.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the result: overrides for mixed_precision_boundaries.overrides, or "
            "a node_config for quantize; else it is printed.",
        ),
    ] = None,
    svg: SvgFile = None,
    mode: Annotated[
        Mode, typer.Option(help="What is measured: 16-bit regions, or regions in float.")
    ] = Mode.INT16,
    target: Annotated[Target, typer.Option(help="What runs the model.")] = Target.CPU,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FLOAT_MODEL",
            help="What outputs are compared with; else MODEL without its activations' grids.",
        ),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="MODEL is a float one: which nodes' weights get 8 bits, not 4."
        ),
    ] = False,
    max_8bit: Annotated[
        str,
        typer.Option(
            "--max-8bit",
            metavar="N",
            help="With --weights: nodes that may get 8 bits, a number or a share.",
        ),
    ] = "",
    method: Annotated[str, typer.Option(help="With --weights: as for quantize.")] = "rtn",
    block_size: Annotated[int, typer.Option(help="With --weights: as for quantize.")] = 32,
    max_calibration_memory: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="What is kept of activations and outputs, so that less is run again.",
        ),
    ] = "1GiB",  # type: ignore[assignment]
    providers: Providers = None,
    work_dir: WorkDir = None,
    force: Force = False,
) -> None:
    """Find the few activations of an 8-bit model that deserve 16 bits.

    With --weights: find the nodes of a float model whose weights deserve 8 bits instead of 4.
    """
    if weights:
        refuse_without_effect(
            context, "with --weights", "max_16bit", "reference", "mode", "target"
        )
    else:
        refuse_without_effect(context, "without --weights", "max_8bit", "method", "block_size")
    source = sample_source(context)
    if source is None:
        raise typer.BadParameter("give inputs to measure with", param_hint="--samples")
    limit = max_8bit if weights else max_16bit
    if not budget and not limit:
        name = "--max-8bit" if weights else "--max-16bit"
        raise typer.BadParameter(f"give --budget, {name} or both", param_hint="--budget")
    cosine = _share(budget, "--budget") if budget else None
    most = _count(limit) if limit else None
    check_absent(output, svg, force=force)
    if weights:
        from ortplugins.quantization.planner.weights import plan_bits

        with progress_bar() as bar:
            bits = plan_bits(
                model,
                source,
                budget=cosine,
                max_8bit=most,
                method=method,
                block_size=block_size,
                max_calibration_memory=max_calibration_memory,
                providers=providers or ("CPUExecutionProvider",),
                work_dir=work_dir,
                progress=bar,
            )
        _print(bits.ranking, bits.curve, frozenset(bits.node_config), bits.notes)
        _conclude(
            len(bits.node_config), bits.nodes, "nodes at 8 bits", bits.before, bits.after
        )
        result, what = json.dumps(bits.node_config), "nodes with weights of 8 bits"
        curve = bits.curve
    else:
        from ortplugins.quantization.planner.activations import plan_precision

        with progress_bar() as bar:
            plan = plan_precision(
                model,
                source,
                budget=cosine,
                max_16bit=most,
                mode=str(mode),
                target=str(target),
                reference=reference,
                max_calibration_memory=max_calibration_memory,
                providers=providers or ("CPUExecutionProvider",),
                work_dir=work_dir,
                progress=bar,
            )
        _print(plan.ranking, plan.curve, frozenset(plan.promoted), plan.notes)
        named = "activations in float" if mode is Mode.FLOAT else "activations at 16 bits"
        _conclude(len(plan.promoted), plan.activations, named, plan.before, plan.after)
        result, what, curve = plan.to_json(), named, plan.curve
    _write(result, what, curve, output, svg, str(model))


def _write(
    text: str,
    what: str,
    curve: Sequence[CurvePoint],
    output: Path | None,
    svg: Path | None,
    title: str,
) -> None:
    from ortplugins.html_report.charts import promotion_chart

    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
        typer.echo(f"wrote {output}")
    if svg is not None:
        svg.write_text(promotion_chart(curve, what, title), encoding="utf-8")
        typer.echo(f"wrote {svg}")


def _share(text: str, option: str) -> float:
    """Read 99.5% or 0.995."""
    try:
        number = float(text.removesuffix("%").strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a number or a percentage", param_hint=option
        ) from None
    return number / 100 if text.endswith("%") else number


def _count(text: str) -> float:
    """Read 24 as a number and 25% as a share."""
    if text.endswith("%"):
        return _share(text, "--max-16bit, --max-8bit")
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: a number, or a share such as 25%, is expected",
            param_hint="--max-16bit, --max-8bit",
        ) from None


def _print(
    ranking: Sequence[Effect],
    curve: Sequence[CurvePoint],
    promoted: frozenset[str],
    notes: Sequence[str],
) -> None:
    """Print the ranking down to the last promoted one, then the curve."""
    from ortplugins.html_report.charts import promotion_bars

    steps = {name: point for point in curve for name in point.added}
    last = max(
        (i for i, effect in enumerate(ranking) if promoted & set(effect.names)), default=0
    )
    rows = []
    for number, effect in enumerate(ranking[: max(_SHOWN, last + 1)], 1):
        step = steps.get(effect.names[0])
        chosen = promoted & set(effect.names)
        rows.append(
            (
                str(number),
                ", ".join(effect.names),
                effect.operator,
                f"{effect.error:.3g}",
                "yes" if chosen else "",
                "" if step is None or not chosen else f"{step.deviation.error:.3g}",
                "" if step is None or not chosen else f"{step.deviation.cosine:.6f}",
            )
        )
    print_table(
        ("", "Name", "Operator", "Its error alone", "Promoted", "Error then", "Cosine"), rows
    )
    for line in promotion_bars(curve):
        typer.echo(line)
    for note in notes:
        console().print(f"note: {note}", soft_wrap=True)


def _conclude(
    promoted: int, count: int, what: str, before: Deviation, after: Deviation
) -> None:
    typer.echo(
        f"{promoted} of {count} {what}: error {before.error:.4g} -> {after.error:.4g}, "
        f"cosine {before.cosine:.6f} -> {after.cosine:.6f}, measured on the rewritten model"
    )
