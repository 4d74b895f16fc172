# SPDX-License-Identifier: MIT
"""How far the outputs of a model move when some of its grids are switched on or off.

A model has switches: inputs of type bool that choose between two ways to compute a value. Each
setting of them gives outputs, which are compared with those of a reference. One session serves
all settings: opening one folds and packs all weights.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import CalibrationError, QuantizationError
from ortplugins.model_io.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.planner.deviation import Deviation, deviation_of
from ortplugins.quantization.statistics.collect import detach_tensors, open_detached
from ortplugins.runtime.stock_session import stock_options
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.sources import Feed

_COMPARED = frozenset({"tensor(float)", "tensor(float16)", "tensor(double)"})


class SwitchedModel:
    """A model whose switches can be set, and the samples that it is measured on.

    Attributes:
        switches: Names of the switches.
        outputs: Names of the outputs that are compared: those of a float type.
    """

    def __init__(
        self,
        model: ir.Model,
        switches: Collection[str] = (),
        *,
        samples: KeptSamples,
        scratch: Path,
        max_memory: int,
        providers: Sequence[Any],
    ) -> None:
        """Open the session.

        Args:
            model: The model, with its switches as bool inputs; it is taken over.
            switches: Names of these inputs.
            samples: What it is run on; read to the end.
            scratch: An existing folder, to be kept as long as this object is used.
            max_memory: Bytes; weights that take up to a quarter of it are kept in float.
            providers: Execution providers, as for ``onnxruntime.InferenceSession``.

        Raises:
            CalibrationError: If a sample can't be used or onnxruntime refuses the model
                (chained).
            QuantizationError: If no output is a float tensor.
        """
        cores = os.cpu_count() or 1
        self.switches = tuple(switches)
        self._samples = samples
        self._workers = min(samples.read_all(), cores)
        self._scratch = Path(tempfile.mkdtemp(dir=scratch))
        self._reference: list[list[TensorReference]] = []
        folder = detach_tensors(model, self._scratch)
        model.graph.sort()
        # Constants are folded at the first level, dequantised weights only where no later
        # level waits for their DQ: MiniLM-L6, 8 samples, runs in 0.1 s instead of 0.3.
        folds = _folded_bytes(model) <= max_memory // 4
        options = stock_options("basic" if folds else "disable")
        # Samples run beside each other.
        options.intra_op_num_threads = max(1, cores // self._workers)
        # It computes as the graph says: every Q and DQ stays what it is.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.disable_double_qdq_remover", "1")
        self._session = open_detached(model, folder, options, providers)
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
        """Run a setting; yield the compared outputs of each sample, by name.

        Raises:
            CalibrationError: If onnxruntime fails on a sample, chained.
        """
        flags = {name: np.array(name in on) for name in self.switches}

        def run(index: int, feed: Feed) -> list[npt.NDArray[Any]]:
            try:
                found: list[npt.NDArray[Any]] = self._session.run(
                    list(self.outputs), feed | flags
                )
            except Exception as error:  # onnxruntime's own classes
                raise CalibrationError(
                    f"sample {index}: onnxruntime failed to run the model on it: {error}"
                ) from error
            return found

        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            feeds = enumerate(self._samples)
            # No more than a sample for each worker is in memory.
            while batch := list(itertools.islice(feeds, self._workers)):
                for outputs in pool.map(run, *zip(*batch, strict=True)):
                    yield dict(zip(self.outputs, outputs, strict=True))

    def refer_to(self, outputs: Iterable[Mapping[str, npt.NDArray[Any]]]) -> None:
        """Take outputs as the reference: of :meth:`values`, of this model or of another.

        They lie in a file, mapped.

        Raises:
            QuantizationError: If one is missing, has another shape than here (found when it is
                compared) or is not finite.
        """
        path = self._scratch / "reference"
        path.unlink(missing_ok=True)
        writer = ScratchWriter(path)
        self._reference = []
        for index, values in enumerate(outputs):
            arrays = self._checked_reference(index, values)
            self._reference.append([writer.append(array) for array in arrays])

    def deviation(self, on: Collection[str]) -> Deviation:
        """Measure a setting against the reference."""
        return self.compare(self.values(on))

    def compare(self, outputs: Iterable[Mapping[str, npt.NDArray[Any]]]) -> Deviation:
        """Measure outputs of another model, sample by sample, against the reference."""
        return deviation_of(
            self._beside_reference(index, values) for index, values in enumerate(outputs)
        )

    def _beside_reference(
        self, index: int, values: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
        found = [values[name] for name in self.outputs]
        wanted = [reference.map() for reference in self._reference[index]]
        for name, x, y in zip(self.outputs, found, wanted, strict=True):
            if x.shape != y.shape:
                raise QuantizationError(
                    f"output {name!r} has shape {list(x.shape)} for sample {index}, but "
                    f"{list(y.shape)} in the reference: it is another model"
                )
        return found, wanted

    def _checked_reference(
        self, index: int, values: Mapping[str, npt.NDArray[Any]]
    ) -> list[npt.NDArray[Any]]:
        for name in self.outputs:
            if name not in values:
                raise QuantizationError(
                    f"the reference has no float output {name!r}; it has {', '.join(values)}"
                )
            if not np.isfinite(values[name]).all():
                raise QuantizationError(
                    f"output {name!r} of the reference holds NaN or infinite values for "
                    f"sample {index}: nothing can be compared with it; leave that sample out"
                )
        return [values[name] for name in self.outputs]


def _folded_bytes(model: ir.Model) -> int:
    """Bytes of the float weights that dequantised constants make."""
    codes = (
        node.inputs[0]
        for node in model.graph.all_nodes()
        if node.op_type == "DequantizeLinear" and node.inputs
    )
    return sum(4 * value.const_value.size for value in codes if value and value.const_value)
