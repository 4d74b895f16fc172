# SPDX-License-Identifier: MIT
"""A model whose grids can be switched on and off, and how far its outputs move then.

    x -> Q -> DQ -> consumers        x -> Where(switch, Q -> DQ, Clip) -> consumers

Past the grid a value is clipped to the grid's range and not rounded: what a grid of infinitely
many codes would do. Plain ``x`` would be another function, as onnxruntime's quantiser drops a
Relu or Clip whose range the grid has. A switch is an input of type bool. One session serves
all settings: opening one folds and packs all weights.

Outputs are compared with those of a reference:

    error  = sum |y - r|^2 / sum |r|^2     of each output, the mean over the outputs
    cosine = y . r / (|y| |r|)             of each sample and output, the mean over all
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.quantization.calibration import (
    Calibration,
    detach_tensors,
    open_detached,
    run_sample,
)
from ortplugins.runtime.stock_session import stock_options
from ortplugins.samples.sources import Feed
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor

_COMPARED = frozenset({"tensor(float)", "tensor(float16)", "tensor(double)"})


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far outputs are from those of the reference.

    Attributes:
        error: Squared error over all samples relative to the reference's energy, the mean over
            the outputs; infinite where an output is not finite.
        cosine: To the reference, the mean over samples and outputs.
    """

    error: float
    cosine: float


class SwitchedModel:
    """A model whose switches can be set, and the samples that it is measured on.

    Attributes:
        switches: Names of the switches.
        outputs: Names of the outputs that are compared: those of a float type.
    """

    def __init__(
        self, model: ir.Model, switches: Collection[str], calibration: Calibration
    ) -> None:
        """Open the session on a model, taken over, with its switches as bool inputs."""
        cores = os.cpu_count() or 1
        self.switches = tuple(switches)
        self._samples = calibration.samples
        self._workers = min(self._samples.read_all(), cores)
        self._scratch = Path(tempfile.mkdtemp(dir=calibration.scratch))
        self._reference: list[list[npt.NDArray[Any]]] = []
        folder = detach_tensors(model, self._scratch)
        model.graph.sort()
        # Constants are folded: MiniLM-L6, 8 samples, runs in 0.1 s instead of 0.3.
        options = stock_options("basic")
        # Samples run beside each other.
        options.intra_op_num_threads = max(1, cores // self._workers)
        # It computes as the graph says: every Q and DQ stays what it is.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.disable_double_qdq_remover", "1")
        self._session = open_detached(model, folder, options, calibration.providers)
        computed = {v.name for v in model.graph.outputs if v.producer() is not None}
        self.outputs = tuple(
            output.name
            for output in self._session.get_outputs()
            if output.type in _COMPARED and output.name in computed
        )
        if not self.outputs:
            raise QuantizationError(
                "the model has no output of type float, float16 or double whose error could "
                "be measured: add the one before the last operator as an output"
            )

    def values(self, on: Collection[str] = ()) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Run a setting; yield the compared outputs of each sample, by name."""
        flags = {name: np.array(name in on) for name in self.switches}

        def run(index: int, feed: Feed) -> list[npt.NDArray[Any]]:
            return run_sample(self._session, self.outputs, feed | flags, f"sample {index}")

        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            feeds = enumerate(self._samples)
            # No more than a sample for each worker is in memory.
            while batch := list(itertools.islice(feeds, self._workers)):
                for outputs in pool.map(run, *zip(*batch, strict=True)):
                    yield dict(zip(self.outputs, outputs, strict=True))

    def refer_to(self, outputs: Iterable[Mapping[str, npt.NDArray[Any]]]) -> None:
        """Take outputs of :meth:`values` as the reference; they lie in files, mapped."""
        self._reference = []
        for index, values in enumerate(outputs):
            for name, array in values.items():
                if not np.isfinite(array).all():
                    raise QuantizationError(
                        f"output {name!r} holds NaN or infinite values for sample {index}, "
                        "all grids switched off: nothing can be compared with it; leave that "
                        "sample out"
                    )
            kept = []
            for place, array in enumerate(values.values()):
                path = self._scratch / f"reference-{index}-{place}.npy"
                np.save(path, array, allow_pickle=False)
                kept.append(np.load(path, mmap_mode="r"))
            self._reference.append(kept)

    def compare(self, outputs: Iterable[Mapping[str, npt.NDArray[Any]]]) -> Deviation:
        """Measure outputs of another model, sample by sample, against the reference."""
        measured = [
            [
                _deviation(values[name], reference)
                for name, reference in zip(self.outputs, self._reference[index], strict=True)
            ]
            for index, values in enumerate(outputs)
        ]
        errors, energies, cosines = np.array(measured).transpose(2, 0, 1)
        # An output that is 0 in every sample has no energy: its error counts as it is.
        energy = energies.sum(axis=0)
        relative = errors.sum(axis=0) / np.where(energy > 0, energy, 1.0)
        return Deviation(float(relative.mean()), float(np.mean(cosines)))


def _deviation(
    found: npt.NDArray[Any], wanted: npt.NDArray[Any]
) -> tuple[float, float, float]:
    """Return squared error, the reference's energy and the cosine of one output."""
    x, y = found.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    with np.errstate(invalid="ignore", over="ignore"):
        # Sums and no BLAS: its threads would fight with onnxruntime's, 3 ms a product.
        error = float(np.square(x - y).sum())
        energy = float(np.square(y).sum())
        lengths = math.sqrt(float(np.square(x).sum()) * energy)
        product = float((x * y).sum())
    if not (math.isfinite(error) and math.isfinite(lengths)):
        return math.inf, energy, 0.0
    return error, energy, product / lengths if lengths else float(error == 0)


def add_switches(model: ir.Model, places: Sequence[QuantizedTensor]) -> list[str]:
    """Add a bool input for each of some activations that have Q and DQ; return their names.

    Outputs of the graph keep their names.
    """
    names = FreshNames(model)
    switches = []
    for number, place in enumerate(places):
        assert place.quantize is not None
        switches.append(names.take(f"ortplugins.grid_{number}"))
        flag = ir.Value(
            name=switches[-1], shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL)
        )
        model.graph.inputs.append(flag)
        clips = _clip(model.graph, place, names)
        place.quantize.prepend(clips)
        for node in place.dequantizes:
            old, clipped = node.outputs[0], clips[-1].outputs[0]
            choice = ir.node("Where", [flag, clipped, clipped], name=names.take("choice"))
            (new,) = choice.outputs
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.name = names.take(f"{old.name}_on_grid")
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            choice.replace_input_with(1, old)
            node.append(choice)
    return switches


def _clip(graph: ir.Graph, place: QuantizedTensor, names: FreshNames) -> list[ir.Node]:
    """Clip the source to the grid's range: Clip has no constants as inputs before opset 11."""
    assert place.source is not None
    low, high = (
        new_initializer(
            graph,
            ir.tensor(np.asarray(end), name=names.take(f"{place.source.name}_{which}")),
        )
        for end, which in zip(place.grid.range, ("least", "greatest"), strict=True)
    )
    above = ir.node("Max", [place.source, low])
    clips = [above, ir.node("Min", [above.outputs[0], high])]
    for node in clips:
        node.name = names.take(f"{place.source.name}_clip")
        node.outputs[0].name = names.take(f"{place.source.name}_clipped")
    return clips
