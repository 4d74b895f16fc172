# SPDX-License-Identifier: MIT
"""``ortplugins quantize-static``: weights and activations, some of them in 16 bits."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, progress_bar


def quantize_static(
    model: opt.Model,
    output: opt.Output,
    source: opt.GivenSamples,
    printing: opt.ReportPrinting,
    overrides: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="""{"TENSOR": [{"quant_type": "QUInt16"}]}, or @FILE with that.""",
        ),
    ] = "{}",
    promote: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A tensor or node to give 16 bits; repeatable."),
    ] = None,
    mode: Annotated[
        Literal["int16", "float"],
        typer.Option(help="float leaves what is promoted unquantised: faster on CPUs."),
    ] = "int16",
    target: Annotated[
        Literal["cpu", "qnn"],
        typer.Option(help="qnn keeps every DQ -> Q, cpu those that change values."),
    ] = "qnn",
    activation_type: Annotated[str, typer.Option(help="QUInt8 or QInt8.")] = "QUInt8",
    weight_type: Annotated[str, typer.Option(help="QInt8, QUInt8, and others.")] = "QInt8",
    per_channel: Annotated[
        bool, typer.Option(help="Weights get a scale for each channel.")
    ] = True,
    calibrate_method: Annotated[
        Literal["MinMax", "Entropy", "Percentile", "Distribution"],
        typer.Option(help="How ranges are found."),
    ] = "MinMax",
    op_types: Annotated[
        list[str] | None,
        typer.Option("--op-type", help="Operators to quantise; repeatable."),
    ] = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    providers: opt.Providers = opt.CPU,
    force: opt.Force = False,
) -> None:
    """Quantise weights and activations, some activations to 16 bits."""
    from ortplugins.quantization.activations.static_mixed import quantize_static_mixed
    from rewrite_rules.mixed_precision_boundaries.tensor_overrides import OverrideError
    from session_options.keys import OptionError

    try:
        with progress_bar() as bar:
            report = quantize_static_mixed(
                model,
                output,
                source,
                overrides=overrides,
                promote=promote or (),
                mode=mode,
                target=target,
                activation_type=activation_type,
                weight_type=weight_type,
                per_channel=per_channel,
                calibrate_method=calibrate_method,
                op_types_to_quantize=op_types,
                nodes_to_quantize=include or (),
                nodes_to_exclude=exclude or (),
                calibration_providers=providers,
                overwrite=force,
                progress=bar,
            ).report
    except (OptionError, OverrideError) as error:
        raise typer.BadParameter(str(error), param_hint="--overrides") from None
    print_report(report, printing, model)
    if printing.format == "text":
        typer.echo(f"wrote {output}")
