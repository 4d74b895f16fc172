# SPDX-License-Identifier: MIT
"""Weight-only quantisation: float weights to integer codes in blocks along K."""

from __future__ import annotations

__all__ = ["BlockFormat", "QuantizeReport", "QuantizeResult", "quantize", "quantize_blocks"]

from ortplugins.quantization.block_format import BlockFormat
from ortplugins.quantization.quantize_model import QuantizeResult, quantize
from ortplugins.quantization.report import QuantizeReport
from ortplugins.quantization.round_to_nearest import quantize_blocks
