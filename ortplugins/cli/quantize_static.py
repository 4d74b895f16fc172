# SPDX-License-Identifier: MIT
"""``ortplugins quantize-static``: weights and activations, some of them in 16 bits."""

from __future__ import annotations

__all__ = ["app"]

import enum
from pathlib import Path
from typing import Annotated

import typer

from ortplugins.cli.options import (
    Chat,
    Count,
    Exclude,
    Force,
    Format,
    Include,
    Mode,
    Model,
    Output,
    Providers,
    ReportFormat,
    Samples,
    Target,
    Text,
    Tokenizer,
    Verbose,
    refuse_without_effect,
    sample_source,
)
from ortplugins.cli.terminal import print_report, progress_bar


class CalibrateMethod(enum.StrEnum):
    MINMAX = "MinMax"
    ENTROPY = "Entropy"
    PERCENTILE = "Percentile"
    DISTRIBUTION = "Distribution"


app = typer.Typer(add_completion=False)


@app.command()
def quantize_static(
    context: typer.Context,
    model: Model,
    output: Output,
    samples: Samples = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    chat: Chat = False,
    count: Count = 32,
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
    promoted_type: Annotated[str, typer.Option(help="QUInt16 or QInt16.")] = "QUInt16",
    mode: Annotated[
        Mode, typer.Option(help="float leaves what is promoted unquantised: faster on CPUs.")
    ] = Mode.INT16,
    target: Annotated[
        Target,
        typer.Option(help="qnn keeps every DQ -> Q, cpu those that change values."),
    ] = Target.QNN,
    close_regions: Annotated[
        bool, typer.Option(help="The nodes around a promoted tensor compute in its type.")
    ] = True,
    activation_type: Annotated[str, typer.Option(help="QUInt8 or QInt8.")] = "QUInt8",
    weight_type: Annotated[str, typer.Option(help="QInt8, QUInt8, and others.")] = "QInt8",
    per_channel: Annotated[
        bool, typer.Option(help="Weights get a scale for each channel.")
    ] = True,
    calibrate_method: Annotated[
        CalibrateMethod, typer.Option(help="How ranges are found.")
    ] = CalibrateMethod.MINMAX,
    calibration_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ranges: read if of this model, or written."),
    ] = None,
    op_types: Annotated[
        list[str] | None,
        typer.Option("--op-type", help="Operators to quantise; repeatable."),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    providers: Providers = None,
    force: Force = False,
    verbose: Verbose = False,
    format: Annotated[Format, typer.Option("--format")] = Format.TEXT,
) -> None:
    """Quantise weights and activations, some activations to 16 bits."""
    from ortplugins.quantization.activations.static_mixed import quantize_static_mixed
    from rewrite_rules.mixed_precision_boundaries.tensor_overrides import OverrideError

    if format is Format.JSON:
        refuse_without_effect(context, "with --format json", "verbose")
    source = sample_source(context)
    if mode is Mode.FLOAT:
        refuse_without_effect(context, "with --mode float", "promoted_type")
    try:
        with progress_bar() as bar:
            report = quantize_static_mixed(
                model,
                output,
                source,
                overrides=overrides,
                promote=promote or (),
                promoted_type=promoted_type,
                mode=str(mode),
                target=str(target),
                close_regions=close_regions,
                activation_type=activation_type,
                weight_type=weight_type,
                per_channel=per_channel,
                calibrate_method=str(calibrate_method),
                calibration_cache=calibration_cache,
                op_types_to_quantize=op_types,
                nodes_to_quantize=include or (),
                nodes_to_exclude=exclude or (),
                calibration_providers=providers or ("CPUExecutionProvider",),
                overwrite=force,
                progress=bar,
            ).report
    except OverrideError as error:
        raise typer.BadParameter(str(error), param_hint="--overrides") from None
    print_report(report, ReportFormat(format), verbose, model)
    if format is Format.TEXT:
        typer.echo(f"wrote {output}")
