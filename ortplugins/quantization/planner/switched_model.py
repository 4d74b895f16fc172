# SPDX-License-Identifier: MIT
"""How far the outputs of a model move when some of its grids are switched on or off.

A model has switches: inputs of type bool that choose between two ways to compute a value. Each
setting of them gives outputs, which are compared with those of a reference.

To rank N switches each of them is set alone, N runs for each sample. They are made cheap
without giving up a bit of the result:

    one session per setting      N x (opening + run)     opening folds and packs all weights
    one session, switched        N x run                 what lies before the switch runs again
    sessions of segments         N x run x (1/2 + 1/2S)  chosen

The graph is cut in S segments where few values cross. A run of a *base* setting keeps what
crosses each cut, for every sample; another setting starts at the segment of its first switch
that differs from the base. Cuts whose values don't fit into the memory given are not kept:
runs start at one before, and the numbers are the same.
"""

from __future__ import annotations

__all__ = ["Base", "SwitchedModel"]

import bisect
import collections
import concurrent.futures
import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import CalibrationError, QuantizationError
from ortplugins.quantization.planner.deviation import Comparison, Deviation
from ortplugins.quantization.planner.graph_cuts import (
    choose_cuts,
    first_readers,
    lifetimes,
    reads,
)
from ortplugins.quantization.statistics.collect import detach_tensors
from ortplugins.samples.sources import Feed, KeptSamples

_COMPARED = frozenset({"tensor(float)", "tensor(float16)", "tensor(double)"})
# At once: a new one is made while the last is held.
_BASES = 2
_State = dict[str, Any]  # name of a value -> onnxruntime.OrtValue


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """A setting whose values at the cuts are kept.

    Attributes:
        on: Names of the switches that are on.
        deviation: Of its outputs; from the reference, if there is one.
    """

    on: frozenset[str]
    deviation: Deviation
    states: Mapping[tuple[int, int], _State] = dataclasses.field(repr=False)


class _NoTensor(Exception):
    """A value that crosses a cut is a sequence, a map or absent."""


