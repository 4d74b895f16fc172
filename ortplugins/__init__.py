# SPDX-License-Identifier: MIT
"""Graph work for ONNX Runtime, from Python, before the session exists.

Example::

    import onnxruntime as ort
    import ortplugins

    so = ort.SessionOptions()
    so.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")
    session = ortplugins.InferenceSession("model.onnx", so, providers=["CPUExecutionProvider"])
    print(session.ortplugins_report)
"""

from __future__ import annotations

__all__ = [
    "Comparison",
    "DqMatMulNBitsFusion",
    "InferenceSession",
    "MissingFileError",
    "MixedPrecisionBoundaries",
    "ModelFileError",
    "OptimizeResult",
    "OptionError",
    "OrtpluginsWarning",
    "Pass",
    "PassError",
    "PassWarning",
    "PrepackedWeights",
    "Report",
    "ShapeSizeReorder",
    "TrimPadding",
    "TransformerFusion",
    "WeightOnlyQuantization",
    "__version__",
    "compare",
    "configure",
    "disable",
    "enable",
    "enabled",
    "option",
    "optimize",
    "quantize_static_mixed",
    "read",
    "warm",
]

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ortplugins._version import __version__

if importlib.util.find_spec("onnxruntime") is None:
    raise ImportError(
        "ortplugins needs one of the onnxruntime wheels: pip install 'ortplugins[cpu]' or "
        "'ortplugins[gpu]', or the onnxruntime-* wheel of your hardware."
    )

from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.report import Report
from ortplugins.weight_only_quantization import WeightOnlyQuantization
from session_options import (
    DqMatMulNBitsFusion,
    MixedPrecisionBoundaries,
    OptionError,
    Pass,
    PassWarning,
    PrepackedWeights,
    ShapeSizeReorder,
    TransformerFusion,
    TrimPadding,
    configure,
    option,
    read,
)
from session_options.registry import ship

ship(WeightOnlyQuantization)

if TYPE_CHECKING:
    from ortplugins.artifacts.warming import warm
    from ortplugins.comparison.compare import Comparison, compare
    from ortplugins.optimization.optimize import OptimizeResult, optimize
    from ortplugins.quantization.activations.static_mixed import quantize_static_mixed
    from ortplugins.session.inference_session import InferenceSession
    from ortplugins.session.patching import disable, enable, enabled

# Imported when first used: a session that comes from the cache needs no onnx.
_LAZY = {
    "Comparison": "ortplugins.comparison.compare",
    "InferenceSession": "ortplugins.session.inference_session",
    "OptimizeResult": "ortplugins.optimization.optimize",
    "compare": "ortplugins.comparison.compare",
    "disable": "ortplugins.session.patching",
    "enable": "ortplugins.session.patching",
    "enabled": "ortplugins.session.patching",
    "optimize": "ortplugins.optimization.optimize",
    "quantize_static_mixed": "ortplugins.quantization.activations.static_mixed",
    "warm": "ortplugins.artifacts.warming",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
