# SPDX-License-Identifier: MIT
"""``ortplugins compare``: two models, or one before and after passes, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import console, print_table

if TYPE_CHECKING:
    from ortplugins.comparison.compare import Comparison
    from ortplugins.comparison.difference import Difference
    from ortplugins.comparison.layers import LayerComparison
    from ortplugins.measurement.measure import Cost, Spread

# Nodes of one model only that are named; --format json has all.
_SHOWN = 20


def compare(
    context: typer.Context,
    model: Annotated[Path, typer.Argument()],
    inputs: opt.Inputs,
    other: Annotated[Path | None, typer.Argument()] = None,
    passes: opt.Passes = [],  # noqa: B006  typer copies it
    settings: opt.Settings = None,
    layers: bool = False,
    runs: Annotated[int, typer.Option(min=0)] = 10,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    providers: opt.Providers = opt.CPU,
    format: opt.Format = "text",
) -> None:
    """Run two models on the same inputs: errors, speed and memory.

    Args:
        model (A): An .onnx file: the reference.
        other ([B]): Another; else A after --pass.
        layers: Compare what each node computes, too.
        runs (N): Timed runs of each process; 0 for none.
        rounds (N): Processes of each, which run in turn.
    """
    from ortplugins.comparison.compare import compare

    if other is not None and passes:
        raise typer.BadParameter("B is given, so no pass makes it", param_hint="--pass")
    if other is None and not passes:
        raise typer.BadParameter("give B, or --pass NAME for A after passes", param_hint="B")
    if not passes:
        opt.refuse_without_effect(context, "without --pass", "settings")
    if not runs:
        opt.refuse_without_effect(context, "with --runs 0", "rounds")
    found = compare(
        model,
        other,
        passes=passes,
        options=opt.parse_settings(settings),
        layers=layers,
        runs=runs,
        rounds=rounds,
        providers=providers,
        **inputs,
    )
    if format == "json":
        typer.echo(found.to_json())
    else:
        _print(found)


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
    if found.layers is not None:
        _print_layers(found, found.layers)
    if found.costs:
        rows = [
            (cost.what, _spread(cost.a, cost.unit), _spread(cost.b, cost.unit), _verdict(cost))
            for cost in found.costs
        ]
        print_table(("median (range)", "a", "b", "a / b"), rows)


def _print_layers(found: Comparison, layers: LayerComparison) -> None:
    out = console()
    print_table(
        ("Node", "Operator", "Value", "Max abs", "Relative RMS", "Cosine", ""),
        [
            (
                layer.node,
                layer.op_type
                if layer.op_type == layer.other_op_type
                else f"{layer.op_type} -> {layer.other_op_type}",
                (d := layer.difference).name,
                *_figures(d),
            )
            for layer in layers.layers
        ],
    )
    for which, nodes in (("a", layers.only_a), ("b", layers.only_b)):
        if nodes:
            named = ", ".join(f"{name} ({op_type})" for name, op_type in nodes[:_SHOWN])
            more = f", and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
            out.print(f"{len(nodes)} nodes in {which} only: {named}{more}", soft_wrap=True)
    if layers.not_compared:
        names = ", ".join(layers.not_compared)
        out.print(f"no tensors of numbers, not compared: {names}", soft_wrap=True)
    parted = found.first_divergence
    if parted is None:
        typer.echo("no value of both has parted")
        return
    d = parted.difference
    why = d.mismatch or f"relative RMS error {d.relative_rms:.3g}"
    node = f"{parted.node} ({parted.op_type}), value {d.name!r}"
    out.print(f"first node where they part: {node}: {why}", soft_wrap=True)


def _spread(spread: Spread, unit: str) -> str:
    scale, name = (1e3, "ms") if unit == "s" else (1e-6, "MB")
    median, least, most = (
        f"{scale * value:.4g}"
        for value in (spread.median, min(spread.values), max(spread.values))
    )
    return f"{median} {name} ({least} to {most})"


def _verdict(cost: Cost) -> str:
    """Return the ratio, where the runs tell the models apart by 1 % or more."""
    ratio = "" if cost.ratio is None else f"{cost.ratio:.2f}"
    return "no difference" if cost.differs is False or ratio == "1.00" else ratio


def _figures(d: Difference) -> tuple[str, ...]:
    return f"{d.max_abs:.3g}", f"{d.relative_rms:.3g}", f"{d.cosine:.7f}", d.mismatch
