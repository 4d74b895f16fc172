# SPDX-License-Identifier: MIT
"""What can be said without measuring: threads, memory that is kept, known defects.

Those of :data:`DEFECTS` on every processor were reproduced with wheels of 1.22 to 1.32.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx_ir as ir

_ARM = ("aarch64", "arm64")
_THREADS, _THREADS_SINCE = "ORT_INTRA_OP_NUM_THREADS", (1, 29, 0)
_KLEIDI_SINCE = (1, 24, 0)  # keeps its buffers: onnxruntime #29538
_KLEIDI_OFF = "session entry mlas.disable_kleidiai=1"


class Defect(NamedTuple):
    """Wrong results, or a leak, of some versions of onnxruntime."""

    versions: tuple[tuple[int, int, int], tuple[int, int, int]]  # from, and fixed in
    machines: tuple[str, ...]  # all, where it is empty
    concerns: Callable[[ir.Node], bool]
    what: str
    workaround: str
    source: str


def _pools_padding(node: ir.Node) -> bool:
    counts = node.attributes.get_int("count_include_pad", 0)
    return node.op_type == "AveragePool" and counts != 0


def _lacks_zero_point(node: ir.Node) -> bool:
    given = len(node.inputs) > 2 and node.inputs[2] is not None
    moved = {reader.op_type for reader in node.outputs[0].consumers()}
    wanted = node.op_type == "DequantizeLinear" and moved & {"Reshape", "Transpose"}
    return bool(wanted) and not given


DEFECTS = (
    Defect(
        ((1, 0, 0), (1, 25, 0)),
        (),
        _pools_padding,
        "AveragePool of opset 19 on is wrong with count_include_pad and uneven padding",
        "opset 18",
        "onnxruntime #27375",
    ),
    Defect(
        ((1, 0, 0), (1, 27, 0)),
        (),
        _lacks_zero_point,
        "int8 without a zero point, before Reshape or Transpose: negative values become 0",
        "a zero point of 0",
        "onnxruntime #27845",
    ),
    Defect(
        ((1, 0, 0), (1, 29, 0)),
        (),
        _pools_padding,
        "AveragePool up to opset 18 is wrong at the end with ceil_mode and count_include_pad",
        "opset 19",
        "onnxruntime #29629",
    ),
    Defect(
        ((1, 24, 0), (1, 27, 1)),
        _ARM,
        lambda node: node.op_type == "Conv",
        "Conv leaks memory at every input, and in 1.27.0 is wrong with uneven padding",
        _KLEIDI_OFF,
        "onnxruntime #28231, sherpa-onnx #3850",
    ),
)


def defects(
    version: str, nodes: Collection[ir.Node] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong in a version on this processor, and what to do about it.

    Given the nodes of a model, only what concerns one of them.
    """
    for item in DEFECTS:
        first, fixed = item.versions
        here = not item.machines or platform.machine() in item.machines
        concerns = nodes is None or any(map(item.concerns, nodes))
        if here and concerns and first <= _numbers(version) < fixed:
            newer = ".".join(map(str, fixed))
            advice = f"pip install 'onnxruntime>={newer}', or {item.workaround}"
            yield f"{item.what} ({item.source})", advice


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
    from rewrite_rules.graph.nodes import all_nodes

    for what, advice in defects(version, list(all_nodes(model))):
        yield f"onnxruntime {version}: {what}: {advice}"
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
