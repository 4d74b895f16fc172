# SPDX-License-Identifier: MIT
"""Quantisation of weights and activations, and the choice of what gets more bits."""

from __future__ import annotations

__all__ = [
    "BlockFormat",
    "GptqOptions",
    "QuantizeReport",
    "QuantizeResult",
    "Recipe",
    "Rule",
    "plan_precision",
    "quantize",
    "quantize_blocks",
    "quantize_static_mixed",
]

from typing import TYPE_CHECKING

from session_options.lazy_names import lazy_names

if TYPE_CHECKING:
    from ortplugins.quantization.methods.gptq import GptqOptions
    from ortplugins.quantization.methods.nearest import BlockFormat, quantize_blocks
    from ortplugins.quantization.weights.quantize import QuantizeResult, quantize
    from ortplugins.quantization.weights.recipe import Recipe, Rule
    from ortplugins.quantization.weights.report import QuantizeReport
    from ortplugins.static_qdq.plan import plan_precision
    from ortplugins.static_qdq.quantize_static import quantize_static_mixed

# static_qdq rests on this package, so its names are imported when they are used.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ortplugins.quantization.methods.gptq": ("GptqOptions",),
        "ortplugins.quantization.methods.nearest": ("BlockFormat", "quantize_blocks"),
        "ortplugins.quantization.weights.report": ("QuantizeReport",),
        "ortplugins.quantization.weights.quantize": ("QuantizeResult", "quantize"),
        "ortplugins.quantization.weights.recipe": ("Recipe", "Rule"),
        "ortplugins.static_qdq.plan": ("plan_precision",),
        "ortplugins.static_qdq.quantize_static": ("quantize_static_mixed",),
    },
)
