# SPDX-License-Identifier: MIT
"""What a hint stands for: exact passes and session settings, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

_SPEED = ("dq_matmulnbits_fusion", "transformer_fusion", "conv_fusion")


class Preset(NamedTuple):
    """Names of passes, which get their default options, and settings of the session.

    A setting with a dot in its name is an entry, which one of the user's own counts before;
    one without is an attribute.
    """

    passes: tuple[str, ...]
    settings: Mapping[str, str] = MappingProxyType({})


PRESETS: Mapping[str, Preset] = {
    "latency": Preset(_SPEED),
    # Several callers share the cores: threads that spin take them from others.
    "throughput": Preset(_SPEED, {"session.intra_op.allow_spinning": "0"}),
    "memory": Preset(
        ("dq_matmulnbits_fusion", "shape_size_reorder", "prepacked_weights"),
        {"enable_cpu_mem_arena": "0"},
    ),
    # Baking, the default, leaves nothing to optimise; packed weights nothing to pack.
    "start": Preset(("dq_matmulnbits_fusion", "conv_fusion", "prepacked_weights")),
}


def settings_of(hint: str, ask: Callable[[str], str | None]) -> Mapping[str, str]:
    """Return what a hint sets for a session; ``ask`` returns the entries that its user set.

    Nothing for a hint that nobody knows, which is an error where the plan is read.
    """
    if hint not in PRESETS:
        return {}
    settings = PRESETS[hint].settings
    return {key: x for key, x in settings.items() if "." not in key or ask(key) is None}
