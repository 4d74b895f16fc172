# SPDX-License-Identifier: MIT
"""Whether a model gives the same numbers before and after, on random inputs, in time."""

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

from ortplugins.runtime.copied_options import apply_settings

from .text_models import graphs

T = onnx.TensorProto
TOLERANCE = {"float32": 1e-5, "float64": 1e-5, "float16": 2e-3}


def session(
    model: ir.Model | onnx.ModelProto | bytes | str,
    *,
    optimised: bool = False,
    accuracy_level: int | None = None,
    final: Path | None = None,
    settings: Mapping[str, str] = {},
) -> ort.InferenceSession:
    """Open a model, or a path, as it stands; a level is that of onnxruntime's own fusion.

    ``final`` is a file for the graph that runs; ``settings`` are what a result asks for.
    """
    options = ort.SessionOptions()
    apply_settings(options, settings)
    if final is not None:
        options.optimized_model_filepath = str(final)
    if accuracy_level is not None:
        key = "session.qdq_matmulnbits_accuracy_level"
        options.add_session_config_entry(key, str(accuracy_level))
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if isinstance(model, ir.Model):
        model = ir.to_proto(model)
    if isinstance(model, onnx.ModelProto):
        model = model.SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def feeds_of(opened: ort.InferenceSession) -> list[list[dict[str, npt.NDArray]]]:
    """Three sets of random inputs, for each branch of a condition; undeclared sizes are 3."""
    conditions = any(value.type == "tensor(bool)" for value in opened.get_inputs())
    return [
        [_feed(opened, seed, truth) for seed in range(3)]
        for truth in ((False, True) if conditions else (True,))
    ]


def _feed(opened: ort.InferenceSession, seed: int, truth: bool) -> dict[str, npt.NDArray]:
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in opened.get_inputs():
        shape = [size if isinstance(size, int) and size >= 0 else 3 for size in value.shape]
        if math.prod(shape) > 1 << 20:
            raise ValueError(f"input {value.name!r} has {shape}: too large to try")
        name = value.type.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": np.float32, "double": np.float64, "float16": np.float16}.get(name)
        if dtype is not None:
            feeds[value.name] = np.asarray(rng.standard_normal(shape)).astype(dtype)
        elif name == "bool":
            feeds[value.name] = np.full(shape, truth)
        else:
            feeds[value.name] = np.zeros(shape, name)
    return feeds


def run_all(
    opened: ort.InferenceSession, feeds: Sequence[Sequence[dict[str, npt.NDArray]]]
) -> list[list[list[npt.NDArray]]]:
    return [[opened.run(None, feed) for feed in group] for group in feeds]


def wrong_numbers(
    before: Sequence[Sequence[list[npt.NDArray]]],
    after: Sequence[Sequence[list[npt.NDArray]]],
    *,
    halves: bool,
) -> str:
    """The first difference beyond rounding; empty if there is none.

    Sums that cancel lose more digits: wrong numbers are wrong for every set of inputs.
    """
    for groups in zip(before, after, strict=True):
        wrong = [difference(a, b, halves=halves) for a, b in zip(*groups, strict=True)]
        if all(wrong):
            return wrong[0]
    return ""


def difference(
    before: Sequence[npt.NDArray], after: Sequence[npt.NDArray], *, halves: bool
) -> str:
    """What is different beyond rounding; empty if nothing is."""
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"output {index} was {a.dtype} {a.shape} and is {b.dtype} {b.shape}"
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                return f"output {index} differs: {a} {b}"
            continue
        expected, actual = a.astype(np.float64), b.astype(np.float64)
        greatest = np.abs(expected).max(initial=0.0)
        limit = 1e3 if halves else 1e30
        if not np.isfinite(greatest) or greatest > limit or 0 < greatest < 1 / limit:
            continue  # where an overflow happens depends on the order of sums
        tolerance = TOLERANCE["float16" if halves else a.dtype.name]
        error = np.abs(actual - expected).max(initial=0.0)
        if not error <= tolerance * greatest:
            return f"output {index} is off by {error} where the greatest is {greatest}"
    return ""


def holds_halves(model: onnx.ModelProto) -> bool:
    """Whether anything in the model rounds to float16 or bfloat16."""
    halves = (T.FLOAT16, T.BFLOAT16)
    kinds = [value.type.tensor_type.elem_type for value in model.graph.input]
    for graph in graphs(model):
        kinds += [tensor.data_type for tensor in getattr(graph, "initializer", ())]
        for attribute in (a for node in graph.node for a in node.attribute):
            kinds.append(attribute.t.data_type)
            if attribute.name in ("to", "output_dtype", "dtype"):
                kinds.append(attribute.i)
    return any(kind in halves for kind in kinds)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow, which no ``except Exception`` stops, after more seconds of CPU time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_slow(*_: object) -> None:
        raise TooSlow(f"more than {seconds} s")

    previous = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


class TooSlow(BaseException):
    pass
