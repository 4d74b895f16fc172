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
from rewrite_rules.transformer_fusion.head_layout import (
    ints,
    number_if_agreed,
    read_split,
    unsplit,
)
from rewrite_rules.transformer_fusion.repeated_heads import RepeatedHeads


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

    def match_heads(self, heads: ir.Value, form: str, are_split: bool = False) -> None:
        """Bind names of ``[B, H, S, D]``, or of ``[B, S, H, D]`` if ``are_split``.

        Sizes are read of what was split into these heads, if that is known: a run would need
        the Transpose for those of its result.
        """
        batch, count, length, size = form.split()
        split = heads if are_split else unsplit(heads)
        if split is heads and not are_split:
            self.match(heads, form)
            return
        found = read_split(split, self.facts)
        if found is None:
            self.match(split, f"{batch} {length} {count} {size}")
            return
        self.match(found.source, f"{batch} {length} _")
        dims = self.facts.dims(split, 4) or ()
        for axis, name in enumerate((batch, length)):
            if axis in found.unproved:
                self.ask(name, dims[axis], split, axis)
            self._dims[name].append(dims[axis])
        # In a run that has these sizes, so many elements are so many heads.
        self.ask(count, known(found.heads), split, 2)
        self.ask(size, known(found.size), split, 3)

    def ask(self, name: str, dim: Dim, value: ir.Value, axis: int) -> None:
        """Bind a name to an axis of a value; a run is asked for what is not proved."""
        if name == "_":
            return
        self._first.setdefault(name, (value, axis))
        same = self._dims.setdefault(name, [dim])
        if dim in same:
            return
        if number(dim) is not None and any(number(other) is not None for other in same):
            raise Refusal("ORP601", f"its sizes are known not to fit each other: {name}")
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

    def forms_of(self, heads: RepeatedHeads) -> list[tuple[ir.Value, tuple[str, ...]]]:
        """Return what Reshapes on the way of heads have to make."""
        self.know("1", known(1))
        self.know("K", known(heads.groups * heads.repeats))
        found = list[tuple[ir.Value, tuple[str, ...]]]()
        for value, axes in heads.reshaped:
            last = " ".join(("BTKD" if heads.split else "BKTD")[axis] for axis in axes)
            found.append((value, (f"B*K {last}", f"B K {last}", f"B K 1 {last}")))
        return found

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
    def key(self) -> object:
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
