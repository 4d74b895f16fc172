# SPDX-License-Identifier: MIT
"""``ortplugins compare``: two models side by side; ``check``: one, and its bounds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import console, print_table
from ortplugins.reasons import with_code
from session_options import DqMatMulNBitsFusion

if TYPE_CHECKING:
    from ortplugins.measurement.compare import Comparison
    from ortplugins.measurement.difference import Difference, Violation
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
    format: opt.Format = "text",
) -> None:
    """Run two models on the same inputs: errors, speed and memory.

    Args:
        model (A): The reference, an .onnx file.
        other ([B]): The model to compare; without it, A after --pass.
        runs (N): Timed runs of each process; 0 for none.
        rounds (N): Processes of each model; the models take turns.
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
    if found.costs:
        rows = [
            (cost.what, _spread(cost.a, cost.unit), _spread(cost.b, cost.unit), _verdict(cost))
            for cost in found.costs
        ]
        print_table(("median (range)", "a", "b", "a / b"), rows)


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


def check(
    model: opt.Model,
    chosen: opt.ChosenPasses,
    inputs: opt.Inputs,
    max_unfused: Annotated[int | None, typer.Option(min=0)] = None,
    rtol: Annotated[float, typer.Option(min=0)] = 1e-3,
    atol: Annotated[float | None, typer.Option(min=0)] = None,
    format: opt.Format = "text",
) -> None:
    """Check an optimised model against bounds; exit with 1 if it exceeds one.

    The passes write to a temporary folder. Both models run without onnxruntime's own
    optimisers; outputs may differ by atol + rtol * |plain|. With accuracy_level=auto they may
    also differ by the greatest error of onnxruntime with all its optimisers.

    Args:
        max_unfused (N): Nodes that may keep a dequantised weight; without it, any number.
        rtol: Relative tolerance of outputs.
        atol: Absolute tolerance; else --rtol times the output's greatest magnitude.
    """
    found = _check(model, chosen, (rtol, atol), inputs, max_unfused)
    failures, unfused, fired = found["failures"], found["unfused"], found["report"]["fired"]
    if format == "json":
        typer.echo(json.dumps(found, indent=1, allow_nan=False))
    else:
        out = console()
        out.print(f"fired {fired}, unfused {len(unfused)}")
        for row in found["errors"]:
            text = f"output {row['output']!r}: max abs error {float(row['max_abs']):.3g}"
            if row["stock_max_abs"] is not None:
                text += f", onnxruntime's own {float(row['stock_max_abs']):.3g}"
            out.print(text, soft_wrap=True)
        for node, reason in unfused.items():
            out.print(f"unfused {node}: {with_code(reason)}", soft_wrap=True, style="yellow")
        for failure in failures:
            out.print(f"failed: {failure}", soft_wrap=True, style="red")
        if not failures:
            out.print("ok", style="green")
    if failures:
        raise typer.Exit(1)


def _check(
    model: Path,
    chosen: Mapping[str, Any],
    tolerance: tuple[float, float | None],
    inputs: Mapping[str, Any],
    max_unfused: int | None,
) -> Any:
    """Run the passes and compare outputs; return what was found, as JSON."""
    from ortplugins.measurement.compare import plain
    from ortplugins.measurement.difference import DifferenceSum, differences_of, find_violation
    from ortplugins.measurement.models import (
        GivenModel,
        ModelPair,
        scratch_folder,
        unfused_in,
    )
    from ortplugins.optimization.optimize import optimize
    from ortplugins.runtime.stock_session import open_model
    from session_options.plan import plan_from_settings

    passes = plan_from_settings(chosen["passes"], chosen["options"]).passes
    fusion = next((item for item in passes if isinstance(item, DqMatMulNBitsFusion)), None)
    with scratch_folder() as scratch:
        given = GivenModel(model)
        # Greatest error of onnxruntime's own optimisers, where that much is allowed.
        stock: dict[str, float] = {}
        if fusion is not None and fusion.accuracy_level == "auto":
            session = GivenModel(open_model(model, "all"))
            found = differences_of(ModelPair(given, session, scratch, **inputs).run())
            stock = {name: item.max_abs for name, item in found.items()}
        result = optimize(model, scratch / "optimised.onnx", **chosen)
        optimised = GivenModel(result)
        pair = ModelPair(given, optimised, scratch, **inputs)
        sums: dict[str, DifferenceSum] = {}
        worst: dict[str, Violation] = {}  # sample of each output that is too far away
        for sample, name, a, b in pair.run():
            sums.setdefault(name, DifferenceSum(name)).add(a, b)
            # Where onnxruntime gives NaN or an infinity of its own, no error is allowed.
            own = stock.get(name, 0.0)
            allowed = own if math.isfinite(own) else 0.0
            item = find_violation(name, sample, a, b, *tolerance, allowed)
            if item is not None and (name not in worst or item.count > worst[name].count):
                worst[name] = item
        unfused = unfused_in(optimised, fusion)
    failures = [*map(str, worst.values())]
    failures += [f"output {k!r} cannot be checked: {v}" for k, v in pair.not_compared.items()]
    if max_unfused is not None and len(unfused) > max_unfused:
        number = f"{len(unfused)}, allowed {max_unfused}"
        failures.insert(0, f"nodes with a dequantised weight: {number}: {', '.join(unfused)}")
    errors = {name: total.result().max_abs for name, total in sums.items()}
    content = {
        "ok": not failures,
        "failures": failures,
        "unfused": unfused,
        "errors": [
            {"output": name, "max_abs": error, "stock_max_abs": stock.get(name)}
            for name, error in errors.items()
        ],
        "violations": [dataclasses.asdict(item) for item in worst.values()],
        "report": result.report.to_dict(),
    }
    return plain(content)
