# SPDX-License-Identifier: MIT
"""llama.cpp's block types: a row of ``TYPES`` each; numpy only.

A tensor ``[N, K]`` is blocks along K of 32 or 256 weights, each

    weight = scale * (code - 2**(bits - 1)) + offset

for 16 or 32 weights at a time. Codes lie in planes: a field of bytes, of which each holds a
code of 8 weights / bits that are as many apart as the plane's run is long. Offsets are of
types with a minimum alone, and come out as minimum + 2**(bits - 1) * scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Factors = npt.NDArray[Any]  # [blocks, parts], or [blocks, 1]

_SIGNED = (*range(128), *range(-128, 0))
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(frozen=True)
class BlockType:
    """How a type stores a block of weights.

    Attributes:
        layout: numpy's description of a block; it has a scale d, and may have a minimum m.
        planes: Field, bits and run in bytes of each plane, those of the low bits first.
        part: Weights that share a scale.
        factors: Returns what d and m are multiplied by, of blocks.
        values: What codes stand for, where that is not ``code - 2**(bits - 1)``.
    """

    layout: tuple[Any, ...]
    planes: tuple[tuple[str, int, int], ...]
    part: int
    factors: Callable[[npt.NDArray[Any]], tuple[Factors, Factors]]
    values: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Of a block."""
        return np.dtype(list(self.layout))

    @property
    def has_minimum(self) -> bool:
        """Whether blocks have minimums."""
        return any(field[0] == "m" for field in self.layout)

    @property
    def size(self) -> int:
        """Weights of a block."""
        name, bits, _ = self.planes[0]
        return self.dtype[name].itemsize * 8 // bits

    @property
    def code_bits(self) -> int:
        """Bits of a code in the file."""
        return sum(bits for _, bits, _ in self.planes)

    @property
    def bits(self) -> int:
        """The fewest of 2, 4 and 8 bits that hold the signed codes."""
        return 8 if self.values else next(b for b in (2, 4, 8) if b >= self.code_bits)

    def read(self, rows: Bytes) -> tuple[npt.NDArray[np.int8], Floats, Floats | None]:
        """Return signed codes ``[n, K]``, scales and offsets ``[n, parts]`` of rows."""
        blocks = np.ascontiguousarray(rows).view(self.dtype).reshape(-1)
        codes = np.zeros((len(blocks), self.size), np.uint8)
        shift = 0
        for name, bits, run in self.planes:
            shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
            field = blocks[name].view(np.uint8).reshape(len(blocks), -1, 1, run)
            numbers = field >> shifts & np.uint8((1 << bits) - 1)
            codes |= numbers.reshape(codes.shape) << np.uint8(shift)
            shift += bits
        middle = 1 << (self.code_bits - 1)
        signed = np.array(self.values or range(-middle, middle), np.int8)[codes]
        of_scales, of_minimums = self.factors(blocks)
        n, scales = len(rows), _float(blocks, "d") * of_scales
        offsets = None
        if self.has_minimum:
            minimums = _float(blocks, "m") * of_minimums
            offsets = (minimums + np.float32(middle) * scales).reshape(n, -1)
        return signed.reshape(n, -1), scales.reshape(n, -1), offsets


def _float(blocks: npt.NDArray[Any], name: str) -> Floats:
    return blocks[name].astype(np.float32)[:, None]


def _none(blocks: npt.NDArray[Any]) -> tuple[Factors, Factors]:
    ones = np.ones((len(blocks), 1), np.float32)
    return ones, ones


def _nibbles(blocks: npt.NDArray[Any]) -> tuple[Factors, Factors]:
    """Q2_K: a scale of 4 bits, a minimum of 4 bits."""
    return blocks["s"] & 15, -(blocks["s"] >> 4).astype(np.float32)


def _six_bits(blocks: npt.NDArray[Any]) -> tuple[Factors, Factors]:
    """Q4_K, Q5_K: of 8 scales and 8 minimums the last four have their top bits elsewhere."""
    first, second, low = np.split(blocks["s"], 3, axis=1)
    scales = np.hstack([first & 63, low & 15 | first >> 6 << 4])
    minimums = np.hstack([second & 63, low >> 4 | second >> 6 << 4])
    return scales, -minimums.astype(np.float32)


def _signed_six_bits(blocks: npt.NDArray[Any]) -> tuple[Factors, Factors]:
    """Q3_K: low 4 bits of 16 scales in 8 bytes, high 2 in the next 4."""
    low, high = blocks["s"][:, :8], blocks["s"][:, 8:]
    numbers = np.hstack([low & 15, low >> 4])
    numbers |= np.hstack([high >> shift & 3 for shift in (0, 2, 4, 6)]) << 4
    return numbers.astype(np.float32) - 32, numbers


def _bytes(blocks: npt.NDArray[Any]) -> tuple[Factors, Factors]:
    """Q6_K: a signed byte for each scale."""
    return blocks["s"], blocks["s"]


def _split_six_bits(blocks: npt.NDArray[Any]) -> tuple[Factors, Factors]:
    """IQ4_XS: low 4 bits of 8 scales in 4 bytes, high 2 in 16 bits."""
    low = (blocks["s"][:, :, None] >> np.array([0, 4], np.uint8) & 15).reshape(len(blocks), 8)
    high = blocks["h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    numbers = (low | high << 4).astype(np.float32) - 32
    return numbers, numbers


_D, _M = ("d", "<f2"), ("m", "<f2")
_Q = ("q", 4, 16), ("h", 1, 1)

TYPES = {
    "Q4_0": BlockType((_D, ("q", "u1", 16)), _Q[:1], 32, _none),
    "Q4_1": BlockType((_D, _M, ("q", "u1", 16)), _Q[:1], 32, _none),
    "Q5_0": BlockType((_D, ("h", "u1", 4), ("q", "u1", 16)), _Q, 32, _none),
    "Q5_1": BlockType((_D, _M, ("h", "u1", 4), ("q", "u1", 16)), _Q, 32, _none),
    "Q8_0": BlockType(
        (_D, ("q", "u1", 32)),
        (("q", 8, 32),),
        32,
        _none,
        values=_SIGNED,
    ),
    "Q2_K": BlockType(
        (("s", "u1", 16), ("q", "u1", 64), _D, _M), (("q", 2, 32),), 16, _nibbles
    ),
    "Q3_K": BlockType(
        (("h", "u1", 32), ("q", "u1", 64), ("s", "u1", 12), _D),
        (("q", 2, 32), ("h", 1, 32)),
        16,
        _signed_six_bits,
    ),
    "Q4_K": BlockType(
        (_D, _M, ("s", "u1", 12), ("q", "u1", 128)), (("q", 4, 32),), 32, _six_bits
    ),
    "Q5_K": BlockType(
        (_D, _M, ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)),
        (("q", 4, 32), ("h", 1, 32)),
        32,
        _six_bits,
    ),
    "Q6_K": BlockType(
        (("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), _D),
        (("q", 4, 64), ("h", 2, 32)),
        16,
        _bytes,
    ),
    "IQ4_NL": BlockType((_D, ("q", "u1", 16)), _Q[:1], 32, _none, values=_NL),
    "IQ4_XS": BlockType(
        (_D, ("h", "<u2"), ("s", "u1", 4), ("q", "u1", 128)),
        (("q", 4, 16),),
        32,
        _split_six_bits,
        values=_NL,
    ),
}
"""By llama.cpp's names. Others have no codes of 2, 4 or 8 bits with a scale for a run of K."""
