# SPDX-License-Identifier: MIT
"""Weight-only quantisation: float weights to integer codes in blocks along K."""

from __future__ import annotations

__all__ = ["quantize_blocks", "quantize_matmuls"]

from ortplugins.quantization.matmul_weights import quantize_matmuls
from ortplugins.quantization.round_to_nearest import quantize_blocks
