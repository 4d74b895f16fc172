# SPDX-License-Identifier: MIT
"""Quantisation of weights and activations, and the choice of what gets more bits."""

from __future__ import annotations

__all__ = [
    "BlockFormat",
    "QuantizeReport",
    "QuantizeResult",
    "plan_bits",
    "plan_precision",
    "quantize",
    "quantize_blocks",
    "quantize_static_mixed",
]

import importlib
from typing import TYPE_CHECKING, Any

from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.methods.nearest import quantize_blocks
from ortplugins.quantization.weights.quantize import QuantizeResult, quantize
from ortplugins.quantization.weights.report import QuantizeReport

if TYPE_CHECKING:
    from ortplugins.quantization.activations.static_mixed import quantize_static_mixed
    from ortplugins.quantization.planner.activations import plan_precision
    from ortplugins.quantization.planner.weights import plan_bits

# These open sessions or import onnxruntime's quantiser, which takes a second.
_LAZY = {
    "plan_bits": "ortplugins.quantization.planner.weights",
    "plan_precision": "ortplugins.quantization.planner.activations",
    "quantize_static_mixed": "ortplugins.quantization.activations.static_mixed",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
