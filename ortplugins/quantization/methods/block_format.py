# SPDX-License-Identifier: MIT
"""What codes and scales a weight gets: bits, blocks along K, and the grid within a block."""

from __future__ import annotations

import dataclasses

import numpy as np

from ortplugins.errors import QuantizationError

GRIDS = ("extreme", "amax")
_SCALE_TYPES = ("float32", "float16")


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """How a weight ``[K, N]`` is quantised in blocks of contiguous elements along K.

    Attributes:
        bits: 2, 4 or 8.
        block_size: Elements along K that share a scale; K need not be a multiple of it. -1
            stands for the whole of K: a scale per column.
        is_symmetric: Signed codes without zero points; else unsigned ones with.
        grid: Of symmetric codes. ``"extreme"`` maps the element of greatest magnitude, sign
            included, to ``-2**(bits - 1)``; ``"amax"`` its magnitude to ``2**(bits - 1) - 1``.
        scale_type: ``"float32"`` or ``"float16"``, the type that scales are stored in. Codes
            are computed with the scale that is stored.

    Raises:
        QuantizationError: If a value is none of these.
    """

    bits: int = 4
    block_size: int = 32
    is_symmetric: bool = True
    grid: str = "extreme"
    scale_type: str = "float32"

    def __post_init__(self) -> None:
        if not _is_int(self.bits) or self.bits not in (2, 4, 8):
            raise QuantizationError(f"bits is {self.bits!r}: 2, 4 or 8 is expected")
        size = self.block_size
        if not _is_int(size) or (size < 1 and size != -1):
            raise QuantizationError(
                f"block_size is {size!r}: 1 or more is expected, or -1 for K"
            )
        if not isinstance(self.is_symmetric, bool):
            raise QuantizationError(
                f"is_symmetric is {self.is_symmetric!r}: True or False is expected"
            )
        if self.grid not in GRIDS:
            raise QuantizationError(f"grid is {self.grid!r}: one of {GRIDS} is expected")
        if self.scale_type not in _SCALE_TYPES:
            raise QuantizationError(
                f"scale_type is {self.scale_type!r}: one of {_SCALE_TYPES} is expected"
            )

    def size_along(self, k: int) -> int:
        """Return the block size for a weight of ``k`` rows, ``k`` where it is -1."""
        return k if self.block_size == -1 else self.block_size

    def blocks(self, k: int) -> int:
        """Return the number of blocks of a weight of ``k`` rows; the last may be short."""
        return -(-k // self.size_along(k))

    def stored_bytes(self, k: int, n: int) -> int:
        """Return the bytes that codes, scales and zero points of ``[k, n]`` take."""
        blocks = self.blocks(k) * n
        zero_points = 0 if self.is_symmetric else -(-blocks * self.bits // 8)
        scales = blocks * np.dtype(self.scale_type).itemsize
        return -(-k * n * self.bits // 8) + scales + zero_points

    @property
    def lowest_code(self) -> int:
        """The smallest code."""
        return -(1 << (self.bits - 1)) if self.is_symmetric else 0

    @property
    def highest_code(self) -> int:
        """The greatest code."""
        return self.lowest_code + (1 << self.bits) - 1

    @property
    def code_dtype(self) -> np.dtype[np.int8] | np.dtype[np.uint8]:
        """Type of codes, a byte each: int8 when symmetric, else uint8."""
        return np.dtype(np.int8) if self.is_symmetric else np.dtype(np.uint8)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
