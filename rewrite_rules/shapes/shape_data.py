# SPDX-License-Identifier: MIT
"""The numbers in small int64 tensors that are computed from shapes.

    Shape(x[a, b, 64])                        a, b, 64
    Gather(that, 1), a scalar                 b
    Concat(Unsqueeze(that, 0), [-1], [64])    b, -1, 64

What a number can't be told of is None in the result; only int64 is followed, since a size may
not fit into anything smaller.
"""

from __future__ import annotations

__all__ = ["INTEGER_OPERATORS", "output_integers"]

import math
from collections.abc import Callable

import onnx_ir as ir

from rewrite_rules.graph.attributes import axis_of
from rewrite_rules.shapes.dimensions import Dim, known, number
from rewrite_rules.shapes.node_facts import Integers, Site

# Longer tensors are no shapes.
_MOST = 64
_LARGEST = 1 << 62


def output_integers(site: Site) -> Integers | None:
    """Work out the numbers of a node's first output; None where it is no small int64 tensor.

    Raises:
        Refusal: If nothing can be said.
    """
    rule = _RULES.get(site.node.op_type) if site.node.domain == "" else None
    found = rule(site) if rule else None
    return found if found is None or len(found.numbers) <= _MOST else None


def _input(site: Site, index: int = 0) -> Integers | None:
    return site.facts.integers(site.input(index))


def _shape(site: Site) -> Integers:
    dims = site.dims(0)
    start, end = site.integer("start", 0), site.integer("end", len(dims))
    return Integers(dims[start:end])


def _size(site: Site) -> Integers:
    return Integers((site.facts.count(site.input(0)),), scalar=True)


def _identity(site: Site) -> Integers | None:
    return _input(site)


def _cast(site: Site) -> Integers | None:
    return _input(site) if site.integer("to", 0) == ir.DataType.INT64 else None


def _gather(site: Site) -> Integers | None:
    data, indices = _input(site), _input(site, 1)
    if data is None or data.scalar or site.integer("axis", 0) not in (0, -1):
        return None
    places = None if indices is None else indices.constants
    if indices is None or places is None:
        return None
    picked = tuple(data.numbers[axis_of(i, len(data.numbers))] for i in places)
    return Integers(picked, indices.scalar)


def _slice(site: Site) -> Integers | None:
    data = _input(site)
    if data is None or data.scalar:
        return None
    if site.opset < 10:
        starts, ends, axes = site.ints("starts"), site.ints("ends"), site.ints("axes")
        steps: tuple[int, ...] = (1,)
    else:
        starts, ends = site.constants(1), site.constants(2)
        axes = site.constants(3) if site.has(3) else None
        steps = site.constants(4) if site.has(4) else (1,)
    if not starts or not ends or axes not in (None, (0,), (-1,)):
        return None
    # Going backwards from before the front, Python takes nothing and ONNX the first.
    if steps[0] < 0 and starts[0] < -len(data.numbers):
        return None
    return Integers(data.numbers[starts[0] : ends[0] : steps[0]])


def _concat(site: Site) -> Integers | None:
    numbers: list[Dim | None] = []
    some = False
    for i in range(len(site.node.inputs)):
        part = _input(site, i)
        some = some or part is not None
        numbers += site.numbers(i) if part is None else part.numbers
    return Integers(tuple(numbers)) if some else None


def _unsqueeze(site: Site) -> Integers | None:
    data, axes = _input(site), site.axes(1)
    if data is None or not data.scalar or axes not in ((0,), (-1,)):
        return None
    return Integers(data.numbers)


def _squeeze(site: Site) -> Integers | None:
    data, axes = _input(site), site.axes(1)
    if (
        data is None
        or data.scalar
        or len(data.numbers) != 1
        or axes not in (None, (0,), (-1,))
    ):
        return None
    return Integers(data.numbers, scalar=True)


def _reshape(site: Site) -> Integers | None:
    data, target = _input(site), site.constants(1)
    if data is None or len(target) > 1:
        return None
    return Integers(data.numbers, scalar=not target)


def _product_of_all(site: Site) -> Integers | None:
    data = _input(site)
    dims = None if data is None else data.known
    if data is None or dims is None or data.scalar or site.axes(1) not in (None, (0,), (-1,)):
        return None
    if site.integer("noop_with_empty_axes", 0):
        return None
    return Integers((_multiplied(site, *dims),), scalar=not site.integer("keepdims", 1))


def _elementwise(
    compute: Callable[[Site, Dim, Dim], Dim | None],
) -> Callable[[Site], Integers | None]:
    def rule(site: Site) -> Integers | None:
        a, b = _input(site), _input(site, 1)
        if a is None or b is None:
            return None
        longest = max(len(a.numbers), len(b.numbers))
        if {len(a.numbers), len(b.numbers)} - {1, longest}:
            return None
        pairs = zip(
            a.numbers * (longest // max(1, len(a.numbers))),
            b.numbers * (longest // max(1, len(b.numbers))),
            strict=True,
        )
        numbers = tuple(
            None if x is None or y is None else compute(site, x, y) for x, y in pairs
        )
        return Integers(numbers, a.scalar and b.scalar)

    return rule


def _multiplied(site: Site, *factors: Dim) -> Dim | None:
    # A negative number of sizes is no size.
    if any(size < 0 for size, _ in factors) and any(unknowns for _, unknowns in factors):
        return None
    if math.prod(abs(size) for size, _ in factors) > _LARGEST:  # int64 may wrap round
        return None
    return site.unknowns.product(factors)


def _added(site: Site, x: Dim, y: Dim) -> Dim | None:
    total = x[0] + y[0]
    if not x[1] and not y[1]:
        return known(total) if abs(total) <= _LARGEST else None
    return site.unknowns.sum((x, y)) if x[0] >= 0 and y[0] >= 0 else None


def _subtracted(site: Site, x: Dim, y: Dim) -> Dim | None:
    del site  # Unused
    first, second = number(x), number(y)
    return None if first is None or second is None else known(first - second)


def _divided(site: Site, x: Dim, y: Dim) -> Dim | None:
    divisor = number(y)
    if divisor is None or divisor <= 0 or x[0] < 0:
        return None
    if not x[1]:
        return known(x[0] // divisor)
    return site.unknowns.quotient(x, y) if x[0] % divisor == 0 else None


_RULES: dict[str, Callable[[Site], Integers | None]] = {
    "Add": _elementwise(_added),
    "Cast": _cast,
    "Concat": _concat,
    "Div": _elementwise(_divided),
    "Gather": _gather,
    "Identity": _identity,
    "Mul": _elementwise(_multiplied),
    "ReduceProd": _product_of_all,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(_subtracted),
    "Unsqueeze": _unsqueeze,
}

# Operators whose numbers are followed.
INTEGER_OPERATORS = frozenset(_RULES)
