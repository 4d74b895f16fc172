# SPDX-License-Identifier: MIT
"""What shapes a model's tensors have for given numbers of its symbolic dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from rewrite_rules.shapes.declared_names import DeclaredNames
from rewrite_rules.shapes.proved_shapes import ProvedShapes

DEFAULT_DIM = 128
"""What a dimension counts as that no number is known for."""


@dataclasses.dataclass(frozen=True)
class ConcreteShapes:
    """Shapes for given numbers of the symbolic dimensions.

    Attributes:
        of: The shapes that could be worked out, of values that nodes make.
        planned: The shapes that onnxruntime's memory planner goes by, of the values of which
            it knows all dimensions: numbers, or names that it takes for equal sizes.
        unknown_dims: Dimensions of inputs that counted as :data:`DEFAULT_DIM`; ``"?"`` for
            those without a name.
    """

    of: Mapping[ir.Value, tuple[int, ...]]
    planned: Mapping[ir.Value, tuple[int | str, ...]]
    unknown_dims: tuple[str, ...] = ()


def concrete_shapes(model: ir.Model, dims: Mapping[str, int] | None = None) -> ConcreteShapes:
    """Work out the shapes of all tensors that nodes make, subgraphs included.

    Symbolic dimensions without a number count as :data:`DEFAULT_DIM`. The nodes are sorted.
    """
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    made = [value for node in nodes for value in node.outputs if value.name]
    planned = {value: _named(value.shape) for value in made if value.shape is not None}
    static = {value: _numbers(shape) for value, shape in planned.items()}
    if len(static) == len(made) and None not in static.values():
        found = {value: shape for value, shape in static.items() if shape is not None}
        return ConcreteShapes(found, found)
    numbers = DeclaredNames(dims, DEFAULT_DIM)
    facts = ProvedShapes(model, numbers)
    of = {value: facts.sizes(value) for value in made}
    if len(planned) < len(made):  # what optimisers make has no shape in the file
        names = DeclaredNames(arithmetic=False)
        facts = ProvedShapes(model, names)
        for value in made:
            shape = facts.shape(value)
            if value not in planned and isinstance(shape, tuple):
                planned[value] = _known(tuple(names.name(dim) for dim in shape))
    return ConcreteShapes(
        {value: sizes for value, sizes in of.items() if sizes is not None},
        {value: shape for value, shape in planned.items() if shape is not None},
        tuple(sorted(numbers.defaulted)),
    )


_Dims = tuple[int | str, ...]


def _named(shape: ir.Shape) -> _Dims | None:
    return _known(tuple(dim if isinstance(dim, int) else dim.value for dim in shape))


def _known(dims: tuple[int | str | None, ...]) -> _Dims | None:
    known = tuple(dim for dim in dims if dim is not None)
    return known if len(known) == len(dims) else None


def _numbers(dims: _Dims | None) -> tuple[int, ...] | None:
    numbers = tuple(dim for dim in dims or () if isinstance(dim, int))
    return numbers if dims is not None and len(numbers) == len(dims) else None
