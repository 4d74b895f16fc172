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
    "evaluate",
    "option",
    "optimize",
    "quantize_static_mixed",
    "read",
    "warm",
]

import importlib.util
import os
from typing import TYPE_CHECKING

from ortplugins._version import __version__

# The names are general, and a program may have a module of its own under them.
for _package, _module in (("session_options", "lazy_names"), ("rewrite_rules", "remarks")):
    _found = importlib.util.find_spec(_package)
    _origin = (_found and _found.origin) or ""
    _expected = os.path.join(os.path.dirname(_origin), _module + os.path.splitext(_origin)[1])
    if os.path.isfile(_origin) and not os.path.isfile(_expected):
        raise ImportError(
            f"{_origin} hides the package {_package!r} of ortplugins: rename it, or keep its "
            "folder off sys.path"
        )

from session_options.lazy_names import lazy_names  # noqa: E402 - once it is found to be ours

if importlib.util.find_spec("onnxruntime") is None:
    raise ImportError(
        "ortplugins needs one of the onnxruntime wheels: pip install 'ortplugins[cpu]' or "
        "'ortplugins[gpu]', or the onnxruntime-* wheel of your hardware."
    )

if TYPE_CHECKING:
    from ortplugins.cache.warming import warm
    from ortplugins.comparison.compare import Comparison, compare
    from ortplugins.errors import (
        MissingFileError,
        ModelFileError,
        OrtpluginsWarning,
        PassError,
    )
    from ortplugins.evaluation import Evaluation, evaluate
    from ortplugins.optimization.optimize import OptimizeResult, optimize
    from ortplugins.report import Report
    from ortplugins.session.opening import InferenceSession
    from ortplugins.session.patching import disable, enable, enabled
    from ortplugins.static_qdq.quantize_static import quantize_static_mixed
    from ortplugins.weight_only_quantization import WeightOnlyQuantization
    from session_options import (
        ConvFusion,
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

# Imported when first used: a session that comes from the cache needs no onnx, and each module
# costs a start part of a millisecond.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "session_options": __all__,  # all that are not named below
        "ortplugins.cache.warming": ("warm",),
        "ortplugins.comparison.compare": ("Comparison", "compare"),
        "ortplugins.errors": (
            "MissingFileError",
            "ModelFileError",
            "OrtpluginsWarning",
            "PassError",
        ),
        "ortplugins.evaluation": ("Evaluation", "evaluate"),
        "ortplugins.optimization.optimize": ("OptimizeResult", "optimize"),
        "ortplugins.static_qdq.quantize_static": ("quantize_static_mixed",),
        "ortplugins.report": ("Report",),
        "ortplugins.session.opening": ("InferenceSession",),
        "ortplugins.session.patching": ("disable", "enable", "enabled"),
        "ortplugins.weight_only_quantization": ("WeightOnlyQuantization",),
    },
)
