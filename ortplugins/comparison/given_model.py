# SPDX-License-Identifier: MIT
"""A model in whatever kind it was given: path, bytes, object, result or session."""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ortplugins.errors import ModelFileError
from ortplugins.runtime.temporary_settings import DATA_FOLDER_KEY
from rewrite_rules.remarks import Outcome
from session_options import DqMatMulNBitsFusion
from session_options.keys import stored

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

    from ortplugins.model_io.loading import ModelLike
    from ortplugins.optimization.optimize import OptimizeResult
    from ortplugins.report import Report

ModelSource: TypeAlias = "ModelLike | bytes | OptimizeResult | onnxruntime.InferenceSession"


class GivenModel:
    """One answer to what a model is, whatever kind it was given as.

    Attributes:
        name: What messages call it.
        session: The session, where one was given. It stands for the model that it opened:
            before onnxruntime's own fusions.
        report: Of what ``optimize`` returned, or of a session with passes.
        settings: What the given session is set to, or what ``optimize`` asks sessions for.
        is_final: Whether it is what will run: a session, or what ``optimize`` returned.
    """

    def __init__(self, model: ModelSource) -> None:
        """Look at what was given; nothing is read."""
        import onnx
        import onnx_ir as ir
        import onnxruntime

        from ortplugins.optimization.optimize import OptimizeResult

        self.name = "the model"
        self.session: onnxruntime.InferenceSession | None = None
        self.report: Report | None = None
        self.settings: Mapping[str, str] = {}
        self._given: Any = model
        self._file: Path | None = None
        # The session's folder for external data; None: beside the model.
        self._data_folder: str | None = None
        if isinstance(model, onnxruntime.InferenceSession):
            self.name, self.session = "the session's model", model
            report = getattr(model, "ortplugins_report", None)
            self.report = report if report is not None and report.passes else None
            self._data_folder = stored(model.get_session_options(), DATA_FOLDER_KEY) or None
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
                f"a {type(model).__name__} is not a model: a path, bytes, an onnx.ModelProto, "
                "an onnx_ir.Model, an OptimizeResult or a session is expected"
            )
        self.is_final = isinstance(model, onnxruntime.InferenceSession | OptimizeResult)

    def file(self, scratch: Path) -> Path:
        """Return its file; what lies in memory is written to ``scratch``, which has to stay.

        So is a model whose data is in another folder, where only a session looks for it.
        """
        from ortplugins.model_io.saving import save_with_data

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
        """Return its graph, for the caller to change; tensors stay where they are."""
        from ortplugins.model_io.loading import from_memory, load_bytes, load_path

        source = self._source()
        if isinstance(source, bytes):
            return load_bytes(source, self._data_folder).model
        if isinstance(source, str | os.PathLike):
            with _quiet_about_packed_weights():
                return load_path(source, self._data_folder).model
        return from_memory(source).model

    def graph_as_written(self) -> ir.Model:
        """Return the graph with constants as nodes, where they are not initializers yet."""
        import onnx
        import onnx_ir as ir

        checked = self.graph()  # whatever is wrong with it is an error there
        source = self._source()
        with _quiet_about_packed_weights():
            if isinstance(source, str | os.PathLike):
                return ir.load(source)
            return ir.from_proto(source) if isinstance(source, onnx.ModelProto) else checked

    def _source(self) -> Any:
        """Path, bytes or object; of a session what onnxruntime was given."""
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


def unfused_in(
    model: GivenModel, fusion: DqMatMulNBitsFusion | None = None, *, final: bool = True
) -> dict[str, str]:
    """Run the fusion on a copy; return nodes whose dequantised weights would stay, and why.

    In a ``final`` model, the one that will run, these are also the nodes that the fusion would
    take, had it been run.
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


def operator_counts(model: ir.Model) -> collections.Counter[tuple[str, str]]:
    """Count nodes by domain and operator, those of subgraphs and functions too."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    return collections.Counter(
        (node.domain, node.op_type) for graph in graphs for node in graph.all_nodes()
    )


def _settings_of(session: onnxruntime.InferenceSession) -> dict[str, str]:
    options = session.get_session_options()
    return {
        "graph_optimization_level": options.graph_optimization_level.name,
        "execution_order": options.execution_order.name,
        "enable_mem_pattern": str(int(options.enable_mem_pattern)),
        "enable_mem_reuse": str(int(options.enable_mem_reuse)),
    }


@contextlib.contextmanager
def _quiet_about_packed_weights() -> Iterator[None]:
    """Keep onnx from warning of records of packed weights, which it has no place for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Ignoring unknown external data")
        yield
