# SPDX-License-Identifier: MIT
"""How many cores this process may keep busy, where onnxruntime counts those of the host."""

from __future__ import annotations

import os
from collections.abc import Iterator


def usable_cores(root: str = "/") -> int:
    """Return the physical cores of the process's affinity, or its quota if that is less.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
    # Where nothing is said of a processor's siblings, it counts as a core.
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {_text(root, siblings.format(number)) or str(number) for number in allowed}
    quotas = [-(-quota // period) for quota, period in _quotas(root)]
    return max(1, min([len(cores), *quotas]))


def _quotas(root: str) -> Iterator[tuple[int, int]]:
    """Yield quota and period of the process's cgroups, and of those above them."""
    for line in _text(root, "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        # cgroup v2 has one hierarchy, with no controllers named; v1 one for each.
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder, path = "sys/fs/cgroup", name.strip("/")
        files = ["cpu.max"]
        if controllers:
            folder, files = f"{folder}/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        while True:
            found = " ".join(_text(root, folder, path, file) for file in files).split()
            if len(found) == 2 and all(text.isdecimal() for text in found):
                yield int(found[0]), int(found[1])
            if not path:
                break
            path = os.path.dirname(path)


def _text(*parts: str) -> str:
    """Return what a file holds; nothing where there is none."""
    try:
        with open(os.path.join(*parts), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
