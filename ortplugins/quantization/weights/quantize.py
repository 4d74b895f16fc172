# SPDX-License-Identifier: MIT
"""From a float model to a weight-only quantised one, as a file or as an object."""

from __future__ import annotations

__all__ = ["QuantizeResult", "quantize"]

import collections
import concurrent.futures
import dataclasses
import enum
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ortplugins.errors import ModelFileError, QuantizationError
from ortplugins.model_io.loading import initializer_tensors, is_path, load_model, same_kind
from ortplugins.model_io.model_folder import OutputFolder, model_in
from ortplugins.model_io.opset import raise_opset
from ortplugins.model_io.saving import Progress, check_output, needs_data_file, save_with_data
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.selection import Pattern
from ortplugins.quantization.statistics.collect import collect
from ortplugins.quantization.weights.plan import (
    QUANT_FORMATS,
    QuantizeSettings,
    Weight,
    WeightPlan,
    check_not_empty,
    plan_weights,
    reported,
)
from ortplugins.quantization.weights.report import QuantizeReport
from ortplugins.quantization.weights.work import quantize_graph
from ortplugins.samples.kept import KeptSamples
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.dq_matmulnbits_fusion.matmulnbits_inputs import (
    fitting_block_size,
    slow_kernel,
)
from rewrite_rules.remarks import Outcome, PassContext, Remarks

if TYPE_CHECKING:
    from ortplugins.model_io.loading import ModelLike

