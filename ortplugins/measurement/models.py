# SPDX-License-Identifier: MIT
"""Models given in any form, and pairs of them that run on the same inputs."""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import ModelFileError, UsageError
from ortplugins.model_io.loading import ModelLike, load_model
from ortplugins.model_io.saving import save_with_data
from ortplugins.optimization.optimize import OptimizeResult
from ortplugins.optimization.request import BuildRequest
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.optimization.stages import PassRuns
from ortplugins.report import Report
from ortplugins.runtime.copied_options import running_options
from ortplugins.runtime.stock_session import (
    quiet_runner,
)
from ortplugins.samples.made_up import Feed, MadeUpInputs
from ortplugins.samples.sources import read_samples
from rewrite_rules.graph.nodes import all_nodes
from rewrite_rules.remarks import Outcome
from session_options import DqMatMulNBitsFusion
from session_options.entries import DATA_FOLDER_KEY, stored
from session_options.plan import make_plan

ModelSource: TypeAlias = "ModelLike | bytes | OptimizeResult | onnxruntime.InferenceSession"


class GivenModel:
    """A model that was given as a path, bytes, an object, a result or a session."""

    def __init__(self, model: ModelSource) -> None:
        """Take what was given; nothing is read yet."""
        self.name = "the model"  # in messages
        # A session stands for the model that it opened, before onnxruntime's own fusions.
        self.session: onnxruntime.InferenceSession | None = None
        self.report: Report | None = None  # of optimize(), or of a session with passes
        # Settings of the given session, or those that a result of ``optimize`` requires.
        self.settings: Mapping[str, str] = {}
        self._given: Any = model
        self._file: Path | None = None
        # The session's folder for external data; None for the model's own.
        self._data_folder: str | None = None
        if isinstance(model, onnxruntime.InferenceSession):
            self.name, self.session = "the session's model", model
            report = getattr(model, "ortplugins_report", None)
            self.report = report if report is not None and report.passes else None
            self._data_folder = stored(running_options(model), DATA_FOLDER_KEY) or None
            self.settings = _settings_of(model)
        elif isinstance(model, OptimizeResult):
            self.report, self.settings = model.report, model.session_settings
            self._given = model.model if model.path is None else model.path
            self.name = "the optimised model" if model.path is None else str(model.path)
        elif isinstance(model, str | os.PathLike):
            self.name = os.fspath(model)
        elif isinstance(model, bytes):
            self.name = "the model given as bytes"
        elif not isinstance(model, onnx.ModelProto | ir.Model):
            raise TypeError(
                f"a {type(model).__name__} is not a model: expected a path, bytes, an "
                "onnx.ModelProto, an onnx_ir.Model, an OptimizeResult or a session"
            )
        # Whether it is what will run.
        self.is_final = isinstance(model, onnxruntime.InferenceSession | OptimizeResult)

    def file(self, scratch: Path) -> Path:
        """Return its file; a model in memory is written to ``scratch``, which has to stay.

        The same holds for a model whose data lies in a folder that only the session knows.
        """
        if self._file is None:
            source = self._source()
            is_file = isinstance(source, str | os.PathLike)
            if is_file and self._data_folder in (None, os.path.dirname(source)):
                self._file = Path(source)
            else:
                self._file = Path(tempfile.mkdtemp(dir=scratch)) / "model.onnx"
                save_with_data(self.graph(), self._file)
        return self._file

    def graph(self) -> ir.Model:
        """Return its graph, which the caller may change; tensors stay where they are."""
        with warnings.catch_warnings():
            # onnx has no place for the records of packed weights.
            warnings.filterwarnings("ignore", message="Ignoring unknown external data")
            return load_model(self._source(), self._data_folder).model

    def _source(self) -> Any:
        """Return a path, bytes or object; for a session, what onnxruntime was given."""
        if self.session is None:
            return self._given
        report = getattr(self.session, "ortplugins_report", None)
        path = self.session._model_path
        if report is not None and report.artifact:
            path = report.artifact  # with passes, the session says what was asked for
        if path is None:
            return bytes(self.session._model_bytes)
        if not os.path.exists(path):
            raise ModelFileError(
                f"{path}: the model that the session opened is gone: it was built without a "
                "cache, or the cache was emptied since"
            )
        return path


def unfused_in(model: GivenModel, *, final: bool = True) -> dict[str, str]:
    """Run the fusion on a copy; return nodes whose dequantised weights would stay, and why.

    For a ``final`` model, which runs as it is, nodes that the fusion would take count as well.
    """
    copy = model.graph()
    infer_shapes(copy)
    runs = PassRuns(BuildRequest(copy, make_plan([DqMatMulNBitsFusion()])))
    runs.run("rewrite", copy)
    found = []
    for remark in (remark for report in runs.reports() for remark in report.remarks):
        if remark.outcome is Outcome.REFUSED:
            found.append((remark.node, remark.reason))
        elif final and remark.outcome is Outcome.FIRED:
            why = f"would fuse, but the fusion was not run ({remark.reason})"
            found.append((remark.node, why))
    return by_node(found)


def by_node(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return one text per node with all its reasons."""
    found: dict[str, list[str]] = {}
    for node, reason in reasons:
        found.setdefault(node, []).append(reason)
    return {node: "; ".join(texts) for node, texts in found.items()}


def operator_counts(model: ir.Model) -> collections.Counter[tuple[str, str]]:
    """Count nodes by domain and operator, including subgraphs and functions."""
    return collections.Counter((node.domain, node.op_type) for node in all_nodes(model))


def _settings_of(session: onnxruntime.InferenceSession) -> dict[str, str]:
    options = running_options(session)
    return {
        "graph_optimization_level": options.graph_optimization_level.name,
        "execution_order": options.execution_order.name,
        "enable_mem_pattern": str(int(options.enable_mem_pattern)),
        "enable_mem_reuse": str(int(options.enable_mem_reuse)),
    }


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder; on Windows, files that are still open stay behind."""
    with tempfile.TemporaryDirectory(
        prefix="ortplugins-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def comparison_feeds(
    session: onnxruntime.InferenceSession,
    *,
    inputs: Any = None,
    dims: Mapping[str, int] | None = None,
    samples: int = 1,
    seed: int = 0,
) -> list[Feed]:
    """Return feeds for a session's model, each checked against it; see :func:`.compare`."""
    if samples < 1:
        raise UsageError(f"samples is {samples}; expected 1 or more")
    model = GivenModel(session).graph()
    if inputs is None:
        made = MadeUpInputs(model.graph, dims)
        made.fit(quiet_runner(session))
        inputs = made.feeds(samples, seed=seed, steps=True)
    elif dims:
        raise UsageError("dims are for random inputs, and inputs are given: leave one out")
    return read_samples([inputs] if isinstance(inputs, Mapping) else inputs, model)
