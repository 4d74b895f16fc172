# SPDX-License-Identifier: MIT
"""What runs here: processor, machine, versions of packages, and the memory of a process.

Memory of a process in bytes, as Linux reports it in /proc:

private   resident memory that no file backs (RssAnon): the heap, the stacks, pages that were
          written to. Each process has its own, whatever others map. Private_Clean of
          smaps_rollup is not counted: these are pages of a mapped model that one process alone
          reads at the moment, and they are shared as soon as a second one opens it. Neither is
          it read often without slowing the process, which RssAnon, a counter, is.
resident  all of it, mapped files included (VmRSS), and the most that it ever was (VmHWM).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ortplugins._version import __version__

_PACKAGES = ("onnx", "onnx_ir", "onnxscript")
# Those that onnxruntime's kernels for quantised weights differ by.
_NOTED = ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm")


def machine() -> dict[str, Any]:
    """Return processor, instruction sets, cores, bytes of memory (None if unknown), system."""
    import platform

    return {
        "processor": processor_name(),
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    import platform

    import numpy
    import onnxruntime

    return {
        "Python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "numpy": numpy.__version__,
        **package_versions(),
    }


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Return the versions of what optimises models, by name; nothing of it is imported."""
    return {"ortplugins": __version__, **{name: _version_of(name) for name in _PACKAGES}}


@functools.cache
def missing_packages() -> tuple[str, ...]:
    """Return which of the packages that optimise models are not installed."""
    import importlib.util

    return tuple(name for name in _PACKAGES if importlib.util.find_spec(name) is None)


def processor_name() -> str:
    """Return what the processor calls itself."""
    import platform

    return _of_processor("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Return the instruction sets that make a difference to kernels, of those it has."""
    flags = _of_processor("flags", "Features")  # on x86, on Arm
    if not flags:  # what numpy.show_runtime() prints
        from numpy._core._multiarray_umath import __cpu_features__

        flags = " ".join(name for name, present in __cpu_features__.items() if present)
    found = flags.lower().replace("_", "").split()  # numpy has AVX512VNNI
    return [name for name in _NOTED if name.replace("_", "") in found]


def _of_processor(*names: str) -> str:
    """Return what Linux says of the first processor, which speaks for all."""
    lines = (line.partition(":") for line in text_of("/proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() in names), "")


def usable_cores(root: str = "/") -> int:
    """Return the physical cores of the process's affinity, or its quota if that is less."""
    if sys.platform == "linux":
        quotas = [-(-quota // period) for quota, period in _quotas(root)]
        return max(1, min([_physical_cores(root, os.sched_getaffinity(0)), *quotas]))
    else:
        return os.cpu_count() or 1


def host_cores(root: str = "/") -> int:
    """Return all physical cores: the threads that sessions of onnxruntime have by default."""
    return _physical_cores(root, range(os.cpu_count() or 1))


def _physical_cores(root: str, processors: Iterable[int]) -> int:
    # Where nothing is said of a processor's siblings, it counts as a core.
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({text_of(root, siblings.format(number)) or number for number in processors})


def _memory_bytes() -> int | None:
    if sys.platform != "win32":
        with contextlib.suppress(ValueError, OSError):  # not known to this system
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _version_of(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # frozen into a program without its metadata


def _quotas(root: str) -> Iterator[tuple[int, int]]:
    """Yield quota and period of the process's cgroups, and of those above them."""
    for line in text_of(root, "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        # cgroup v2 has one hierarchy, with no controllers named; v1 one for each.
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder, path = "sys/fs/cgroup", name.strip("/")
        files = ["cpu.max"]
        if controllers:
            folder, files = f"{folder}/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        while True:
            found = " ".join(text_of(root, folder, path, file) for file in files).split()
            if len(found) == 2 and all(text.isdecimal() for text in found):
                yield int(found[0]), int(found[1])
            if not path:
                break
            path = os.path.dirname(path)


def text_of(*parts: str) -> str:
    """Return what a file holds; nothing where there is none."""
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


class ProcessMemory(NamedTuple):
    """What a process holds; None for what the system does not tell."""

    private: int | None = None
    resident: int | None = None
    peak_resident: int | None = None


def process_memory(pid: int | str = "self") -> ProcessMemory:
    """Return what a process holds; nothing of one that has ended, or without /proc."""
    text = text_of("/proc", str(pid), "status")
    found = re.findall(r"^(RssAnon|VmRSS|VmHWM):\s+(\d+) kB$", text, re.MULTILINE)
    sizes = {name: int(number) * 1024 for name, number in found}
    return ProcessMemory(sizes.get("RssAnon"), sizes.get("VmRSS"), sizes.get("VmHWM"))
