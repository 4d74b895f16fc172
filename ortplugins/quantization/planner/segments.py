# SPDX-License-Identifier: MIT
"""A graph cut into segments that run one after the other: where few values cross.

What depends on constants alone, a dequantised weight for one, never crosses: each segment that
reads it makes it.
"""

from __future__ import annotations

__all__ = ["Segments", "State", "value_bytes"]

import bisect
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import CalibrationError
from ortplugins.quantization.statistics.collect import detach_tensors
from ortplugins.samples.sources import Feed
from rewrite_rules.graph.nodes import subgraphs

State = dict[str, Any]  # name of a value -> onnxruntime.OrtValue

# Twice as many would save 4 % of the time and cost a session each, and their cuts' memory.
_MOST_SEGMENTS = 12
# Two runs of these differ though they read the same.
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomUniform"}
    | {"RandomNormalLike", "RandomUniformLike"}
)


class _NoTensor(Exception):
    """A value that crosses a cut is a sequence, a map or absent."""


class Segments:
    """The sessions of a model's segments.

    Attributes:
        switches: Names of the switches, in the graph's order.
        outputs: Outputs of the graph that a node computes.
        cuts: Numbers of the segments that a cut precedes: 1 and more.
    """

    def __init__(
        self,
        model: ir.Model,
        switches: Collection[str],
        *,
        scratch: Path,
        threads: int,
        float_bytes: int,
        providers: Sequence[Any],
    ) -> None:
        """Choose the cuts.

        Args:
            model: The model, with its switches as bool inputs; it is taken over.
            switches: Names of these inputs.
            scratch: An existing folder, to be kept as long as this object is used.
            threads: Of each session.
            float_bytes: What weights that are dequantised ahead may take.
            providers: Execution providers, as for ``onnxruntime.InferenceSession``.
        """
        self._threads, self._providers = threads, tuple(providers)
        self._folder = detach_tensors(model, scratch)
        model.graph.sort()
        self._model = model
        self._fold = _folded_bytes(model) <= float_bytes
        self._nodes = list(model.graph)
        self._places = _first_readers(self._nodes, frozenset(switches))
        self.switches = tuple(sorted(self._places, key=self._places.__getitem__))
        places = [self._places[switch] for switch in self.switches]
        self._lay_out(_choose_cuts(self._nodes, model.graph, places))

    def open(self, feed: Feed) -> tuple[dict[int, int], State]:
        """Open the sessions while a sample runs.

        Returns:
            Bytes that cross each cut (and leave the graph), and the values at the end.

        Raises:
            CalibrationError: If the sample can't be used or onnxruntime fails on it.
        """
        while True:
            sizes: dict[int, int] = {}
            final: State = {}
            try:
                for segment, final in self.run(feed, frozenset()):
                    sizes[segment + 1] = sum(value_bytes(value) for value in final.values())
            except _NoTensor as error:
                self._lay_out([cut for cut in self._starts[1:] if cut != error.args[0]])
            else:
                return sizes, final

    def of(self, switch: str) -> int:
        """Return the number of the first segment that reads a switch."""
        return bisect.bisect_right(self._starts, self._places[switch]) - 1

    def _lay_out(self, cuts: Sequence[int]) -> None:
        """Describe the segments: from where to where, what they read, what they leave."""
        self._starts = [0, *cuts]
        graph = self._model.graph
        last_use, made = _lifetimes(self._nodes, graph)
        self._crossing: list[list[ir.Value]] = []
        for cut in [*cuts, len(self._nodes)]:
            crossing = [v for v, at in made.items() if at < cut <= last_use.get(v, -1)]
            self._crossing.append(crossing)
        # No node runs for an output that is an input or constant: it is fed or never moves.
        self.outputs = [v for v in graph.outputs if v in made]
        self._sessions: list[onnxruntime.InferenceSession | None] = []
        self._inputs: list[list[str]] = []
        self.cuts = list(range(1, len(self._starts)))

    def run(
        self,
        feed: Feed,
        on: Collection[str],
        start: int = 0,
        state: State | None = None,
        index: int | None = None,
    ) -> Iterator[tuple[int, State]]:
        """Run segments from one on; yield each with what crosses the cut behind it.

        Args:
            feed: A sample.
            on: Switches that are on.
            start: The first segment to run.
            state: What crosses the cut before it.
            index: Number of the sample, for messages.
        """
        state = state or {}
        given = {
            **{name: _ort_value(name, array) for name, array in feed.items()},
            **{name: _FLAGS[name in on] for name in self.switches},
        }
        for segment in range(start, len(self._starts)):
            if segment == len(self._sessions):
                self._open(segment, {**given, **state})
            session = self._sessions[segment]
            fresh: State = {}
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

    def _open(self, segment: int, given: State) -> None:
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
        used = {v.name for node in nodes for v in _reads(node)}
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


def value_bytes(value: Any) -> int:
    """Return the bytes of an onnxruntime.OrtValue, 0 if it is not a tensor."""
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


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, its subgraphs included; values of the subgraphs come along."""
    yield from (value for value in node.inputs if value is not None)
    for body in subgraphs(node):
        for inner in ir.traversal.RecursiveGraphIterator(body):
            yield from (value for value in inner.inputs if value is not None)
        yield from body.outputs


def _lifetimes(
    nodes: Sequence[ir.Node], graph: ir.Graph
) -> tuple[dict[ir.Value, int], dict[ir.Value, int]]:
    """Return where each value is read last (outputs: behind the end) and where it is made."""
    made: dict[ir.Value, int] = {}
    varies = {value for value in graph.inputs if not value.is_initializer()}
    for i, node in enumerate(nodes):
        # Dequantised weights and the like are made in each segment that reads them.
        if node.op_type not in _RANDOM and not any(value in varies for value in _reads(node)):
            continue
        varies.update(node.outputs)
        made.update((value, i) for value in node.outputs if value.name)
    last = {
        value: i for i, node in enumerate(nodes) for value in _reads(node) if value in made
    }
    last.update((value, len(nodes)) for value in graph.outputs)
    return last, made


def _first_readers(nodes: Sequence[ir.Node], switches: frozenset[str]) -> dict[str, int]:
    """Return the first node that reads each switch."""
    places: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for value in node.inputs:
            if value is not None and value.name in switches:
                places.setdefault(value.name or "", i)
    return places


def _choose_cuts(
    nodes: Sequence[ir.Node], graph: ir.Graph, places: Sequence[int]
) -> list[int]:
    """Cut between the switches, where fewest values cross; equally many in each segment."""
    segments = min(_MOST_SEGMENTS, len(places) // 2)
    if segments < 2:
        return []
    last, made = _lifetimes(nodes, graph)
    ends = [0] * (len(nodes) + 2)
    for value, at in made.items():
        if (until := last.get(value, at)) > at:
            ends[at + 1] += 1
            ends[until + 1] -= 1
    crossing = np.cumsum(ends)
    cuts: list[int] = []
    width = len(places) / segments
    for k in range(1, segments):
        # A quarter of a segment to either side is looked at.
        low = places[max(0, round((k - 0.25) * width) - 1)] + 1
        high = places[min(len(places) - 1, round((k + 0.25) * width))]
        window = range(low, max(low, high) + 1)
        cut = min(window, key=lambda i: (crossing[i], abs(i - (low + high) / 2)))
        if not cuts or cut > cuts[-1]:
            cuts.append(cut)
    return cuts
