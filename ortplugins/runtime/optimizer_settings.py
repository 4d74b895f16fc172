# SPDX-License-Identifier: MIT
"""What onnxruntime's own optimisers look at in ``SessionOptions``."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import onnxruntime

from ortplugins.runtime.temporary_settings import DISABLED_OPTIMIZERS_KEY, given_entry

# Entries that change what the optimisers do. SessionOptions cannot list its entries.
_KEYS = (
    "optimization.constant_folding_max_output_size_in_bytes",
    DISABLED_OPTIMIZERS_KEY,
    "optimization.enable_cast_chain_elimination",
    "optimization.enable_gelu_approximation",
    "optimization.minimal_build_optimizations",
    "session.disable_aot_function_inlining",
    "session.disable_double_qdq_remover",
    "session.disable_qdq_constant_folding",
    "session.disable_quant_qdq",
    "session.enable_dq_matmulnbits_fusion",
    "session.enable_quant_qdq_cleanup",
    "session.function_expansion_byte_limit",
    "session.function_expansion_node_limit",
    "session.gqa_value_layout",
    "session.graph_optimizations_loop_level",
    "session.qdq_matmulnbits_accuracy_level",
    "session.qdq_matmulnbits_block_size",
    "session.qdqisint8allowed",
    "session.set_denormal_as_zero",
    "session.strict_shape_type_inference",
    "session.x64quantprecision",
)


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

    @property
    def native_block_size(self) -> int:
        """Block size of fused weights with one scale, or one for each column.

        0 is onnxruntime's default, -1 the size that pads K least.
        """
        text = dict(self.entries).get("session.qdq_matmulnbits_block_size", "0")
        return int(text) if text in ("-1", "16", "32", "64", "128", "256") else 0


# For a file that no session asked for.
ALL_OPTIMIZERS = OptimizerSettings("ORT_ENABLE_ALL")


def read_optimizer_settings(
    options: onnxruntime.SessionOptions, disabled_optimizers: Collection[str] | None
) -> OptimizerSettings:
    """Read the settings of a session."""
    entries = ((key, given_entry(options, key)) for key in _KEYS)
    return OptimizerSettings(
        options.graph_optimization_level.name,
        tuple(sorted(disabled_optimizers or ())),
        tuple((key, text) for key, text in entries if text is not None),
    )
