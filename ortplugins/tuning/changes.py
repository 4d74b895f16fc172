# SPDX-License-Identifier: MIT
"""What may be changed about a start, and for which hints that is tried."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ortplugins.optimization.offline_optimizers import SLOW_OPTIMIZERS
from ortplugins.runtime.copied_options import MALLOC_THRESHOLD_KEY
from ortplugins.runtime.machine import host_cores, usable_cores
from ortplugins.runtime.session_settings import (
    DISABLED_OPTIMIZERS_KEY,
    DISABLED_PACKING_KEY,
    PARALLEL_PACKING_KEY,
)

NONE: Mapping[str, str] = MappingProxyType({})


class Change(NamedTuple):
    """Passes and settings that a start may have beside plain onnxruntime's."""

    name: str  # in tables
    passes: tuple[str, ...] = ()
    options: Mapping[str, str] = NONE  # of these, {"<pass>.<option>": value}
    settings: Mapping[str, str] = NONE  # of the session, as Pass.session_settings has them
    keeps_graph: bool = False  # even if no pass fires: as onnxruntime's optimisers leave it
    operators: tuple[str, ...] = ()  # a model without any of these has nothing to gain
    is_safe: bool = False  # serves what the hint aims at on any machine, unmeasured

    def with_change(self, other: Change) -> Change:
        """Return both as one, under the other's name; its value for an option counts."""
        settings = {**self.settings, **other.settings}
        if settings.get(DISABLED_PACKING_KEY) == "1":
            settings.pop(PARALLEL_PACKING_KEY, None)  # there is nothing to pack
        return Change(
            other.name,
            tuple(dict.fromkeys((*self.passes, *other.passes))),
            {**self.options, **other.options},
            settings,
            self.keeps_graph or other.keeps_graph,
        )


def _pass(name: str) -> Change:
    # What other passes do depends on which weights are fused.
    return Change(name, tuple(dict.fromkeys(("dq_matmulnbits_fusion", name))))


def _setting(name: str, key: str, value: str, *operators: str) -> Change:
    return Change(name, settings={key: value}, operators=operators)


_FUSION = _pass("dq_matmulnbits_fusion")._replace(is_safe=True)
_INT8 = Change(
    "int8 activations", _FUSION.passes, {"dq_matmulnbits_fusion.accuracy_level": "4"}
)
_TRIM = _pass("trim_padding")
# Values that share buffers make attention's products up to 1.4 times as slow.
_NO_PLAN = _setting("no plan for buffers", "enable_mem_reuse", "0")
# Without it glibc keeps large buffers that are freed, often more of them than the arena.
# 128 KiB is what it starts with, and raises.
_GIVES_BACK = {MALLOC_THRESHOLD_KEY: "131072"} if platform.libc_ver()[0] == "glibc" else {}
_NO_ARENA = Change(
    "no arena", settings={"enable_cpu_mem_arena": "0", **_GIVES_BACK}, is_safe=True
)
# What onnxruntime's fusion of a sum and its norm starts from, and its approximation of Gelu.
_NORMS = ("LayerNormalization", "SimplifiedLayerNormalization", "ReduceMean")
_GELUS = ("Erf", "Gelu", "BiasGelu")
_CONVOLUTIONS = _pass("conv_fusion")._replace(
    operators=("Conv", "ConvInteger", "ConvTranspose")
)
_SPEED = (
    _FUSION,
    _pass("transformer_fusion"),
    _CONVOLUTIONS,
    _TRIM,
    Change("real tokens gathered", _TRIM.passes, {"trim_padding.pack": "1"}),
    _INT8,
    # Long runs multiply float weights faster than int4 ones; that takes their memory.
    _setting("float weights", "session.disable_quant_qdq", "1", "DequantizeLinear"),
    _setting("denormals as zero", "session.set_denormal_as_zero", "1"),
    # See offline_optimizers: the kernel that it makes is slower.
    _setting(
        "sums apart from norms",
        DISABLED_OPTIMIZERS_KEY,
        ";".join(SLOW_OPTIMIZERS),
        *_NORMS,
    ),
    _NO_PLAN,
    _setting("approximate Gelu", "optimization.enable_gelu_approximation", "1", *_GELUS),
    _setting("dynamic blocks", "session.dynamic_block_base", "4"),
)
_ARM = (_setting("bfloat16 MatMul", "mlas.enable_gemm_fastmath_arm64_bfloat16", "1"),)
_CHANGES: Mapping[str, Sequence[Change]] = {
    "latency": _SPEED,
    "throughput": (*_SPEED, _setting("no spinning", "session.intra_op.allow_spinning", "0")),
    "memory": (
        _FUSION,
        _NO_ARENA,
        _pass("prepacked_weights")._replace(is_safe=True),
        _pass("shape_size_reorder"),
    ),
    "start": (
        _FUSION,
        _CONVOLUTIONS,
        _NO_PLAN,
        Change("optimised graph kept", keeps_graph=True),
        # Packing is most of the start where weights are large. Some kernels are as fast on
        # unpacked weights, some many times slower: the search compares runs, too.
        _setting("weights not packed", DISABLED_PACKING_KEY, "1"),
        _setting("weights packed in parallel", PARALLEL_PACKING_KEY, "1"),
        # Giving memory back takes as long as a small net's start.
        _pass("prepacked_weights")._replace(options={"prepacked_weights.trim": "0"}),
    ),
}  # fmt: skip


def changes_for(
    hint: str, session: Mapping[str, str], operators: frozenset[str]
) -> list[Change]:
    """Return what a hint tries for a model of these operators, the most promising first.

    Settings that the user gave to the session are left as they are.
    """
    found = list(_CHANGES[hint])
    if platform.machine() in ("aarch64", "arm64") and hint in ("latency", "throughput"):
        found += _ARM
    if session.get("intra_op_num_threads", "0") == "0" and hint in ("latency", "throughput"):
        # One thread for each caller hands nothing over; for a single caller it would be what
        # gains while others use the cores, and loses once they are free.
        counts = {usable_cores(), 1} if hint == "throughput" else {usable_cores()}
        found += [
            _setting(f"threads: {count}", "intra_op_num_threads", str(count))
            for count in sorted(counts - {host_cores()})
        ]
    defaults = {"intra_op_num_threads": "0", "enable_cpu_mem_arena": "1"}
    defaults |= {"enable_mem_pattern": "1", "enable_mem_reuse": "1"}
    chosen = {key for key, value in session.items() if defaults.get(key) != value}
    return [
        item
        for item in found
        if not item.settings.keys() & chosen
        and (not item.operators or operators & set(item.operators))
    ]


def passes_for_speed() -> tuple[str, ...]:
    """Return the passes that a hint for speed tries, in its order."""
    return tuple(dict.fromkeys(name for change in _SPEED for name in change.passes))
