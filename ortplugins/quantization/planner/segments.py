# SPDX-License-Identifier: MIT
"""A graph cut into segments that run one after the other: where few values cross.

What depends on constants alone, a dequantised weight for one, never crosses: each segment that
reads it makes it.
"""

from __future__ import annotations

__all__ = ["Segments", "State", "value_bytes"]

import bisect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import CalibrationError
from ortplugins.quantization.statistics.collect import detach_tensors, open_detached
from ortplugins.runtime.stock_session import stock_options
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
        crossing_bytes: What crosses each cut takes in a run of the first sample, by the number
            of the segment behind it, 1 and more.
        values: Those outputs, of that sample.
    """

    def __init__(
        self,
        model: ir.Model,
        switches: Collection[str],
        feed: Feed,
        *,
        scratch: Path,
        threads: int,
        float_bytes: int,
        providers: Sequence[Any],
    ) -> None:
        """Choose the cuts, and open the sessions while a sample runs.

        Args:
            model: The model, with its switches as bool inputs; it is taken over.
            switches: Names of these inputs.
            feed: A sample.
            scratch: An existing folder, to be kept as long as this object is used.
            threads: Of each session.
            float_bytes: What weights that are dequantised ahead may take.
            providers: Execution providers, as for ``onnxruntime.InferenceSession``.

        Raises:
            CalibrationError: If the sample can't be used or onnxruntime fails on it.
        """
        self._threads, self._providers = threads, tuple(providers)
        self._folder = detach_tensors(model, scratch)
        model.graph.sort()
        self._model = model
        self._fold = _folded_bytes(model) <= float_bytes
        self._nodes = list(model.graph)
        self._places = _first_readers(self._nodes, frozenset(switches))
        self.switches = tuple(sorted(self._places, key=self._places.__getitem__))
        last_use, made = _lifetimes(self._nodes, model.graph)
        # No node runs for an output that is an input or constant: it is fed or never moves.
        self.outputs = [v for v in model.graph.outputs if v in made]
        cuts = _choose_cuts(last_use, made, len(self._nodes), list(self._places.values()))
        while True:
            self._starts = [0, *cuts]
            self._crossing = [
                [v for v, at in made.items() if at < cut <= last_use.get(v, -1)]
                for cut in [*cuts, len(self._nodes)]
            ]
            self._sessions: list[onnxruntime.InferenceSession | None] = []
            self._inputs: list[list[str]] = []
            sizes = []
            try:
                for _, crossing in self.run(feed, frozenset()):
                    self.values = crossing
                    sizes.append(sum(map(value_bytes, crossing.values())))
            except _NoTensor as error:
                cuts.remove(error.args[0])
            else:
                self.crossing_bytes = dict(enumerate(sizes[:-1], 1))
                return

    def of(self, switch: str) -> int:
        """Return the number of the first segment that reads a switch."""
        return bisect.bisect_right(self._starts, self._places[switch]) - 1

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
            known = {**given, **state}
            if segment == len(self._sessions):
                self._open(segment, known)
            session = self._sessions[segment]
            if session is not None:
                made = [output.name for output in session.get_outputs()]
                values = {name: known[name] for name in self._inputs[segment] if name in known}
                try:
                    found = session.run_with_ort_values(made, values)
                except Exception as error:  # onnxruntime's own classes
                    what = "the largest sample" if index is None else f"sample {index}"
                    raise CalibrationError(
                        f"{what}: onnxruntime failed to run the model on it: {error}"
                    ) from error
                state = {**state, **dict(zip(made, found, strict=True))}
            crossing = {value.name for value in self._crossing[segment]}
            state = {name: value for name, value in state.items() if name in crossing}
            yield segment, state

    def _open(self, segment: int, given: State) -> None:
        """Open the session of a segment, with the types of what was just computed."""
        graph = self._model.graph
        begin = self._starts[segment]
        nodes = self._nodes[begin : [*self._starts, len(self._nodes)][segment + 1]]
        inside = {value for node in nodes for value in node.outputs}
        outputs = [value for value in self._crossing[segment] if value in inside]
        before = self._crossing[segment - 1] if segment else []
        if any(not given[value.name or ""].is_tensor() for value in before):
            raise _NoTensor(begin)
        if not outputs:
            self._sessions.append(None)
            self._inputs.append([])
            return
        extracted = ir.convenience.extract(
            graph, [*(v for v in graph.inputs if v not in before), *before], outputs
        )
        used = {v.name for node in nodes for v in _reads(node)}
        crossed = {value.name for value in before}
        for value in list(extracted.inputs):
            if value.name not in used:
                extracted.inputs.remove(value)
                continue
            if value.dtype is None and value.name in given:
                value.dtype = ir.DataType(given[value.name].element_type())
            if value.name in crossed:  # inferred shapes may say less, or more, than what comes
                value.shape = None
        self._inputs.append([value.name or "" for value in extracted.inputs])
        model = ir.Model(
            extracted,
            ir_version=self._model.ir_version or 10,
            functions=list(self._model.functions.values()),
        )
        # Constants are folded at the first level, dequantised weights only where no later
        # level waits for their DQ: MiniLM-L6, 8 samples, runs in 0.1 s instead of 0.3.
        options = stock_options("basic" if self._fold else "disable")
        # Samples run beside each other. Threads of a dozen sessions that wait spinning for
        # work made runs ten times longer.
        options.intra_op_num_threads = self._threads
        # It computes as the graph says: every Q and DQ stays what it is.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.disable_double_qdq_remover", "1")
        self._sessions.append(open_detached(model, self._folder, options, self._providers))


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
    last: Mapping[ir.Value, int],
    made: Mapping[ir.Value, int],
    nodes: int,
    switches: Sequence[int],
) -> list[int]:
    """Cut between the switches, where fewest values cross; equally many in each segment."""
    places = sorted(switches)
    segments = min(_MOST_SEGMENTS, len(places) // 2)
    if segments < 2:
        return []
    ends = [0] * (nodes + 2)
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
