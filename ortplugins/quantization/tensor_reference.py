# SPDX-License-Identifier: MIT
"""Where the numbers of a tensor lie on disk, so that work on it can be sent anywhere."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by its name
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.lazy_tensors import packed_bytes

# Of tensors within a file: a cache line, which is enough for every vector instruction.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class TensorReference:
    """Numbers in a file: small enough to send to another process."""

    path: str  # absolute
    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: str  # numpy's name, or bfloat16

    def map(self, mode: str = "r") -> npt.NDArray[Any]:
        """Return the tensor, mapped: its pages belong to the file and not to the process."""
        dtype = np.dtype(self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        mapped = np.memmap(
            self.path,
            dtype=np.uint8,
            mode=mode,
            offset=self.offset,  # type: ignore[call-overload]
            shape=(self.nbytes,),
        )
        return np.asarray(mapped).view(dtype).reshape(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class ScratchWriter:
    """Files of a folder that numbers are put into one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0

    def reserve(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> TensorReference:
        """Allocate a tensor of zeros; fill it through :meth:`TensorReference.map`."""
        reference = TensorReference(str(self.path), self._end, shape, np.dtype(dtype).name)
        size = reference.nbytes
        with open(self.path, "ab") as file:
            # Writing to a mapping of a full disk would kill the process.
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), self._end, size)
            else:
                file.truncate(self._end + size)
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return reference

    def append(self, array: npt.NDArray[Any]) -> TensorReference:
        """Write an array."""
        array = np.asarray(array, order="C")
        reference = TensorReference(str(self.path), self._end, array.shape, array.dtype.name)
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.seek(self._end)
            file.write(array.reshape(-1).view(np.uint8).data)
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return reference

    def refer_to(self, tensor: ir.TensorProtocol) -> TensorReference:
        """Return where a tensor lies; one that is in memory is written first."""
        shape = tuple(tensor.shape.numpy())
        name = tensor.dtype.numpy().name
        if isinstance(tensor, ir.ExternalTensor):
            path = os.path.realpath(tensor.path)
            return TensorReference(path, tensor.offset or 0, shape, name)
        return dataclasses.replace(self.append(packed_bytes(tensor)), shape=shape, dtype=name)
