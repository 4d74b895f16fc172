# SPDX-License-Identifier: MIT
"""Quantisation of weights."""

from __future__ import annotations

__all__ = [
    "BlockFormat",
    "GptqOptions",
    "QuantizeReport",
    "QuantizeResult",
    "Recipe",
    "Rule",
    "quantize",
    "quantize_blocks",
]

from ortplugins.quantization.methods.gptq import GptqOptions
from ortplugins.quantization.methods.nearest import BlockFormat, quantize_blocks
from ortplugins.quantization.weights.quantize import QuantizeResult, quantize
from ortplugins.quantization.weights.recipe import Recipe, Rule
from ortplugins.quantization.weights.report import QuantizeReport
