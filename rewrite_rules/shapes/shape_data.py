# SPDX-License-Identifier: MIT
"""The numbers in small int64 tensors that are computed from shapes.

    Shape(x[a, b, 64])                        a, b, 64
    Gather(that, 1), a scalar                 b
    Concat(Unsqueeze(that, 0), [-1], [64])    b, -1, 64
    Where(Equal(that, -1), [9, 9, 9], that)   b, 9, 64

A number of which nothing is known is None in the result. Only int64 is followed, since a size
may not fit into anything smaller; for estimates int32, too, in which tf2onnx computes shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import EXACT, Dim, int64, known, number
from rewrite_rules.shapes.node_facts import Integers, Site, sliced

# Longer tensors are not shapes.
_MAX = 64

# Of the elements of a tensor, their numbers in its flat order.
_Places = npt.NDArray[np.int64]


def output_integers(site: Site) -> Integers | None:
    """Return the numbers of a node's first output; None for other than small int64 tensors."""
    if site.node.domain:
        return None
    rule = _RULES.get(site.node.op_type)
    found = rule(site) if rule else None
    return found if found is None or len(found.numbers) <= _MAX else None


def _input(site: Site, index: int = 0) -> Integers | None:
    return site.facts.integers(site.input(index))


def _shape(site: Site) -> Integers:
    dims = site.dims(0)
    start, end = site.integer("start"), site.integer("end", len(dims))
    return Integers.list(dims[start:end])


def _cast_like(site: Site) -> Integers | None:
    """Torch writes ``CastLike(0.0, size)`` for the start of a Range, unless it folds it."""
    is_int64 = _input(site, 1) is not None
    return (_input(site) or _whole_numbers(site)) if is_int64 else None


def _whole_numbers(site: Site) -> Integers | None:
    """Return the numbers of a constant of floats that are whole."""
    tensor = constant(site.input(0))
    if tensor is None or tensor.size > _MAX or not tensor.dtype.is_floating_point():
        return None
    numbers = tensor.numpy().astype(np.float64).reshape(-1).tolist()
    if not all(one.is_integer() and abs(one) <= EXACT for one in numbers):
        return None
    return Integers(tuple(known(int(one)) for one in numbers), tuple(tensor.shape.numpy()))


def _cast(site: Site) -> Integers | None:
    to, data = site.integer("to"), _input(site)
    if to == ir.DataType.INT64 and data is None:
        return _whole_numbers(site)
    return data if to in site.facts.integer_types else None


def _moved(site: Site, move: Callable[[_Places], _Places]) -> Integers | None:
    """Move the first input's elements as numpy moves the places of them."""
    data = _input(site)
    if data is None:
        return None
    places = move(_places(data))
    return Integers(tuple(data.numbers[place] for place in places.flat), places.shape)


def _places(data: Integers) -> _Places:
    return np.arange(len(data.numbers)).reshape(data.shape)


def _gather(site: Site) -> Integers | None:
    indices = _input(site, 1)
    if indices is None or indices.constants is None:
        return None
    picked = np.array(indices.constants, np.int64).reshape(indices.shape)
    return _moved(site, lambda places: places.take(picked, site.integer("axis")))


def _slice(site: Site) -> Integers | None:
    starts, ends, axes, steps = site.slices()

    def move(places: _Places) -> _Places:
        for *ends_of, axis, step in zip(starts, ends, axes, steps, strict=True):
            start, end = map(number, ends_of)
            if start is None or end is None:
                raise Refusal("ORP602", "starts or ends where only a run tells")
            places = places.take(sliced(places.shape[axis], start, end, step), axis)
        return places

    return _moved(site, move)


def _concat(site: Site) -> Integers | None:
    numbers: list[Dim | None] = []
    some = False
    for i in range(len(site.node.inputs)):
        part = _input(site, i)
        some = some or part is not None
        if part is not None and len(part.shape) != 1:
            return None
        numbers += site.numbers(i) if part is None else part.numbers
    return Integers.list(numbers) if some else None


def _unsqueeze(site: Site) -> Integers | None:
    axes = site.axes(1)
    return None if axes is None else _moved(site, lambda p: np.expand_dims(p, axes))


def _reshape(site: Site) -> Integers | None:
    sizes = site.constants(1)
    copies = not site.is_set("allowzero")
    return _moved(
        site,
        lambda places: places.reshape(
            [places.shape[i] if size == 0 and copies else size for i, size in enumerate(sizes)]
        ),
    )