# The first opset whose DequantizeLinear takes blocks of so many bits, and the file format that
# can hold the codes.
_OPSETS = {2: (25, 13), 4: (21, 10), 8: (21, 10)}
_MICROSOFT_IR_VERSION = 10


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
    method: str = "rtn",
    bits: int = 4,
    block_size: int = 32,
    is_symmetric: bool = True,
    grid: str = "extreme",
    op_types: Sequence[str] = ("MatMul", "Gemm"),
    nodes_to_include: Sequence[Pattern] | None = None,
    nodes_to_exclude: Sequence[Pattern] = (),
    node_config: Mapping[Any, Mapping[str, int]] | None = None,
    share_of_8_bits: float = 0.0,
    quant_format: str | enum.Enum = "QDQ",
    accuracy_level: int | None = None,
    alphas: Sequence[float] | None = None,
    clip_ratios: Sequence[float] | None = None,
    fold_scales: bool = True,
    calibration_data_reader: Any = None,
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    max_calibration_memory: int = 1 << 30,
    rewind: bool = False,
    external_data: bool | None = None,
    overwrite: bool = False,
    executor: concurrent.futures.Executor | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Quantise the constant matrices of a model; activations stay in float.

    Args:
        model: Path of an .onnx file or of a folder with one, ``onnx.ModelProto`` or
            ``onnx_ir.Model``; not changed. Weights of a path are mapped, never read whole.
        output: File to write; its data goes to ``<output>.data``. For a folder, a folder to
            write, unless it ends with ``.onnx``: tokenizer and configurations go along.
        method: ``"rtn"`` rounds to nearest and needs no data. ``"awq_lite"`` scales input
            channels so that those that matter are rounded finer, ``"awq_clip"`` clips blocks,
            ``"awq_full"`` does both (Lin et al., arXiv 2306.00978). ``"gptq"`` makes up for
            each rounding in what is rounded later (Frantar et al., arXiv 2210.17323);
            ``"awq_gptq"`` scales first.
        bits: 2, 4 or 8.
        block_size: Neighbours along K that share a scale; -1 for a scale per column.
        is_symmetric: Signed codes without zero points; else unsigned ones with.
        grid: Of symmetric codes, ``"extreme"`` or ``"amax"``; see :class:`BlockFormat`.
        op_types: Some of MatMul (FusedMatMul included), Gemm and Gather.
        nodes_to_include: Nodes to quantise, by name, by glob, or by regular expression
            (compiled, or text that starts with ``re:``; found anywhere in the name). None for
            all of them. Nodes without a name go by their first output's.
        nodes_to_exclude: Nodes that keep their float weight, in the same way.
        node_config: ``{pattern: {"bits": 8, "block_size": 32}}`` for some nodes; later entries
            win over earlier ones.
        share_of_8_bits: Share of the weights, 0 to 1, that get 8 bits, rounded to nearest:
            those whose codes add the most error to outputs. 0.03 of them make 4.6 bits per
            weight out of 4.5. Needs samples.
        quant_format: ``"QDQ"``, codes ``[K, N]``, blocks along axis 0; ``"QDQ_transposed"``,
            codes ``[N, K]``, and a Transpose; ``"MatMulNBits"``, for onnxruntime alone
            (Gather becomes GatherBlockQuantized). onnxruntime's ``QuantFormat`` is taken, too.
        accuracy_level: Attribute of MatMulNBits: 0 or 1 computes in float32 (the default), 4
            with int8 activations. Only for that format.
        alphas: Exponents that AWQ tries for the scales of input channels, 0 to 1.
        clip_ratios: Ratios that it tries for what blocks are clipped to, above 0 and up to 1.
        fold_scales: Whether those scales may be folded into the constants that an activation
            comes from; else a Mul takes them out again.
        calibration_data_reader: Samples, each a dict of input names and arrays: an object with
            ``get_next()``, an iterable, or paths of ``.npz`` files. None for random ones, with
            a warning. With ``method="rtn"`` they only measure the error of outputs.
        calibration_providers: Execution providers that run the samples.
        max_calibration_memory: Bytes that activations and their statistics may take at once;
            what does not fit is watched in further passes over the samples.
        rewind: Whether further passes may rewind the reader; else samples are kept, in memory
            and beyond 64 MiB on disk.
        external_data: Whether tensors of 1 KiB and more go to the data file; by default as the
            source has them, and always when they are more than 1 GiB.
        overwrite: Whether ``output`` may exist.
        executor: Where weights are worked on: any ``concurrent.futures.Executor``; by default
            threads, one per core. The result is the same, bit for bit.
        work_dir: Folder for intermediate files, about as large as the result; every worker of
            the executor has to see it. By default the output's own folder.
        dry_run: Only report what would be quantised, and to how many bytes.
        progress: Called while groups are quantised and tensors written: done, total, name.

    Returns:
        Path, report and model.

    Raises:
        CalibrationError: If a sample is no dict of the model's inputs, holds NaN or infinite
            values, or there is none.
        FileExistsError: If ``output`` exists and ``overwrite`` is false.
        MissingFileError, ModelFileError: If the model or its data can't be used, or nothing is
            left to quantise.
        QuantizationError: If an argument is out of range, a pattern means no node, or a weight
            holds NaN or infinite values. No output is written, whatever is raised.
        OSError: If a file can't be written.
    """
    settings = QuantizeSettings(
        method=method,
        form=BlockFormat(bits, block_size, is_symmetric, grid),
        op_types=tuple(op_types),
        nodes_to_include=nodes_to_include,
        nodes_to_exclude=nodes_to_exclude,
        node_config=dict(node_config or {}),
        share_of_8_bits=share_of_8_bits,
        quant_format=_format_name(quant_format),
        accuracy_level=accuracy_level,
        alphas=None if alphas is None else tuple(alphas),
        clip_ratios=None if clip_ratios is None else tuple(clip_ratios),
        fold_scales=fold_scales,
    )
    target = None if output is None or dry_run else Path(output)
    folder = None
    if is_path(model) and os.path.isdir(model):  # type: ignore[arg-type]
        source, model = Path(model), model_in(model)  # type: ignore[arg-type]
        if target is not None and target.suffix != ".onnx":
            folder = OutputFolder(source, model, target, overwrite)
    if folder is not None:
        folder.check()
    elif target is not None:
        check_output(model, target, overwrite)
    loaded = load_model(model, map_inline=True)
    plan = plan_weights(loaded.model, settings)
    check_not_empty(plan, settings)
    if dry_run:
        return QuantizeResult(None, _expected(plan, settings), None)
    notes = _raise_opset(loaded.model, settings, plan)
    if notes:  # the conversion made new nodes
        plan = plan_weights(loaded.model, settings)
    notes += _misfused(plan, settings)
    with tempfile.TemporaryDirectory(
        prefix=".ortplugins-", dir=_work_dir(work_dir, target)
    ) as scratch_folder:
        scratch = Path(scratch_folder)
        calibration = None
        watched = any(group.activations for group in plan.groups)
        if watched and (settings.needs_statistics or calibration_data_reader is not None):
            calibration = functools.partial(
                collect,
                loaded.model,
                samples=KeptSamples(
                    calibration_data_reader, loaded.model, scratch=scratch, rewind=rewind
                ),
                scratch=scratch,
                max_calibration_memory=max_calibration_memory,
                providers=calibration_providers,
                progress=progress,
            )
        report = quantize_graph(
            plan,
            settings,
            scratch,
            calibration=calibration,
            executor=executor,
            progress=progress,
        )
        notes += _unpacked(report, settings)
        report = dataclasses.replace(report, notes=(*report.notes, *notes))
        if settings.for_kernels:
            _to_kernels(loaded.model, accuracy_level or 0, report)
        if target is None:
            _into_memory(loaded.model, scratch)
            return QuantizeResult(None, report, same_kind(model, loaded.model))
        if external_data is None:
            # Tensors within the model's own file are not external to it.
            own = os.path.realpath(model) if is_path(model) else None  # type: ignore[arg-type]
            files = {os.path.realpath(path) for path in loaded.data_files.values()} - {own}
            external_data = bool(files) or needs_data_file(loaded.model)
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
            target = folder.written_model
            _move(loaded.model, staged.parent, target.parent)
    return QuantizeResult(target, report, same_kind(model, loaded.model))


def _move(model: ir.Model, old: Path, new: Path) -> None:
    """Point tensors to a folder that has got another name."""
    for _, tensor in initializer_tensors(model):
        if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) == old:
            tensor.base_dir = os.path.realpath(new)


def _format_name(quant_format: str | enum.Enum) -> str:
    """Read a format by our name or onnxruntime's.

    Raises:
        QuantizationError: If there is none of that name.
    """
    name = quant_format.name if isinstance(quant_format, enum.Enum) else quant_format
    for known in QUANT_FORMATS:
        if str(name).lower() == known.lower():
            return known
    if name == "QOperator":
        return "MatMulNBits"
    raise QuantizationError(f"quant_format is {name!r}: one of {QUANT_FORMATS} is expected")


def _work_dir(given: str | os.PathLike[str] | None, target: Path | None) -> str | None:
    if given is not None:
        return os.path.abspath(given)
    # The system's own folder may be memory, or too small; the output has to fit here anyway.
    return None if target is None else os.fspath(target.absolute().parent)


def _raise_opset(model: ir.Model, settings: QuantizeSettings, plan: WeightPlan) -> list[str]:
    """Convert the model to the opset that its new form needs; tell if that was done."""
    if settings.for_kernels:
        model.ir_version = max(model.ir_version or 0, _MICROSOFT_IR_VERSION)
        return []
    bits = {weight.form.bits for group in plan.groups for weight in group.weights}
    opset, ir_version = max(_OPSETS[each] for each in bits)
    found = model.opset_imports.get("", 0)
    reason = f"DequantizeLinear in blocks of {min(bits)} bits"
    converted = raise_opset(model, opset, reason)
    model.ir_version = max(model.ir_version or 0, ir_version)
    return [f"opset {found} was converted to {opset}: {reason} needs it"] if converted else []


def _misfused(plan: WeightPlan, settings: QuantizeSettings) -> list[str]:
    """Warn of what onnxruntime's own fusion gets wrong; measured on 1.31."""
    weights = [weight for group in plan.groups for weight in group.weights]
    two_bits = [weight for weight in weights if weight.form.bits == 2]
    layout = settings.quant_format
    if layout == "QDQ" and any(weight.N % 4 for weight in two_bits):
        text = "is wrong on 2-bit weights along axis 0 whose N is no multiple of 4"
    elif layout == "QDQ_transposed" and any(
        weight.form.block_size == -1 and not weight.form.is_symmetric for weight in two_bits
    ):
        text = "fails on uint2 weights with a scale per column"
    else:
        return []
    remedy = "the fusion of ortplugins, and quant_format='MatMulNBits', are right"
    return [f"plain onnxruntime 1.31 {text}; {remedy}"]


