# SPDX-License-Identifier: MIT
"""What passes are run on, and for: a model, a plan, and the sessions that are to come."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import onnxruntime

from session_options.entries import DISABLED_OPTIMIZERS_KEY
from session_options.plan import Plan

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel, ModelLike

# onnxruntime's optimiser that fuses dequantised weights.
_QDQ = "QDQSelectorActionTransformer"


class BuildRequest(NamedTuple):
    """A model, and everything else that the result depends on."""

    # Absolute path or serialized; for a file that no session asked for, in memory as well.
    source: ModelLike | bytes
    plan: Plan
    providers: tuple[str, ...] = ("CPUExecutionProvider",)  # in order of precedence
    data_folder: str | None = None  # where external data is; None for the model's own folder
    # onnxruntime's own optimisers, as sessions run them: the level, the disabled ones by name,
    # and entries that they read.
    level: str = "ORT_ENABLE_ALL"
    disabled: tuple[str, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
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
        return self.level == "ORT_DISABLE_ALL"

    @property
    def native_accuracy_level(self) -> int | None:
        """The accuracy level of onnxruntime's own fusion; None if it does not run."""
        entries = dict(self.entries)
        named = entries.get(DISABLED_OPTIMIZERS_KEY, "").split(";")
        if (
            self.level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC")
            or entries.get("session.disable_quant_qdq") == "1"
            or _QDQ in {*self.disabled, *map(str.strip, named)}
        ):
            return None
        level = entries.get("session.qdq_matmulnbits_accuracy_level", "4")
        # onnxruntime refuses any other.
        return int(level) if level in ("0", "1", "2", "3", "4") else None

    def load(self) -> LoadedModel:
        """Load and check the model."""
        from ortplugins.model_io.loading import load_model

        return load_model(self.source, self.data_folder)
