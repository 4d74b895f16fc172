# SPDX-License-Identifier: MIT
"""Versions and providers of onnxruntime, as far as results depend on them."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Major and minor version of onnxruntime.
Version = tuple[int, int]
OLDEST: Version = (1, 24)  # that results run on


def parse_version(text: str) -> Version:
    """Read ``"1.31"``, ``"1.31.1"``, ``"1.32.0.dev20261101+cpu"``.

    Raises:
        ValueError: If it is none.
    """
    match = re.match(r"(\d+)\.(\d+)(?:[.+-]|$)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a version of onnxruntime: 1.31 or 1.31.1 is one")
    return int(match[1]), int(match[2])


def are_cpu_only(providers: Iterable[str]) -> bool:
    """Whether every node of a session with these providers runs on the CPU.

    The Azure provider, which CPU wheels list as available, takes no standard operator.
    """
    return set(providers) <= {"CPUExecutionProvider", "AzureExecutionProvider"}
