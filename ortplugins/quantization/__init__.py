# SPDX-License-Identifier: MIT
"""Quantisation of weights."""

from __future__ import annotations

__all__ = [
    "BlockFormat",
    "QuantizeReport",
    "QuantizeResult",
    "Recipe",
    "quantize",
    "quantize_blocks",
    "quantize_encoder8",
    "quantize_kv_cache",
]

from ortplugins.quantization.encoder8 import quantize_encoder8
from ortplugins.quantization.files import QuantizeResult
from ortplugins.quantization.kv_cache import quantize_kv_cache
from ortplugins.quantization.methods.nearest import BlockFormat, quantize_blocks
from ortplugins.quantization.weights.quantize import quantize
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.report import QuantizeReport
