# SPDX-License-Identifier: MIT
"""Runs calibration samples through a model and collects statistics of its activations.

Memory decides how many activations at a time. A batch of them takes

    what they accumulate (K * K * 4 bytes for a Gram matrix)
    + what they are themselves in a run of the largest sample

and gets one pass over the samples, in a session of its own: the model cut down to what those
activations need, its weights mapped from the files where they lie. Batches go in the graph's
order, so that early passes are short. Several runs per sample and fewer passes would cost the
same. (RunOptions.only_execute_path_to_fetches would do for one session, but does nothing in
onnxruntime's inference builds: issue 16013.)
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common
import onnxruntime
import threadpoolctl

from ortplugins.errors import CalibrationError, OrtpluginsWarning, QuantizationError
from ortplugins.model_io.loading import initializer_tensors, lift_constants, stored_bytes
from ortplugins.model_io.saving import DATA_THRESHOLD, Progress
from ortplugins.quantization.statistics.accumulator import (
    ActivationRequest,
    ActivationStatistics,
    StatisticsAccumulator,
)
from ortplugins.runtime.stock_session import stock_options
from ortplugins.samples.sources import Feed, KeptSamples, feed_bytes
from rewrite_rules.facts.token_rows import TokenRows


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Samples, and what it takes to run them."""

    samples: KeptSamples
    scratch: Path  # for files, which are needed as long as this is
    providers: Sequence[Any] = ("CPUExecutionProvider",)
    max_memory: int = 1 << 30  # bytes
    progress: Progress = lambda done, total, what: None

    def __post_init__(self) -> None:
        if self.max_memory < 1:
            raise QuantizationError(
                f"max_calibration_memory is {self.max_memory}: 1 byte or more is needed"
            )


def collect(
    model: ir.Model, requests: Iterable[ActivationRequest], calibration: Calibration
) -> Iterator[dict[str, ActivationStatistics | None]]:
    """Yield statistics of activations, batch after batch, in the order of the graph.

    A batch is made when it is asked for, and not held afterwards; the statistics do not depend
    on the batches. An activation without tokens in any sample has None. The memory is for
    accumulators and fetched activations: one that needs more alone gets it, with an
    OrtpluginsWarning, and onnxruntime's own values and the samples come on top.
    """
    # Bad ones are reported before hours of work.
    calibration.samples.read_all()
    detached = model.clone()
    folder = detach_tensors(detached, calibration.scratch)
    source = _Source(detached, folder, calibration, TokenRows(detached))
    named = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    order = {name: place for place, name in enumerate(named)}
    requests = sorted(requests, key=lambda request: order[request.name])
    sizes = _measure(source, [request.name for request in requests])
    needed = [_without_needless_gram(request, sizes[request.name]) for request in requests]
    batches = _batches(needed, sizes, calibration.max_memory)
    for number, batch in enumerate(batches):
        what = f"calibration, pass {number + 1} of {len(batches)}"

        def show(done: int, count: int, number: int = number, what: str = what) -> None:
            calibration.progress(number * count + done, count * len(batches), what)

        accumulators = _accumulate(source, batch, sizes, show)
        yield {name: accumulators.pop(name).finish() for name in list(accumulators)}


