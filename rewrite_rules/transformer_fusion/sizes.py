# SPDX-License-Identifier: MIT
"""Sizes by the names that kernels have for them: proved to agree, or asked in each run.

sizes.match(query, "B H S D")    a name is bound where it is first met
sizes.match(keys, "B G T D")     and met again, it is the same: where that is not proved,
a run is asked
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.heads import FLAT, SPLIT, Heads, ints, number_left


class Sizes:
    """The sizes of one attention; what is said of them holds in runs that say yes."""

    def __init__(self, facts: ProvedShapes) -> None:
        self.facts = facts
        self._first: dict[str, tuple[ir.Value, int]] = {}
        self._dims: dict[str, list[Dim]] = {}
        self._masked: dict[str, set[Dim]] = {}
        # What is not proved, by the two sizes that are compared.
        self._asked: dict[tuple[Dim, Dim], tuple[str, ir.Value, int]] = {}

    def match(self, value: ir.Value, form: str) -> None:
        """Bind names of the axes of a value; ``_`` for any size.

        Raises:
            Refusal: If it has another rank, or numbers that differ.
        """
        names = form.split()
        dims = self.facts.dims(value, len(names))
        if dims is None:
            raise Refusal(
                "ORP602", f"{value.name!r} is not known to have {len(names)} axes: [{form}]"
            )
        for axis, (name, dim) in enumerate(zip(names, dims, strict=True)):
            self.ask(name, dim, value, axis)

    def match_heads(self, heads: Heads, form: str) -> None:
        """Bind names of ``"B N L D"`` of what a kernel reads.

        What is split into heads is asked whether that keeps B and L, if one may change: other
        sizes make other heads of the same elements.
        """
        names = dict(zip("BNLD", form.split(), strict=True))
        if heads.axes != FLAT:
            self.match(heads.source, " ".join(names[axis] for axis in heads.axes))
            return
        split, _ = heads.path[-2]
        self.match(heads.source, f"{names['B']} {names['L']} _")
        self.ask(names["N"], known(heads.count or 0), split, 2)
        self.ask(names["D"], known(heads.size or 0), split, 3)
        is_kept = self.fits(split, " ".join(names[axis] for axis in SPLIT))
        for axis, dim in enumerate((self.facts.dims(split) or ())[:2]):
            if not is_kept:
                self.ask(names[SPLIT[axis]], dim, split, axis)
            self.know(names[SPLIT[axis]], dim)

    def ask(self, name: str, dim: Dim, value: ir.Value, axis: int) -> None:
        """Bind a name to an axis of a value; a run is asked for what is not proved."""
        if name == "_":
            return
        self._first.setdefault(name, (value, axis))
        same = self._dims.setdefault(name, [dim])
        if dim in same:
            return
        if number(dim) is not None and any(number(other) is not None for other in same):
            raise Refusal("ORP601", f"its sizes contradict each other: {name}")
        self._asked[same[0], dim] = name, value, axis
        same.append(dim)

    def place(self, name: str) -> tuple[ir.Value, int]:
        """Return the value and axis where a name was first met."""
        return self._first[name]

    def dim(self, name: str) -> Dim:
        """Return the size of a name as it was first met."""
        return self._dims[name][0]

    def know(self, name: str, dim: Dim) -> None:
        """Note a size that a name has in each run that goes on."""
        self._dims.setdefault(name, []).append(dim)

    def mask(self, form: str, dims: Dims) -> None:
        """Note sizes of a mask: a run asks that they make no more of those that are named."""
        for name, dim in zip(form.split(), dims, strict=True):
            parts = self.facts.unknowns.broadcast_parts(dim)
            self._masked.setdefault(name, set[Dim]()).update(parts)

    def fits(self, value: ir.Value, *forms: str) -> bool:
        """Whether a Reshape makes one of some forms, ``"B*H S D"``, of as many elements.

        It does if all of its sizes but one are those.
        """
        dims = self.facts.dims(value) or ()
        found = [form.split() for form in forms if len(form.split()) == len(dims)]
        return any(sum(map(self.is_size, form, dims)) >= len(dims) - 1 for form in found)

    def misfit(self, heads: Heads, form: str) -> ir.Value | None:
        """Return what a Reshape on the way may lay out in another way than it is named.

        ``form`` names B, N, L and D, and repeated heads in the place of R.
        """
        names = dict(zip("BNLDK", form.split(), strict=True)) | {each: each for each in "1GR"}
        self.know("1", known(1))
        for value, axes in heads.reshaped():
            if not self.fits(
                value, " ".join("*".join(names[each] for each in axis) for axis in axes)
            ):
                return value
        return None

    def is_size(self, name: str, dim: Dim) -> bool:
        """Whether a size is that of a name, or what masks make of it."""
        first, *factors = name.split("*")
        for factor in factors:
            dim = self.facts.unknowns.quotient(dim, self.dim(factor))
        parts = self.facts.unknowns.broadcast_parts
        more = self._masked.get(first, set[Dim]())
        same = ({*parts(one)} for one in self._dims[first])
        return any(one <= {*parts(dim)} <= one | more for one in same)

    def emit(self, op: Any, name: str) -> Any:
        """Emit a size, int64 ``[1]``."""
        if (known_size := number(self.dim(name))) is not None:
            return ints(op, known_size)
        value, axis = self._first[name]
        return op.Shape(value, start=axis, end=axis + 1)

    @property
    def key(self) -> tuple[object, ...]:
        """What two attentions have in common that ask the same."""
        return tuple(self._asked)

    def agree(self) -> bool:
        """Whether what is asked holds if the inputs have one batch and length."""
        facts = self.facts
        return all(
            facts.agree(one, other) or known(number_if_agreed(other, facts) or 0) == one
            for one, other in self._asked
        )

    def questions(self, op: Any) -> list[ir.Value]:
        """Emit what is not proved."""
        return [
            op.Equal(self.emit(op, name), op.Shape(value, start=axis, end=axis + 1))
            for name, value, axis in self._asked.values()
        ]


def keeps_size(size: Dim, own: Dim, facts: ProvedShapes) -> bool:
    """Whether what broadcasts to a size leaves it as it is."""
    parts, others = (facts.unknowns.broadcast_parts(dim) for dim in (size, own))
    return {*parts} <= {(1, ()), *others}


def rows_are(size: Dim, own: Dim, facts: ProvedShapes) -> bool:
    """Whether what broadcasts to texts or tokens leaves them as many as they are.

    It does in each run whose inputs have one batch and length, on one axis each: others may be
    an error. Of what the graph itself cuts, one text for instance, it may make more.
    """
    return keeps_size(size, own, facts) or facts.agree(size, own)


def count_query_heads(heads: ir.Value, facts: ProvedShapes) -> int | None:
    """Return H of ``[B, H, S, D]``, or what a Reshape leaves for it.

    That is H if the inputs have one batch and length. One that may be 1 would be repeated.
    """
    dims = facts.dims(heads)
    if dims is None or len(dims) < len(SPLIT):
        return None
    return number(dims[-3]) or number_if_agreed(dims[-3], facts)


def number_if_agreed(dim: Dim, facts: ProvedShapes) -> int | None:
    """Return what a size is, left to a Reshape, if the inputs have one batch and length."""
    match facts.unknowns.key(*dim[1]) if len(dim[1]) == 1 else ():
        case "quotient", total, part if facts.agree((1, total[1]), (1, part[1])):
            return number_left(dim, facts)
    return None
