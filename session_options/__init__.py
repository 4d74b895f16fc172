# SPDX-License-Identifier: MIT
"""Flags in, an ordered plan out: which passes a ``SessionOptions`` switches on, and how.

Importing this package imports neither onnx nor onnxruntime.
"""

from __future__ import annotations

__all__ = [
    "ConvFusion",
    "DqMatMulNBitsFusion",
    "MixedPrecisionBoundaries",
    "OptionError",
    "Pass",
    "PassWarning",
    "Plan",
    "PrepackedWeights",
    "ShapeSizeReorder",
    "TransformerFusion",
    "TrimPadding",
    "configure",
    "enable_key",
    "option",
    "option_key",
    "read",
    "registered_passes",
]

from typing import TYPE_CHECKING

from session_options.lazy_names import lazy_names

if TYPE_CHECKING:
    from session_options.builtin_passes.conv_fusion import ConvFusion
    from session_options.builtin_passes.dq_matmulnbits_fusion import DqMatMulNBitsFusion
    from session_options.builtin_passes.mixed_precision_boundaries import (
        MixedPrecisionBoundaries,
    )
    from session_options.builtin_passes.prepacked_weights import PrepackedWeights
    from session_options.builtin_passes.shape_size_reorder import ShapeSizeReorder
    from session_options.builtin_passes.transformer_fusion import TransformerFusion
    from session_options.builtin_passes.trim_padding import TrimPadding
    from session_options.keys import OptionError, enable_key, option, option_key
    from session_options.passes import Pass
    from session_options.plan import Plan, configure, read
    from session_options.registry import PassWarning, registered_passes

_BUILTIN = "session_options.builtin_passes"

# A start pays for the passes that it switches on, and for no other.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        f"{_BUILTIN}.conv_fusion": ("ConvFusion",),
        f"{_BUILTIN}.dq_matmulnbits_fusion": ("DqMatMulNBitsFusion",),
        f"{_BUILTIN}.mixed_precision_boundaries": ("MixedPrecisionBoundaries",),
        f"{_BUILTIN}.prepacked_weights": ("PrepackedWeights",),
        f"{_BUILTIN}.shape_size_reorder": ("ShapeSizeReorder",),
        f"{_BUILTIN}.transformer_fusion": ("TransformerFusion",),
        f"{_BUILTIN}.trim_padding": ("TrimPadding",),
        "session_options.keys": ("OptionError", "enable_key", "option", "option_key"),
        "session_options.passes": ("Pass",),
        "session_options.plan": ("Plan", "configure", "read"),
        "session_options.registry": ("PassWarning", "registered_passes"),
    },
)
