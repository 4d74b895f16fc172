# SPDX-License-Identifier: MIT
"""Tensors that are not held in memory: made in chunks, mapped from a file, or shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


class AliasTensor(ir.LazyTensor):
    """The bytes of another initializer under another type or shape; saved once."""

    def __init__(
        self, original: ir.Value, dtype: ir.DataType, shape: tuple[int, ...], name: str
    ) -> None:
        def evaluate() -> ir.TensorProtocol:
            assert original.const_value is not None
            stored = np.frombuffer(original.const_value.tobytes(), np.uint8)
            return ir.Tensor(stored.view(dtype.numpy()).reshape(shape), dtype=dtype, name=name)

        super().__init__(evaluate, dtype, ir.Shape(shape), name=name)
        self.original = original


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

        ``chunks`` yields its elements in storage order, in pieces of any shape; elements of
        less than a byte packed, as uint8.
        """

        def evaluate() -> ir.TensorProtocol:
            stored = np.frombuffer(b"".join(_bytes(piece) for piece in chunks()), np.uint8)
            if dtype.bitwidth < 8:
                return ir.PackedTensor(stored, dtype, shape=ir.Shape(shape), name=name)
            return ir.Tensor(stored.view(dtype.numpy()).reshape(shape), dtype=dtype, name=name)

        super().__init__(evaluate, dtype, ir.Shape(shape), name=name)
        self._chunks = chunks

    def tofile(self, file: BinaryIO) -> None:
        for chunk in self._chunks():
            file.write(_bytes(chunk))


def packed_bytes(tensor: ir.TensorProtocol) -> npt.NDArray[np.uint8]:
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
    place = tensor.location, tensor.offset, tensor.length
    return ir.ExternalTensor(
        *place, dtype, shape=ir.Shape(shape), name=name, base_dir=tensor.base_dir
    )


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
