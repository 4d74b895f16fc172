# SPDX-License-Identifier: MIT
"""Checkpoints of compressed-tensors, as llm-compressor writes them.

    pack-quantized   weight_packed int32 [N, K * bits / 32]   codes + 2**(bits - 1), low first
                     weight_shape [2]                         N and K, which words may exceed
    int-quantized    weight int8 [N, K]
    both             weight_scale [N, blocks], [N, 1] for a column, or [1]
                     weight_zero_point of the same shape; packed along N in pack-quantized
                     weight_g_idx [K]                         block of each k, for act-order

The tensors of a layer say which format it has; the configuration says whether activations are
rounded, too, which no weight-only form does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ortplugins.errors import ModelFileError
from ortplugins.quantization.checkpoints.layers import Layer, UnreadableError
from ortplugins.quantization.checkpoints.safetensors_folder import (
    BITS,
    FLOATS,
    WORD,
    Numbers,
    SafetensorsCheckpoint,
    StoredTensor,
    stored_layer,
)

_INTEGERS = ("I32", "I64")
_ZERO_POINTS = ("I8", "I16", *_INTEGERS)


class CompressedTensors(SafetensorsCheckpoint):
    """A folder with such layers."""

    marks = ("weight_scale", "weight_packed")

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups")
        self._rounded = list(_rounded(groups)) if isinstance(groups, dict) else []
        super().__init__(folder)

    def read_layer(self, name: str) -> Layer:
        """Return the layer of a module, if weights alone are rounded to integers."""
        packed = f"{name}.weight_packed" in self.tensors
        codes = self.tensors.get(f"{name}.weight_packed" if packed else f"{name}.weight")
        stored_as = "nothing" if codes is None else codes.dtype
        other = f"{name}.weight_global_scale" in self.tensors
        if codes is None or stored_as != ("I32" if packed else "I8") or other:
            raise UnreadableError(
                f"{name}.weight",
                f"stored as {stored_as}, of which MatMulNBits has no form: quantise it again "
                "with the scheme W4A16 or W8A16",
            )
        if any(pattern.match(name) for pattern in self._rounded):
            raise UnreadableError(
                f"{name}.weight",
                "for activations that are rounded, too, which no weight-only form does: "
                "quantise it again with the scheme W8A16, or with --recipe encoder8",
            )
        if packed:
            n, k, bits = self._packed_form(name, codes)
        else:
            (n, k), bits = self.part(codes.name, ("I8",), 2).shape, 8
        index, zero_point = f"{name}.weight_g_idx", f"{name}.weight_zero_point"
        scales, zeros = self.part(f"{name}.weight_scale", FLOATS, 1, 2), None
        if zero_point in self.tensors:
            ranks = (2,) if packed else (1, 2)
            stored = self.part(zero_point, _ZERO_POINTS, *ranks)
            in_words = packed and stored.dtype == "I32"
            count = scales.shape[0]  # 1 for all columns
            zeros = Numbers(stored.T, bits, count, 1 if in_words else None)
        return stored_layer(
            name,
            "compressed-tensors",
            Numbers(codes.T, bits, n, 0 if packed else None),
            k,
            scales.T,
            zeros,
            self.part(index, _INTEGERS, 1) if index in self.tensors else None,
        )

    def _packed_form(self, name: str, codes: StoredTensor) -> tuple[int, int, int]:
        """Return N, K and bits of codes in words."""
        shape = self.part(f"{name}.weight_shape", _INTEGERS, 1)
        numbers = shape.read().tolist() if shape.shape == (2,) else list(shape.shape)
        if shape.shape != (2,) or min(numbers) < 1:
            raise ModelFileError(
                f"tensor {shape.name!r} of the checkpoint holds {numbers}: N and K are "
                "expected"
            )
        n, k = numbers
        for bits in BITS:
            if codes.shape == (n, -(-k // (WORD // bits))):
                return n, k, bits
        raise ModelFileError(
            f"tensor {codes.name!r} of the checkpoint has {list(codes.shape)} words for "
            f"[{n}, {k}] codes: 2, 4 and 8 bits are read"
        )


def _rounded(groups: Mapping[str, Any]) -> Iterator[re.Pattern[str]]:
    """Yield patterns of layers whose activations are rounded."""
    for group in groups.values():
        if not isinstance(group, dict) or not group.get("input_activations"):
            continue
        targets = group.get("targets")
        for target in map(str, targets if isinstance(targets, list) else ()):
            pattern = target.removeprefix("re:")
            if pattern == target:
                # Of classes of modules nothing is known here but that there is Linear.
                pattern = "" if target == "Linear" else f"{re.escape(target)}$"
            try:
                yield re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ModelFileError(
                    f"the configuration's target {target!r} is no regular expression: {error}"
                ) from error
