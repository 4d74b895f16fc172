# SPDX-License-Identifier: MIT
"""Runs the passes of a request and onnxruntime's own optimisers, and saves the result.

This is the only way to an optimised model: ``optimize`` writes a file, the cache an entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnxruntime.capi import _pybind_state

from ortplugins.errors import OrtpluginsWarning, PassError
from ortplugins.model_io.data_in_place import (
    LEAST_BYTES,
    NEW_BYTES,
    PlacedData,
    in_place,
)
from ortplugins.model_io.loading import (
    LoadedModel,
    initializer_tensors,
    load_result,
    stored_bytes,
)
from ortplugins.model_io.saving import (
    original_of,
    save_with_data,
    scratch_within,
    serialized,
)
from ortplugins.optimization.request import BuildRequest
from ortplugins.optimization.shape_inference import shapes_while
from ortplugins.optimization.stages import FailedPass, PassRuns
from ortplugins.report import Report
from rewrite_rules.graph.nodes import all_nodes
from session_options import Pass
from session_options.caller_warnings import warn_caller
from session_options.entries import DATA_FOLDER_KEY

# New constants of this size leave a baked .onnx file; otherwise every session holds a copy.
_INLINE_LIMIT = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class BuildResult:
    """The result of :func:`build`; without files if nothing had to be written."""

    model: ir.Model  # after the last pass that changed it in memory
    files: tuple[Path, ...]
    baked: bool
    report: Report
    session_settings: Mapping[str, str]
    modified: bool  # whether a pass changed anything
    content: bytes | None = None  # the model, if nothing may be written
    placed: PlacedData | None = None  # data that stays where it is


def build(
    request: BuildRequest,
    loaded: LoadedModel,
    output: Path | None,
    *,
    only_if_modified: bool = False,
    placed: PlacedData | None = None,
    **saving: Any,
) -> BuildResult:
    """Take a loaded model, which is changed, through all stages.

    Without ``output`` the model stays in memory; onnxruntime's optimisers and passes that work
    on files need an output. Data stays in ``placed`` unless passes work on files or much data
    is new. Other arguments are passed to :func:`save_with_data`.
    """
    runs = PassRuns(request)
    runs.needs_of_session()  # raises before anything is written
    model, baked = loaded.model, False
    notes: list[str] = []
    if runs.take_part_in("rewrite"):
        with shapes_while(model):
            runs.run("rewrite", model)
    if not request.bakes:
        runs.run("rearrange", model, final_graph=request.final_graph)

    if placed is not None and (
        runs.take_part_in("finish") or _new_bytes(model, placed) > NEW_BYTES
    ):
        placed = None

    def finish(path: Path) -> None:
        nonlocal baked, placed
        if request.bakes:
            final, baked = _optimized(path, request, notes, placed)
            if placed is not None and _new_bytes(final, placed) > NEW_BYTES:
                placed = None  # onnxruntime folded constants
            runs.run("rearrange", final, final_graph=baked)
            save_with_data(
                final,
                path,
                keep_in_place=True,
                overwrite=True,
                data_folder=placed and placed.folder,
                least_bytes=_INLINE_LIMIT,
            )
        runs.run("finish", path, final_graph=request.final_graph or baked)

    files: list[Path] = []
    later = request.bakes and runs.take_part_in("rearrange")
    later |= runs.take_part_in("finish")
    if output is not None and (runs.modified or later or not only_if_modified):
        finishing = request.bakes or runs.take_part_in("finish")
        saving = {"keep_in_place": not finishing, "sources": loaded.sources, **saving}
        if placed is not None:
            saving["data_folder"] = placed.folder
        files = save_with_data(model, output, finish=finish, **saving)
        if only_if_modified and not runs.modified:
            for path in files:
                path.unlink()
            files, baked = [], False
    result = BuildResult(
        model,
        tuple(files),
        baked,
        Report(runs.reports(), "built", tuple(notes)),
        runs.needs_of_session(),
        runs.modified,
        serialized(model) if request.in_memory and runs.modified else None,
        placed if files else None,
    )
    if runs.modified:
        _check(request, result, output)
    return result


def _check(request: BuildRequest, result: BuildResult, path: Path | None) -> None:
    """If a result is wrong, remove it and raise FailedPass; ``path`` is its file, if any."""
    from ortplugins.optimization.smoke_check import find_failure

    settings = dict(result.session_settings)
    if result.baked:
        settings["graph_optimization_level"] = "ORT_DISABLE_ALL"
    if result.placed is not None:
        settings[DATA_FOLDER_KEY] = str(result.placed.folder)
    after = result.content or path
    with contextlib.ExitStack() as stack:
        scratch = None
        if not request.in_memory:
            scratch = Path(stack.enter_context(scratch_within(None)))
        if after is None:
            after = Path(str(scratch), "after.onnx")
            save_with_data(result.model.clone(), after)
        failure = find_failure(request, result.model, after, settings, scratch)
    if failure is not None:
        for file in result.files:
            file.unlink()
        raise FailedPass(
            _first_wrong(request), f"made a wrong result, please report it: {failure}"
        )


def _first_wrong(request: BuildRequest) -> Pass:
    """Return the first pass after which the result is wrong; after the last, it is."""
    passes = request.plan.passes
    for count in range(1, len(passes)):
        plan = request.plan._replace(passes=passes[:count])
        fewer = request._replace(plan=plan)
        with contextlib.ExitStack() as stack:
            output = None
            if not request.in_memory:
                output = Path(stack.enter_context(scratch_within(None)), "model.onnx")
            try:
                build(fewer, fewer.load(), output)
            except FailedPass:
                return passes[count - 1]
    return passes[-1]


def build_artifact(
    request: BuildRequest, loaded: LoadedModel, folder: Path | None
) -> dict[str, Any]:
    """Make the files of a cache entry, leaving out passes that fail.

    Returns its report and fields of an :class:`.Artifact`; without a folder, also ``content``,
    the new model as bytes, or None if nothing was modified.
    """
    described, failed = _described(loaded.model), list[str]()
    while True:
        output = None if folder is None else folder / "model.onnx"
        placed = _may_stay(loaded)
        try:
            result = build(request, loaded, output, only_if_modified=True, placed=placed)
            break
        except FailedPass as error:
            if request.plan.strict:
                raise
            failed.append(f"{error}; the model is optimised without this pass [ORP901]")
            warn_caller(failed[-1], OrtpluginsWarning)
            left = tuple(item for item in request.plan.passes if item.name != error.name)
            request = request._replace(plan=request.plan._replace(passes=left))
            loaded = request.load()  # it may be half rewritten
    notes = (*result.report.notes, *failed)
    has_result = bool(result.files or result.content)
    return {
        **described,
        "content": result.content,
        "baked": result.baked,
        "settings": dict(result.session_settings) if has_result else {},
        "report": dataclasses.replace(result.report, notes=notes).to_dict(),
        "failed": failed,
        "data": {} if result.placed is None else result.placed.names,
    }


def _described(model: ir.Model) -> dict[str, Any]:
    """Return facts of the original that sessions on the result are checked against."""
    free = {
        str(value.name): "".join("0" if isinstance(x, int) else "1" for x in value.shape)
        for value in model.graph.inputs
        if value.shape is not None
    }
    names = {name for graph in model.graphs() for name in graph.initializers}
    known = {(x.domain, x.name) for x in _pybind_state.get_all_operator_schema()}
    known |= {identifier[:2] for identifier in model.functions}
    custom = any((node.domain, node.op_type) not in known for node in all_nodes(model))
    return {
        "free": free,
        "initializers": sorted(names),
        "has_custom_operators": custom,
    }


def _may_stay(loaded: LoadedModel) -> PlacedData | None:
    """Return where a model's data is, if it is so much that copying should be avoided."""
    files = loaded.data_files
    if sum(path.stat().st_size for path in files.values()) < LEAST_BYTES:
        return None
    return in_place(files)


def _optimized(
    path: Path, request: BuildRequest, notes: list[str], placed: PlacedData | None
) -> tuple[ir.Model, bool]:
    """Run onnxruntime's optimisers on a saved model; return the result and if they ran."""
    from ortplugins.optimization.offline_optimizers import bake

    try:
        model, baked = bake(path, request, placed and placed.folder), True
    except PassError as error:
        notes.append(
            f"not baked, so each start runs onnxruntime's optimisers: {error} [ORP907]"
        )
        model, baked = load_result(path), False
    if placed is not None:
        for _, tensor in initializer_tensors(model):  # the model was read without its data
            if hasattr(tensor, "base_dir"):
                tensor.base_dir = str(placed.folder)
    return model, baked


def _new_bytes(model: ir.Model, placed: PlacedData) -> int:
    """Return the bytes of the tensors that lie outside the placed files."""
    size = 0
    for _, tensor in initializer_tensors(model):
        path = getattr(original_of(tensor), "path", None)
        if path is None or placed.folder not in Path(os.path.realpath(path)).parents:
            size += stored_bytes(tensor)
    return size
