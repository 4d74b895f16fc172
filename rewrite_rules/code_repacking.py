# SPDX-License-Identifier: MIT
"""Integer codes from the order a model stores them in to MatMulNBits' order, tile by tile.

ONNX packs codes of 2 and 4 bits densely over the flattened tensor, the first element in the
low bits. MatMulNBits wants, for each output column, the codes along K, in blocks padded to
``block_size``, low bits first, unsigned: uint8 ``[N, blocks, block_size * bits / 8]``.
Two's-complement codes become unsigned by adding ``2**(bits - 1)``, which flips the top bit.
"""

from __future__ import annotations

__all__ = [
    "SIGN_BITS",
    "ChunkedTensor",
    "pack_rows",
    "packed_bytes",
    "relabel",
    "repack",
    "unpack",
]

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Bytes = npt.NDArray[np.uint8]

# The top bit of every code in a byte, by bits per code.
SIGN_BITS = {2: 0xAA, 4: 0x88, 8: 0x80}

# Bytes of packed output made at a time: small enough to stay out of a process's peak, large
# enough that a strip of a row-major source spans whole pages.
_TILE_BYTES = 8 << 20


class ChunkedTensor(ir.LazyTensor):
    """A tensor that is made in chunks while it is written, and never held whole."""

    def __init__(
        self,
        chunks: Callable[[], Iterator[npt.NDArray[Any]]],
        dtype: ir.DataType,
        shape: tuple[int, ...],
        name: str,
    ) -> None:
        """Describe the tensor; nothing is computed yet.

        Args:
            chunks: Yields the tensor's elements in storage order, in pieces of any shape;
                elements of less than a byte packed, as uint8.
            dtype: Element type.
            shape: Whole shape.
            name: Name of the tensor.
        """

        def evaluate() -> ir.TensorProtocol:
            stored = np.frombuffer(b"".join(_bytes(piece) for piece in chunks()), np.uint8)
            if dtype.bitwidth < 8:
                return ir.PackedTensor(stored, dtype, shape=ir.Shape(shape), name=name)
            return ir.Tensor(stored.view(dtype.numpy()).reshape(shape), dtype=dtype, name=name)

        super().__init__(evaluate, dtype, ir.Shape(shape), name=name)
        self._chunks = chunks

    def tofile(self, file: BinaryIO) -> None:
        """Write the tensor chunk by chunk."""
        for chunk in self._chunks():
            file.write(_bytes(chunk))


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def packed_bytes(tensor: ir.TensorProtocol) -> Bytes:
    """Return a tensor's stored bytes, flat; mapped, not read, when they are in a file."""
    if isinstance(tensor, ir.ExternalTensor):
        # numpy() of a 4-bit external tensor unpacks a byte per code; the same bytes under
        # another type are a view of the mapping.
        return relabel(tensor, ir.DataType.UINT8, (tensor.nbytes,), "bytes").numpy()
    return np.frombuffer(tensor.tobytes(), np.uint8)


def relabel(
    tensor: ir.ExternalTensor, dtype: ir.DataType, shape: tuple[int, ...], name: str
) -> ir.ExternalTensor:
    """Return the same bytes on disk under another type and shape; nothing is read."""
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir=tensor.base_dir,
    )


