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
    "Plan",
    "PrepackedWeights",
    "ShapeSizeReorder",
    "TransformerFusion",
    "TrimPadding",
    "configure",
    "enable_key",
    "option",
    "option_key",
    "our_passes",
    "read",
]

from typing import TYPE_CHECKING, Any

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
    from session_options.entries import enable_key, option_key
    from session_options.keys import OptionError, option
    from session_options.passes import Pass
    from session_options.plan import Plan, configure, read
    from session_options.registry import our_passes

_BUILTIN = "session_options.builtin_passes"

# A start pays for the passes that it switches on, and for no other.
_MODULES = {
    "ConvFusion": f"{_BUILTIN}.conv_fusion",
    "DqMatMulNBitsFusion": f"{_BUILTIN}.dq_matmulnbits_fusion",
    "MixedPrecisionBoundaries": f"{_BUILTIN}.mixed_precision_boundaries",
    "OptionError": "session_options.keys",
    "Pass": "session_options.passes",
    "Plan": "session_options.plan",
    "PrepackedWeights": f"{_BUILTIN}.prepacked_weights",
    "ShapeSizeReorder": f"{_BUILTIN}.shape_size_reorder",
    "TransformerFusion": f"{_BUILTIN}.transformer_fusion",
    "TrimPadding": f"{_BUILTIN}.trim_padding",
    "configure": "session_options.plan",
    "enable_key": "session_options.entries",
    "option": "session_options.keys",
    "option_key": "session_options.entries",
    "our_passes": "session_options.registry",
    "read": "session_options.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