@dataclasses.dataclass(frozen=True)
class _Source:
    """What activations come from."""

    model: ir.Model  # without large tensors
    folder: Path  # above the files of these
    calibration: Calibration
    rows: TokenRows

    def part(
        self, names: Sequence[str], *, shapes: bool = False
    ) -> Callable[[Feed, str], Iterator[tuple[str, npt.NDArray[Any]]]]:
        """Return what runs a sample on a part of the model: activations, or their shapes.

        Each is let go afterwards; shapes alone take no memory, and are asked for once.
        """
        model = self.model.clone()
        values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        outputs: dict[str, ir.Value] = {}
        for name in names:
            value = values[name]
            if shapes:
                value = appended(model, "Shape", value, {})
            elif value.is_graph_input() and not value.is_initializer():
                continue  # taken from the sample, which may leave out one with a default
            elif value.dtype is ir.DataType.BFLOAT16:
                # onnxruntime has no numpy arrays of these.
                value = appended(model, "Cast", value, {"to": ir.DataType.FLOAT.value})
            outputs[name] = value
        session, made = None, [value.name for value in outputs.values()]
        if outputs:
            model.graph.outputs.clear()
            model.graph.outputs.extend(outputs.values())
            onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
            providers = self.calibration.providers
            session = open_for_samples(model, self.folder, providers, runs_often=not shapes)

        def fetch(feed: Feed, what: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
            # onnxruntime's own buffers. (IOBinding would save no copy, and took the same time
            # and memory.)
            arrays = [] if session is None else run_sample(session, made, feed, what)[::-1]
            for name in names:
                yield name, arrays.pop() if name in outputs else feed[name]

        return fetch


@dataclasses.dataclass(frozen=True)
class _Size:
    """How much of an activation there is."""

    nbytes: int  # fetched, of the largest sample
    most_tokens: int  # of all samples, if all were as large
    tokens: float  # of all samples, by their own sizes, less padding


def _measure(source: _Source, names: Sequence[str]) -> dict[str, _Size]:
    """Run the largest sample for the shapes of activations; scale by the sizes of others."""
    samples = source.calibration.samples
    largest = samples.largest()
    part_of_largest = dict.fromkeys(names, 0.0)
    for feed in samples:
        part = feed_bytes(feed) / max(1, feed_bytes(largest))
        for name in part_of_largest:
            part_of_largest[name] += part * source.rows.share(name, feed)
    given = {value.name for value in source.model.graph.inputs}  # which are there anyway
    found = {}
    for name, shape in source.part(names, shapes=True)(largest, "the largest sample"):
        rows = math.prod(shape[:-1].tolist())
        nbytes = 0 if name in given else math.prod(shape.tolist()) * 4
        found[name] = _Size(nbytes, rows * (samples.count or 0), rows * part_of_largest[name])
    return found


def _accumulate(
    source: _Source,
    batch: Sequence[ActivationRequest],
    sizes: Mapping[str, _Size],
    show: Callable[[int, int], None],
) -> dict[str, StatisticsAccumulator]:
    """Go through the samples once for some activations; nothing else is held afterwards."""
    accumulators = {
        r.name: StatisticsAccumulator(r, max(1, round(sizes[r.name].tokens / r.gram_tokens)))
        for r in batch
    }
    samples = source.calibration.samples
    # How BLAS shares a sum out among threads changes its last bits; activations are shared
    # out instead, each to one thread.
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        fetch = source.part([request.name for request in batch])
        for index, feed in enumerate(samples):
            show(index, samples.count or 0)
            arrays = without_padding(fetch(feed, f"sample {index}"), source.rows, feed)
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                updates = [pool.submit(accumulators[name].update, x) for name, x in arrays]
            for update in updates:
                try:
                    update.result()
                except CalibrationError as error:
                    raise CalibrationError(f"sample {index}: {error}") from None
    return accumulators


def _without_needless_gram(request: ActivationRequest, size: _Size) -> ActivationRequest:
    """Keep all tokens instead of the Gram matrix where there are few."""
    tokens = size.most_tokens
    if not request.gram or not 0 < 2 * tokens <= request.k:
        return request
    most = max(request.max_tokens, tokens)
    return dataclasses.replace(request, gram=False, max_tokens=most)


def _batches(
    requests: Iterable[ActivationRequest], sizes: Mapping[str, _Size], budget: int
) -> list[list[ActivationRequest]]:
    """Fill batches with activations, in their order."""
    batches: list[list[ActivationRequest]] = []
    left = 0
    for request in requests:
        need = request.nbytes + sizes[request.name].nbytes
        if need > budget:
            warnings.warn(
                f"calibrating {request.name!r} takes {need / 2**20:.0f} MiB, more than "
                f"max_calibration_memory ({budget / 2**20:.0f} MiB); use shorter samples to "
                "stay below it [ORP911]",
                OrtpluginsWarning,
                stacklevel=3,
            )
        if need > left or not batches:
            batches.append([])
            left = budget
        batches[-1].append(request)
        left -= need
    return batches


def without_padding(
    arrays: Iterable[tuple[str, npt.NDArray[Any]]], rows: TokenRows, feed: Feed
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Leave the rows of padding out of activations; those without a row per token stay."""
    for name, array in arrays:
        real = rows.real(name, array.shape, feed)
        if real is not None:
            array = array[real]
        if array.size:
            yield name, array


def appended(
    model: ir.Model, op_type: str, value: ir.Value, attributes: Mapping[str, int]
) -> ir.Value:
    """Add a node that reads a value; return its output."""
    node = ir.node(op_type, [value], attributes)
    (output,) = node.outputs
    output.name = f"{value.name}.ortplugins_calibration_{op_type.lower()}"
    output.type = ir.TensorType(ir.DataType.INT64 if op_type == "Shape" else ir.DataType.FLOAT)
    model.opset_imports.setdefault("", 21)
    model.graph.append(node)
    return output


def detach_tensors(model: ir.Model, scratch: Path) -> Path:
    """Leave no large tensor in the graph; return the folder above all files with tensors.

    A serialized graph is limited to 2 GB, and onnxruntime keeps what is in it on the heap,
    while it maps files. onnxruntime reads no files outside of the one folder that it is given;
    a parent of all of them will do.
    """
    lift_constants(model)
    owners = {
        value: tensor
        for value, tensor in initializer_tensors(model)
        if isinstance(tensor, ir.ExternalTensor) or stored_bytes(tensor) >= DATA_THRESHOLD
    }
    in_memory = {id(t): t for t in owners.values() if not isinstance(t, ir.ExternalTensor)}
    written = ir.external_data.convert_tensors_to_external(
        list(in_memory.values()), scratch, "tensors.data"
    )
    files: dict[int, ir.TensorProtocol] = dict(zip(in_memory, written, strict=True))
    paths: dict[ir.Value, tuple[Path, ir.ExternalTensor]] = {}
    for value, tensor in owners.items():
        external = files.get(id(tensor), tensor)
        assert isinstance(external, ir.ExternalTensor)
        paths[value] = Path(os.path.realpath(external.path)), external
    if not paths:
        return scratch
    try:
        folder = Path(os.path.commonpath({path.parent for path, _ in paths.values()}))
    except ValueError as error:  # on two drives of Windows
        raise CalibrationError(
            f"the model's data and the scratch folder {str(scratch)!r} have no parent folder "
            "in common, which onnxruntime needs: use a scratch folder on the model's drive"
        ) from error
    for value, (path, external) in paths.items():
        # The type and the shape are the value's: a tensor may be stored under another name.
        value.const_value = ir.ExternalTensor(
            path.relative_to(folder).as_posix(),
            external.offset,
            external.length,
            external.dtype,
            shape=ir.Shape(external.shape),
            name=value.name or "",
            base_dir=str(folder),
        )
    return folder


def open_for_samples(
    model: ir.Model, folder: Path, providers: Sequence[Any], runs_often: bool = True
) -> onnxruntime.InferenceSession:
    """Open a session that keeps the weights in their files.

    Measured on SmolLM2-135M (540 MB of weights), samples of 256 tokens, 120 activations, 2
    cores: 0.23 s a sample, and 165 MB of private memory, 100 of which are the activations.

    - No optimisation. It gained nothing there, and what it fuses depends on the activations
      that are outputs: statistics would depend on the batches. Folded constants (transposed
      or cast weights) would move to the heap besides.
    - Weights packed for the kernels make runs 12 % faster and take 500 MB of heap: left out.
    - Threads do not spin after a run, while numpy multiplies on the same cores: with Gram
      matrices, on a busy machine, 11 to 15 s instead of 20 for 4 samples.
    - The arena is on: runs without take 60 MB more, as malloc gives less back.
    """
    options = stock_options()
    # Planning which buffers to use again is quadratic in nodes of unknown shapes, 0.65 s for
    # SmolLM2. Without it a session opens in a tenth of the time, but each run takes a tenth
    # longer.
    options.enable_mem_reuse = runs_often
    options.add_session_config_entry("session.disable_prepacking", "1")
    return open_detached(model, folder, options, providers)


def open_detached(
    model: ir.Model,
    folder: Path,
    options: onnxruntime.SessionOptions,
    providers: Sequence[Any],
) -> onnxruntime.InferenceSession:
    """Open a session on a graph that :func:`detach_tensors` left; its threads do not spin."""
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    content = ir.to_proto(model).SerializeToString()
    try:
        return onnxruntime.InferenceSession(
            content, options, providers=list(providers), enable_fallback=0
        )
    except Exception as error:  # onnxruntime's own classes, none is documented
        raise CalibrationError(
            f"onnxruntime refuses the model for calibration: {error}"
        ) from error


def run_sample(
    session: onnxruntime.InferenceSession, names: Sequence[str | None], feed: Feed, what: str
) -> list[npt.NDArray[Any]]:
    """Return outputs, all where none is named; an error names the sample."""
    try:
        arrays: list[npt.NDArray[Any]] = session.run(names, feed)
    except Exception as error:  # onnxruntime's own classes, none is documented
        raise CalibrationError(
            f"{what}: onnxruntime failed to run the model on it: {error}"
        ) from error
    return arrays
