# SPDX-License-Identifier: MIT
"""Weight-only quantisation: float weights to integer codes in blocks along K."""

from __future__ import annotations

__all__ = ["BlockFormat", "QuantizeReport", "QuantizeResult", "quantize", "quantize_blocks"]

from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.methods.nearest import quantize_blocks
from ortplugins.quantization.weights.quantize import QuantizeResult, quantize
from ortplugins.quantization.weights.report import QuantizeReport
