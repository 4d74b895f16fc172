# SPDX-License-Identifier: MIT
"""What a checkpoint has for the weights of a graph, whatever its format.

    Checkpoint    finds by name what it has of a weight, and compares it with the float weight
    Layer         codes in their file; small enough to send to another process
    FloatMatrix   a matrix that the checkpoint has in float
    Unreadable    one whose format ONNX cannot hold as it is

A checkpoint of another model, or one whose rows are in another order, has weights that do not
resemble the graph's: that is an error before anything is written.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import ModelFileError
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    Codes,
    Floats,
    ZeroPoints,
    dequantize_blocks,
)
from ortplugins.quantization.weights.uses import OP_TYPES, WeightUse, find_uses

_OPERATORS = (".MatMul", ".FusedMatMul", ".Gemm", ".Gather")
# Columns of a weight that are compared, and the least mean cosine of their rows to the float
# ones: codes of 2 bits have .8 and more, other weights 0.
_COMPARED, _LEAST_COSINE = 64, 0.5
# Modules that onnxruntime-genai's builder makes one of, and what stands between their names.
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
BETWEEN = " + "


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCodes:
    """Codes of some columns.

    Attributes:
        codes: ``[K, n]``, a byte each: int8 where the form is symmetric, else uint8.
        scales: float32 ``[blocks, n]``.
        zero_points: uint8 ``[blocks, n]``; None where the form is symmetric.
        offsets: float32 ``[blocks, n]``, added to all weights of a block; None for 0.
        order: Which row of the weight each row of codes is; None where all are in place.
    """

    codes: Codes
    scales: Floats
    zero_points: ZeroPoints | None = None
    offsets: Floats | None = None
    order: npt.NDArray[np.int64] | None = None

    def dequantized(self, form: BlockFormat) -> Floats:
        """Return what they stand for, float32 ``[K, n]``, rows in the weight's order."""
        found = dequantize_blocks(self.codes, self.scales, self.zero_points, form)
        if self.offsets is not None:
            k = len(found)
            found += np.repeat(self.offsets, form.size_along(k), axis=0)[:k]
        if self.order is not None:
            in_place = np.empty_like(found)
            in_place[self.order] = found
            return in_place
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """Codes of one weight in a checkpoint.

    Attributes:
        name: What the checkpoint calls it.
        method: What made the codes, or their type.
        shape: K and N.
        form: Of the codes.
        read: Reads some columns, of which the first is a multiple of 8.
        has_offsets: Whether blocks have offsets.
        order: As in :class:`LayerCodes`.
    """

    name: str
    method: str
    shape: tuple[int, int]
    form: BlockFormat
    read: Callable[[slice], LayerCodes]
    has_offsets: bool = False
    order: npt.NDArray[np.int64] | None = None

    def load(self, columns: slice) -> LayerCodes:
        """Read some columns; the first is a multiple of 8."""
        return dataclasses.replace(self.read(columns), order=self.order)

    def columns(self, columns: slice) -> Floats:
        """Return some columns of the weight, float32 ``[K, n]``."""
        return self.load(columns).dequantized(self.form)


