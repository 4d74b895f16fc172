# SPDX-License-Identifier: MIT
"""``ortplugins check``: a model through passes, in a temporary folder, against bounds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import annotation, console
from ortplugins.reasons import with_code
from session_options import DqMatMulNBitsFusion

if TYPE_CHECKING:
    from ortplugins.comparison.difference import Violation
    from ortplugins.report import Report


def check(
    model: opt.Model,
    chosen: opt.ChosenPasses,
    inputs: opt.Inputs,
    max_unfused: Annotated[int | None, typer.Option(min=0)] = None,
    rtol: Annotated[float, typer.Option(min=0)] = 1e-3,
    atol: Annotated[float | None, typer.Option(min=0)] = None,
    format: opt.ReportFormat = "text",
) -> None:
    """Hold an optimised model to bounds: exit with 1 if it is beyond them.

    The passes write to a temporary folder. The outputs of the plain and the optimised model,
    both without onnxruntime's own optimisers, may differ by atol + rtol * |plain|. Where
    accuracy_level is auto, by the greatest error of onnxruntime with all its optimisers, too.

    Args:
        max_unfused (N): Nodes that may keep a dequantised weight; without it, any number.
        rtol: Relative tolerance of outputs.
        atol: Absolute tolerance; else --rtol times the output's greatest magnitude.
    """
    report, unfused, errors, violations, lost = _check(model, chosen, (rtol, atol), inputs)
    failures = [*map(str, violations)]
    failures += [f"output {name!r} cannot be checked: {why}" for name, why in lost.items()]
    if max_unfused is not None and len(unfused) > max_unfused:
        names = ", ".join(unfused)
        text = f"{len(unfused)} nodes keep a dequantised weight, {max_unfused} may: {names}"
        failures.insert(0, text)
    if format == "json":
        from ortplugins.comparison.compare import plain

        content = {
            "ok": not failures,
            "failures": failures,
            "unfused": unfused,
            "errors": [
                {"output": name, "max_abs": error, "stock_max_abs": own}
                for name, (error, own) in errors.items()
            ],
            "violations": [dataclasses.asdict(item) for item in violations],
            "report": report.to_dict(),
        }
        typer.echo(json.dumps(plain(content), indent=1, allow_nan=False))
    elif format == "github":
        for text in failures:
            typer.echo(annotation("error", text, model, "ortplugins check"))
        for node, reason in unfused.items():
            typer.echo(annotation("warning", with_code(reason), model, f"unfused: {node}"))
        if not failures:
            text = f"fired {len(report.fired)}, unfused {len(unfused)}, outputs within bounds"
            typer.echo(annotation("notice", text, model, "ortplugins check"))
    else:
        out = console()
        out.print(f"fired {len(report.fired)}, unfused {len(unfused)}")
        for name, (error, own) in errors.items():
            text = "" if own is None else f", onnxruntime's own {own:.3g}"
            out.print(f"output {name!r}: max abs error {error:.3g}{text}", soft_wrap=True)
        for node, reason in unfused.items():
            out.print(f"unfused {node}: {with_code(reason)}", soft_wrap=True, style="yellow")
        for failure in failures:
            out.print(f"failed: {failure}", soft_wrap=True, style="red")
        if not failures:
            out.print("ok", style="green")
    if failures:
        raise typer.Exit(1)


class _Checked(NamedTuple):
    """What the passes did to a model, and to its outputs."""

    report: Report
    unfused: Mapping[str, str]  # nodes that could take no weight, by what stands in the way
    # Greatest absolute error of each output, and that of onnxruntime with all its optimisers,
    # where that much is allowed.
    errors: Mapping[str, tuple[float, float | None]]
    violations: Collection[Violation]  # the worst sample of each output that is too far away
    lost: Mapping[str, str]  # outputs that have no arrays on both sides, and why


def _check(
    model: Path,
    chosen: Mapping[str, Any],
    tolerance: tuple[float, float | None],
    inputs: Mapping[str, Any],
) -> _Checked:
    """Run the passes and compare outputs."""
    from ortplugins.comparison.difference import difference_of, find_violation
    from ortplugins.comparison.models import (
        GivenModel,
        InputChoice,
        ModelPair,
        scratch_folder,
        unfused_in,
    )
    from ortplugins.optimization.optimize import optimize
    from ortplugins.runtime.stock_session import open_model
    from session_options.plan import plan_from_settings

    on = InputChoice(**inputs)
    passes = plan_from_settings(chosen["passes"], chosen["options"]).passes
    fusion = next((item for item in passes if isinstance(item, DqMatMulNBitsFusion)), None)
    with scratch_folder() as scratch:
        plain = GivenModel(model)
        stock: dict[tuple[int, str], float] = {}
        if fusion is not None and fusion.accuracy_level == "auto":
            session = GivenModel(open_model(model, "all"))
            for sample, name, a, b in ModelPair(plain, session, on, scratch).run():
                stock[sample, name] = difference_of(name, a, b).max_abs
        result = optimize(model, scratch / "optimised.onnx", **chosen)
        optimised = GivenModel(result)
        pair = ModelPair(plain, optimised, on, scratch)
        errors: dict[str, tuple[float, float | None]] = {}
        worst: dict[str, Violation] = {}
        for sample, name, a, b in pair.run():
            own = stock.get((sample, name))
            before = errors.get(name, (0.0, own))
            error = max(difference_of(name, a, b).max_abs, before[0])
            errors[name] = error, own if own is None else max(own, before[1] or 0.0)
            # Where onnxruntime gives NaN or an infinity of its own, no error is allowed.
            allowed = own if own is not None and math.isfinite(own) else 0.0
            item = find_violation(name, sample, a, b, *tolerance, allowed)
            if item is not None and (name not in worst or item.count > worst[name].count):
                worst[name] = item
        unfused = unfused_in(optimised, fusion)
        return _Checked(result.report, unfused, errors, worst.values(), pair.not_compared)
