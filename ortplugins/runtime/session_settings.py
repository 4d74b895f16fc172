# SPDX-License-Identifier: MIT
"""How a session runs onnxruntime's own optimisers."""

from __future__ import annotations

from typing import NamedTuple

from session_options.entries import DISABLED_OPTIMIZERS_KEY

# The optimiser that fuses dequantised weights.
_QDQ = "QDQSelectorActionTransformer"


class OptimizerSettings(NamedTuple):
    """How to run the optimisers: the level, names of disabled ones, session entries."""

    level: str
    disabled: tuple[str, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()

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


# For files, which belong to no session.
ALL_OPTIMIZERS = OptimizerSettings("ORT_ENABLE_ALL")
