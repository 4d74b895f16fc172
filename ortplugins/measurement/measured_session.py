# SPDX-License-Identifier: MIT
"""Opens one session, runs it and prints what that took, as a line of JSON.

A script, run by its path in a process of its own: that of plain onnxruntime must not import
anything of ours, which would count as its memory. The job comes as JSON in the only argument.
"""

from __future__ import annotations

__all__ = ["main"]

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import onnxruntime

# Runs are repeated until both are reached, or the most.
_SECONDS, _LEAST, _MOST = 1.0, 3, 50


def main() -> None:
    """Do the job: ``model``, ``feeds``, ``passes``, ``settings``, ``cache_dir``, ``run``."""
    job = json.loads(sys.argv[1])
    options = onnxruntime.SessionOptions()
    make = onnxruntime.InferenceSession
    if job["passes"]:
        import ortplugins
        from session_options.plan import plan_from_settings

        plan = plan_from_settings(job["passes"], job["settings"])
        ortplugins.configure(options, *plan.passes, cache_dir=job["cache_dir"], strict=True)
        make = ortplugins.InferenceSession
    start = time.perf_counter()
    session = make(job["model"], options, providers=["CPUExecutionProvider"])
    result: dict[str, Any] = {
        "start_seconds": time.perf_counter() - start,
        "started_private_bytes": _private_bytes(),
    }
    if job["passes"]:
        result["report"] = session.ortplugins_report.to_dict()
    if job["run"]:
        with np.load(job["feeds"], allow_pickle=False) as file:
            names = json.loads(str(file["names"]))
            feeds = {name: file[f"input{index}"] for index, name in enumerate(names)}
        seconds: list[float] = []
        session.run(None, feeds)  # allocates, and packs what is packed late
        while len(seconds) < _LEAST or (sum(seconds) < _SECONDS and len(seconds) < _MOST):
            start = time.perf_counter()
            session.run(None, feeds)
            seconds.append(time.perf_counter() - start)
        result["run_seconds"] = statistics.median(seconds)
        result["runs"] = len(seconds)
    print(json.dumps(result))


def _private_bytes() -> int | None:
    """Memory of this process that no file stands behind; None where /proc tells nothing."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


if __name__ == "__main__":
    main()
