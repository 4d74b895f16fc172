# SPDX-License-Identifier: MIT
"""What shapes a model's tensors have for given numbers of its symbolic dimensions."""

from __future__ import annotations

__all__ = ["DEFAULT_DIM", "ConcreteShapes", "concrete_shapes"]

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
        symbolic: The shapes that onnxruntime will infer, symbols included, of values that have
            none in the model: those that its optimisers made.
        unknown_dims: Dimensions of inputs that counted as :data:`DEFAULT_DIM`; ``"?"`` for
            those without a name.
    """

    of: Mapping[ir.Value, tuple[int, ...]]
    unknown_dims: tuple[str, ...]
    symbolic: Mapping[ir.Value, ir.Shape] = dataclasses.field(default_factory=dict)


def concrete_shapes(model: ir.Model, dims: Mapping[str, int]) -> ConcreteShapes:
    """Work out the shapes of all tensors that nodes make, subgraphs included.

    Args:
        model: Stays as it is; its nodes are sorted.
        dims: Numbers for symbolic dimensions; others count as :data:`DEFAULT_DIM`.
    """
    made = [
        value
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        for value in node.outputs
    ]
    if all(value.shape is not None and value.shape.is_static() for value in made):
        return ConcreteShapes(
            {v: tuple(v.shape.numpy()) for v in made if v.shape is not None}, ()
        )
    numbers = DeclaredNames(dims, DEFAULT_DIM)
    facts = ProvedShapes(model, numbers)
    of = {value: facts.sizes(value) for value in made}
    symbolic = {}
    unshaped = [value for value in made if value.shape is None]
    if unshaped:
        names = DeclaredNames(arithmetic=False)
        facts = ProvedShapes(model, names)
        for value in unshaped:
            shape = facts.shape(value)
            if isinstance(shape, tuple):
                symbolic[value] = ir.Shape(names.name(dim) for dim in shape)
    return ConcreteShapes(
        {value: sizes for value, sizes in of.items() if sizes is not None},
        tuple(sorted(numbers.defaulted)),
        symbolic,
    )
