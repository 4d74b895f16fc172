# SPDX-License-Identifier: MIT
"""What :mod:`..order_peaks` does with a session, in the session's process.

It imports little, and the same in all processes: they differ in nothing but the session.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from typing import Any

import numpy as np

from ortplugins.runtime.machine import process_memory


def peaks(session: Any, feeds: str) -> tuple[float, float]:
    """Run four times; return the peak of the first run and of all, MB above the start."""
    inputs = dict(np.load(feeds))
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # or the run takes what loading left on the heap
    with open("/proc/self/maps") as maps:
        for line in maps:  # weights are mapped: their pages do not count for a run's peak
            if line.rstrip().endswith(".data"):
                first, last = (int(end, 16) for end in line.split()[0].split("-"))
                populate = ctypes.c_void_p(first), ctypes.c_size_t(last - first), 22
                assert libc.madvise(*populate) == 0
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts again at what is resident now
    start = process_memory().resident
    found = []
    for _ in range(4):
        session.run(None, inputs)
        peak = process_memory().peak_resident
        assert peak is not None and start is not None
        found.append((peak - start) / 1e6)
    return found[0], found[-1]


def outputs(session: Any, feeds: str) -> list[str]:
    """Return a digest of each output; every NaN counts as the same."""
    digests = []
    for array in session.run(None, dict(np.load(feeds))):
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), np.nan, array) + 0.0  # -0 is 0
        digests.append(hashlib.sha256(array.tobytes()).hexdigest())
    return digests


def executed_order(session: Any, feeds: str, model: str) -> tuple[bool, int, str]:
    """Run once; say whether the pass set an order, how many nodes ran out of place, the path.

    Out of place is a node that ran at another place than the file has it at.
    """
    import onnx

    session.run(None, dict(np.load(feeds)))
    profile = session.end_profiling()
    with open(profile) as file:
        events = [event["name"] for event in json.load(file) if event["cat"] == "Node"]
    os.unlink(profile)
    report = session.ortplugins_report
    is_ordered = any(remark.node == "graph" for remark in report.fired)
    path = report.artifact or model
    nodes = onnx.load(path, load_external_data=False).graph.node
    names = [node.name for node in nodes if node.op_type != "Constant"]
    known, end = set(names), "_kernel_time"
    ran = [name.removesuffix(end) for name in events if name.endswith(end)]
    ran = [name for name in ran if name in known]  # subgraphs have nodes of their own
    elsewhere = sum(a != b for a, b in zip(ran, names, strict=False))
    return is_ordered, elsewhere + abs(len(ran) - len(names)), path
