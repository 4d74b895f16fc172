# SPDX-License-Identifier: MIT
"""What all quantisers of weights do around their work: a model comes in, and goes out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortplugins.model_io.loading import (
    ModelLike,
    initializer_tensors,
    is_path,
    load_model,
    same_kind,
)
from ortplugins.model_io.model_folder import model_in
from ortplugins.model_io.saving import (
    Progress,
    check_output,
    has_data_file,
    save_with_data,
    scratch_within,
)
from ortplugins.quantization.weights.report import QuantizeReport


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizeResult:
    """What a quantiser made.

    Attributes:
        path: The .onnx file written; None when no output was asked for.
        report: What became of every node.
        model: The quantised model, of the type that was given (``onnx_ir.Model`` for a path);
            None after a dry run.
    """

    path: Path | None
    report: QuantizeReport
    model: Any


class QuantizedFile:
    """A model that is loaded, quantised in place and written.

    Attributes:
        given: A path, or an object.
        loaded: What was given; large tensors of a path are mapped.
        model: What is written.
    """

    def __init__(
        self,
        model: ModelLike,
        output: str | os.PathLike[str] | None,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Load a file, a folder with one, or an object, which is copied; check the output."""
        self._target = None if output is None else Path(output)
        self._beside = None if output is None else Path(output).absolute().parent
        self.given = model_in(model) if is_path(model) else model
        self.loaded = load_model(self.given, map_inline=True)
        if self._target is not None:
            check_output(self.loaded, self._target, overwrite)
        self.model = self.loaded.model
        self._overwrite, self._progress = overwrite, progress

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a folder for files that the result is made of, until it is saved."""
        # The system's own folder may be memory, or too small; the output has to fit anyway.
        with scratch_within(self._beside) as folder:
            yield Path(folder)

    def saved(self, report: QuantizeReport) -> QuantizeResult:
        """Write the model, or take into it what lies in files; return it with a report."""
        if self._target is None:
            _into_memory(self.model)
        else:
            save_with_data(
                self.model,
                self._target,
                inline=not has_data_file(self.loaded, self.model),
                overwrite=self._overwrite,
                sources=self.loaded.sources,
                progress=self._progress,
            )
        return QuantizeResult(self._target, report, same_kind(self.given, self.model))


def _into_memory(model: ir.Model) -> None:
    """Compute tensors that the fusion's rules only promise; they are of whole bytes all."""
    for value, tensor in initializer_tensors(model):
        if isinstance(tensor, ir.LazyTensor):
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
