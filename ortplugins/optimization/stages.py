# SPDX-License-Identifier: MIT
"""Runs the passes of a plan over a model, stage by stage, and keeps their remarks."""

from __future__ import annotations

__all__ = ["AfterPass", "PassRuns", "infer_shapes", "run_stage"]

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common
import onnxruntime

from ortplugins.errors import PassError
from ortplugins.report import PassReport
from rewrite_rules.onnxruntime_version import parse_version
from rewrite_rules.remarks import PassContext, Remarks, RewriteError
from rewrite_rules.shapes.unified_names import unify_dimension_names
from session_options import Pass, Plan

# Called after each pass of a graph stage with the pass, the model and the pass's report:
# timing, dumps and verification hang here.
AfterPass = Callable[[Pass, ir.Model, PassReport], None]


class PassRuns:
    """The reports of a plan's passes so far; a pass that takes part in two stages has one.

    Attributes:
        provisional: What broke and may work another time.
        session_settings: What passes found that sessions on this model need.
    """

    def __init__(self) -> None:
        self._reports: dict[str, PassReport] = {}
        self.provisional: list[str] = []
        self.session_settings: dict[str, str] = {}

    def add(self, report: PassReport) -> None:
        """Append what a pass did in one stage."""
        before = self._reports.get(report.name, PassReport(report.name, 0.0))
        self._reports[report.name] = PassReport(
            report.name, before.seconds + report.seconds, before.remarks + report.remarks
        )

    def reports(self) -> tuple[PassReport, ...]:
        """Return one report per pass."""
        return tuple(self._reports.values())

    @property
    def any_fired(self) -> bool:
        """Whether any pass has changed anything."""
        return any(r.outcome.value == "fired" for item in self.reports() for r in item.remarks)


def run_stage(
    stage: str,
    plan: Plan,
    target: ir.Model | Path,
    providers: Sequence[str],
    runs: PassRuns,
    after_pass: AfterPass | None = None,
    version: str | None = None,
    final_graph: bool = False,
) -> None:
    """Run every pass of the plan that takes part in a stage.

    Args:
        stage: ``"rewrite"``, ``"rearrange"`` or ``"finish"``.
        plan: The passes, in order.
        target: The model, changed in place; for ``"finish"`` the path of the saved one.
        providers: Execution providers of the session.
        runs: Gets each pass's report.
        after_pass: Called after each pass on a model.
        version: Of onnxruntime, that the result is for; the installed one by default.
        final_graph: Whether no optimiser of onnxruntime will change the graph any more.

    Raises:
        PassError: If a pass raises, chained to its exception; the model is then in whatever
            state the pass left it in.
    """
    target_version = parse_version(version or onnxruntime.__version__)
    for item in plan.passes:
        if not item.takes_part_in(stage):
            continue
        remarks = Remarks(item.name)
        start = time.perf_counter()
        try:
            getattr(item, stage)(
                target,
                PassContext(
                    remarks,
                    tuple(providers),
                    target_version,
                    final_graph,
                    runs.session_settings,
                    plan.cpu_arena,
                ),
            )
            if isinstance(target, ir.Model):
                # Rewrites may put a producer behind its consumer; sorting is stable.
                target.graph.sort()
        except RewriteError as error:
            raise PassError(f"pass {item.name!r} failed at {error}") from error
        except Exception as error:
            raise PassError(
                f"pass {item.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        report = PassReport(item.name, time.perf_counter() - start, tuple(remarks))
        runs.add(report)
        runs.provisional += [f"{item.name}: {text}" for text in remarks.provisional]
        if after_pass is not None and isinstance(target, ir.Model):
            after_pass(item, target, report)


def infer_shapes(model: ir.Model) -> None:
    """Give intermediate values their shapes, as far as onnx can tell.

    Done on the user's graph, before it holds operators that onnx does not know. With shapes in
    the file, onnxruntime's memory planner finds a buffer to reuse at once instead of searching
    all of them for each node.
    """
    if _has_sequences(model):
        return  # onnx_ir's pass would call them tensors, and onnxruntime refuse the model
    from rewrite_rules.graph.functions import check_inlined_size

    try:
        check_inlined_size(model)
    except ValueError:
        return  # functions that call each other would take minutes and fill the memory
    # Lenient: a node that can't be inferred must not cost the others their shapes, and a
    # model without shapes runs as well.
    with contextlib.suppress(Exception):
        onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
        unify_dimension_names(model)


# What makes values that are no tensors.
_SEQUENCES = frozenset({
    "Optional", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "SequenceMap", "SplitToSequence", "StringSplit", "ZipMap",
})  # fmt: skip


def _has_sequences(model: ir.Model) -> bool:
    """Whether values of the model are sequences, optionals or maps."""
    inputs = (value for graph in model.graphs() for value in graph.inputs)
    if any(value.type is not None and _is_other(value.type) for value in inputs):
        return True
    return any(node.op_type in _SEQUENCES for node in model.graph.all_nodes())


def _is_other(kind: ir.TypeProtocol) -> bool:
    return not isinstance(kind, (ir.TensorType, ir.SparseTensorType))
