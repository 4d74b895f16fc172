# SPDX-License-Identifier: MIT
"""What runs here: the machine, and the versions of packages."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ortplugins.runtime.cpu_features import instruction_sets, processor_name

_PACKAGES = ("ortplugins", "onnxruntime", "onnx", "onnx_ir", "onnxscript", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # onnxruntime has several wheels
            module = __import__(package)
            found[package] = str(getattr(module, "__version__", "unknown"))
    return found


def machine() -> dict[str, Any]:
    """Return processor, instruction sets, cores, bytes of memory (None if unknown), system."""
    return {
        "processor": processor_name(),
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
