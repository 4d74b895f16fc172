# SPDX-License-Identifier: MIT
"""``ortplugins inspect``: what passes would do to a model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report


def inspect(
    model: opt.Model,
    chosen: opt.ChosenPasses,
    printing: opt.ReportPrinting,
    onnxruntime: str | None = None,
) -> None:
    """Print what would fire on a model, what would not, and why; write nothing."""
    from ortplugins.optimization.optimize import optimize
    from session_options.plan import plan_from_settings

    plan = plan_from_settings(chosen["passes"], chosen["options"])
    # Passes that finish a file find out what they can do from the file that sessions get.
    finishes = any(item.takes_part_in("finish") for item in plan.passes)
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        report = optimize(
            model,
            Path(folder) / "model.onnx" if finishes else None,
            onnxruntime_version=onnxruntime,
            bake=finishes,
            **chosen,
        ).report
    print_report(report, printing, model)
