# SPDX-License-Identifier: MIT
"""What is proved of shapes, held against the arrays of a run."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from rewrite_rules.shapes.dimensions import Dim, Shape
from rewrite_rules.shapes.proved_shapes import ProvedShapes


def assert_proved(
    facts: ProvedShapes, values: Iterable[ir.Value], arrays: Mapping[str, np.ndarray]
) -> None:
    """Each unknown must stand for one number, and each proved shape be the array's."""
    sizes: dict[int, tuple[int, str]] = {}
    wholes: dict[Shape, tuple[int, ...]] = {}
    products: list[tuple[Dim, int, str]] = []
    for value in values:
        name = str(value.name)
        if not isinstance(arrays.get(name), np.ndarray):
            continue
        shape, real = facts.shape(value), arrays[name].shape
        assert wholes.setdefault(shape, real) == real, f"{name}: {shape} is {real}"
        if isinstance(shape, tuple):
            assert len(shape) == len(real), f"{name}: {shape} is {real}"
            products += [(dim, size, name) for dim, size in zip(shape, real, strict=True)]
        products.append((facts.count(value), math.prod(real), f"the count of {name}"))
        integers = facts.integers(value)
        if integers is not None:
            assert integers.shape == real, f"{name}: {integers} is {real}"
            numbers = zip(integers.numbers, arrays[name].reshape(-1), strict=True)
            products += [(dim, int(n), name) for dim, n in numbers if dim is not None]
    for dim, real, name in products:
        if dim[0] == 1 and len(dim[1]) == 1:
            first = sizes.setdefault(dim[1][0], (real, name))
            assert first[0] == real, f"{name}: {dim} is {real}, and {first[0]} in {first[1]}"
    for dim, real, name in products:
        if all(unknown in sizes for unknown in dim[1]):
            said = dim[0] * math.prod(sizes[unknown][0] for unknown in dim[1])
            assert said == real, f"{name}: {dim} is {real}, not {said}"
