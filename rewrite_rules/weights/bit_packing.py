# SPDX-License-Identifier: MIT
"""Integer codes of 4 and 8 bits: packed, unpacked, and put into MatMulNBits' order.

ONNX packs codes densely over the flattened tensor, the first element in the low bits.
MatMulNBits wants, for each output column, the codes along K, in blocks padded to
``block_size``, low bits first, unsigned: uint8 ``[N, blocks, block_size * bits / 8]``.
Two's-complement codes become unsigned by adding ``2**(bits - 1)``, which flips the top bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
# The top bit of every code in a byte, by bits per code.
SIGN_BITS = {4: 0x88, 8: 0x80}


def unpack(packed: Bytes, bits: int, indices: npt.NDArray[np.int64]) -> Bytes:
    """Return the codes at flat element ``indices``, one unsigned byte each, same shape."""
    if bits == 8:
        return packed[indices]
    per_byte = 8 // bits
    shift = ((indices % per_byte) * bits).astype(np.uint8)
    codes: Bytes = (packed[indices // per_byte] >> shift) & np.uint8((1 << bits) - 1)
    return codes


def pack_rows(codes: Bytes, bits: int) -> Bytes:
    """Pack uint8 ``[..., n]`` to ``[..., ceil(n * bits / 8)]``, low bits first."""
    if bits == 8:
        return codes
    per_byte = 8 // bits
    if padding := -codes.shape[-1] % per_byte:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
    packed = codes[..., 0::per_byte].copy()
    for position in range(1, per_byte):
        packed |= codes[..., position::per_byte] << np.uint8(position * bits)
    return packed


# Bytes of packed output made at a time: small enough to stay out of a process's peak, large
# enough that a strip of a row-major source spans many cache lines.
_TILE_BYTES = 4 << 20
# What is transposed at once, rows and bytes of each: little enough to stay in the cache.
_BLOCK_ROWS, _BLOCK_BYTES = 2048, 64


def repack(
    packed: Bytes, *, bits: int, signed: bool, k: int, n: int, block_size: int, k_axis: int
) -> Iterator[Bytes]:
    """Yield MatMulNBits' codes for successive ranges of output columns, N in all.

    The stored bytes hold codes ``[K, N]`` (``k_axis`` 0) or ``[N, K]`` (1); each piece is
    uint8 ``[columns, blocks * block_size * bits / 8]``; ``block_size`` is 8 at least.
    """
    row_bytes = -(-k // block_size) * block_size * bits // 8
    flip = np.uint8(SIGN_BITS[bits] if signed else 0)
    step = max(8, _TILE_BYTES // row_bytes // 8 * 8)
    for start in range(0, n, step):
        stop = min(start + step, n)
        if k_axis == 0:
            yield _transposed(packed, bits, flip, k, n, row_bytes, start, stop)
            continue
        rows = _rows(packed, bits, k, start, stop, 0, k) ^ flip
        if unused := -k * bits % 8:
            rows[:, -1] &= np.uint8(0xFF >> unused)
        yield np.pad(rows, [(0, 0), (0, row_bytes - rows.shape[1])])


def _rows(
    packed: Bytes, bits: int, columns: int, top: int, bottom: int, left: int, right: int
) -> Bytes:
    """A part of codes ``[rows, columns]``, each row from a whole byte on."""
    if columns * bits % 8 == left * bits % 8 == 0:
        stored = packed.reshape(-1, columns * bits // 8)
        return stored[top:bottom, left * bits // 8 : -(-right * bits // 8)]
    at = np.arange(top, bottom)[:, None] * columns + np.arange(left, right)
    return pack_rows(unpack(packed, bits, at), bits)


def _transposed(
    packed: Bytes,
    bits: int,
    flip: np.uint8,
    k: int,
    n: int,
    row_bytes: int,
    start: int,
    stop: int,
) -> Bytes:
    """Columns ``start`` to ``stop`` of codes ``[K, N]``, each padded to ``row_bytes``."""
    per_byte, mask = 8 // bits, np.uint8((1 << bits) - 1)
    tile = np.zeros((-(-(stop - start) // per_byte), per_byte, row_bytes), np.uint8)
    for top in range(0, k, _BLOCK_ROWS):
        bottom = min(top + _BLOCK_ROWS, k)
        for byte in range(0, len(tile), _BLOCK_BYTES):
            left = start + byte * per_byte
            right = min(left + _BLOCK_BYTES * per_byte, stop)
            rows = _rows(packed, bits, n, top, bottom, left, right)
            codes = np.ascontiguousarray(rows.T) ^ flip
            target = tile[
                byte : byte + _BLOCK_BYTES, :, top * bits // 8 : -(-bottom * bits // 8)
            ]
            for column in range(per_byte):
                target[:, column] = pack_rows(codes >> np.uint8(column * bits) & mask, bits)
    return tile.reshape(-1, row_bytes)[: stop - start]
