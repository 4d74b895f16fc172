# SPDX-License-Identifier: MIT
"""A copy of a model for shape inference: nodes and types, and of constants the short ones.

onnx knows nothing of onnxruntime's fused operators; in the copy, standard ones of the same
shape stand in for them. Values are named by number, as names are no more than unique within a
body. Made straight from the nodes it takes a third of the time that a clone and its
serialization take, and no copy of weights.
"""

from __future__ import annotations

__all__ = ["Skeleton"]

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.constants import constant
from rewrite_rules.graph.nodes import is_constant, subgraphs
from rewrite_rules.graph.refusal import Refusal

# Fused operator -> the standard one whose first output has its shape, and that one's inputs.
_STAND_INS = {
    "AveragePool": ("AveragePool", 1),  # this one, Conv and other pools: of ...nchwc
    "BiasGelu": ("Add", 2),
    "Conv": ("Conv", 2),
    "DecoderMaskedMultiHeadAttention": ("Relu", 1),
    "FastGelu": ("Relu", 1),
    "FusedConv": ("Conv", 2),
    "FusedMatMul": ("MatMul", 2),
    "Gelu": ("Relu", 1),
    "GlobalAveragePool": ("GlobalAveragePool", 1),
    "GlobalMaxPool": ("GlobalMaxPool", 1),
    "GroupQueryAttention": ("Relu", 1),
    # onnxruntime writes the first in files of older opsets, and the second in all.
    "LayerNormalization": ("Relu", 1),
    "SimplifiedLayerNormalization": ("Relu", 1),
    "MaxPool": ("MaxPool", 1),
    "MultiHeadAttention": ("Relu", 1),
    "QuickGelu": ("Relu", 1),
    "ReorderInput": ("Relu", 1),
    "RotaryEmbedding": ("Relu", 1),
    "SkipLayerNormalization": ("Add", 2),
    "SkipSimplifiedLayerNormalization": ("Add", 2),
}
_OWN_BUT_STANDARD = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
# Those whose further outputs, as far as they are used, have the shape of the first.
_ALIKE = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
_TRANSPOSING = ("transA", "transB", "transBatchA", "transBatchB")
# Longer constants are no shapes.
_SHORT_BYTES = 1000

# Sizes; a symbol or None where a size is not known.
Shape = list[int | str | None]