def unpack(packed: Bytes, bits: int, indices: npt.NDArray[np.int64]) -> Bytes:
    """Return the codes at flat element ``indices``, one unsigned byte each, same shape."""
    if bits == 8:
        return packed[indices]
    per_byte = 8 // bits
    shift = ((indices % per_byte) * bits).astype(np.uint8)
    codes: Bytes = (packed[indices // per_byte] >> shift) & np.uint8((1 << bits) - 1)
    return codes


def pack_rows(codes: Bytes, bits: int) -> Bytes:
    """Pack the last axis, low bits first, each row padded with zeros to whole bytes.

    Args:
        codes: uint8 ``[..., n]``, each below ``2**bits``.
        bits: 2, 4 or 8.

    Returns:
        uint8 ``[..., ceil(n * bits / 8)]``.
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


def repack(
    packed: Bytes, *, bits: int, signed: bool, k: int, n: int, block_size: int, k_axis: int
) -> Iterator[Bytes]:
    """Yield MatMulNBits' codes for successive ranges of output columns.

    Args:
        packed: The stored bytes, flat, of codes ``[K, N]`` (``k_axis`` 0) or ``[N, K]`` (1).
        bits: 2, 4 or 8.
        signed: Whether the codes are in two's complement.
        k: Size of the reduced dimension.
        n: Number of output columns.
        block_size: Codes per block along K; a power of 2, at least 8.
        k_axis: Axis of the stored codes along which K runs.

    Yields:
        uint8 ``[columns, blocks * block_size * bits / 8]``; N columns in all.
    """
    padded = -(-k // block_size) * block_size
    row_bytes = padded * bits // 8
    flip = np.uint8(SIGN_BITS[bits] if signed else 0)
    # A multiple of 8 columns starts on a whole byte whatever the bits.
    columns = max(8, _TILE_BYTES // row_bytes // 8 * 8)
    for start in range(0, n, columns):
        stop = min(start + columns, n)
        if k_axis == 1 and k * bits % 8 == 0:
            used = k * bits // 8
            source = packed[start * used : stop * used].reshape(stop - start, used)
            if used == row_bytes and not flip:
                yield source
                continue
            tile = np.zeros((stop - start, row_bytes), np.uint8)
            np.bitwise_xor(source, flip, out=tile[:, :used])
        elif k_axis == 0 and bits == 4 and n % 2 == 0 and k % 2 == 0:
            tile = np.zeros((stop - start, row_bytes), np.uint8)
            strip = packed.reshape(k, n // 2)[:, start // 2 : stop // 2]
            _transpose_nibbles(strip, tile[:, : k // 2], flip)
        elif k_axis == 0 and bits == 8:
            tile = np.zeros((stop - start, row_bytes), np.uint8)
            np.bitwise_xor(packed.reshape(k, n)[:, start:stop].T, flip, out=tile[:, :k])
        else:
            tile = _repack_any(packed, bits, flip, k, n, row_bytes, k_axis, start, stop)
        yield tile


def _transpose_nibbles(strip: Bytes, out: Bytes, flip: np.uint8) -> None:
    """[K, columns / 2] bytes, neighbours along N, -> [columns, K / 2], neighbours along K.

    Works on narrow strips: a transposed copy of a wide one misses the cache at every byte.
    """
    width = 128
    for j in range(0, strip.shape[1], width):
        block = strip[:, j : j + width]
        even, odd = block[0::2], block[1::2]
        out[2 * j : 2 * (j + width) : 2] = (((even & 0x0F) | (odd << 4)) ^ flip).T
        out[2 * j + 1 : 2 * (j + width) : 2] = (((even >> 4) | (odd & 0xF0)) ^ flip).T


def _repack_any(
    packed: Bytes,
    bits: int,
    flip: np.uint8,
    k: int,
    n: int,
    row_bytes: int,
    k_axis: int,
    start: int,
    stop: int,
) -> Bytes:
    """Any shape, odd ones too: rows that do not start on a byte are gathered code by code."""
    tile = np.zeros((stop - start, row_bytes), np.uint8)
    used = -(-k * bits // 8)
    # Eight bytes of index per code: a few columns at a time keep that small.
    step = max(1, _TILE_BYTES // (8 * k))
    along_k = np.arange(k, dtype=np.int64)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        column = np.arange(first, last, dtype=np.int64)[:, None]
        indices = column * k + along_k if k_axis == 1 else along_k * n + column
        codes = unpack(packed, bits, indices) ^ (flip & np.uint8((1 << bits) - 1))
        tile[first - start : last - start, :used] = pack_rows(codes, bits)
    return tile
