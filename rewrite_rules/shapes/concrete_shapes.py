# SPDX-License-Identifier: MIT
"""What shapes a model's tensors have for given numbers of its symbolic dimensions.

Inference on symbols ends at the first sum or product (``unk__7``). With numbers for the
dimensions of the inputs it goes on, so it is run on a copy that has them
(:mod:`.inference_copy`); where it still ends, at integers that are computed in
ways onnx does not follow, these are computed.
"""

from __future__ import annotations

__all__ = ["DEFAULT_DIM", "ConcreteShapes", "concrete_shapes"]

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import onnx_ir.passes.common
import onnxscript.optimizer

from rewrite_rules.graph.nodes import captures, label, subgraphs
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.shapes.inference_copy import Skeleton

DEFAULT_DIM = 128
"""What a dimension counts as that no number is known for."""

# Folding takes about a millisecond for each node.
_MOST_FOLDED = 2000


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
    """Infer the shapes of all tensors that nodes make, subgraphs included.

    Args:
        model: Stays as it is.
        dims: Numbers for symbolic dimensions; others count as :data:`DEFAULT_DIM`.

    Raises:
        Refusal: If a node stands before one whose output it reads.
    """
    made = list(_values(model.graph))
    known = {value: _static(value) for value in made}
    if None not in known.values():
        return ConcreteShapes({v: s for v, s in known.items() if s is not None}, ())
    _check_sorted(model.graph)
    skeleton = Skeleton(model)
    symbolic: dict[ir.Value, ir.Shape] = {}
    if any(value.shape is None for value in made):
        found = skeleton.shapes(skeleton.infer())
        for value in made:
            if value.shape is None and (shape := found.get(skeleton.names[value])) is not None:
                symbolic[value] = ir.Shape(shape)
    unknown_dims = skeleton.give_numbers(dims, DEFAULT_DIM)
    inferred = skeleton.infer()
    shapes = skeleton.shapes(inferred)
    if len(made) <= _MOST_FOLDED and any(
        not _is_static(shapes.get(skeleton.names[value])) for value in made
    ):
        folded = ir.from_proto(inferred)
        onnxscript.optimizer.fold_constants(folded, onnx_shape_inference=True)
        onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(folded)
        for value in _values(folded.graph):
            # Folding replaces nodes; what they make is known by its name.
            if not _is_static(shapes.get(value.name or "")) and _static(value) is not None:
                shapes[value.name or ""] = list(_static(value) or ())
    result = dict[ir.Value, tuple[int, ...]]()
    for value in made:
        shape = shapes.get(skeleton.names[skeleton.alike.get(value, value)])
        if shape is not None and _is_static(shape):
            result[value] = tuple(int(size) for size in shape if isinstance(size, int))
    return ConcreteShapes(result, tuple(sorted(unknown_dims)), symbolic)


def _is_static(shape: Sequence[int | str | None] | None) -> bool:
    return shape is not None and all(isinstance(size, int) for size in shape)


def _static(value: ir.Value) -> tuple[int, ...] | None:
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(value.shape.numpy())


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _check_sorted(graph: ir.Graph) -> None:
    """Refuse what can't be cloned."""
    seen = set()
    for node in graph:
        for value in (*node.inputs, *captures(node)):
            producer = None if value is None else value.producer()
            if producer is not None and producer.graph is graph and producer not in seen:
                raise Refusal(
                    f"node {label(node)!r} stands before {label(producer)!r}, whose output it "
                    "reads: sort the nodes"
                )
        seen.add(node)
        for body in subgraphs(node):
            _check_sorted(body)