def _elementwise(
    compute: Callable[[Site, Dim, Dim], Dim | None],
) -> Callable[[Site], Integers | None]:
    return lambda site: _broadcast(site, site.node.inputs, partial(compute, site))


def _broadcast(
    site: Site, values: Sequence[ir.Value | None], compute: Callable[..., Dim | None]
) -> Integers | None:
    data = [None if value is None else site.facts.integers(value) for value in values]
    known = [part for part in data if part is not None]
    if len(known) < len(data):
        return None
    places = np.broadcast_arrays(*map(_places, known))
    numbers = (
        [part.numbers[place] for part, place in zip(known, group, strict=True)]
        for group in zip(*(p.flat for p in places), strict=True)
    )
    return Integers(
        tuple(None if None in group else compute(*group) for group in numbers), places[0].shape
    )


def _constant_of_shape(site: Site) -> Integers | None:
    shape = site.constants(0)
    value = site.node.attributes.get("value")
    tensor = None if value is None or value.is_ref() else value.as_tensor()
    if tensor is None or tensor.dtype is not ir.DataType.INT64:
        return None
    if min(shape, default=0) < 0 or math.prod(shape) > _MAX:
        return None
    return Integers((known(int(tensor.numpy().item())),) * math.prod(shape), shape)


def _where(site: Site) -> Integers | None:
    condition, shape = site.input(0), site.shape(0)
    equal = condition.producer()
    if equal is not None and equal.op_type == "Equal" and not equal.domain:
        return _broadcast(site, [*equal.inputs, *site.node.inputs[1:]], _chosen)
    if not isinstance(shape, tuple) or any(dim != known(1) for dim in shape):
        return None
    either = partial(_either, site, condition)
    return _broadcast(site, site.node.inputs[1:], either) if len(shape) < 2 else None


def _either(site: Site, condition: ir.Value, then: Dim, otherwise: Dim) -> Dim | None:
    """Return one of two sizes, the same one for one condition."""
    if then == otherwise:
        return then
    sizes = then[0] >= 0 and otherwise[0] >= 0
    return site.unknowns.remembered("Where", condition, then, otherwise) if sizes else None


def _chosen(a: Dim, b: Dim, then: Dim, otherwise: Dim) -> Dim | None:
    """Return the number of ``Where(Equal(a, b), then, otherwise)``."""
    if a == b or then == otherwise:
        return then
    # Two numbers, or a negative one beside a size.
    if (not a[1] and not b[1]) or (a[0] >= 0) != (b[0] >= 0):
        return otherwise
    return None


def _multiplied(site: Site, *factors: Dim) -> Dim | None:
    # A negative number of sizes is not a size.
    if any(size < 0 for size, _ in factors) and any(unknowns for _, unknowns in factors):
        return None
    unknowns = tuple(unknown for factor in factors for unknown in factor[1])
    fits = int64(math.prod(size for size, _ in factors), unknowns)
    return None if fits is None else site.unknowns.product(factors)


def _added(site: Site, x: Dim, y: Dim) -> Dim | None:
    if not x[1] and not y[1]:
        return int64(x[0] + y[0])
    fits = int64(x[0] + y[0], x[1] + y[1])
    return site.unknowns.sum((x, y)) if fits and x[0] >= 0 and y[0] >= 0 else None


def _subtracted(site: Site, x: Dim, y: Dim) -> Dim | None:
    return None if x[1] or y[1] else int64(x[0] - y[0])


def _divided(site: Site, x: Dim, y: Dim) -> Dim | None:
    divisor = number(y)
    if divisor is None or divisor <= 0 or x[0] < 0:
        return None
    if not x[1]:
        return int64(x[0] // divisor)
    return site.unknowns.quotient(x, y) if x[0] % divisor == 0 else None


_RULES: dict[str, Callable[[Site], Integers | None]] = {
    "Add": _elementwise(_added),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _elementwise(_divided),
    "Gather": _gather,
    "Identity": _input,
    "Mul": _elementwise(_multiplied),
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": lambda site: Integers((site.facts.count(site.input(0)),), ()),
    "Slice": _slice,
    "Squeeze": lambda site: _moved(site, lambda p: p.squeeze(site.axes(1) or None)),
    "Sub": _elementwise(_subtracted),
    "Unsqueeze": _unsqueeze,
    "Transpose": lambda site: _moved(site, lambda p: p.transpose(site.ints("perm"))),
    "Where": _where,
}

# Operators whose numbers are followed.
INTEGER_OPERATORS = frozenset(_RULES)
