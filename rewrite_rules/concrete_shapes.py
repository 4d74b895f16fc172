# SPDX-License-Identifier: MIT
"""What shapes a model's tensors have for given numbers of its symbolic dimensions.

Inference on symbols ends at the first sum or product (``unk__7``). With numbers for the
dimensions of the inputs it goes on, so it is run on a copy that has them; where it still ends,
at integers that are computed in ways onnx does not follow, these are computed. onnx knows
nothing of onnxruntime's fused operators; in the copy, standard ones of the same shape stand in
for them.
"""

from __future__ import annotations

__all__ = ["DEFAULT_DIM", "ConcreteShapes", "concrete_shapes"]

import dataclasses
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import onnx_ir.passes.common
import onnxscript.optimizer

from rewrite_rules.constants import Refusal, int_attribute
from rewrite_rules.execution_order import captures
from rewrite_rules.nodes import bodies, label

DEFAULT_DIM = 128
"""What a dimension counts as that no number is known for."""

# Fused operator -> the standard one whose first output has its shape, and that one's inputs.
_STAND_INS = {
    "BiasGelu": ("Add", 2),
    "Conv": ("Conv", 2),  # of com.microsoft.nchwc
    "DecoderMaskedMultiHeadAttention": ("Relu", 1),
    "FastGelu": ("Relu", 1),
    "FusedConv": ("Conv", 2),
    "FusedMatMul": ("MatMul", 2),
    "Gelu": ("Relu", 1),
    "GroupQueryAttention": ("Relu", 1),
    # onnxruntime writes the first in files of older opsets, and the second in all.
    "LayerNormalization": ("Relu", 1),
    "SimplifiedLayerNormalization": ("Relu", 1),
    "MaxPool": ("MaxPool", 1),
    "MultiHeadAttention": ("Relu", 1),
    "QuickGelu": ("Relu", 1),
    "ReorderInput": ("Relu", 1),
    "ReorderOutput": ("Relu", 1),
    "RotaryEmbedding": ("Relu", 1),
    "SkipLayerNormalization": ("Add", 2),
    "SkipSimplifiedLayerNormalization": ("Add", 2),
}
_OWN_BUT_STANDARD = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
# Those whose further outputs, as far as they are used, have the shape of the first.
_ALIKE = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
# Folding takes about a millisecond for each node.
_MOST_FOLDED = 2000
_NAME = "ortplugins.concrete_shapes."
_TRANSPOSING = ("transA", "transB", "transBatchA", "transBatchB")


@dataclasses.dataclass(frozen=True)
class ConcreteShapes:
    """Shapes for given numbers of the symbolic dimensions.

    Attributes:
        of: The shapes that could be worked out, of values that nodes make.
        unknown_dims: Dimensions of inputs that counted as :data:`DEFAULT_DIM`; ``"?"`` for
            those without a name.
    """

    of: Mapping[ir.Value, tuple[int, ...]]
    unknown_dims: tuple[str, ...]


def concrete_shapes(model: ir.Model, dims: Mapping[str, int]) -> ConcreteShapes:
    """Infer the shapes of all tensors that nodes make, bodies included.

    Args:
        model: Stays as it is.
        dims: Numbers for symbolic dimensions; others count as :data:`DEFAULT_DIM`.

    Raises:
        Refusal: If a node stands before one whose output it reads.
    """
    known = {value: _static(value) for value in _values(model)}
    if None not in known.values():
        return ConcreteShapes({v: s for v, s in known.items() if s is not None}, ())
    _check_sorted(model.graph)
    copy = model.clone()
    pairs = list(zip(_values(model), _values(copy), strict=True))
    unknown_dims: set[str] = set()
    for value in copy.graph.inputs:
        if value.shape is not None:
            unknown_dims.update(
                dim.value or "?"
                for dim in value.shape
                if not isinstance(dim, int) and dim.value not in dims
            )
            value.shape = ir.Shape(
                dim if isinstance(dim, int) else dims.get(dim.value or "", DEFAULT_DIM)
                for dim in value.shape
            )
    for _, value in pairs:
        if value.shape is not None:
            value.shape = ir.Shape(
                dim if isinstance(dim, int) else dims.get(dim.value or "")
                for dim in value.shape
            )
    alike = []
    for node in list(ir.traversal.RecursiveGraphIterator(copy.graph)):
        if node.domain.startswith("com.microsoft") or node.op_type in _OWN_BUT_STANDARD:
            if node.op_type in _ALIKE:
                alike += [(value, node.outputs[0]) for value in node.outputs[1:]]
            _stand_in(copy, node)
    copy.graph.opset_imports.setdefault("", 21)
    onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(copy)
    result = {original: shape for original, v in pairs if (shape := _static(v)) is not None}
    if len(result) < len(pairs) <= _MOST_FOLDED:
        # Folding replaces nodes: what is left of them is known by names, so each gets one.
        for index, (_, value) in enumerate(pairs):
            value.name = f"{_NAME}{index}"
        onnxscript.optimizer.fold_constants(copy, onnx_shape_inference=True)
        onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(copy)
        for value in _values(copy):
            name, shape = value.name or "", _static(value)
            if name.startswith(_NAME) and name[len(_NAME) :].isdecimal() and shape is not None:
                result.setdefault(pairs[int(name[len(_NAME) :])][0], shape)
    originals = {value: original for original, value in pairs}
    for value, first in alike:
        if (shape := result.get(originals[first])) is not None:
            result[originals[value]] = shape
    return ConcreteShapes(result, tuple(sorted(unknown_dims)))


def _static(value: ir.Value) -> tuple[int, ...] | None:
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(value.shape.numpy())


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
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
        for body in bodies(node):
            _check_sorted(body)


def _stand_in(copy: ir.Model, node: ir.Node) -> None:
    if node.op_type == "MatMulNBits":
        try:
            shape = [int_attribute(node, name, 0) for name in ("K", "N")]
        except Refusal:
            return  # onnxruntime will say so
        weight = ir.Value(
            name=f"stand_in_{len(copy.graph.inputs)}",
            shape=ir.Shape(shape),
            type=ir.TensorType(ir.DataType.FLOAT),
        )
        copy.graph.inputs.append(weight)
        node.resize_inputs(2)
        node.replace_input_with(1, weight)
        operator = "MatMul"
    elif node.op_type in _STAND_INS and not any(
        name in node.attributes and node.attributes[name].value for name in _TRANSPOSING
    ):
        operator, inputs = _STAND_INS[node.op_type]
        node.resize_inputs(min(inputs, len(node.inputs)))
    else:
        return
    node.domain, node.op_type = "", operator
