# SPDX-License-Identifier: MIT
"""From a float model to a weight-only quantised one, as a file or as an object."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortplugins.errors import ModelFileError
from ortplugins.model_io.loading import (
    ModelLike,
    initializer_tensors,
    is_path,
    load_model,
    same_kind,
)
from ortplugins.model_io.model_folder import OutputFolder, model_in
from ortplugins.model_io.opset import raise_opset
from ortplugins.model_io.saving import (
    Progress,
    check_output,
    has_data_file,
    save_with_data,
    scratch_within,
)
from ortplugins.quantization.encoders import SLOWER, is_encoder
from ortplugins.quantization.statistics.collect import Calibration
from ortplugins.quantization.weights.plan import (
    WeightPlan,
    check_not_empty,
    plan_weights,
    reported,
)
from ortplugins.quantization.weights.recipe import Recipe, read_recipe
from ortplugins.quantization.weights.report import QuantizeReport
from ortplugins.quantization.weights.run import quantize_graph
from ortplugins.samples.sources import KeptSamples
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.dq_matmulnbits_fusion.kernels import (
    fitting_block_size,
    slow_kernel,
)
from rewrite_rules.graph.nodes import dequantizer, label
from rewrite_rules.remarks import Outcome, PassContext, Remarks

# The first opset whose DequantizeLinear takes blocks, and the file format that can hold them.
_OPSET, _IR_VERSION = 21, 10


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizeResult:
    """What :func:`quantize` made.

    Attributes:
        path: The .onnx file written; None when no output was asked for.
        report: What became of every node.
        model: The quantised model, of the type that was given (``onnx_ir.Model`` for a path);
            None after a dry run.
    """

    path: Path | None
    report: QuantizeReport
    model: Any


def quantize(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    calibration_data_reader: Any = None,
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    max_calibration_memory: int = 1 << 30,
    external_data: bool | None = None,
    overwrite: bool = False,
    executor: concurrent.futures.Executor | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> QuantizeResult:
    """Quantise the constant matrices of a model; activations stay in float.

    Args:
        model: Path of an .onnx file or of a folder with one, ``onnx.ModelProto`` or
            ``onnx_ir.Model``; not changed. Weights of a path are mapped, never read whole.
        output: File to write; its data goes to ``<output>.data``. For a folder, a folder to
            write, unless it ends with ``.onnx``: tokenizer and configurations go along.
        recipe: Which weights are quantised, and how: a :class:`Recipe`, the path of one in
            YAML, or ``"small"``, ``"balanced"``, ``"best"`` or ``"encoder8"``. By default 4
            bits in blocks of 32, rounded to nearest.
        calibration_data_reader: Samples, each a dict of input names and arrays: an object with
            ``get_next()``, an iterable, or paths of ``.npz`` files. None for random ones, with
            a warning. With ``method="rtn"`` they only measure the error of outputs.
        calibration_providers: Execution providers that run the samples.
        max_calibration_memory: Bytes that activations and their statistics may take at once,
            and then the work on weights in threads; what does not fit is left to further
            passes over the samples, and worked on later.
        external_data: Whether tensors of 1 KiB and more go to the data file; by default as the
            source has them, and always when they are more than 1 GiB.
        overwrite: Whether ``output`` may exist.
        executor: Where weights are worked on: any ``concurrent.futures.Executor``; by default
            threads, one per core. The result is the same, bit for bit.
        dry_run: Only report what would be quantised, and to how many bytes.
        progress: Called as calibration, the work on weights and saving go on, with steps done,
            steps of that stage, and what is being done.
        settings: What the recipe is to have instead: fields of :class:`Recipe` by name, such
            as ``method``, ``bits`` and ``block_size``. ``rules`` are added to its own.

    Returns:
        Path, report and model.

    Raises:
        CalibrationError: If a sample is not a dict of the model's inputs, holds NaN or
            infinite values, or there is none.
        FileExistsError: If ``output`` exists and ``overwrite`` is false.
        MissingFileError, ModelFileError: If the model or its data can't be used,
            or nothing is left to quantise.
        QuantizationError: If a setting is out of range, a pattern means no node, the file of a
            recipe is not one, or a weight holds NaN or infinite values. No output is written,
            whatever is raised.
        TypeError: If a keyword is not a setting; names the closest.
        OSError: If a file can't be written.
    """
    chosen = read_recipe(recipe).with_settings(settings)
    target = None if output is None or dry_run else Path(output)
    model, folder = _folder_of(model, target, overwrite)
    if folder is not None:
        folder.check()
    elif target is not None:
        check_output(model, target, overwrite)
    loaded = load_model(model, map_inline=True)
    plan = plan_weights(loaded.model, chosen)
    check_not_empty(plan, chosen)
    if dry_run:
        return QuantizeResult(None, reported(plan, chosen), None)
    notes = _raise_opset(loaded.model, chosen, plan)
    if notes:  # the conversion made new nodes
        plan = plan_weights(loaded.model, chosen)
    with contextlib.ExitStack() as stack:
        # The system's own folder may be memory, or too small; the output has to fit anyway.
        beside = None if target is None else target.absolute().parent
        scratch = Path(stack.enter_context(scratch_within(beside)))
        calibration = None
        needed = chosen.needs_statistics
        by_uses = chosen.for_integers or chosen.kv_bits is not None
        says = by_uses or any(group.activations for group in plan.groups)
        if says and (needed or calibration_data_reader is not None):
            calibration = Calibration(
                KeptSamples(calibration_data_reader, loaded.model, scratch=scratch),
                scratch,
                calibration_providers,
                max_calibration_memory,
                progress or (lambda done, total, what: None),
            )
        report = quantize_graph(
            plan,
            chosen,
            scratch,
            calibration,
            executor=executor,
            max_memory=max_calibration_memory,
            progress=progress,
        )
        notes += _unpacked(report, chosen)
        notes += [SLOWER] if not chosen.for_integers and is_encoder(loaded.model) else []
        report = dataclasses.replace(report, notes=(*report.notes, *notes))
        if chosen.for_kernels or chosen.fuse_tables:
            _to_kernels(loaded.model, chosen, report)
        if target is None:
            _into_memory(loaded.model, scratch)
        else:
            if external_data is None:
                external_data = has_data_file(loaded, loaded.model)
            save = functools.partial(
                save_with_data,
                loaded.model,
                inline=not external_data,
                overwrite=overwrite,
                progress=progress,
            )
            if folder is None:
                save(target)
            else:
                with folder.staged(without=loaded.data_files.values()) as staged:
                    save(staged)
                loaded = load_model(target := folder.written_model)
    return QuantizeResult(target, report, same_kind(model, loaded.model))


def _folder_of(
    model: ModelLike, target: Path | None, overwrite: bool
) -> tuple[ModelLike, OutputFolder | None]:
    """Return the model of a folder, and what the folder becomes; None where that is a file."""
    if not is_path(model) or not os.path.isdir(model):
        return model, None
    source, found = Path(model), model_in(model)
    if target is None or target.suffix == ".onnx":
        return found, None
    return found, OutputFolder(source, found, target, overwrite)


def _raise_opset(model: ir.Model, recipe: Recipe, plan: WeightPlan) -> list[str]:
    """Convert the model to the opset that its new form needs; return a note of that."""
    notes: list[str] = []
    if plan.groups and not (recipe.for_kernels or recipe.for_integers):
        advice = ", or take quant_format='MatMulNBits', which needs no other opset"
        notes = raise_opset(model, _OPSET, "DequantizeLinear in blocks", advice)
    model.ir_version = max(model.ir_version or 0, _IR_VERSION)
    return notes


def _unpacked(report: QuantizeReport, recipe: Recipe) -> list[str]:
    """Warn of codes that plain onnxruntime dequantises at every run, and what avoids it."""
    tables = [row.weight for row in report.quantized if row.op_type == "Gather"]
    if tables and not recipe.fuses(table=True):
        text = f"plain onnxruntime dequantises the whole table at every run ({len(tables)} "
        return [f"{text}Gather): fuse_tables, and the fusion of ortplugins, read single rows"]
    reasons: collections.Counter[str | None] = collections.Counter()
    for row in report.quantized:
        along_k = row.K if row.block_size == -1 else row.block_size
        size = fitting_block_size(row.bits, along_k, row.K)
        is_product = row.op_type != "Gather"
        fused = is_product and recipe.fuses(table=row.weight in tables)
        if size is not None and fused:
            reasons[slow_kernel(row.bits, size, recipe.accuracy_level or 0)] += 1
    return [
        f"onnxruntime dequantises the weights of {count} nodes at every run: {reason}"
        for reason, count in reasons.items()
        if reason is not None
    ]


def _to_kernels(model: ir.Model, recipe: Recipe, report: QuantizeReport) -> None:
    """Fuse what was quantised, or its tables, into MatMulNBits and GatherBlockQuantized."""
    remarks = Remarks("dq_matmulnbits_fusion")
    ours = {node.node for node in report.quantized}
    only = None
    if not recipe.for_kernels:
        gathers = (n for n in model.graph.all_nodes() if n.op_type == "Gather")
        tables = (dequantizer(node.inputs[0]) for node in gathers if label(node) in ours)
        only = {node for node in tables if node is not None}
    options = FusionOptions(recipe.accuracy_level or 0, "fuse")
    fuse(model, options, PassContext(remarks), only)
    for remark in remarks:
        if remark.outcome is Outcome.REFUSED and remark.node in ours:
            raise ModelFileError(
                f"node {remark.node!r} has no MatMulNBits: {remark.reason}; exclude it, or "
                "take quant_format='QDQ'"
            )


def _into_memory(model: ir.Model, folder: Path) -> None:
    """Read the tensors that lie in a folder which is about to go."""
    for value, tensor in initializer_tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            if Path(tensor.path).is_relative_to(folder):
                (value.const_value,) = ir.external_data.convert_tensors_from_external([tensor])
        elif isinstance(tensor, ir.LazyTensor):
            # Made from such files, by the fusion's rules; of whole bytes all.
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
