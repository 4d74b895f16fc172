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
    "plan_bits",
    "plan_precision",
    "quantize",
    "quantize_blocks",
    "quantize_static_mixed",
]

from ortplugins.quantization.activations.static_mixed import quantize_static_mixed
from ortplugins.quantization.methods.gptq import GptqOptions
from ortplugins.quantization.methods.nearest import BlockFormat, quantize_blocks
from ortplugins.quantization.planner.activations import plan_precision
from ortplugins.quantization.planner.weights import plan_bits
from ortplugins.quantization.weights.plan import QuantizeReport
from ortplugins.quantization.weights.quantize import QuantizeResult, quantize
from ortplugins.quantization.weights.recipe import Recipe, Rule
