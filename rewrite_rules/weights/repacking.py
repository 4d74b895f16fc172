# SPDX-License-Identifier: MIT
"""Integer codes from the order a model stores them in to MatMulNBits' order, tile by tile.

ONNX packs codes of 2 and 4 bits densely over the flattened tensor, the first element in the
low bits. MatMulNBits wants, for each output column, the codes along K, in blocks padded to
``block_size``, low bits first, unsigned: uint8 ``[N, blocks, block_size * bits / 8]``.
Two's-complement codes become unsigned by adding ``2**(bits - 1)``, which flips the top bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rewrite_rules.weights.bit_packing import SIGN_BITS

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


# Bytes of packed output made at a time: small enough to stay out of a process's peak, large
# enough that a strip of a row-major source spans many cache lines.
_TILE_BYTES = 4 << 20
# What is transposed at once: little enough to stay in the cache, enough that threads seldom
# meet at the interpreter's lock between two array operations.
_BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 2048
# Codes are transposed in words of this type; the first code is in the low bits everywhere.
_WORD = np.dtype("<u4")


def repack(
    packed: Bytes, *, bits: int, signed: bool, k: int, n: int, block_size: int, k_axis: int
) -> Iterator[Bytes]:
    """Yield MatMulNBits' codes for successive ranges of output columns, N in all.

    The stored bytes hold codes ``[K, N]`` (``k_axis`` 0) or ``[N, K]`` (1); each piece is
    uint8 ``[columns, blocks * block_size * bits / 8]``; ``block_size`` is 8 at least.
    """
    padded = -(-k // block_size) * block_size
    row_bytes = padded * bits // 8
    flip = np.uint8(SIGN_BITS[bits] if signed else 0)
    codes = _Codes(packed, bits, flip, columns=k if k_axis else n)
    step = max(8, _TILE_BYTES // row_bytes // 8 * 8)
    for start in range(0, n, step):
        stop = min(start + step, n)
        if k_axis == 0:
            yield _transposed(codes, k, row_bytes, start, stop)
        elif k == padded and not flip:
            yield packed[start * row_bytes : stop * row_bytes].reshape(-1, row_bytes)
        else:
            yield _padded(codes, row_bytes, start, stop)


@dataclasses.dataclass(frozen=True, eq=False)
class _Codes:
    """Codes ``[rows, columns]`` as they are stored: a row may start within a byte."""

    packed: Bytes
    bits: int
    flip: np.uint8
    columns: int

    def read(self, row: int, step: int, left: int, width: int, out: Bytes) -> None:
        """Read rows, made unsigned, each from a whole byte on; bits behind them are anything.

        ``step`` leads from a row to the next such that all start on the same bit of a byte.
        """
        byte, shift = divmod((row * self.columns + left) * self.bits, 8)
        spanned = -(-(shift + width * self.bits) // 8)
        strides = (step * self.columns * self.bits // 8, 1)
        rows = np.ndarray((len(out), spanned), np.uint8, self.packed, byte, strides)
        if shift == 0:
            np.bitwise_xor(rows, self.flip, out=out)
            return
        np.right_shift(rows[:, : out.shape[1]], np.uint8(shift), out=out)
        out[:, : spanned - 1] |= rows[:, 1:] << np.uint8(8 - shift)
        out ^= self.flip


def _padded(codes: _Codes, row_bytes: int, start: int, stop: int) -> Bytes:
    """Rows ``start`` to ``stop`` of codes ``[N, K]``, each padded to ``row_bytes``."""
    k, bits = codes.columns, codes.bits
    tile = np.zeros((stop - start, row_bytes), np.uint8)
    used = tile[:, : -(-k * bits // 8)]
    # Mostly, every row starts on a whole byte; every 8th starts on the same bit whatever K.
    step = 1 if k * bits % 8 == 0 else 8
    for first in range(min(step, len(used))):
        codes.read(start + first, step, 0, k, used[first::step])
    if unused := -k * bits % 8:
        used[:, -1] &= np.uint8(0xFF >> unused)
    return tile


def _transposed(codes: _Codes, k: int, row_bytes: int, start: int, stop: int) -> Bytes:
    """Columns ``start`` to ``stop`` of codes ``[K, N]``, each padded to ``row_bytes``.

    Squares of codes, as many rows as a word has codes, are transposed by operations on whole
    words; then the words themselves are, which is faster the fewer they are.
    """
    side = 8 * _WORD.itemsize // codes.bits
    # Whole squares; what that is more than N and row_bytes is cut off at the end.
    squares = -(-(stop - start) // side)
    tile = np.empty((squares, side, -(-row_bytes // _WORD.itemsize)), _WORD)
    tile[..., -(-k // side) :] = 0
    high = min(_BLOCK_ROWS // side, -(-k // side))
    wide = _BLOCK_BYTES // (high * side * _WORD.itemsize)
    buffer, scratch = np.empty((2, side * high * wide), _WORD)
    for top in range(0, k, high * side):
        rows = min(high * side, k - top)
        down = -(-rows // side)
        for across in range(0, squares, wide):
            target = tile[across : across + wide, :, top // side : top // side + down]
            block = buffer[: target.size].reshape(side, down, len(target))
            left = start + across * side
            _read_squares(codes, top, rows, left, min(wide * side, stop - left), block)
            _transpose_squares(block, codes.bits, scratch)
            target[:] = block.transpose(2, 0, 1)
    return tile.reshape(squares * side, -1).view(np.uint8)[: stop - start, :row_bytes]


def _read_squares(
    codes: _Codes, top: int, rows: int, left: int, width: int, block: Words
) -> None:
    """Read a part of codes ``[K, N]`` into words ``[row in its square, down, across]``.

    Rows past the last become zeros; columns past the last may be anything.
    """
    side = len(block)
    if rows % side:
        block.fill(0)
    out = block.view(np.uint8)[..., : -(-width * codes.bits // 8)]
    # The rows of a square may each start on another bit of a byte; one square on, all start on
    # the same ones again.
    for first in range(min(side, rows)):
        count = len(range(first, rows, side))
        codes.read(top + first, side, left, width, out[first, :count])


def _transpose_squares(block: Words, bits: int, scratch: Words) -> None:
    """Transpose each of the squares of codes ``block[:, down, across]`` in place.

    Its upper right and lower left quarters change places, then those of each quarter, and so
    on down to single codes.
    """
    half = len(block) // 2
    while half:
        pairs = block.reshape(len(block) // (2 * half), 2, -1)
        upper, lower = pairs[:, 0], pairs[:, 1]
        # The first codes are in the low bits: right is up. Fields of `half` codes of `upper`
        # change places with those of `lower`; the mask has every other field.
        shift = np.uint32(half * bits)
        mask = np.uint32(0xFFFFFFFF // ((1 << half * bits) + 1))
        swap = scratch[: upper.size].reshape(upper.shape)
        np.right_shift(upper, shift, out=swap)
        swap ^= lower
        swap &= mask
        lower ^= swap
        swap <<= shift
        upper ^= swap
        half //= 2
