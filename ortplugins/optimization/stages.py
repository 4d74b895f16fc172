# SPDX-License-Identifier: MIT
"""Runs the passes of a request on a model, stage by stage, and collects their remarks."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from ortplugins.errors import PassError
from ortplugins.optimization.request import BuildRequest
from ortplugins.report import PassReport
from ortplugins.runtime.child_process import child_environment, child_python
from ortplugins.runtime.copied_options import apply_settings
from rewrite_rules.graph.nodes import sort_nodes
from rewrite_rules.onnxruntime_version import parse_version
from rewrite_rules.remarks import (
    Outcome,
    PassContext,
    Remark,
    Remarks,
    RewriteError,
)
from session_options import Pass
from session_options.passes import NOTHING_TO_DO


class FailedPass(PassError):
    """The pass :attr:`name` raised; the model may be in any state."""

    def __init__(self, item: Pass, text: str) -> None:
        super().__init__(f"pass {item.name!r} {text}")
        self.name = item.name


class PassRuns:
    """The runs of one request's passes on one model."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._reports: dict[str, PassReport] = {}
        self.modified = False  # the model, or the settings that sessions on it need
        self.session_settings: dict[str, str] = {}

    def reports(self) -> tuple[PassReport, ...]:
        """Return one report per pass, even if it takes part in two stages.

        If a pass met no candidate, its report says so.
        """
        found = []
        for item in self._reports.values():
            idle = Remark(item.name, "model", Outcome.NOTE, NOTHING_TO_DO)
            found.append(dataclasses.replace(item, remarks=item.remarks or (idle,)))
        return tuple(found)

    def take_part_in(self, stage: str) -> bool:
        """Whether any pass takes part in a stage."""
        return any(item.takes_part_in(stage) for item in self._request.plan.passes)

    def run(self, stage: str, target: ir.Model | Path, *, final_graph: bool = False) -> None:
        """Run the passes of a stage on the model or, for ``"finish"``, on the file's path.

        ``final_graph`` says that no optimiser of onnxruntime will change the graph any more.
        """
        for item in self._request.plan.passes:
            if item.takes_part_in(stage):
                self._run_pass(item, stage, target, final_graph)

    def _run_pass(
        self, item: Pass, stage: str, target: ir.Model | Path, final_graph: bool
    ) -> None:
        settings_before = dict(self.session_settings)
        context = self._context(item, final_graph)
        start = time.perf_counter()
        try:
            modified = getattr(item, stage)(target, context)
            if isinstance(target, ir.Model):
                # Rewrites may put a producer after its consumer; sorting is stable.
                sort_nodes(target.graph)
        except RewriteError as error:
            raise FailedPass(item, f"failed at {error}") from error
        except Exception as error:
            raise FailedPass(item, f"failed: {type(error).__name__}: {error}") from error
        remarks = context.remarks
        self.session_settings = context.session_settings
        seconds = time.perf_counter() - start
        if modified is None:
            modified = any(remark.outcome is Outcome.FIRED for remark in remarks)
        self.modified |= modified or self.session_settings != settings_before
        before = self._reports.get(item.name, PassReport(item.name, 0.0))
        self._reports[item.name] = PassReport(
            item.name, before.seconds + seconds, (*before.remarks, *remarks)
        )

    def _context(self, item: Pass, final_graph: bool) -> PassContext:
        python = child_python(item.name)
        return PassContext(
            Remarks(item.name),
            self._request.providers,
            parse_version(self._request.onnxruntime_version),
            final_graph,
            dict(self.session_settings),
            self._request.cpu_arena,
            None if python is None else (python, child_environment(item.name)),
            native_accuracy_level=self._request.native_accuracy_level,
        )

    def needs_of_session(self) -> dict[str, str]:
        """Return the settings that sessions on the result need, after trying them out."""
        needs: dict[str, str] = {}
        for item in self._request.plan.passes:
            try:
                wanted = dict(item.session_settings())
                if not all(isinstance(text, str) for pair in wanted.items() for text in pair):
                    raise TypeError(f"{wanted!r} are not all strings")
                apply_settings(onnxruntime.SessionOptions(), wanted)
            except Exception as error:
                raise FailedPass(item, f"session_settings: {error}") from error
            needs.update(wanted)
        return {**needs, **self.session_settings}
