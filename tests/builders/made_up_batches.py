# SPDX-License-Identifier: MIT
"""Made-up batches: which inputs of a transformer hold tokens, mask, positions and cache.

No rows, no tokens, and inputs of one row beside larger batches are among the runs. Inputs that
are not known to be a transformer's get any sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.facts.input_roles import Kind, Role, made_up_values, role_of
from rewrite_rules.shapes.proved_shapes import ProvedShapes

# Sizes of axes that count anything else than tokens.
_OTHER = 5


@dataclasses.dataclass(frozen=True)
class Run:
    """Sizes of one run; row r is padded by 2 r positions, ``"left"``, ``"right"`` or not.

    ``one_row``: positions, and what an encoder made, have one row for the whole batch.
    """

    batch: int
    length: int
    past: int
    padding: str = ""
    one_row: bool = False

    def __str__(self) -> str:
        rows = f"{self.batch} x {self.length} tokens, {self.past} cached"
        rows += f", {self.padding} padding" if self.padding else ""
        return f"{rows}, other inputs of one row" if self.one_row else rows

    def kept(self) -> NDArray[np.bool_]:
        """Return which positions hold tokens, ``[batch, past + length]``."""
        total = self.past + self.length
        most = total - 1 - (self.past if self.padding == "right" else 0)
        count = np.minimum(2 * np.arange(self.batch), most)[:, None] * bool(self.padding)
        place = np.arange(total)[None]
        return place < total - count if self.padding == "right" else place >= count


TRIED = (
    Run(1, 9, 0),
    Run(1, 1, 8),
    Run(2, 4, 6),
    Run(3, 1, 0),
    Run(3, 2, 0, one_row=True),
    Run(0, 3, 0),
    Run(2, 1, 13, "left"),
    Run(3, 5, 0, "left"),
    Run(3, 6, 0, "right"),
    Run(3, 3, 6, "left"),
)
# How far a mask is followed to the scores, and what adds it or hides scores by it.
_MAX_FOLLOWED = 64
_BROADCASTS = frozenset({"Add", "And", "Mul", "Or", "Where"})
# What the axes of scores and of token ids count.
_SCORES = ("batch", "heads", "sequence", "total")
_TOKENS = ("batch", "sequence")
# Kinds of ints that are rows of a table, where they have two axes.
_INDICES = (Kind.IDS, Kind.NUMBERS, Kind.ZEROS)
# Inputs whose fixed sizes are those of every run, and the fields of these.
_DECLARING = (Kind.CACHE, Kind.EMBEDDINGS, Kind.IDS, Kind.MASK)
_FIELDS = {"batch": "batch", "sequence": "length", "past": "past"}
# Ranks that values are made up in; of other floats, up to four.
_RANKS = {Kind.BIAS: (1, 2, 3, 4), Kind.IDS: (2,), Kind.MASK: (2,), Kind.POSITIONS: (1, 2)}


class DecoderInputs:
    """The inputs of a transformer by role, read by type, rank and name.

    What another input holds is made up.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        graph = model.graph
        facts = ProvedShapes(model, on_demand=True)
        self._roles = {
            value: _role(value, facts)
            for value in graph.inputs
            if str(value.name) not in graph.initializers
        }
        # What the names of dimensions count, for inputs of which nothing else is known.
        self._counts = {
            dim.value: counts
            for value, role in self._roles.items()
            for dim, counts in zip(value.shape or (), role.axes, strict=True)
            if role.known and isinstance(dim, ir.SymbolicDim)
        }
        self.has_cache = bool(self.all(Kind.CACHE, "past"))
        self.has_mask = bool(self.all(Kind.MASK, "total"))
        if not self.runs(TRIED):
            raise ValueError("no made-up run has the sizes that the inputs declare")

    def all(self, kind: Kind, counts: str) -> list[ir.Value]:
        """Return the inputs of a kind that have an axis for what is counted."""
        found = ((v, one) for v, one in self._roles.items() if one.known and one.kind is kind)
        return [value for value, one in found if counts in one.axes]

    def runs(self, wanted: Iterable[Run]) -> list[Run]:
        """Return runs in the sizes that inputs declare; without what no input can tell."""
        sizes: dict[str, Any] = {
            _FIELDS[counts]: dim
            for value, role in self._roles.items()
            for dim, counts in zip(value.shape or (), role.axes, strict=True)
            if role.known and role.kind in _DECLARING and counts in _FIELDS and _is_fixed(dim)
        }
        found = dict[Run, None]()
        for run in wanted:
            if (self.has_cache or not run.past) and (self.has_mask or not run.padding):
                run = dataclasses.replace(run, **sizes)
                found[dataclasses.replace(run, padding=run.padding * (run.batch > 1))] = None
        masks = self.all(Kind.MASK, "total")
        numbers = {v.shape[1] for v in masks if v.shape is not None and _is_fixed(v.shape[1])}
        for total in numbers:
            open_ones = [field for field in ("length", "past") if field not in sizes]
            fitted = (_fitted(run, total, open_ones[:1]) for run in found)
            found = dict.fromkeys(run for run in fitted if run is not None)
        return list(found)

    def feeds(self, run: Run, seed: int = 0) -> dict[ir.Value, NDArray[Any]]:
        """Make up the inputs of a run."""
        rng, kept = np.random.default_rng(seed), run.kept()
        feeds = {}
        for value, role in self._roles.items():
            sizes = self._sizes(value, role, run)
            assert value.dtype is not None
            array: NDArray[Any]
            one = run.one_row and role.kind is Kind.POSITIONS and not self._is_batch(value)
            rows = slice(1) if one else slice(None)
            if role.known and role.kind is Kind.MASK and "total" in role.axes:
                array = kept
            elif role.kind is Kind.POSITIONS and len(sizes) == 2:
                array = np.maximum(kept.cumsum(axis=1) - 1, 0)[rows, run.past :]
            elif role.kind is Kind.BIAS:
                is_float = value.dtype.is_floating_point()
                array = rng.standard_normal(sizes) if is_float else rng.integers(0, 2, sizes)
            else:
                array = made_up_values(value, role, sizes, run.past, run.length, rng)
            feeds[value] = np.array(array, value.dtype.numpy(), order="C")
        return feeds

    def _is_batch(self, value: ir.Value) -> bool:
        """Whether a first axis is declared as that of the tokens.

        onnxruntime gives values of one name one buffer, where another size is an error.
        """
        tokens = self.all(Kind.IDS, "sequence") + self.all(Kind.EMBEDDINGS, "sequence")
        named = [v.shape[0] for v in (value, *tokens) if v.shape]
        names = [dim.value for dim in named if isinstance(dim, ir.SymbolicDim)]
        return len(names) == len(named) and None not in names and names[0] in names[1:]

    def _sizes(self, value: ir.Value, role: Role, run: Run) -> list[int]:
        total = run.past + run.length
        # Whatever a caller adds to scores, or hides of them, is the same for all heads.
        asked = dict(zip(_SCORES, (run.batch, 1, run.length, total), strict=True))
        asked["past"] = run.past
        if run.one_row and "source" in role.axes and not self._is_batch(value):
            asked["batch"] = 1
        axes = _with_batch(role.axes)
        if not role.known:
            dims = zip(value.shape or (), axes, strict=True)
            axes = tuple(self._counts.get(getattr(d, "value", None), axis) for d, axis in dims)
        return [
            dim if _is_fixed(dim) else asked.get(counts, _OTHER)
            for dim, counts in zip(value.shape or (), axes, strict=True)
        ]