class Skeleton:
    """The copy.

    Attributes:
        names: What each value of the model is called in the copy.
        alike: Outputs that the copy lacks -> the output that has their shape.
    """

    def __init__(self, model: ir.Model) -> None:
        self.names: dict[ir.Value, str] = {}
        self.alike: dict[ir.Value, ir.Value] = {}
        self._proto = onnx.ModelProto(ir_version=model.ir_version or 10)
        for domain, version in {"": 21, **model.opset_imports}.items():
            self._proto.opset_import.add(domain=domain, version=version)
        self._has_bodies = False
        self._symbols: set[str] = set()
        self._inputs = {self._name(value) for value in model.graph.inputs}
        self._fill(self._proto.graph, model.graph)

    def infer(self) -> onnx.ModelProto:
        """Return the copy with all shapes that onnx can infer; none if it fails."""
        try:
            return onnx.shape_inference.infer_shapes(self._proto, data_prop=True)
        except Exception:  # of any kind; a model that onnx can't infer may run all the same
            return self._proto

    def shapes(self, inferred: onnx.ModelProto) -> dict[str, Shape]:
        """Return the shapes in what :meth:`infer` returned, of values that nodes make."""
        return {
            info.name: [
                dim.dim_value
                if dim.HasField("dim_value")
                else dim.dim_param
                if dim.dim_param in self._symbols  # onnx makes others up, onnxruntime doesn't
                else None
                for dim in info.type.tensor_type.shape.dim
            ]
            for info in self._infos(inferred.graph)
            if info.type.HasField("tensor_type") and info.type.tensor_type.HasField("shape")
        }

    def give_numbers(self, dims: Mapping[str, int], default: int) -> set[str]:
        """Put numbers for symbols.

        Args:
            dims: Numbers of symbols.
            default: Number of the inputs' other symbols; others become unknown sizes.

        Returns:
            The symbols of inputs that count as ``default``; ``"?"`` for those without a name.
        """
        unknown = set()
        for info in (*self._proto.graph.input, *self._infos(self._proto.graph)):
            for dim in info.type.tensor_type.shape.dim:
                if dim.HasField("dim_value"):
                    continue
                if dim.dim_param in dims:
                    dim.dim_value = dims[dim.dim_param]
                elif info.name in self._inputs:
                    unknown.add(dim.dim_param or "?")
                    dim.dim_value = default
                else:
                    dim.ClearField("dim_param")
        return unknown

    def _name(self, value: ir.Value | None) -> str:
        if value is None:
            return ""
        name = self.names.get(value)
        if name is None:
            name = self.names[value] = f"v{len(self.names)}"
        return name

    def _fill(self, target: onnx.GraphProto, graph: ir.Graph) -> None:
        target.name = "graph"
        for value in graph.inputs:
            target.input.append(self._info(value))
        for value in graph.initializers.values():
            if not value.is_graph_input():
                self._add_constant(target, value, value.const_value)
        for node in graph:
            if is_constant(node):
                self._add_constant(target, node.outputs[0], constant(node.outputs[0]))
                continue
            self._add_node(target, node)
        for value in graph.outputs:
            target.output.append(self._info(value))
        results = set(graph.outputs)
        for node in graph:
            for value in node.outputs:
                if value.shape is not None and value not in results and value.type is not None:
                    target.value_info.append(self._info(value))

    def _add_node(self, target: onnx.GraphProto, node: ir.Node) -> None:
        inputs = [self._name(value) for value in node.inputs]
        domain, operator = node.domain, node.op_type
        if domain.startswith("com.microsoft") or operator in _OWN_BUT_STANDARD:
            if operator in _ALIKE:
                self.alike.update(dict.fromkeys(node.outputs[1:], node.outputs[0]))
            domain, operator, inputs = self._stand_in(node, inputs)
        made = target.node.add(domain=domain, op_type=operator, input=inputs)
        made.output.extend(self._name(value) if value.name else "" for value in node.outputs)
        inner = {id(body) for body in subgraphs(node)}
        for name, attribute in node.attributes.items():
            if inner and attribute.type is ir.AttributeType.GRAPH and not attribute.is_ref():
                self._has_bodies = True
                made.attribute.add(name=name, type=onnx.AttributeProto.GRAPH)
                self._fill(made.attribute[-1].g, attribute.as_graph())
            elif attribute.type is not ir.AttributeType.GRAPHS:
                made.attribute.append(ir.serde.serialize_attribute(attribute))

    def _stand_in(self, node: ir.Node, inputs: list[str]) -> tuple[str, str, list[str]]:
        """Return domain, operator and inputs of what has a node's shape, or its own."""
        try:
            if node.op_type == "MatMulNBits":
                shape = [int_attribute(node, name, 0) for name in ("K", "N")]
                return "", "MatMul", [inputs[0], self._weight(shape)]
            if node.op_type == "ReorderOutput" and not int_attribute(node, "channels_last", 0):
                # Fewer channels may come out than went in, which were filled up to blocks.
                shape = [int_attribute(node, "channels", 0), 1, 1, 1]
                return "", "Conv", [inputs[0], self._weight(shape)]
        except Refusal:
            return node.domain, node.op_type, inputs  # onnxruntime will say so
        if node.op_type not in _STAND_INS or any(
            name in node.attributes and node.attributes[name].value for name in _TRANSPOSING
        ):
            return node.domain, node.op_type, inputs
        operator, count = _STAND_INS[node.op_type]
        return "", operator, inputs[:count]

    def _weight(self, shape: list[int]) -> str:
        name = f"w{len(self._proto.graph.input)}"
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        self._proto.graph.input.append(info)
        return name

    def _add_constant(
        self, target: onnx.GraphProto, value: ir.Value, tensor: ir.TensorProtocol | None
    ) -> None:
        if tensor is not None and tensor.nbytes <= _SHORT_BYTES:
            proto = ir.serde.serialize_tensor(tensor)
            proto.name = self._name(value)
            target.initializer.append(proto)
        elif tensor is not None:
            # Seen from all subgraphs.
            self._proto.graph.input.append(
                onnx.helper.make_tensor_value_info(
                    self._name(value), int(tensor.dtype), list(tensor.shape.numpy())
                )
            )
        else:
            self._proto.graph.input.append(self._info(value))

    def _info(self, value: ir.Value) -> onnx.ValueInfoProto:
        info = onnx.ValueInfoProto(name=self._name(value))
        if isinstance(value.type, ir.TensorType):
            kind = info.type.tensor_type
            kind.elem_type = int(value.type.dtype)
            if value.shape is not None:
                kind.shape.SetInParent()
                for size in value.shape:
                    if isinstance(size, int):
                        kind.shape.dim.add(dim_value=size)
                    else:
                        kind.shape.dim.add(dim_param=size.value or "")
                        self._symbols.update(filter(None, [size.value]))
        elif value.type is not None:
            ir.serde.serialize_type_into(info.type, value.type)
        return info

    def _infos(self, graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
        found = [*graph.value_info, *graph.output]
        if self._has_bodies:
            for node in graph.node:
                for attribute in node.attribute:
                    if attribute.type == onnx.AttributeProto.GRAPH:
                        found += self._infos(attribute.g)
        return found
