# SPDX-License-Identifier: MIT
"""From a model to a folder that a server takes as it is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import onnxruntime

from ortplugins.errors import ModelFileError
from ortplugins.model_io.loading import load_model
from ortplugins.model_io.model_folder import OutputFolder, model_in
from ortplugins.model_io.saving import Progress
from ortplugins.optimization.genai import genai_layout
from ortplugins.optimization.optimize import checked_version, optimize_for
from ortplugins.optimization.request import BuildRequest
from ortplugins.report import Report
from ortplugins.runtime.session_settings import ALL_OPTIMIZERS, OptimizerSettings
from ortplugins.runtime.stock_session import open_model
from rewrite_rules.onnxruntime_version import newest_format, parse_version
from session_options import DqMatMulNBitsFusion, Pass
from session_options.plan import plan_from_settings

Server = Literal["genai", "plain"]


@dataclasses.dataclass(frozen=True)
class PackResult:
    """What :func:`pack` made."""

    path: Path  # the folder
    files: Mapping[str, int]  # sizes in bytes of what is in it, by path relative to it
    report: Report


def pack(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    server: Server = "plain",
    passes: Sequence[Pass | str] = (DqMatMulNBitsFusion.name,),
    options: Mapping[str, Any] | None = None,
    onnxruntime_version: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackResult:
    """Write a folder with an optimised model and all that it needs; nothing points outside.

    onnxruntime loads the result before the folder appears. ``model`` is an .onnx file, or a
    folder with one and what belongs to it; ``server`` is ``"genai"`` for onnxruntime-genai,
    with genai_config.json checked against the graph, ``"plain"`` for the model and what lay
    beside it in its folder. The other arguments are those of :func:`~ortplugins.optimize`.
    """
    layout_of = {"genai": genai_layout, "plain": _plain_layout}
    folder, finish, optimizers = layout_of[server](Path(model), Path(output), overwrite)
    folder.check()
    request = BuildRequest(
        folder.model,
        plan_from_settings(passes, options or {}),
        optimizers=optimizers,
        onnxruntime_version=checked_version(onnxruntime_version),
    )
    source = load_model(folder.model)
    if onnxruntime_version is not None:
        _check_format(source.model, folder.model, onnxruntime_version)
    with folder.staged(without=source.data_files.values()) as staged:
        result = optimize_for(request, staged, progress=progress)
        root = staged.parents[len(folder.location.parts) - 1]
        try:
            session = open_model(staged, "all", settings=result.session_settings)
        except ModelFileError as error:
            text = str(error).replace(str(staged), str(folder.model))
            version = onnxruntime.__version__
            raise ModelFileError(f"{text} (onnxruntime {version})") from error
        finish(root, staged, session, result.session_settings)
        found = sorted(path for path in root.rglob("*") if path.is_file())
        files = {path.relative_to(root).as_posix(): path.stat().st_size for path in found}
    report = dataclasses.replace(result.report, artifact=str(folder.written_model))
    return PackResult(folder.target, files, report)


def _plain_layout(
    model: Path, target: Path, overwrite: bool
) -> tuple[OutputFolder, Callable[..., None], OptimizerSettings]:
    """Return the layout of the source: of a file the model alone, of a folder all."""
    along = model.is_dir()
    source = model if along else model.parent
    folder = OutputFolder(source, model_in(model), target, overwrite, companions=along)
    return folder, lambda *_: None, ALL_OPTIMIZERS


def _check_format(model: ir.Model, path: Path, version: str) -> None:
    """Refuse a file that is too new for the server's onnxruntime."""
    opset, ir_version = newest_format(parse_version(version))
    if model.opset_imports.get("", 0) > opset or model.ir_version > ir_version:
        raise ModelFileError(
            f"{path}: has opset {model.opset_imports.get('')} and IR version "
            f"{model.ir_version}; onnxruntime {version} opens {opset} and {ir_version} at most"
        )
