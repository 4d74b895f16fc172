# SPDX-License-Identifier: MIT
"""What passes are run on, and for: a model, a plan, and the sessions that are to come."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import onnxruntime

from ortplugins.runtime.session_settings import ALL_OPTIMIZERS, OptimizerSettings
from session_options.plan import Plan

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel, ModelLike


class BuildRequest(NamedTuple):
    """A model, and everything else that the result depends on."""

    # Absolute path or serialized; for a file that no session asked for, in memory as well.
    source: ModelLike | bytes
    plan: Plan
    providers: tuple[str, ...] = ("CPUExecutionProvider",)  # in order of precedence
    data_folder: str | None = None  # where external data is; None for beside the model
    optimizers: OptimizerSettings = ALL_OPTIMIZERS  # onnxruntime's own, as sessions run them
    bakes: bool = False  # whether they run before the result is finished
    in_memory: bool = False  # whether nothing may be written to the disk
    cpu_arena: bool = True  # whether the session's memory on the CPU comes from an arena
    onnxruntime_version: str = onnxruntime.__version__  # the oldest that the result runs on

    @property
    def name(self) -> str:
        """The model's path; "bytes" for a serialized one."""
        return "bytes" if isinstance(self.source, bytes) else os.fspath(self.source)  # type: ignore[arg-type]

    @property
    def final_graph(self) -> bool:
        """Whether the session runs no optimiser."""
        return self.optimizers.level == "ORT_DISABLE_ALL"

    def load(self) -> LoadedModel:
        """Load and check the model."""
        from ortplugins.model_io.loading import load_model

        return load_model(self.source, self.data_folder)
