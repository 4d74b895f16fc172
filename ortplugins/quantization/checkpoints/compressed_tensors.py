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

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import ModelFileError
from ortplugins.quantization.checkpoints.layers import Found, LayerCodes, Unreadable
from ortplugins.quantization.checkpoints.safetensors_folder import (
    BITS,
    FLOATS,
    WORD,
    SafetensorsCheckpoint,
    StoredLayer,
    StoredTensor,
    unpacked,
)
from ortplugins.quantization.methods.nearest import BlockFormat

_INTEGERS = ("I32", "I64")


@dataclasses.dataclass(frozen=True)
class CompressedLayer(StoredLayer):
    """Codes of one weight."""

    @property
    def method(self) -> str:
        """What made them."""
        return "compressed-tensors"

    @property
    def _packed(self) -> bool:
        return "weight_packed" in self.parts

    def shape(self) -> tuple[int, int]:
        """Return K and N."""
        if not self._packed:
            n, k = self.part("weight", 2, ("I8",)).shape
            return k, n
        n, k = self._stored_shape
        return k, n

    @functools.cached_property
    def _stored_shape(self) -> tuple[int, int]:
        numbers = self.part("weight_shape", 1, _INTEGERS).read().tolist()
        if len(numbers) != 2 or min(numbers) < 1:
            raise ModelFileError(
                f"tensor '{self.name}.weight_shape' of the checkpoint is {numbers}: N and K "
                "are expected"
            )
        n, k = numbers
        return n, k

    def _bits(self) -> int:
        if not self._packed:
            return 8
        (k, n), stored = self.shape(), self.part("weight_packed", 2, ("I32",)).shape
        for bits in BITS:
            if stored == (n, -(-k // (WORD // bits))):
                return bits
        raise ModelFileError(
            f"layer {self.name!r} of the checkpoint has {list(stored)} words for [{n}, {k}] "
            "codes: 2, 4 and 8 bits are read"
        )

    def _blocks(self) -> int:
        """Return how many scales there are to a column."""
        (k, n), scales = self.shape(), self.parts.get("weight_scale")
        shape = None if scales is None else scales.shape
        if shape in ((1,), (1, 1)):
            return 1
        blocks = self.part("weight_scale", 2, FLOATS).shape[1]
        if shape != (n, blocks):
            raise ModelFileError(
                f"tensor '{self.name}.weight_scale' of the checkpoint is {list(shape or ())} "
                f"for a weight [{n}, {k}]: scales for each of its {n} rows are expected"
            )
        return blocks

    def form(self, scale_type: str) -> BlockFormat:
        """Return the form of the codes."""
        blocks = self._blocks()
        size = -1 if blocks == 1 else self.block_size(blocks)
        bits, symmetric = self._bits(), "weight_zero_point" not in self.parts
        if not symmetric:
            symmetric = bool((self._zero_points(bits) == 1 << (bits - 1)).all())
        return BlockFormat(bits, size, symmetric, scale_type=scale_type)

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the rows block by block, where act-order scattered them."""
        return self.sorted_order(self._blocks())

    def load(self, columns: slice, is_symmetric: bool) -> LayerCodes:
        """Read some columns, which are rows in the file."""
        (k, n), order, bits = self.shape(), self.order(), self._bits()
        rows, middle = slice(columns.start, min(columns.stop, n)), 1 << (self._bits() - 1)
        if self._packed:
            words = self.part("weight_packed", 2, ("I32",)).read(rows)
            codes = unpacked(words, bits)[:, :k].T
        else:
            # Unsigned bytes wrap around to what the signed ones are.
            stored = self.part("weight", 2, ("I8",)).read(rows)
            codes = stored.view(np.uint8).T + np.uint8(middle)
        if order is not None:
            codes = codes[order]
        scales = self._grid(self.parts["weight_scale"].read().astype(np.float32), rows)
        if is_symmetric:
            return LayerCodes((codes - np.uint8(middle)).view(np.int8), scales, order=order)
        return LayerCodes(
            codes, scales, self._grid(self._zero_points(bits), rows), order=order
        )

    def _zero_points(self, bits: int) -> npt.NDArray[np.uint8]:
        """Return them all, unsigned."""
        stored = self.parts["weight_zero_point"]
        if self._packed and stored.dtype == "I32":
            words = self.part("weight_zero_point", 2, ("I32",)).read()
            return unpacked(words.T, bits).T[: self.shape()[1]]
        numbers = stored.read().astype(np.int64) + (1 << (bits - 1))
        if not ((numbers >= 0) & (numbers < 1 << bits)).all():
            raise ModelFileError(
                f"tensor '{stored.name}' of the checkpoint has zero points beyond {bits} bits"
            )
        return numbers.astype(np.uint8)

    def _grid(self, numbers: npt.NDArray[Any], rows: slice) -> npt.NDArray[Any]:
        """Return what belongs to some columns, ``[blocks, n]``."""
        whole = np.broadcast_to(numbers, (self.shape()[1], self._blocks()))
        return np.ascontiguousarray(whole[rows].T)


class CompressedTensors(SafetensorsCheckpoint):
    """A folder with such layers."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups")
        self._groups = list(groups.values()) if isinstance(groups, dict) else []
        super().__init__(folder)
        if not self.layers:
            raise ModelFileError(f"{folder}: no layer has a weight_scale: is it quantised?")

    def read_layer(self, name: str, parts: Mapping[str, StoredTensor]) -> Found | None:
        """Return the layer that has scales."""
        if "weight_scale" not in parts and "weight_packed" not in parts:
            return None
        stored = parts.get("weight_packed") or parts.get("weight")
        wanted = "I32" if "weight_packed" in parts else "I8"
        if stored is None or stored.dtype != wanted or "weight_global_scale" in parts:
            kind = "nothing" if stored is None else stored.dtype
            return Unreadable(
                f"{name}.weight",
                f"stored as {kind}, of which MatMulNBits has no form: quantise it again with "
                "the scheme W4A16 or W8A16",
            )
        if self._rounds_activations(name):
            return Unreadable(
                f"{name}.weight",
                "for activations that are rounded, too, which no weight-only form does: "
                "quantise it again with the scheme W8A16, or with --recipe encoder8",
            )
        return CompressedLayer(name, parts)

    def _rounds_activations(self, name: str) -> bool:
        """Whether a group that a layer may belong to has rounded inputs."""
        for group in self._groups:
            if not isinstance(group, dict) or not group.get("input_activations"):
                continue
            for target in map(str, group.get("targets") or ()):
                pattern = target.removeprefix("re:")
                # Of classes of modules nothing is known here but that there is Linear.
                if target == "Linear" or target == name:
                    return True
                if pattern != target and re.match(pattern, name):
                    return True
        return False
