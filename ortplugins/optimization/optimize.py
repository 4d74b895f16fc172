# SPDX-License-Identifier: MIT
"""Optimises a model into a file or an object."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from ortplugins.model_io.loading import (
    ModelLike,
    initializer_tensors,
    load_model,
    same_kind,
)
from ortplugins.model_io.saving import Progress, check_output, has_data_file
from ortplugins.optimization.build import build
from ortplugins.optimization.request import BuildRequest
from ortplugins.report import Report
from rewrite_rules.onnxruntime_version import OLDEST, parse_version
from session_options import DqMatMulNBitsFusion, OptionError, Pass
from session_options.plan import plan_from_settings


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeResult:
    """The result of :func:`optimize`.

    Attributes:
        path: The file written; None if no output was requested.
        report: What the passes did.
        model: The optimised model, of the given type (``onnx_ir.Model`` for a path). Its
            tensors may still lie in the source's files.
        session_settings: Settings that sessions on the file need, as from
            ``Pass.session_settings``.
        data_files: Data files that the model needs: written with it, or left where they were.
    """

    path: Path | None
    report: Report
    model: Any
    session_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data_files: tuple[Path, ...] = ()


def optimize(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    passes: Sequence[Pass | str] = (DqMatMulNBitsFusion.name,),
    options: Mapping[str, Any] | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    onnxruntime_version: str | None = None,
    external_data: bool | None = None,
    bake: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> OptimizeResult:
    """Apply passes to a model ahead of any session. The result runs on every machine.

    Args:
        model: Path of an .onnx file, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
            Large tensors of a path are read only where a pass rewrites them.
        output: File to write; its data goes to ``<output>.data``. Unchanged tensors stay where
            they are if their file is in the output's folder.
        passes: Pass objects, or names (also a single one) with their options in ``options``.
        options: ``{"<pass>.<option>": value}`` for passes given by name.
        providers: Names of execution providers that the result is for, or a single one.
        onnxruntime_version: The oldest onnxruntime that the result has to run on, for example
            ``"1.24"``; by default the installed one.
        external_data: Whether tensors of at least 1 KiB go to the data file; by default as in
            the source, and always if they exceed 1 GiB.
        bake: Also run all of onnxruntime's own optimisers for the CPU. The result is then
            specific to this machine and this onnxruntime, and for sessions with
            ``ORT_DISABLE_ALL``. :class:`PrepackedWeights` needs it.
        overwrite: Whether ``output`` may exist.
        progress: Called while tensors are written: done, total, name.

    Returns:
        Path, report and model.

    Raises:
        FileExistsError: If ``output`` exists and ``overwrite`` is false.
        MissingFileError, ModelFileError: If the model or its data can't be used.
        OptionError: If a pass, an option or the version is unknown.
        PassError: If a pass fails, or makes a wrong result. Then no output is written.
    """
    providers = [providers] if isinstance(providers, str) else providers
    if bake and (foreign := set(providers) - {"CPUExecutionProvider"}):
        raise OptionError(f"bake is for the CPU, not for {', '.join(sorted(foreign))}")
    request = BuildRequest(
        model,
        plan_from_settings(passes, options or {}),
        tuple(providers),
        bakes=bake,
        onnxruntime_version=checked_version(onnxruntime_version),
    )
    target = written = None if output is None else Path(output)
    start = time.perf_counter()
    loaded = request.load()
    if target is not None:
        check_output(loaded, target, overwrite)
    if external_data is None:
        external_data = has_data_file(loaded, loaded.model)
    finishing = bake or any(item.takes_part_in("finish") for item in request.plan.passes)
    scratch = None
    if target is None and finishing:
        scratch = tempfile.TemporaryDirectory(prefix="ortplugins-")
        written = Path(scratch.name, "model.onnx")
    result = build(
        request,
        loaded,
        written,
        inline=not external_data,
        overwrite=overwrite,
        progress=progress,
    )
    needs = dict(result.session_settings)
    if result.baked:
        needs["graph_optimization_level"] = "ORT_DISABLE_ALL"
    optimized = result.model
    if finishing and written is not None:  # the files differ from the model in memory
        with warnings.catch_warnings():
            # onnx_ir has no place for the records of packed weights.
            warnings.filterwarnings("ignore", message="Ignoring unknown external data")
            optimized = load_model(written).model
        if scratch is not None:  # its tensors are in these files
            weakref.finalize(optimized, scratch.cleanup)
    report = result.report
    data: tuple[Path, ...] = ()
    if target is not None:
        data = tuple(_data_beside(target, optimized))
        kept = [path for path in data if path not in result.files]
        notes = (*report.notes, *_notes_on(target, needs, kept))
        report = Report(report.passes, "built", notes, str(target))
    seconds = time.perf_counter() - start
    logging.getLogger("ortplugins").info("%s in %.3f s: %s", "optimize()", seconds, report)
    return OptimizeResult(target, report, same_kind(model, optimized), needs, data)


def _notes_on(
    output: Path, needs: Mapping[str, str], kept_data: Sequence[Path]
) -> Iterator[str]:
    """Yield what a user of the file has to know."""
    for name, text in needs.items():
        yield f"sessions on this file need {name} = {text}"
    for path in kept_data:
        yield f"{output.name} reads {path.name}, which was there before: keep both together"


def _data_beside(output: Path, model: ir.Model) -> list[Path]:
    """Return the data files of a saved model, as paths in its folder."""
    folder = Path(os.path.realpath(output.parent))
    found = {
        Path(os.path.realpath(tensor.path)).relative_to(folder)
        for _, tensor in initializer_tensors(model)
        if isinstance(tensor, ir.ExternalTensor)
    }
    return [output.parent / name for name in sorted(found)]


def checked_version(text: str | None) -> str:
    """Return the oldest onnxruntime that a result has to run on, by default this one."""
    if text is None:
        return str(onnxruntime.__version__)
    try:
        version = parse_version(text)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise OptionError(f"onnxruntime {text}: results run on {oldest} and newer")
    return text
