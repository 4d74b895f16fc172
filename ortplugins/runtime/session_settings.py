# SPDX-License-Identifier: MIT
"""What is read of a user's ``SessionOptions``, and of models, for what depends on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import onnxruntime

from session_options.keys import stored

if TYPE_CHECKING:
    import onnx_ir as ir

# Names of optimisers that are left out, semicolons between them.
DISABLED_OPTIMIZERS_KEY = "optimization.disable_specified_optimizers"

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
# Stands for providers that were set by device or by policy.
PROVIDERS_OF_OPTIONS = "those of the SessionOptions"


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
    entries = ((key, stored(options, key)) for key in _KEYS)
    return OptimizerSettings(
        options.graph_optimization_level.name,
        tuple(sorted({*(disabled_optimizers or ())})),
        tuple((key, text) for key, text in entries if text is not None),
    )


def describe_model(model: ir.Model) -> dict[str, Any]:
    """Return what the functions below compare with, as JSON."""
    fixed = {
        str(value.name): [isinstance(size, int) for size in value.shape]
        for value in model.graph.inputs
        if value.shape is not None
    }
    names = {name for graph in model.graphs() for name in graph.initializers}
    return {"fixed_dimensions": fixed, "initializers": sorted(names)}


def overrides_dimensions(
    session: onnxruntime.InferenceSession, described: Mapping[str, Any]
) -> bool:
    """Whether a free dimension of the model's inputs is overridden in a session."""
    fixed = described["fixed_dimensions"]
    return any(
        isinstance(size, int) and not was_fixed
        for meta in session.get_inputs()
        for size, was_fixed in zip(meta.shape, fixed.get(meta.name, ()), strict=False)
    )
