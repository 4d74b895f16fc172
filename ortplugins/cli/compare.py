# SPDX-License-Identifier: MIT
"""``ortplugins compare``: two models side by side, and bounds for CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter
from cyclopts.validators import Number

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import console, print_table, progress_bar
from ortplugins.errors import UsageError

if TYPE_CHECKING:
    from ortplugins.measurement.compare import Comparison
    from ortplugins.measurement.measure import Cost, Spread

NotNegative: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0))]
Bound: TypeAlias = Annotated[float | None, Parameter(validator=Number(gte=0))]


def compare(
    a: Path,
    b: Path | None = None,
    /,
    *,
    passes: opt.Passes = (),
    settings: opt.Settings = (),
    given: opt.GivenSamples = opt.GivenSamples(),
    dims: opt.Dims = "",
    seed: NotNegative | None = None,
    runs: NotNegative = 10,
    rounds: opt.Positive = 5,
    providers: opt.Providers = opt.CPU,
    rtol: Bound = None,
    atol: Bound = None,
    max_unfused: NotNegative | None = None,
    format: opt.Format = "text",
) -> None:
    """Run two models on the same inputs: errors, speed and memory.

    Exit with 1 if B exceeds a bound: --rtol, --atol, --max-unfused. Without samples or text,
    --count inputs are made up, 1 by default.

    Args:
        a: The reference, an .onnx file.
        b: The model to compare; without it, A after --pass.
        seed: Seed of made-up samples.
        runs: Timed runs of each process; 0 for none.
        rounds: Processes of each model; the models take turns.
        rtol: Outputs may differ by atol + rtol * |a|.
        atol: The same; default: --rtol times the output's greatest magnitude.
        max_unfused: Nodes of B that may keep a dequantised weight.
    """
    from ortplugins.measurement.compare import compare

    if b is not None:
        opt.refuse("with B", **{"pass": passes, "set": settings})
    elif not passes:
        raise UsageError("B is missing: give a second model, or --pass NAME")
    if given.text is not None or given.samples:
        source = "--text" if given.text else "--samples"
        opt.refuse(f"with {source}", dims=dims, seed=seed)
    made_up = given == opt.GivenSamples(count=given.count)
    with progress_bar() as bar:
        found = compare(
            a,
            b,
            passes=passes,
            options=opt.parse_settings(settings),
            runs=runs,
            rounds=rounds,
            providers=providers,
            rtol=rtol,
            atol=atol,
            max_unfused=max_unfused,
            inputs=None if made_up else given.read(a),
            dims=opt.parse_dims(dims),
            samples=given.count or 1,
            seed=seed or 0,
            progress=bar,
        )
    if format == "json":
        print(found.to_json())
    else:
        _print(found)
    if found.failures:
        sys.exit(1)


def _print(found: Comparison) -> None:
    out = console()
    if found.report is not None:
        out.print(str(found.report), soft_wrap=True)
    out.print(str(found), soft_wrap=True)
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
