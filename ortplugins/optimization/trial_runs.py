# SPDX-License-Identifier: MIT
"""Sessions that trials run on, and how far apart two of their outputs are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ortplugins.optimization.offline_optimizers import SLOW_OPTIMIZERS

Outputs = list[NDArray[Any]]


class Apart(NamedTuple):
    """How far two arrays are apart: a share of the greatest number, infinite if unlike."""

    share: float
    text: str


def outputs_on(
    path: Path,
    providers: Sequence[str],
    feeds: Iterable[Mapping[str, NDArray[Any]]],
    threads: int = 1,
) -> tuple[Any, list[Outputs | Exception]]:
    """Run a model on feeds; return its session, and outputs or what failed."""
    feeds, results = list(feeds), list[Outputs | Exception]()
    try:
        session = _open(path, providers, threads)
    except Exception as error:  # onnxruntime's own classes, none of which is documented
        return None, [error] * len(feeds)
    for feed in feeds:
        try:
            results.append(session.run(None, dict(feed)))
        except Exception as error:
            results.append(error)
    return session, results


def _open(path: Path, providers: Sequence[str], threads: int) -> Any:
    """Open a session that rounds no activations of its own and logs nothing."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is reported by the caller
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return onnxruntime.InferenceSession(
        str(path),
        options,
        providers=list(providers),
        enable_fallback=0,
        disabled_optimizers=[*SLOW_OPTIMIZERS],
    )


def apart(a: NDArray[Any], b: NDArray[Any], counted: NDArray[np.bool_] | None = None) -> Apart:
    """Compare the elements that count, all if None; the greatest number is one of ``a``."""
    if a.shape != b.shape:
        return Apart(np.inf, f"has shape {list(b.shape)} instead of {list(a.shape)}")
    if counted is not None:
        counted = np.broadcast_to(counted, a.shape)
        a, b = a[counted], b[counted]
    same = (a == b) | ((a != a) & (b != b))
    if same.all():
        return Apart(0.0, "")
    if a.dtype.kind not in "fc":
        return Apart(np.inf, f"differs in {int((~same).sum())} elements")
    wide, other = a.astype(np.float64), b.astype(np.float64)
    far = np.abs(wide[~same] - other[~same]).max()
    greatest = np.abs(wide[np.isfinite(wide)]).max(initial=0.0)
    share = float(far / greatest) if greatest and np.isfinite(far) else np.inf
    return Apart(share, f"differs by {share:.1e} of its greatest")
