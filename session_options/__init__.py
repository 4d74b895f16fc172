# SPDX-License-Identifier: MIT
"""Flags in, an ordered plan out: which passes a ``SessionOptions`` switches on, and how.

Importing this package imports neither onnx nor onnxruntime.
"""

from __future__ import annotations

__all__ = [
    "DqMatMulNBitsFusion",
    "MixedPrecisionBoundaries",
    "OptionError",
    "Pass",
    "PassWarning",
    "Plan",
    "PrepackedWeights",
    "ShapeSizeReorder",
    "TrimPadding",
    "TransformerFusion",
    "configure",
    "enable_key",
    "option",
    "option_key",
    "read",
    "registered_passes",
]

from session_options.builtin_passes import (
    DqMatMulNBitsFusion,
    MixedPrecisionBoundaries,
    PrepackedWeights,
    ShapeSizeReorder,
    TransformerFusion,
    TrimPadding,
)
from session_options.keys import OptionError, enable_key, option, option_key
from session_options.passes import Pass
from session_options.plan import Plan, configure, read
from session_options.registry import PassWarning, registered_passes
