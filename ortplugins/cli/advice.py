# SPDX-License-Identifier: MIT
"""What can be said without measuring: threads, and memory that is kept."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

_ARM = ("aarch64", "arm64")
_THREADS, _THREADS_SINCE = "ORT_INTRA_OP_NUM_THREADS", (1, 29, 0)
_KLEIDI_SINCE = (1, 24, 0)  # keeps its buffers: onnxruntime #29538
_KLEIDI_OFF = "session entry mlas.disable_kleidiai=1"


def threads(version: str) -> tuple[int, int, str]:
    """Return the threads of a session by default, the cores it may use, and what to do."""
    from ortplugins.runtime.machine import host_cores, usable_cores

    default, usable = host_cores(), usable_cores()
    known = _numbers(version) >= _THREADS_SINCE
    if known and (given := os.environ.get(_THREADS, "")).isdecimal():
        default = int(given) or default
    if default <= usable:
        return default, usable, ""
    environment = f", or {_THREADS}={usable} in the environment" if known else ""
    return default, usable, f"set intra_op_num_threads={usable}{environment}"


def memory_kept(version: str) -> Iterator[tuple[str, str]]:
    """Yield what keeps the memory of the largest input, and how to get it back."""
    yield "arena", "ortplugins.hint=memory, or enable_cpu_mem_arena = False"
    if platform.machine() in _ARM and _numbers(version) >= _KLEIDI_SINCE:
        yield "KleidiAI's buffers of each thread", _KLEIDI_OFF


def notes_on(model: ir.Model, version: str) -> Iterator[str]:
    """Yield what is said of a model, a line each."""
    default, usable, advice = threads(version)
    if advice:
        yield f"sessions start {default} threads on {usable} cores: {advice}"
    shapes = (value.shape for value in model.graph.inputs if value.shape is not None)
    if any(shape.is_dynamic() for shape in shapes):
        for what, advice in memory_kept(version):
            yield f"memory of the largest input stays in the {what}: {advice}"


def _numbers(version: str) -> tuple[int, ...]:
    found = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return (*found, *[0] * (3 - len(found)))
