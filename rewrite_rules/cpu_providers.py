# SPDX-License-Identifier: MIT
"""Whether execution providers leave every node to the CPU."""

from __future__ import annotations

from collections.abc import Iterable


def are_cpu_only(providers: Iterable[str]) -> bool:
    """Whether every node of a session with these providers runs on the CPU.

    The Azure provider, which CPU wheels list among the available ones, takes no standard
    operator.
    """
    return set(providers) <= {"CPUExecutionProvider", "AzureExecutionProvider"}
