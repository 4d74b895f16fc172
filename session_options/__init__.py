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
    from session_options.builtin_passes import (
        ConvFusion,
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

# Imported when first used: programs that switch nothing on pay for none.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "session_options.builtin_passes": (
            "ConvFusion",
            "DqMatMulNBitsFusion",
            "MixedPrecisionBoundaries",
            "PrepackedWeights",
            "ShapeSizeReorder",
            "TransformerFusion",
            "TrimPadding",
        ),
        "session_options.keys": ("OptionError", "enable_key", "option", "option_key"),
        "session_options.passes": ("Pass",),
        "session_options.plan": ("Plan", "configure", "read"),
        "session_options.registry": ("PassWarning", "registered_passes"),
    },
)
