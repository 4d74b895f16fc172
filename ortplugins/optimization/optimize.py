# SPDX-License-Identifier: MIT
"""From a model to an optimised model, as a file, as an object, or as a cache entry's files."""

from __future__ import annotations

__all__ = ["OptimizeResult", "build_artifact", "optimize"]

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import onnxruntime

from ortplugins.errors import OrtpluginsWarning, PassError
from ortplugins.model_io.loading import LoadedModel, from_memory, is_path, load_path, same_kind
from ortplugins.model_io.saving import (
    DATA_THRESHOLD,
    Progress,
    check_output,
    needs_data_file,
    save_with_data,
)
from ortplugins.optimization.stages import AfterPass, PassRuns, infer_shapes, run_stage
from ortplugins.report import Report
from ortplugins.runtime.hidden_options import write_probe
from rewrite_rules.onnxruntime_version import parse_version
from session_options import DqMatMulNBitsFusion, OptionError, Pass, Plan
from session_options.option_files import read_option_files
from session_options.plan import make_plan, plan_from_settings

if TYPE_CHECKING:
    from ortplugins.model_io.loading import ModelLike
    from ortplugins.optimization.offline_optimizers import BakeSettings


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizeResult:
    """What :func:`optimize` made.

    Attributes:
        path: The file written; None when no output was asked for.
        report: What the passes did.
        model: The optimised model, of the type that was given (``onnx_ir.Model`` for a path).
            Its tensors may still lie in the source's files.
        session_settings: What sessions on the file need, as ``Pass.session_settings`` returns
            it.
    """

    path: Path | None
    report: Report
    model: Any
    session_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)


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
    after_pass: AfterPass | None = None,
) -> OptimizeResult:
    """Apply passes to a model, ahead of any session. The result runs on every machine.

    Args:
        model: Path of an .onnx file, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
            Large tensors of a path are read only where a pass rewrites them.
        output: File to write; its data goes to ``<output>.data``. Tensors that lie in files
            of the output's folder already, unchanged, stay there.
        passes: Pass objects, or names with their options in ``options``.
        options: ``{"<pass>.<option>": value}`` for passes given by name.
        providers: Execution providers that the result is for.
        onnxruntime_version: Oldest onnxruntime that the result has to run on, ``"1.24"`` for
            instance; the installed one by default.
        external_data: Whether tensors of 1 KiB and more go to the data file; by default as
            the source has them, and always when they are more than 1 GiB.
        bake: Run onnxruntime's own optimisers too (all of them, for the CPU) before the file
            is finished. The result is for this machine and this onnxruntime, and for sessions
            with ``ORT_DISABLE_ALL``. :class:`PrepackedWeights` needs it.
        overwrite: Whether ``output`` may exist.
        progress: Called while tensors are written: done, total, name.
        after_pass: Called after each pass.

    Returns:
        Path, report and model.

    Raises:
        FileExistsError: If ``output`` exists and ``overwrite`` is false.
        MissingFileError, ModelFileError: If the model or its data can't be used.
        OptionError: If a pass, an option or the version is unknown.
        PassError: If a pass fails. No output is written then.
    """
    plan = _plan(passes, options or {})
    if onnxruntime_version is not None:
        _check_version(onnxruntime_version)
    target = None if output is None else Path(output)
    if target is not None:
        check_output(model, target, overwrite)
    loaded = load_path(model) if is_path(model) else from_memory(model)  # type: ignore[arg-type]
    _infer_for_rewrites(loaded.model, plan)
    runs = PassRuns()
    version = onnxruntime_version
    run_stage("rewrite", plan, loaded.model, providers, runs, after_pass, version)
    if not bake:
        run_stage("rearrange", plan, loaded.model, providers, runs, after_pass, version)
    if target is None:
        report = Report(runs.reports(), "built")
        needs = _session_settings(plan, runs)
        return OptimizeResult(None, report, same_kind(model, loaded.model), needs)
    if external_data is None:
        external_data = bool(loaded.data_files) or needs_data_file(loaded.model)
    if bake and (foreign := set(providers) - {"CPUExecutionProvider"}):
        raise OptionError(f"bake is for the CPU, not for {', '.join(sorted(foreign))}")
    finishing = bake or any(item.takes_part_in("finish") for item in plan.passes)
    notes: list[str] = []
    baked = False

    def finish(path: Path) -> None:
        nonlocal baked
        if bake:
            from ortplugins.optimization.offline_optimizers import ALL_OPTIMISERS

            baked = _bake_in_place(path, ALL_OPTIMISERS, notes)
            _rearrange_file(path, plan, providers, runs, version, baked)
        run_stage("finish", plan, path, providers, runs, None, version, baked)

    save_with_data(
        loaded.model,
        target,
        keep_in_place=not finishing,
        inline=not external_data,
        overwrite=overwrite,
        finish=finish,
        progress=progress,
    )
    needs = _session_settings(plan, runs)
    if baked:
        needs["graph_optimization_level"] = "ORT_DISABLE_ALL"
    notes += [f"sessions on this file need {name} = {value}" for name, value in needs.items()]
    report = Report(runs.reports(), "built", tuple(notes), str(target))
    if finishing:  # the files are not what the model was any more
        with warnings.catch_warnings():
            # onnx_ir has no place for the records of packed weights.
            warnings.filterwarnings("ignore", message="Ignoring unknown external data")
            loaded = load_path(target)
    return OptimizeResult(target, report, same_kind(model, loaded.model), needs)