@dataclasses.dataclass(frozen=True, eq=False)
class FloatMatrix:
    """A float matrix, in its file."""

    name: str
    read: Callable[[], npt.NDArray[Any]]  # of any float type, mapped at best
    k_last: bool = True  # it is [N, K]

    def matrix(self) -> npt.NDArray[Any]:
        """Return it as ``[K, N]``."""
        return self.read().T if self.k_last else self.read()

    @property
    def shape(self) -> tuple[int, int]:
        """K and N."""
        k, n = self.matrix().shape
        return k, n

    def columns(self, columns: slice) -> Floats:
        """Return some columns, float32 ``[K, n]``."""
        return np.asarray(self.matrix()[:, columns], np.float32)

    def put(self, use: WeightUse) -> None:
        """Give a weight of the graph these numbers; they are read when the model is saved."""
        old, value = use.tensor, use.weight

        def stored() -> ir.TensorProtocol:
            matrix = self.matrix()
            numbers = matrix.T if use.stored_k_last else matrix
            return as_tensor(self.name, numbers, old)

        value.const_value = ir.LazyTensor(
            stored, old.dtype, ir.Shape(old.shape.numpy()), name=value.name
        )


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A layer that has no codes as ONNX has them."""

    name: str
    reason: str  # why, and what to do


Found = Layer | FloatMatrix | Unreadable


@dataclasses.dataclass(frozen=True, eq=False)
class Vector:
    """A norm or a bias, in each way that it may have to be read."""

    name: str
    readings: Sequence[npt.NDArray[Any]]


class Checkpoint(abc.ABC):
    """Layers of a file or a folder."""

    # Of a vector, the greatest difference from the float model's, of its norm; and vectors
    # without which its matrices are wrong.
    greatest_change = math.inf
    required: Collection[str] = ()

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.taken: set[str] = set()  # names of layers and vectors

    @abc.abstractmethod
    def candidates(self, name: str) -> Sequence[Found]:
        """Return what there is for a module of the graph, as often as it can be read."""

    @abc.abstractmethod
    def vector(self, name: str) -> Vector | None:
        """Return what there is for a vector of the graph."""

    @abc.abstractmethod
    def matrices(self) -> Sequence[str]:
        """Return the names of all that may be taken."""

    def put_floats(self, model: ir.Model) -> None:
        """Give a model what the checkpoint has in float."""
        for name, value in model.graph.initializers.items():
            old = value.const_value
            found = next(filter(None, map(self.vector, spellings(name))), None)
            if found is not None and old is not None and len(old.shape) == 1:
                self._put_vector(found, value, old)
        for name in self.required:
            if name not in self.taken:
                raise ModelFileError(
                    f"tensor {name!r} of the AWQ checkpoint: the model has no initializer of "
                    "this name and shape: export the float model with its names"
                )
        for _, use in find_uses(model, OP_TYPES):
            if isinstance(use, WeightUse) and use.weight.is_initializer():
                matrix = self._found(use)
                if isinstance(matrix, FloatMatrix):
                    self.taken.update(matrix.name.split(BETWEEN))
                    matrix.put(use)

    def _put_vector(self, found: Vector, value: ir.Value, old: ir.TensorProtocol) -> None:
        """Give a vector of the model the numbers of the reading that is nearest to it."""
        floats = old.numpy()
        read = [each for each in found.readings if each.shape == floats.shape]
        if not read:
            return
        size = float(np.linalg.norm(floats)) or 1.0
        changes = [float(np.linalg.norm(each - floats)) / size for each in read]
        least = int(np.argmin(changes))
        if not changes[least] <= self.greatest_change:
            raise ModelFileError(
                f"tensor {found.name!r} of the checkpoint is not {value.name!r} of the model: "
                f"they differ by {changes[least]:.0%}; give a checkpoint of this model"
            )
        self.taken.add(found.name)
        value.const_value = as_tensor(found.name, read[least], old)

    def layer_of(self, use: WeightUse) -> Layer | str:
        """Return the layer of a node, by the name of its weight, its own or its module's.

        Or why it has none.

        Raises:
            ModelFileError: If it has one that can't be taken, or that is another weight.
        """
        found = self._found(use)
        if isinstance(found, Unreadable):
            raise ModelFileError(
                f"tensor {found.name!r} of the checkpoint is {found.reason}; or leave node "
                f"{use.label!r} in float: --rule '{use.label}=float'"
            )
        if isinstance(found, FloatMatrix):
            return "float in the checkpoint, too"
        if found is None:
            return "not in the checkpoint"
        self.taken.update(found.name.split(BETWEEN))
        return found

    def notes(self) -> list[str]:
        """Say what was left out."""
        left = [name for name in self.matrices() if name not in self.taken]
        if not left:
            return []
        return [
            f"{len(left)} matrices of the checkpoint are not in the result, as {left[0]!r}"
        ]

    def _found(self, use: WeightUse) -> Found | None:
        for name in module_names(use):
            if found := self.candidates(name):
                return _most_alike(found, use, slice(0, use.N))
            parent, _, last = name.rpartition(".")
            parts = [self.candidates(f"{parent}.{part}") for part in PARTS.get(last, ())]
            if parts and all(parts):
                return _side_by_side(parts, use)
        return None


def _side_by_side(parts: Sequence[Sequence[Found]], use: WeightUse) -> Found:
    """Return parts of a weight, each as it is most alike to its columns, as one."""
    from ortplugins.quantization.checkpoints.joined import joined

    found, start = [], 0
    for part in parts:
        if isinstance(part[0], Unreadable):
            return part[0]
        stop = start + part[0].shape[1]
        found.append(_most_alike(part, use, slice(start, stop)))
        start = stop
    whole = joined(found)
    return (
        whole if isinstance(whole, Unreadable) else _most_alike([whole], use, slice(0, use.N))
    )


def _most_alike(found: Sequence[Found], use: WeightUse, place: slice) -> Found:
    """Return the one of several readings of a tensor that is some columns of a weight."""
    readable = [one for one in found if not isinstance(one, Unreadable)]
    if not readable:
        return found[0]
    wanted = (use.K, place.stop - place.start)
    known = [
        (_cosine(one.columns(slice(0, _COMPARED)), use, place.start), one)
        for one in readable
        if one.shape == wanted and place.stop <= use.N
    ]
    name = found[0].name
    if not known:
        raise ModelFileError(
            f"layer {name!r} of the checkpoint is {list(readable[0].shape)}, node "
            f"{use.label!r} multiplies by [{use.K}, {use.N}]: give a checkpoint of this model"
        )
    cosine, best = max(known, key=lambda one: np.nan_to_num(one[0], nan=-1))
    if not cosine >= _LEAST_COSINE:
        raise ModelFileError(
            f"layer {name!r} of the checkpoint is not the weight of node {use.label!r}: their "
            f"cosine is {cosine:.2f}; give a checkpoint of this model, its rows in this order"
        )
    return best


def _cosine(columns: Floats, use: WeightUse, start: int) -> float:
    """Return the mean cosine of rows: AWQ's are scaled, each by another number."""
    floats = use.tensor.numpy().T if use.stored_k_last else use.tensor.numpy()
    own = np.asarray(floats[:, start : start + columns.shape[1]], np.float32)
    norms = np.linalg.norm(own, axis=1) * np.linalg.norm(columns, axis=1)
    some = norms > 0
    if not norms.any():
        return float(not (own.any() or columns.any()))
    products = np.einsum("kn,kn->k", own[some], columns[some])
    return float(np.mean(products / norms[some])) if some.any() else math.nan