class SwitchedModel:
    """A model whose switches can be set, and the samples that it is measured on.

    Attributes:
        switches: Names of the switches, in the graph's order.
        outputs: Names of the outputs that are compared: those of a float type.
    """

    def __init__(
        self,
        model: ir.Model,
        switches: Collection[str],
        samples: KeptSamples,
        *,
        scratch: Path,
        max_memory: int = 1 << 30,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> None:
        """Cut the model and run the largest sample.

        Args:
            model: The model, with its switches as bool inputs; it is taken over.
            switches: Names of these inputs.
            samples: What it is run on; read to the end.
            scratch: An existing folder, to be kept as long as this object is used.
            max_memory: Bytes for values that are kept at cuts, of all samples; the outputs of
                a reference go first and spill to ``scratch`` if they take more than half. A
                quarter of it bounds weights that are kept in float.
            providers: Execution providers, as for ``onnxruntime.InferenceSession``.

        Raises:
            CalibrationError: If a sample can't be used or onnxruntime fails on it (chained).
            QuantizationError: If no output is a float tensor.
        """
        count = samples.read_all()
        cores = os.cpu_count() or 1
        self._workers = min(count, cores)
        self._threads = max(1, cores // self._workers)
        self._samples, self._providers = samples, tuple(providers)
        self._scratch = Path(tempfile.mkdtemp(dir=scratch))
        self._folder = detach_tensors(model, self._scratch)
        model.graph.sort()
        self._model = model
        self._max_memory = max_memory
        self._fold = _folded_bytes(model) <= max_memory // 4
        self._nodes = list(model.graph)
        self._places = first_readers(self._nodes, frozenset(switches))
        self.switches = tuple(sorted(self._places, key=self._places.__getitem__))
        self._reference: list[list[npt.NDArray[Any]] | Path] = []
        self._kept_cuts: list[int] = []
        cuts = choose_cuts(self._nodes, model.graph, [self._places[s] for s in self.switches])
        while True:
            self._lay_out(cuts)
            try:
                self._probe()
                break
            except _NoTensor as error:
                cuts.remove(error.args[0])

    def base(self, on: Collection[str]) -> Base:
        """Run a setting and keep what crosses the cuts; let go of the last one first."""
        states: dict[tuple[int, int], _State] = {}

        def run(index: int, feed: Feed) -> _State:
            final: _State = {}
            for segment, final in self._run(feed, frozenset(on), 0, {}, index):
                if segment + 1 in self._kept_cuts:
                    states[index, segment + 1] = final
            return final

        return Base(frozenset(on), self._measured(run), states)

    def values(self, on: Collection[str] = ()) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Run a setting; yield the compared outputs of each sample, by name."""
        wanted = frozenset(on)

        def run(index: int, feed: Feed) -> _State:
            return self._last(feed, wanted, 0, {}, index)

        for _, arrays in self._each(run):
            yield dict(zip(self.outputs, arrays, strict=True))

    def refer_to(self, outputs: Iterable[Mapping[str, npt.NDArray[Any]]]) -> None:
        """Take outputs as the reference: of :meth:`values`, of this model or of another.

        Raises:
            QuantizationError: If one is missing, has another shape than here (found when it is
                compared) or is not finite.
        """
        self._reference = []
        for index, arrays in enumerate(outputs):
            self._add_reference(index, arrays)

    def deviation(self, on: Collection[str], base: Base) -> Deviation:
        """Measure a setting; what it shares with the base is not run again."""
        wanted = frozenset(on)
        changed = wanted ^ base.on
        if not changed:
            return base.deviation
        first = min(self._segment_of(name) for name in changed)
        start = max((cut for cut in self._kept_cuts if cut <= first), default=0)

        def run(index: int, feed: Feed) -> _State:
            state = dict(base.states[index, start]) if start else {}
            return self._last(feed, wanted, start, state, index)

        return self._measured(run)

    def compare(self, outputs: Iterable[Mapping[str, npt.NDArray[Any]]]) -> Deviation:
        """Measure outputs of another model, sample by sample, against the reference."""
        comparison = Comparison(len(self.outputs))
        for index, arrays in enumerate(outputs):
            self._add(comparison, index, [arrays[name] for name in self.outputs])
        return comparison.result()

    def _measured(self, run: Callable[[int, Feed], _State]) -> Deviation:
        comparison = Comparison(len(self.outputs))
        for index, found in self._each(run):
            self._add(comparison, index, found)
        return comparison.result()

    def _add(
        self, comparison: Comparison, index: int, found: Sequence[npt.NDArray[Any]]
    ) -> None:
        wanted = self._referred(index) if self._reference else found
        for name, x, y in zip(self.outputs, found, wanted, strict=True):
            if x.shape != y.shape:
                raise QuantizationError(
                    f"output {name!r} has shape {list(x.shape)} for sample {index}, but "
                    f"{list(y.shape)} in the reference: it is another model"
                )
        comparison.add(found, wanted)

    def _each(
        self, run: Callable[[int, Feed], _State]
    ) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
        """Run every sample, as many at once as there are cores; yield outputs in order."""
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            waiting: collections.deque[concurrent.futures.Future[_State]] = collections.deque()
            feeds = enumerate(self._samples)
            for index in itertools.count():
                # No more than a sample for each worker is in memory.
                for number, feed in itertools.islice(feeds, self._workers - len(waiting)):
                    waiting.append(pool.submit(run, number, feed))
                if not waiting:
                    return
                final = waiting.popleft().result()
                yield index, [final[name].numpy() for name in self.outputs]

    def _last(
        self, feed: Feed, on: frozenset[str], start: int, state: _State, index: int
    ) -> _State:
        for _, now in self._run(feed, on, start, state, index):
            state = now
        return state

    def _add_reference(self, index: int, outputs: Mapping[str, npt.NDArray[Any]]) -> None:
        arrays = []
        for name in self.outputs:
            if name not in outputs:
                raise QuantizationError(
                    f"the reference has no float output {name!r}; it has {', '.join(outputs)}"
                )
            if not np.isfinite(outputs[name]).all():
                raise QuantizationError(
                    f"output {name!r} of the reference holds NaN or infinite values for "
                    f"sample {index}: nothing can be compared with it; leave that sample out"
                )
            arrays.append(outputs[name])
        if not self._spill:
            self._reference.append(arrays)
            return
        path = self._scratch / f"reference-{index}.npz"
        np.savez(path, *arrays)
        self._reference.append(path)

    def _referred(self, index: int) -> Sequence[npt.NDArray[Any]]:
        kept = self._reference[index]
        if isinstance(kept, list):
            return kept
        with np.load(kept) as file:
            return [file[f"arr_{i}"] for i in range(len(self.outputs))]

    def _segment_of(self, switch: str) -> int:
        return bisect.bisect_right(self._starts, self._places[switch]) - 1

    def _lay_out(self, cuts: Sequence[int]) -> None:
        """Describe the segments: from where to where, what they read, what they leave."""
        self._starts = [0, *cuts]
        graph = self._model.graph
        last_use, made = lifetimes(self._nodes, graph)
        self._crossing: list[list[ir.Value]] = []
        for cut in [*cuts, len(self._nodes)]:
            crossing = [v for v, at in made.items() if at < cut <= last_use.get(v, -1)]
            self._crossing.append(crossing)
        # No node runs for an output that is an input or constant: it is fed or never moves.
        self._outputs = [v for v in graph.outputs if v in made]
        self._sessions: list[onnxruntime.InferenceSession | None] = []
        self._inputs: list[list[str]] = []

    def _probe(self) -> None:
        """Open the sessions while the largest sample runs; decide what is kept of each cut."""
        sizes: dict[int, int] = {}
        final: _State = {}
        for segment, final in self._run(self._samples.largest(), frozenset(), 0, {}, None):
            sizes[segment + 1] = sum(_nbytes(value) for value in final.values())
        self.outputs = tuple(
            value.name or ""
            for value in self._outputs
            if final[value.name or ""].data_type() in _COMPARED
        )
        if not self.outputs:
            raise QuantizationError(
                "the model has no output of type float, float16 or double whose error could "
                "be measured: add the one before the last operator as an output"
            )
        count = self._samples.count or 0
        reference = count * sum(_nbytes(final[name]) for name in self.outputs)
        self._spill = reference > self._max_memory // 2
        room = self._max_memory - (0 if self._spill else reference)
        cuts = list(range(1, len(self._starts)))
        for step in range(1, len(cuts) + 2):
            self._kept_cuts = cuts[step // 2 :: step]
            if sum(sizes[cut] for cut in self._kept_cuts) * count * _BASES <= room:
                break
        else:
            self._kept_cuts = []

    def _run(
        self, feed: Feed, on: frozenset[str], start: int, state: _State, index: int | None
    ) -> Iterator[tuple[int, _State]]:
        """Run segments from one on; yield each with what crosses the cut behind it."""
        given = {
            **{name: _ort_value(name, array) for name, array in feed.items()},
            **{name: _FLAGS[name in on] for name in self.switches},
        }
        for segment in range(start, len(self._starts)):
            if segment == len(self._sessions):
                self._open(segment, {**given, **state})
            session = self._sessions[segment]
            fresh: _State = {}
            if session is not None:
                names = self._inputs[segment]
                made = [output.name for output in session.get_outputs()]
                values = {
                    name: state[name] if name in state else given[name]
                    for name in names
                    if name in state or name in given
                }
                try:
                    found = session.run_with_ort_values(made, values)
                except Exception as error:  # onnxruntime's own classes
                    what = "the largest sample" if index is None else f"sample {index}"
                    raise CalibrationError(
                        f"{what}: onnxruntime failed to run the model on it: {error}"
                    ) from error
                fresh = dict(zip(made, found, strict=True))
            crossing = {value.name or "" for value in self._crossing[segment]}
            state = {k: v for k, v in {**state, **fresh}.items() if k in crossing}
            yield segment, state

    def _open(self, segment: int, given: _State) -> None:
        """Open the session of a segment, with the types of what was just computed."""
        graph = self._model.graph
        begin = self._starts[segment]
        nodes = self._nodes[begin : [*self._starts, len(self._nodes)][segment + 1]]
        inside = {value for node in nodes for value in node.outputs}
        outputs = [value for value in self._crossing[segment] if value in inside]
        if not outputs:
            self._sessions.append(None)
            self._inputs.append([])
            return
        before = self._crossing[segment - 1] if segment else []
        for value in before:
            if not given[value.name or ""].is_tensor():
                raise _NoTensor(begin)
        extracted = ir.convenience.extract(
            graph,
            [*(v for v in graph.inputs if v not in before), *before],
            outputs,
        )
        for value in extracted.inputs:
            if (name := value.name or "") in given and value.dtype is None:
                value.dtype = ir.DataType(given[name].element_type())
        if segment:  # inferred shapes may say less, or more, than what comes
            crossed = {value.name for value in before}
            for value in extracted.inputs:
                if value.name in crossed:
                    value.shape = None
        used = {v.name for node in nodes for v in reads(node)}
        for value in list(extracted.inputs):
            if value.name not in used:
                extracted.inputs.remove(value)
        self._inputs.append([value.name or "" for value in extracted.inputs])
        model = ir.Model(
            extracted,
            ir_version=self._model.ir_version or 10,
            functions=list(self._model.functions.values()),
        )
        self._sessions.append(self._open_session(model))

    def _open_session(self, model: ir.Model) -> onnxruntime.InferenceSession:
        """Open a session that computes as the graph says: every Q and DQ stays what it is."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Samples run beside each other. Threads of a dozen sessions that wait spinning for
        # work made runs ten times longer.
        options.intra_op_num_threads = self._threads
        level = onnxruntime.GraphOptimizationLevel
        # Constants are folded at the first level, dequantised weights only where no later
        # level waits for their DQ: MiniLM-L6, 8 samples, runs in 0.1 s instead of 0.3.
        options.graph_optimization_level = (
            level.ORT_ENABLE_BASIC if self._fold else level.ORT_DISABLE_ALL
        )
        for key, text in (
            ("session.disable_quant_qdq", "1"),
            ("session.intra_op.allow_spinning", "0"),
            ("session.disable_double_qdq_remover", "1"),
            ("session.model_external_initializers_file_folder_path", str(self._folder)),
        ):
            options.add_session_config_entry(key, text)
        try:
            return onnxruntime.InferenceSession(
                ir.to_proto(model).SerializeToString(),
                options,
                providers=list(self._providers),
                enable_fallback=0,
            )
        except Exception as error:  # onnxruntime's own classes
            raise CalibrationError(
                f"onnxruntime refuses a part of the model: {error}"
            ) from error


_FLAGS = {
    flag: onnxruntime.OrtValue.ortvalue_from_numpy(np.array(flag)) for flag in (False, True)
}


def _ort_value(name: str, array: npt.NDArray[Any]) -> Any:
    if array.dtype.kind not in "biufc":
        raise CalibrationError(
            f"input {name!r} is {array.dtype}, which onnxruntime takes from numpy in no value "
            "of its own: give a model whose inputs are numbers"
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _nbytes(value: Any) -> int:
    if not value.is_tensor():
        return 0
    bits = ir.DataType(value.element_type())
    item = 8 if bits is ir.DataType.STRING else max(1, bits.bitwidth // 8)
    size: int = math.prod(value.shape())
    return size * item


def _folded_bytes(model: ir.Model) -> int:
    """Bytes of the float weights that dequantised constants make."""
    codes = (
        node.inputs[0]
        for node in model.graph.all_nodes()
        if node.op_type == "DequantizeLinear" and node.inputs
    )
    return sum(4 * value.const_value.size for value in codes if value and value.const_value)
