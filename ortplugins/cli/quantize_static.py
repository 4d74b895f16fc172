# SPDX-License-Identifier: MIT
"""``ortplugins quantize-static``: weights and activations, some of them in 16 bits."""

from __future__ import annotations

from typing import Literal

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, progress_bar


def quantize_static(
    model: opt.Model,
    output: opt.Output,
    source: opt.GivenSamples,
    printing: opt.ReportPrinting,
    overrides: str = "{}",
    promote: list[str] | None = None,
    mode: Literal["int16", "float"] = "int16",
    target: Literal["cpu", "qnn"] = "qnn",
    per_channel: bool = True,
    nodes_to_include: opt.Include = None,
    nodes_to_exclude: opt.Exclude = None,
    providers: opt.Providers = opt.CPU,
    force: bool = False,
) -> None:
    """Quantise weights and activations, some activations to 16 bits.

    Args:
        overrides (JSON): {"TENSOR": [{"quant_type": "QUInt16"}]}, or @FILE with that.
        promote (NAME): A tensor or node to give 16 bits; repeatable.
        mode: float leaves what is promoted unquantised: faster on CPUs.
        target: qnn keeps every DQ -> Q, cpu those that change values.
        per_channel: Weights get a scale for each channel.
    """
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
                per_channel=per_channel,
                nodes_to_quantize=nodes_to_include or (),
                nodes_to_exclude=nodes_to_exclude or (),
                calibration_providers=providers,
                overwrite=force,
                progress=bar,
            ).report
    except (OptionError, OverrideError) as error:
        raise typer.BadParameter(str(error), param_hint="--overrides") from None
    print_report(report, printing, model)
    if printing.format == "text":
        typer.echo(f"wrote {output}")
