# SPDX-License-Identifier: MIT
"""llama.cpp's names of modules, by those that training frameworks give them.

Read from the tables of the gguf package: what it makes of these is as large as a file says,
and differs once a model of another architecture was asked for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ortplugins.quantization.checkpoints.packages import package


@functools.cache
def architectures() -> Mapping[str, Any]:
    """Return the architectures that are known, by name."""
    gguf = package("gguf")

    return {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}


def llama_names(module: str, architecture: str = "") -> Sequence[str]:
    """Return what a module is called in an architecture; by default, in any."""
    number = re.search(r"\.(\d+)\.", f".{module}")
    if number is None:
        return _patterns(architecture).get(module, ())
    pattern = f".{module}".replace(number[0], ".{bid}.", 1)[1:]
    return [
        name.replace("{bid}", number[1]) for name in _patterns(architecture).get(pattern, ())
    ]


@functools.cache
def _patterns(architecture: str) -> Mapping[str, Sequence[str]]:
    """Return names by names, ``{bid}`` in the place of a layer's number."""
    gguf = package("gguf")

    known, own = gguf.TensorNameMap, architectures().get(architecture)
    blocks = known.block_mappings_cfg | known.arch_block_mappings_cfg.get(own, {})
    found: dict[str, list[str]] = {}
    for tensor, modules in (*known.mappings_cfg.items(), *blocks.items()):
        if own is None or tensor in gguf.MODEL_TENSORS[own]:
            name = gguf.TENSOR_NAMES[tensor]
            for module in (*modules, name):  # of several names the last one counts
                found.setdefault(module, []).insert(0, name)
    return found
