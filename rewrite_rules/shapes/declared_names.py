# SPDX-License-Identifier: MIT
"""Names of dimensions taken at their word, as onnxruntime's memory planner takes them.

Two dimensions of one name have one size. Where no operator says more, annotations count:

    Reshape(x[batch, 9, sequence, 64], [0, 3, -1, 64]) -> [batch, 3, unk__4, 64]
        the number of elements stays: unk__4 is called 3 sequence
    Loop(...)                                          -> [batch, unk__5]
        nothing is known of the second dimension but its name

With its dimensions named alike, the planner finds a buffer of the same size at once; with
unknown ones it searches all free buffers for every node, which takes most of the start of a
large graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from rewrite_rules.shapes.dimensions import Dim, Shape, Unknowns, known


class DeclaredNames:
    """What the names of a model's dimensions stand for.

    Args:
        numbers: Sizes of names.
        default: Size of the names of inputs that have none; None to leave them unknown.
            ``defaulted`` has them then; ``"?"`` for dimensions without a name.
        arithmetic: Whether ``3 sequence / 3`` is ``sequence``. onnxruntime's own shape
            inference only hands names on.
    """

    def __init__(
        self,
        numbers: Mapping[str, int] | None = None,
        default: int | None = None,
        arithmetic: bool = True,
    ) -> None:
        self.arithmetic = arithmetic
        self._dims = {name: known(size) for name, size in (numbers or {}).items()}
        self._names: dict[Dim, str] = {}
        self._default = default
        self.defaulted: set[str] = set()

    def declared(self, shape: ir.Shape | None, unknowns: Unknowns) -> Shape | None:
        """Return the shape of an input of the main graph."""
        return None if shape is None else tuple(self._of_input(d, unknowns) for d in shape)

    def believe(
        self, annotation: ir.Shape | None, shape: Shape | None, unknowns: Unknowns, before: int
    ) -> Shape | None:
        """Complete what an operator says of a value's shape by the annotation in the model.

        ``before`` is how many unknowns there were before the operator was asked.
        """
        if annotation is None:
            return shape
        if not isinstance(shape, tuple):
            shape = unknowns.fresh_dims(len(annotation))
        if len(shape) != len(annotation):
            return shape
        return tuple(
            self._settle(dim, named, unknowns.is_new(dim, before))
            for dim, named in zip(shape, annotation, strict=True)
        )

    def name(self, dim: Dim) -> int | str | None:
        """Return the number or the first name of a dimension; None where it has neither."""
        return self._names.get(dim) if dim[1] else dim[0]

    def _of_input(self, dim: int | ir.SymbolicDim, unknowns: Unknowns) -> Dim:
        if isinstance(dim, int) and dim >= 0:
            return known(dim)
        name = None if isinstance(dim, int) else dim.value
        if name is not None and name in self._dims:
            return self._dims[name]
        if self._default is None:
            found = unknowns.fresh_dim()
        else:
            self.defaulted.add(name or "?")
            found = known(self._default)
        return found if name is None else self._call(found, name)

    def _settle(self, dim: Dim, named: int | ir.SymbolicDim, is_new: bool) -> Dim:
        """Return the one dimension that an operator and an annotation speak of."""
        if not dim[1]:
            found = None
        elif isinstance(named, int):
            return known(named) if named >= 0 else dim
        else:
            found = None if named.value is None else self._dims.get(named.value)
        if found is not None and is_new:
            return found
        # A name that is first met at an earlier dimension is news to its other values.
        speaks = self.arithmetic or is_new or not dim[1]
        if found is None and speaks and isinstance(named, ir.SymbolicDim) and named.value:
            self._call(dim, named.value)
        return dim

    def _call(self, dim: Dim, name: str) -> Dim:
        self._names.setdefault(dim, name)
        return self._dims.setdefault(name, dim)
