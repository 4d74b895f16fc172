# SPDX-License-Identifier: MIT
"""Times imports in a process that has imported onnxruntime, and no more."""

import time


def import_seconds(_: object) -> float:
    """Return the seconds to import the package and its InferenceSession."""
    start = time.perf_counter()
    import ortplugins

    _ = ortplugins.InferenceSession
    return time.perf_counter() - start
