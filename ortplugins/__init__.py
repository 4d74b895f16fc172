# SPDX-License-Identifier: MIT
"""Optimise and quantise ONNX models for ONNX Runtime, from Python.

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
    "ConvFusion",
    "DqMatMulNBitsFusion",
    "Evaluation",
    "InferenceSession",
    "MissingFileError",
    "MixedPrecisionBoundaries",
    "ModelFileError",
    "OptimizeResult",
    "OptionError",
    "OrtpluginsWarning",
    "Pass",
    "PassError",
    "PrepackedWeights",
    "Report",
    "ShapeSizeReorder",
    "TrimPadding",
    "TransformerFusion",
    "__version__",
    "compare",
    "configure",
    "disable",
    "enable",
    "enabled",
    "evaluate",
    "option",
    "optimize",
    "quantize_static_mixed",
    "read",
    "warm",
]

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from ortplugins._version import __version__


def _check_package(name: str, module: str) -> None:
    """Raise ImportError if a module of the program has the name of one of our packages.

    A wheel cannot prevent it: the names of the packages were asked for.
    """
    for folder in sys.path:
        package = os.path.join(str(folder), name)
        is_package = os.path.isfile(found := os.path.join(package, "__init__.py"))
        if is_package and os.path.isfile(os.path.join(package, f"{module}.py")):
            return
        if is_package or os.path.isfile(found := f"{package}.py"):
            raise ImportError(
                f"{found} hides the package {name!r} of ortplugins: rename it, or keep its "
                "folder off sys.path"
            )


# Found without importlib.util, which takes as long as the rest of this import.
_check_package("rewrite_rules", "remarks")
_check_package("session_options", "registry")

if sys.modules.get("onnxruntime") is None:
    import importlib.util

    if importlib.util.find_spec("onnxruntime") is None:
        raise ImportError(
            "ortplugins needs one of the onnxruntime wheels: pip install 'ortplugins[cpu]' or "
            "'ortplugins[gpu]', or the onnxruntime-* wheel of your hardware."
        )

if TYPE_CHECKING:
    from ortplugins.errors import (
        MissingFileError,
        ModelFileError,
        OrtpluginsWarning,
        PassError,
    )
    from ortplugins.evaluation import Evaluation, evaluate
    from ortplugins.measurement.compare import Comparison, compare
    from ortplugins.optimization.optimize import OptimizeResult, optimize
    from ortplugins.report import Report
    from ortplugins.session.opening import InferenceSession
    from ortplugins.session.patching import disable, enable, enabled
    from ortplugins.session.warming import warm
    from ortplugins.static_qdq.quantize_static import quantize_static_mixed
    from session_options import (
        ConvFusion,
        DqMatMulNBitsFusion,
        MixedPrecisionBoundaries,
        OptionError,
        Pass,
        PrepackedWeights,
        ShapeSizeReorder,
        TransformerFusion,
        TrimPadding,
        configure,
        option,
        read,
    )

# Imported when first used: a session that comes from the cache needs no onnx, and each module
# costs a start part of a millisecond. Those of session_options are not named here.
_MODULES = {
    "Comparison": "measurement.compare",
    "Evaluation": "evaluation",
    "InferenceSession": "session.opening",
    "MissingFileError": "errors",
    "ModelFileError": "errors",
    "OptimizeResult": "optimization.optimize",
    "OrtpluginsWarning": "errors",
    "PassError": "errors",
    "Report": "report",
    "compare": "measurement.compare",
    "disable": "session.patching",
    "enable": "session.patching",
    "enabled": "session.patching",
    "evaluate": "evaluation",
    "optimize": "optimization.optimize",
    "quantize_static_mixed": "static_qdq.quantize_static",
    "warm": "session.warming",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ours = f"{__name__}.{_MODULES[name]}" if name in _MODULES else "session_options"
    value = globals()[name] = getattr(importlib.import_module(ours), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
