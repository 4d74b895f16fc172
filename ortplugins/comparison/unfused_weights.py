# SPDX-License-Identifier: MIT
"""Which weights of a model are unpacked at every inference, and what stands in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rewrite_rules.remarks import Outcome
from session_options import DqMatMulNBitsFusion

if TYPE_CHECKING:
    from ortplugins.comparison.given_model import GivenModel


def unfused_in(
    model: GivenModel, fusion: DqMatMulNBitsFusion | None = None, *, final: bool = True
) -> dict[str, str]:
    """Run the fusion on a copy; return the nodes whose dequantised weights would stay.

    Args:
        model: The model.
        fusion: The fusion with its options.
        final: Whether this is the model that will run: then nodes that the fusion would take,
            had it been run, are named as well.
    """
    from ortplugins.optimization.request import BuildRequest
    from ortplugins.optimization.shape_inference import infer_shapes
    from ortplugins.optimization.stages import PassRuns
    from session_options.plan import make_plan

    copy = model.graph()
    infer_shapes(copy)
    runs = PassRuns(BuildRequest(copy, make_plan([fusion or DqMatMulNBitsFusion()])))
    runs.run("rewrite", copy)
    found: dict[str, list[str]] = {}
    for remark in (remark for report in runs.reports() for remark in report.remarks):
        if remark.outcome is Outcome.REFUSED:
            found.setdefault(remark.node, []).append(remark.reason)
        elif final and remark.outcome is Outcome.FIRED:
            found.setdefault(remark.node, []).append(
                f"would fuse, but the fusion was not run ({remark.reason})"
            )
    return {node: "; ".join(reasons) for node, reasons in found.items()}
