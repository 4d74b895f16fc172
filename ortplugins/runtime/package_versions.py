# SPDX-License-Identifier: MIT
"""Versions of the packages that an optimised model depends on; none of them is imported."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ortplugins._version import __version__
from session_options.installed import installed_distributions

_NAMES = ("onnx", "onnx_ir", "onnxscript")


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Return the versions of ortplugins, onnx, onnx_ir and onnxscript by name."""
    return {"ortplugins": __version__, **{name: _version_of(name) for name in _NAMES}}


def _version_of(name: str) -> str:
    for item in installed_distributions() or ():
        if item.name == name:
            return item.version
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # frozen into a program without its metadata
