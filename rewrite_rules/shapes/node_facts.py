# SPDX-License-Identifier: MIT
"""A node as the functions see it that work out shapes: its inputs' shapes, its attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import onnx_ir as ir

from rewrite_rules.graph.parameters import int_attribute, ints_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, Shape, Unknowns, number


@dataclasses.dataclass(frozen=True)
class Integers:
    """What is known of the numbers in a small int64 tensor, in flat order; None: nothing."""

    numbers: tuple[Dim | None, ...]
    shape: tuple[int, ...]

    @classmethod
    def list(cls, numbers: Sequence[Dim | None]) -> Integers:
        """Return a tensor of rank 1."""
        return cls(tuple(numbers), (len(numbers),))

    @property
    def known(self) -> Dims | None:
        """The numbers, if something is known of each."""
        dims = tuple(number for number in self.numbers if number is not None)
        return dims if len(dims) == len(self.numbers) else None

    @property
    def constants(self) -> tuple[int, ...] | None:
        """The numbers, if no run can change them."""
        if any(number is None or number[1] for number in self.numbers):
            return None
        return tuple(number[0] for number in self.numbers if number is not None)


_OPEN_ENDS = (1 << 31) - 1, (1 << 63) - 1


def is_open(end: int) -> bool:
    """Whether a Slice by that end takes everything: onnxruntime's two marks for it."""
    return end in _OPEN_ENDS


def sliced(size: int, start: int, end: int, step: int) -> range:
    """Return the places that a Slice takes of an axis, as onnxruntime counts them.

    Not as Python does: the greatest int32 and int64 are no ends but mean that there is none,
    and what starts backwards from before the front takes the first element.
    """
    if step == 0:
        raise Refusal("ORP602", "slices by steps of 0")
    backwards = step < 0
    last = size - 1 if backwards else size
    start = min(max(start + size if start < 0 else start, 0), last)
    if is_open(end):
        end = -1 if backwards else size
    else:
        end = min(max(end + size if end < 0 else end, -1 if backwards else 0), size)
    return range(start, end, step) if size else range(0)


class Facts:
    """What is known of the values before a node.

    Attributes:
        nonempty: Whether no size is 0.
        integer_types: Of the tensors whose numbers are followed.
    """

    unknowns: Unknowns
    nonempty = False
    integer_types: tuple[ir.DataType, ...] = (ir.DataType.INT64,)

    def shape(self, value: ir.Value) -> Shape:
        """The shape of a value."""
        raise NotImplementedError

    def integers(self, value: ir.Value) -> Integers | None:
        """The numbers of a small int64 tensor; None for anything else."""
        raise NotImplementedError

    def count(self, value: ir.Value) -> Dim:
        """How many elements a value has."""
        shape = self.shape(value)
        if isinstance(shape, tuple):
            return self.unknowns.product(shape)
        return self.unknowns.remembered("count", shape)


class Site:
    """A node and what is known of its inputs."""

    def __init__(self, node: ir.Node, facts: Facts, opset: int | None) -> None:
        self.node = node
        self.facts = facts
        self.opset = opset or 0
        self.unknowns = facts.unknowns

    def has(self, index: int) -> bool:
        inputs = self.node.inputs
        return index < len(inputs) and inputs[index] is not None

    def input(self, index: int) -> ir.Value:
        """An input; refused if it is missing."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None:
            raise Refusal("ORP204", f"lacks input {index}")
        return value

    def shape(self, index: int) -> Shape:
        return self.facts.shape(self.input(index))

    def dims(self, index: int) -> Dims:
        """The dimensions of an input; refused if not even their number is known."""
        shape = self.shape(index)
        if isinstance(shape, int):
            raise Refusal(
                "ORP602", f"reads {self.input(index).name!r}, whose rank is not known"
            )
        return shape

    def numbers(self, index: int) -> tuple[Dim | None, ...]:
        """What is known of the numbers of an input; refused if they can't be counted."""
        integers = self.facts.integers(self.input(index))
        if integers is not None:
            return integers.numbers
        shape = self.shape(index)
        count = number(shape[0]) if isinstance(shape, tuple) and len(shape) == 1 else None
        if count is None or count > 64:
            raise Refusal(
                "ORP504", f"reads {self.input(index).name!r}, whose length is not known"
            )
        return (None,) * count

    def element(self, index: int, place: int, known: Dim | None = None) -> Hashable:
        """Return what an element of an input is known by: the same one is the same number."""
        value = self.input(index)
        node = value.producer()
        if node is not None and (node.op_type, node.domain) == ("Concat", ""):
            parts = [part for part in node.inputs if part is not None]
            if all(self.facts.shape(part) == ((1, ()),) for part in parts):
                value, place = parts[place], 0
        return (value, place) if known is None else known

    def constants(self, index: int) -> tuple[int, ...]:
        """The numbers of an input; refused if a run can change them."""
        integers = self.facts.integers(self.input(index))
        constants = None if integers is None else integers.constants
        if constants is None:
            raise Refusal("ORP504", f"reads {self.input(index).name!r}, which is not constant")
        return constants

    def integer(self, name: str, default: int = 0) -> int:
        return int_attribute(self.node, name, default)

    def is_set(self, name: str, default: int = 0) -> bool:
        """Whether a flag is 1: reductions and Reshape take any other number for no."""
        return self.integer(name, default) == 1

    def ints(self, name: str) -> tuple[int, ...] | None:
        found = ints_attribute(self.node, name)
        return None if found is None else tuple(found)

    def text(self, name: str, default: str) -> str:
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        if attribute.is_ref() or attribute.type is not ir.AttributeType.STRING:
            raise Refusal("ORP602", f"attribute {name!r} is not a string")
        return attribute.as_string()

    def axes(self, index: int, name: str = "axes") -> tuple[int, ...] | None:
        """Axes, given as an attribute or, by newer opsets, as an input; None where absent."""
        return self.constants(index) if self.has(index) else self.ints(name)

    def slices(
        self,
    ) -> tuple[Sequence[Dim | None], Sequence[Dim | None], Sequence[int], Sequence[int]]:
        """The starts, ends, axes and steps of a Slice from opset 10 on, as many of each."""
        starts, ends, axes = self.numbers(1), self.numbers(2), self.axes(3)
        steps = self.constants(4) if self.has(4) else None
        axes = tuple(range(len(starts))) if axes is None else axes
        steps = (1,) * len(axes) if steps is None else steps
        if not len(starts) == len(ends) == len(axes) == len(steps):
            raise Refusal("ORP602", "has starts, ends, axes and steps of different lengths")
        return starts, ends, axes, steps