def _unpacked(report: QuantizeReport, settings: QuantizeSettings) -> list[str]:
    """Warn of codes that plain onnxruntime dequantises at every run, and what avoids it."""
    tables = sum(row.op_type == "Gather" for row in report.quantized)
    if not settings.for_kernels:
        text = (
            f"plain onnxruntime dequantises the whole table at every run ({tables} Gather): "
            "the fusion of ortplugins, and quant_format='MatMulNBits', read single rows"
        )
        return [text] if tables else []
    reasons: collections.Counter[str | None] = collections.Counter()
    for row in report.quantized:
        along_k = row.K if row.block_size == -1 else row.block_size
        size = fitting_block_size(row.bits, along_k, row.K)
        if size is not None and row.op_type != "Gather":
            reasons[slow_kernel(row.bits, size, settings.accuracy_level or 0)] += 1
    return [
        f"onnxruntime dequantises the weights of {count} nodes at every run: {reason}"
        for reason, count in reasons.items()
        if reason is not None
    ]


def _expected(plan: WeightPlan, settings: QuantizeSettings) -> QuantizeReport:
    """Tell what would be done, and to how many bytes."""
    rows: dict[Weight, dict[str, str]] = {}
    for group in plan.groups:
        method = settings.method if group.activations else "rtn"
        reason = group.reason if settings.needs_statistics else ""
        rows |= {weight: {"method": method, "reason": reason} for weight in group.weights}
    return reported(plan, settings, rows)


def _to_kernels(model: ir.Model, accuracy_level: int, report: QuantizeReport) -> None:
    """Fuse what was quantised into MatMulNBits and GatherBlockQuantized.

    Raises:
        ModelFileError: If the rules refuse a node that was quantised now.
    """
    remarks = Remarks("dq_matmulnbits_fusion")
    fuse(model, FusionOptions(accuracy_level, "fuse"), PassContext(remarks))
    ours = {node.node for node in report.quantized}
    for remark in remarks:
        if remark.outcome is Outcome.REFUSED and remark.node in ours:
            raise ModelFileError(
                f"node {remark.node!r} has no MatMulNBits: {remark.reason}; exclude it, or "
                "take quant_format='QDQ'"
            )


def _into_memory(model: ir.Model, scratch: Path) -> None:
    """Read the tensors that lie in files which are about to go."""
    for value, tensor in initializer_tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            if Path(tensor.path).is_relative_to(scratch):
                (value.const_value,) = ir.external_data.convert_tensors_from_external([tensor])
        elif isinstance(tensor, ir.LazyTensor):
            # Made from such files, by the fusion's rules; of whole bytes all.
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
