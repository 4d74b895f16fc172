# SPDX-License-Identifier: MIT
"""Finds by name what a checkpoint has of the weights of a graph, whatever its format.

A checkpoint of another model, or one whose rows are in another order, has weights that do not
resemble the graph's: that is an error before anything is written.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import ModelFileError
from ortplugins.quantization.checkpoints.layers import (
    BETWEEN,
    FloatMatrix,
    Found,
    Layer,
    UnreadableError,
    as_tensor,
    joined,
)
from ortplugins.quantization.methods.nearest import Floats
from ortplugins.quantization.weights.uses import OP_TYPES, WeightUse, find_uses

_OPERATORS = (".MatMul", ".FusedMatMul", ".Gemm", ".Gather")
# Columns that tell one reading from another, and the least mean cosine of their rows to the
# float ones: codes of 2 bits have .8 and more, other weights 0.
_COMPARED, _LEAST_COSINE = 64, 0.5
_TILE = 1024  # columns that are read at once
# Of a vector that is found under a wrapper, which may be another network's beside it: the
# greatest difference from the float model's, of its norm.
_GREATEST_CHANGE = 0.5
# Modules that onnxruntime-genai's builder makes one of.
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


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
        """Return what there is for a module of the graph, as often as it can be read.

        Raises:
            UnreadableError: If ONNX has no form for it.
        """

    @abc.abstractmethod
    def vector(self, name: str) -> tuple[str, Sequence[npt.NDArray[Any]]] | None:
        """Return the name of a norm or a bias, and each way that it may have to be read."""

    def _vector(self, name: str) -> tuple[str, Sequence[npt.NDArray[Any]], float] | None:
        """Return what there is for a vector of the graph, or for all parts of it.

        The number is how much it may differ from the graph's.
        """
        # Of a stack of experts, with the number of one behind it.
        name = re.sub(r"\bexperts\.(\w+)[._]bias\.(\d+)$", r"experts.\2.\1.bias", name)
        # onnxruntime-genai's builder names a bias by the node that adds it.
        name = re.sub(r"\.Add\.bias$", ".bias", name)
        certain = _without_wrapper(name)
        for spelled in spellings(name):
            most = math.inf if spelled in certain else _GREATEST_CHANGE
            most = min(most, self.greatest_change)
            if found := self.vector(spelled):
                return (*found, most)
            module, _, suffix = spelled.rpartition(".")
            parent, _, last = module.rpartition(".")
            parts = [
                part
                for each in _PARTS.get(last, ())
                if (part := self.vector(f"{parent}.{each}.{suffix}")) is not None
            ]
            if parts and len(parts) == len(_PARTS[last]):
                names, readings = zip(*parts, strict=True)
                joint = map(np.concatenate, itertools.product(*readings))
                return BETWEEN.join(names), list(joint), most
        return None

    @abc.abstractmethod
    def matrices(self) -> Sequence[str]:
        """Return the names of all that may be taken."""

    @property
    @abc.abstractmethod
    def vectors(self) -> Collection[str]:
        """The names of norms and biases."""

    def put_floats(self, model: ir.Model) -> None:
        """Give a model what the checkpoint has in float."""
        for name, value in model.graph.initializers.items():
            old = value.const_value
            found = self._vector(name)
            if found is not None and old is not None and len(old.shape) == 1:
                self._put_vector(*found, value, old)
        for name in self.required:
            if name not in self.taken:
                raise ModelFileError(
                    f"tensor {name!r} of the AWQ checkpoint: the model has no initializer of "
                    "this name and shape: export the float model with its names"
                )
        taken: dict[ir.Value, tuple[FloatMatrix, WeightUse]] = {}
        for _, use in find_uses(model, OP_TYPES):
            if isinstance(use, WeightUse) and use.weight.is_initializer():
                with contextlib.suppress(UnreadableError):  # of one that may stay in float
                    matrix = self._found(use)
                    if isinstance(matrix, FloatMatrix):
                        self.taken.update(matrix.name.split(BETWEEN))
                        _check_same(taken.setdefault(use.weight, (matrix, use)), matrix, use)
                        matrix.put(use)

    def _put_vector(
        self,
        name: str,
        readings: Sequence[npt.NDArray[Any]],
        most: float,
        value: ir.Value,
        old: ir.TensorProtocol,
    ) -> None:
        """Give a vector of the model the numbers of the reading that is nearest to it."""
        floats = old.numpy()
        read = [each for each in readings if each.shape == floats.shape]
        if not read:
            return
        size = float(np.linalg.norm(floats)) or 1.0
        changes = [float(np.linalg.norm(each - floats)) / size for each in read]
        least = int(np.argmin(changes))
        if not changes[least] <= most:
            raise ModelFileError(
                f"tensor {name!r} of the checkpoint is not {value.name!r} of the model: "
                f"they differ by {changes[least]:.0%}; give a checkpoint of this model"
            )
        self.taken.update(name.split(BETWEEN))
        value.const_value = as_tensor(name, read[least], old)

    def has_codes(self, name: str) -> bool:
        """Whether there are codes of a weight of this name, or of parts of it."""
        try:
            found = self._readings(module_spellings(name))
        except UnreadableError:
            return True  # an error where it is asked for
        return any(isinstance(each, Layer) for part in found for each in part)

    def layer_of(self, use: WeightUse) -> Layer | str:
        """Return the layer of a node, by the name of its weight, its own or its module's.

        Or why it has none.

        Raises:
            ModelFileError: If it has one that can't be taken, or that is another weight.
        """
        try:
            found = self._found(use)
        except UnreadableError as error:
            raise ModelFileError(
                f"{error}; or leave node {use.label!r} in float: --rule '{use.label}=float'"
            ) from None
        if isinstance(found, FloatMatrix):
            return "float in the checkpoint, too"
        if found is None:
            return "not in the checkpoint"
        self.taken.update(found.name.split(BETWEEN))
        return found

    def notes(self) -> list[str]:
        """Say what was left out."""
        left = [*self.matrices(), *self.vectors]
        left = [name for name in left if name not in self.taken]
        if not left:
            return []
        # A bias first: in its place, the model keeps its own.
        left.sort(key=lambda name: not name.endswith(".bias"))
        return [f"{len(left)} tensors of the checkpoint are not in the result, as {left[0]!r}"]

    def _readings(self, names: Iterator[str]) -> Sequence[Sequence[Found]]:
        """Return the candidates of each part of the first module that is there."""
        for name in names:
            if found := self.candidates(name):
                return [found]
            parent, _, last = name.rpartition(".")
            parts = [self.candidates(f"{parent}.{part}") for part in _PARTS.get(last, ())]
            if parts and all(parts):
                return parts
        return []

    def _found(self, use: WeightUse) -> Found | None:
        """Return what there is of a weight, its parts each as it is most alike."""
        found = self._readings(module_names(use))
        parts, start = list[Found](), 0
        for readings in found:
            width = use.N if len(found) == 1 else readings[0].shape[1]
            parts.append(_most_alike(readings, use, slice(start, start + width)))
            start += width
        if len(parts) > 1:
            parts = [_most_alike([joined(parts)], use, slice(0, use.N))]
        return parts[0] if parts else None


def _check_same(
    first: tuple[FloatMatrix, WeightUse], matrix: FloatMatrix, use: WeightUse
) -> None:
    """Refuse a second matrix for a weight: exporters store equal ones of two nodes once."""
    of_first, other = first
    if of_first.name == matrix.name:
        return
    if other.stored_k_last == use.stored_k_last:
        tiles = (slice(at, min(at + _TILE, use.N)) for at in range(0, use.N, _TILE))
        same = all(np.array_equal(of_first.columns(x), matrix.columns(x)) for x in tiles)
    else:  # the columns of one are the rows of the other
        rows = matrix.columns(slice(0, use.N)).T
        same = np.array_equal(of_first.columns(slice(0, other.N)), rows)
    if not same:
        raise ModelFileError(
            f"layers {of_first.name!r} and {matrix.name!r} of the checkpoint differ, but "
            f"nodes {other.label!r} and {use.label!r} share weight {use.weight.name!r}: "
            "export the float model with two"
        )


def _most_alike(found: Sequence[Found], use: WeightUse, place: slice) -> Found:
    """Return the one of several readings of a tensor that is some columns of a weight."""
    wanted = (use.K, place.stop - place.start)
    known = [
        (_cosine(one.columns(slice(0, min(_COMPARED, wanted[1]))), use, place.start), one)
        for one in found
        if one.shape == wanted and place.stop <= use.N
    ]
    name = found[0].name
    if not known:
        raise ModelFileError(
            f"layer {name!r} of the checkpoint is {list(found[0].shape)}, node "
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
    names = ((use.weight.name or "").removesuffix(".weight"), *use.names)
    return iter(dict.fromkeys(each for name in names for each in module_spellings(name)))


def module_spellings(name: str) -> Iterator[str]:
    """Yield what checkpoints may call the module of a node or weight of this name."""
    name = name.replace("/", ".").removeprefix(".")
    for operator in _OPERATORS:
        name = name.removesuffix(operator)
    # Of a stack of experts, with the number of one behind it.
    yield from filter(
        None, spellings(re.sub(r"\bexperts\.(\w+)\.(\d+)$", r"experts.\2.\1", name))
    )


def spellings(name: str) -> tuple[str, ...]:
    """Return what transformers may call what the graph calls so."""
    # Exports often have a wrapper or two around the model, of any name.
    parts = name.split(".")
    inner = [".".join(parts[start:]) for start in range(1, min(len(parts), 3))]
    return _without_wrapper(name) + tuple(itertools.chain(*map(_without_wrapper, inner)))


def _without_wrapper(name: str) -> tuple[str, ...]:
    """Return what a name is if only a model of models is around it."""
    # onnxruntime-genai's builder says attn where transformers says self_attn.
    inner = name.removeprefix("model.") if name.startswith("model.model.") else name
    return name, inner, inner.replace(".attn.", ".self_attn.")