def module_names(use: WeightUse) -> Iterator[str]:
    """Yield what checkpoints may call the module of a node."""
    seen = set()
    for name in ((use.weight.name or "").removesuffix(".weight"), *use.names):
        name = name.replace("/", ".").removeprefix(".")
        for operator in _OPERATORS:
            name = name.removesuffix(operator)
        for spelled in spellings(name):
            if spelled and spelled not in seen:
                seen.add(spelled)
                yield spelled


def spellings(name: str) -> tuple[str, ...]:
    """Return what transformers may call what the graph calls so."""
    # Exports often have a wrapper around the model. onnxruntime-genai's builder says attn
    # where transformers says self_attn.
    inner = name.removeprefix("model.") if name.startswith("model.model.") else name
    return (name, inner, inner.replace(".attn.", ".self_attn."))


def as_tensor(
    name: str, numbers: npt.NDArray[Any], old: ir.TensorProtocol
) -> ir.TensorProtocol:
    """Return numbers of a checkpoint in the type of a tensor of the graph."""
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(numbers).astype(old.dtype.numpy())
    if not np.isfinite(converted).all():
        raise ModelFileError(
            f"tensor {name!r} of the checkpoint has numbers beyond {old.dtype.name.lower()}"
        )
    return ir.Tensor(converted, dtype=old.dtype, name=old.name)