def build_artifact(
    loaded: LoadedModel,
    plan: Plan,
    folder: Path,
    *,
    providers: Sequence[str],
    settings: BakeSettings | None,
    final_graph: bool = False,
) -> dict[str, Any]:
    """Make the files of a cache entry in an empty folder.

    Args:
        loaded: The model; changed.
        plan: What to do.
        folder: Gets ``model.onnx`` and its data; nothing when the original is as good.
        providers: Execution providers of the session.
        settings: How to run onnxruntime's optimisers; None to leave them to the session.
        final_graph: Whether the session runs none.

    Returns:
        The manifest: whether the model is baked, settings for the session, the report.

    Raises:
        PassError: If a pass fails.
        OSError: If the folder can't be written.
    """
    runs = PassRuns()
    notes: list[str] = []
    probed = write_probe(loaded.model, folder)
    _infer_for_rewrites(loaded.model, plan)
    run_stage("rewrite", plan, loaded.model, providers, runs)
    later = any(item.takes_part_in(s) for item in plan.passes for s in ("rearrange", "finish"))
    baked = False
    if runs.any_fired or later:
        model_path = folder / "model.onnx"
        save_with_data(loaded.model, model_path)
        if settings is not None:
            baked = _bake_in_place(model_path, settings, notes)
        final = final_graph or baked
        _rearrange_file(model_path, plan, providers, runs, final_graph=final)
        run_stage("finish", plan, model_path, providers, runs, final_graph=final)
    if later and not runs.any_fired:  # all that was to follow was refused
        _remove_model(folder)
        baked = False
    needs = _session_settings(plan, runs)
    source = "built" if runs.any_fired else "untouched"
    report = Report(runs.reports(), source, tuple(notes))
    for text in runs.provisional:
        warnings.warn(f"{text}; a later start tries again", OrtpluginsWarning, stacklevel=2)
    return {
        **probed,
        "baked": baked,
        "session_settings": needs,
        "report": report.to_dict(),
        "provisional": bool(runs.provisional),
    }


def _rearrange_file(
    model_path: Path,
    plan: Plan,
    providers: Sequence[str],
    runs: PassRuns,
    version: str | None = None,
    final_graph: bool = False,
) -> None:
    """Run the passes that change the graph after onnxruntime's own optimisers."""
    if any(item.takes_part_in("rearrange") for item in plan.passes):
        model = ir.load(model_path)
        run_stage(
            "rearrange",
            plan,
            model,
            providers,
            runs,
            version=version,
            final_graph=final_graph,
        )
        if any(map(_is_new_data, model.graph.initializers.tensors())):
            save_with_data(model, model_path, keep_in_place=True, overwrite=True)
        else:
            ir.save(model, model_path)


def _is_new_data(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor is no file's, and too large to lie in the graph's."""
    stored = isinstance(tensor, (ir.ExternalTensor, ir.TensorProtoTensor))
    return not stored and tensor.nbytes >= DATA_THRESHOLD


def _infer_for_rewrites(model: ir.Model, plan: Plan) -> None:
    """Give the user's graph shapes where a pass is going to rewrite it.

    Else not: knowing more shapes, onnxruntime fuses more and holds more buffers for reuse, so
    that a model which no rule touches would neither run nor compute quite as it did.
    """
    if any(item.takes_part_in("rewrite") for item in plan.passes):
        infer_shapes(model)


def _remove_model(folder: Path) -> None:
    """Remove a saved model and its data; what else is in the folder stays."""
    model = ir.load(folder / "model.onnx")
    locations = {
        tensor.location
        for graph in model.graphs()
        for tensor in graph.initializers.tensors()
        if isinstance(tensor, ir.ExternalTensor)
    }
    for name in ("model.onnx", *locations):
        (folder / name).unlink(missing_ok=True)


def _session_settings(plan: Plan, runs: PassRuns) -> dict[str, str]:
    """What the passes want of the session, tried on options of our own.

    Raises:
        PassError: If a pass raises, or wants what onnxruntime does not take.
    """
    from ortplugins.runtime.temporary_settings import lent

    needs: dict[str, str] = {}
    for item in plan.passes:
        try:
            wanted = dict(item.session_settings())
            if not all(isinstance(text, str) for pair in wanted.items() for text in pair):
                raise TypeError(f"{wanted!r} are not all strings")
            with lent(onnxruntime.SessionOptions(), wanted):
                pass
        except Exception as error:
            raise PassError(f"pass {item.name!r}: session_settings: {error}") from error
        needs.update(wanted)
    needs.update(runs.session_settings)
    return needs


def _bake_in_place(model_path: Path, settings: BakeSettings, notes: list[str]) -> bool:
    """Replace a model by its baked form; tell why not where onnxruntime refuses."""
    from ortplugins.optimization.offline_optimizers import bake

    baked = model_path.with_name("baked.onnx")
    try:
        bake(model_path, baked, settings)
    except PassError as error:
        notes.append(f"not baked, so each start runs onnxruntime's optimisers: {error}")
        baked.unlink(missing_ok=True)
        return False
    os.replace(baked, model_path)
    return True


def _plan(passes: Sequence[Pass | str], options: Mapping[str, Any]) -> Plan:
    names = [item for item in passes if isinstance(item, str)]
    objects = [item for item in passes if not isinstance(item, str)]
    if wrong := [item for item in objects if not isinstance(item, Pass)]:
        raise OptionError(f"{wrong[0]!r} is neither a pass nor the name of one")
    from session_options.keys import format_value

    settings = {key: format_value(value) for key, value in options.items()}
    plan = make_plan([*objects, *plan_from_settings(names, settings).passes])
    return read_option_files(plan)


def _check_version(text: str) -> None:
    try:
        parse_version(text)
    except ValueError as error:
        raise OptionError(str(error)) from None
