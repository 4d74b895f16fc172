# SPDX-License-Identifier: MIT
"""onnxruntime's own optimisers, as a session runs them."""

from __future__ import annotations

from typing import NamedTuple

from session_options.entries import DISABLED_OPTIMIZERS_KEY

# The optimiser that fuses dequantised weights.
_QDQ = "QDQSelectorActionTransformer"


class OptimizerSettings(NamedTuple):
    """How to run the optimisers: level, names of those to leave out, session entries."""

    level: str
    disabled: tuple[str, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()

    @property
    def native_accuracy_level(self) -> int | None:
        """Level at which dequantised weights are fused; None where they are not."""
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


# For a file that no session asked for.
ALL_OPTIMIZERS = OptimizerSettings("ORT_ENABLE_ALL")
