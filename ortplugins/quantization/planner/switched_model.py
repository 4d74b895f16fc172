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

import collections
import concurrent.futures
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.quantization.planner.deviation import Comparison, Deviation
from ortplugins.quantization.planner.segments import Segments, State, value_bytes
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.sources import Feed

_COMPARED = frozenset({"tensor(float)", "tensor(float16)", "tensor(double)"})
# At once: a new one is made while the last is held.
_BASES = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """A setting whose values at the cuts are kept.

    Attributes:
        on: Names of the switches that are on.
        deviation: Of its outputs; from the reference, if there is one.
    """

    on: frozenset[str]
    deviation: Deviation
    states: Mapping[tuple[int, int], State] = dataclasses.field(repr=False)


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
        self._samples = samples
        self._scratch = Path(tempfile.mkdtemp(dir=scratch))
        self._max_memory = max_memory
        self._segments = Segments(
            model,
            switches,
            samples.largest(),
            scratch=self._scratch,
            threads=max(1, cores // self._workers),
            float_bytes=max_memory // 4,
            providers=providers,
        )
        self.switches = self._segments.switches
        self._reference: list[list[npt.NDArray[Any]] | Path] = []
        self._divide_memory(self._segments.crossing_bytes, self._segments.values)

    def base(self, on: Collection[str]) -> Base:
        """Run a setting and keep what crosses the cuts; let go of the last one first."""
        states: dict[tuple[int, int], State] = {}

        def run(index: int, feed: Feed) -> State:
            final: State = {}
            for segment, final in self._segments.run(feed, frozenset(on), index=index):
                if segment + 1 in self._kept_cuts:
                    states[index, segment + 1] = final
            return final

        return Base(frozenset(on), self._measured(run), states)

    def values(self, on: Collection[str] = ()) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Run a setting; yield the compared outputs of each sample, by name."""
        wanted = frozenset(on)

        def run(index: int, feed: Feed) -> State:
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
        first = min(self._segments.of(name) for name in changed)
        start = max((cut for cut in self._kept_cuts if cut <= first), default=0)

        def run(index: int, feed: Feed) -> State:
            state = dict(base.states[index, start]) if start else {}
            return self._last(feed, wanted, start, state, index)

        return self._measured(run)

    def compare(self, outputs: Iterable[Mapping[str, npt.NDArray[Any]]]) -> Deviation:
        """Measure outputs of another model, sample by sample, against the reference."""
        comparison = Comparison(len(self.outputs))
        for index, arrays in enumerate(outputs):
            self._add(comparison, index, [arrays[name] for name in self.outputs])
        return comparison.result()

    def _measured(self, run: Callable[[int, Feed], State]) -> Deviation:
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
        self, run: Callable[[int, Feed], State]
    ) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
        """Run every sample, as many at once as there are cores; yield outputs in order."""
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            waiting: collections.deque[concurrent.futures.Future[State]] = collections.deque()
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
        self, feed: Feed, on: frozenset[str], start: int, state: State, index: int
    ) -> State:
        for _, now in self._segments.run(feed, on, start, state, index):
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

    def _divide_memory(self, sizes: Mapping[int, int], final: State) -> None:
        """Decide what is kept of each cut, and whether the reference spills."""
        self.outputs = tuple(
            value.name or ""
            for value in self._segments.outputs
            if final[value.name or ""].data_type() in _COMPARED
        )
        if not self.outputs:
            raise QuantizationError(
                "the model has no output of type float, float16 or double whose error could "
                "be measured: add the one before the last operator as an output"
            )
        count = self._samples.count or 0
        reference = count * sum(value_bytes(final[name]) for name in self.outputs)
        self._spill = reference > self._max_memory // 2
        room = self._max_memory - (0 if self._spill else reference)
        cuts = list(sizes)
        self._kept_cuts: list[int] = []
        for step in range(1, len(cuts) + 2):
            kept = cuts[step // 2 :: step]
            if sum(sizes[cut] for cut in kept) * count * _BASES <= room:
                self._kept_cuts = kept
                break
