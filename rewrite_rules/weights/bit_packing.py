# SPDX-License-Identifier: MIT
"""Codes of 2, 4 and 8 bits, packed in bytes with the first code in the low bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
# The top bit of every code in a byte, by bits per code.
SIGN_BITS = {2: 0xAA, 4: 0x88, 8: 0x80}


def unpack(packed: Bytes, bits: int, indices: npt.NDArray[np.int64]) -> Bytes:
    """Return the codes at flat element ``indices``, one unsigned byte each, same shape."""
    if bits == 8:
        return packed[indices]
    per_byte = 8 // bits
    shift = ((indices % per_byte) * bits).astype(np.uint8)
    codes: Bytes = (packed[indices // per_byte] >> shift) & np.uint8((1 << bits) - 1)
    return codes


def unpack_rows(packed: Bytes, bits: int) -> Bytes:
    """Return the codes of packed rows, uint8 ``[..., bytes * 8 / bits]``; see pack_rows."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def pack_rows(codes: Bytes, bits: int) -> Bytes:
    """Pack the last axis, low bits first, each row padded with zeros to whole bytes.

    uint8 ``[..., n]``, each below ``2**bits`` -> uint8 ``[..., ceil(n * bits / 8)]``.
    """
    if bits == 8:
        return codes
    per_byte = 8 // bits
    if padding := -codes.shape[-1] % per_byte:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
    packed = codes[..., 0::per_byte].copy()
    for position in range(1, per_byte):
        packed |= codes[..., position::per_byte] << np.uint8(position * bits)
    return packed
