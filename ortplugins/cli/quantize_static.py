# SPDX-License-Identifier: MIT
"""``ortplugins quantize-static``: 8 bits, and 16 for the activations that are worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, print_table, progress_bar

if TYPE_CHECKING:
    from ortplugins.static_qdq.plan import PrecisionPlan

_SHOWN = 20


def quantize_static(
    model: opt.Model,
    /,
    *,
    output: opt.Output,
    given: opt.GivenSamples = opt.GivenSamples(),
    printing: opt.Printing = opt.Printing(),
    promote: tuple[str, ...] = (),
    budget: float | None = None,
    max_16bit: Annotated[float | None, Parameter("--max-16bit")] = None,
    mode: Literal["int16", "float"] = "int16",
    per_channel: Annotated[bool, Parameter(negative="--no-per-channel")] = True,
    nodes_to_exclude: opt.Exclude = (),
    providers: opt.Providers = opt.CPU,
    force: opt.Force = False,
) -> None:
    """Quantise weights and activations to 8 bits, chosen activations to 16.

    With --budget or --max-16bit, find the activations that cost most accuracy and promote
    them; also in a model that is already quantised.

    Args:
        promote: A tensor or node to give 16 bits; repeatable.
        budget: Promote until the outputs have this cosine to those with unquantised
            activations, for example 0.995.
        max_16bit: Share of the activations to promote at most, for example 0.25.
        mode: Promote to int16, or leave in float, which is faster on CPUs.
        per_channel: Give weights one scale per channel.
    """
    import onnxruntime

    from ortplugins.static_qdq.quantize_static import quantize_static_mixed

    printing.check()
    source = given.read(model)
    # Its calibrators' sessions warn of each weight that is an input, as in older files.
    onnxruntime.set_default_logger_severity(3)
    with progress_bar() as bar:
        result = quantize_static_mixed(
            model,
            output,
            source,
            promote=promote,
            budget=budget,
            max_16bit=max_16bit,
            mode=mode,
            nodes_to_exclude=nodes_to_exclude,
            calibration_providers=providers,
            overwrite=force,
            progress=bar,
            **({} if per_channel else {"per_channel": False}),
        )
    if result.plan is not None and printing.format == "text":
        _print_plan(result.plan, mode)
    print_report(result.report, printing)
    if printing.format == "text":
        print(f"wrote {output}")


def _print_plan(plan: PrecisionPlan, mode: str) -> None:
    """Print the ranking down to the last promoted one, then the errors."""
    promoted = frozenset(plan.promoted)
    chosen = [not promoted.isdisjoint(unit.names) for unit in plan.ranking]
    last = max((i for i, item in enumerate(chosen) if item), default=0)
    shown = plan.ranking[: max(_SHOWN, last + 1)]
    rows = [
        (
            str(number),
            ", ".join(unit.names),
            unit.operator,
            f"{unit.error:.3g}",
            "yes" if chosen[number - 1] else "",
        )
        for number, unit in enumerate(shown, 1)
    ]
    print_table(("", "Name", "Operator", "Its error alone", "Promoted"), rows)
    before, after = plan.before, plan.after
    what = "activations in float" if mode == "float" else "activations at 16 bits"
    print(
        f"{len(promoted)} of {plan.activations} {what}: error {before.error:.4g} -> "
        f"{after.error:.4g}, cosine {before.cosine:.6f} -> {after.cosine:.6f}"
    )