def _fitted(run: Run, total: int, open_ones: list[str]) -> Run | None:
    """Return a run of so many positions, if one of its fields may change; else None."""
    more = total - run.past - run.length
    fields = {field: getattr(run, field) + more for field in open_ones}
    fits = not more or (fields and min(fields.values()) >= 0)
    return dataclasses.replace(run, **fields) if fits else None


def _with_batch(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Take a first axis of which nothing is known for the batch."""
    return ("batch", *axes[1:]) if axes[:1] == ("",) else axes


def _is_fixed(dim: int | ir.SymbolicDim) -> TypeGuard[int]:
    """Whether a dimension has a size: -1 is written for none, 0 is that of an empty cache."""
    return isinstance(dim, int) and dim >= 0


def _axes_of_scores(mask: ir.Value, facts: ProvedShapes) -> tuple[str, ...]:
    """Return which of :data:`_SCORES` each axis of a mask is; empty if unknown.

    Found at the first value of four axes that it becomes, or that it is broadcast to.
    """
    dims, followed = facts.dims(mask), [mask]
    if dims is None or not 0 < len(dims) < len(_SCORES):
        return ()
    for value in followed:
        own = facts.dims(value)
        for node in value.consumers() if len(followed) < _MAX_FOLLOWED else ():
            made = facts.dims(node.outputs[0])
            if made is None or own is None:
                continue
            if len(made) == len(_SCORES) and node.op_type in _BROADCASTS:
                made = ((1, ()),) * (len(_SCORES) - len(own)) + own
            axes = list[int]()
            for dim in dims if len(made) == len(_SCORES) else ():
                places = (i for i, size in enumerate(made) if size == dim and i not in axes)
                axes += [*places][:1]
            if len(axes) == len(dims):
                return tuple(_SCORES[axis] for axis in axes)
            if dims[0] in made:
                followed.append(node.outputs[0])
    return ()


def _role(value: ir.Value, facts: ProvedShapes) -> Role:
    """Return what an input is, by rank and sizes where its name says nothing."""
    if value.dtype is None or value.shape is None:
        raise ValueError(f"input {value.name!r} has no declared type and shape")
    role, rank, floating = role_of(value), len(value.shape), value.dtype.is_floating_point()
    on_scores = _axes_of_scores(value, facts) if role.kind is Kind.MASK else ()
    if on_scores and (rank != len(_TOKENS) or on_scores == _SCORES[2:]):
        role = Role(Kind.BIAS, on_scores)
    elif role.kind in _INDICES and not floating and rank == len(_TOKENS):
        role = Role(Kind.IDS, _TOKENS)
    elif role.kind is Kind.NUMBERS and "encoder" not in str(value.name):
        fixed = [_is_fixed(size) for size in value.shape]
        if fixed[1:] == [True, False, True]:
            role = Role(Kind.CACHE, ("batch", "heads", "past", "head_size"))
    if rank in _RANKS.get(role.kind, range(5) if floating else ()):
        return role
    return dataclasses.replace(role, known=False)
