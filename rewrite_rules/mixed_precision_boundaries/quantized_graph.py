# SPDX-License-Identifier: MIT
"""The quantised activations of a QDQ graph, read once.

    float value -> QuantizeLinear -> codes -> DequantizeLinear* -> what reads them

One description for each value of codes, or the reason why there is none. Two QuantizeLinear of
one float value are two activations of one name; a graph input of codes has no QuantizeLinear.
Dequantised initializers, weights that are quantised in the graph, and what subgraphs quantise
do not count as activations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import (
    input_of,
    is_dequantize_linear,
    is_quantize_linear,
    label,
)
from rewrite_rules.graph.parameters import (
    constant,
    int_attribute,
    require_constant,
    type_attribute,
)
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.remarks import Refusal

# Their constants are quantised like activations; those of others are weights.
ELEMENTWISE_OPERATORS = frozenset({
    "Add", "Concat", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max",
    "Mean", "Min", "Mod", "Mul", "Pow", "PRelu", "Sub", "Sum", "Where",
})  # fmt: skip
# What onnxruntime's quantiser appends to the name of a graph output's float producer.
_RENAMED = "_QuantizeLinear_Input"


def read_grid(node: ir.Node) -> QuantizationGrid:
    """Read the grid of a Q or DQ; refused unless it is constant, sound and per tensor."""
    if int_attribute(node, "block_size"):
        raise Refusal("ORP301", "it is quantised in blocks; per tensor is rewritten")
    if input_of(node, 0) is None or input_of(node, 1) is None:
        raise Refusal("ORP204", f"{node.op_type} {label(node)!r} has no scale")
    tensor = _single(node.inputs[1], "scale")
    if tensor.dtype != ir.DataType.FLOAT:
        raise Refusal(
            "ORP311",
            f"scale {tensor.name!r} is {tensor.dtype.name.lower()}: float32 is rewritten",
        )
    scale = np.float32(tensor.numpy().item())
    for attribute in ("output_dtype", "precision"):
        named = type_attribute(node, attribute)
        # Of DequantizeLinear it is the type of the values, which grids take from the scale.
        of_values = attribute == "precision" or is_dequantize_linear(node)
        if named and of_values and named != tensor.dtype:
            raise Refusal(
                "ORP311",
                f"{attribute} of {label(node)!r} is {named.name.lower()}, but the "
                f"scale is {tensor.dtype.name.lower()}",
            )
    zero_point = input_of(node, 2)
    if zero_point is None:
        return QuantizationGrid(_type_without_zero_point(node), scale, 0)
    tensor = _single(zero_point, "zero point")
    if tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 8:
        raise Refusal(
            "ORP306", f"codes of type {tensor.dtype.name.lower()} are not activations"
        )
    return QuantizationGrid(tensor.dtype, scale, int(tensor.numpy().item()))


def _single(value: ir.Value | None, role: str) -> ir.TensorProtocol:
    value, tensor = require_constant(value, role)
    if tensor.size != 1 or len(tensor.shape) > 1:
        raise Refusal(
            "ORP301",
            f"{role} {value.name!r} has shape {list(tensor.shape.numpy())}; one for the whole "
            "tensor is rewritten",
        )
    return tensor


def _type_without_zero_point(node: ir.Node) -> ir.DataType:
    if not is_dequantize_linear(node):
        return type_attribute(node, "output_dtype") or ir.DataType.UINT8
    codes = node.inputs[0]
    assert codes is not None
    if (producer := codes.producer()) is not None and is_quantize_linear(producer):
        return read_grid(producer).dtype
    if codes.dtype is None:
        raise Refusal(
            "ORP311", f"the type of {codes.name!r} is not known, and it has no zero point"
        )
    return codes.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One quantised activation; two of them are equal if they are the same.

    ``name`` is that of the float tensor. Without ``quantize``, the codes are fed, or computed
    from codes.
    """

    name: str
    codes: ir.Value
    quantize: ir.Node | None
    dequantizes: tuple[ir.Node, ...]
    grid: QuantizationGrid

    @property
    def source(self) -> ir.Value | None:
        return None if self.quantize is None else self.quantize.inputs[0]

    @property
    def producer(self) -> ir.Node | None:
        """The operator that computes the float value; no Q, no DQ."""
        node = None if self.source is None else self.source.producer()
        return None if node is None or is_dequantize_linear(node) else node

    @property
    def codes_are_read(self) -> bool:
        """Whether anything but DequantizeLinear reads the codes, or the caller does."""
        return self.codes.is_graph_output() or len(self.codes.uses()) > len(self.dequantizes)

    @property
    def is_output(self) -> bool:
        return any(node.outputs[0].is_graph_output() for node in self.dequantizes)

    def values(self) -> set[ir.Value]:
        """The dequantised values."""
        return {node.outputs[0] for node in self.dequantizes}

    def consumers(self) -> list[ir.Node]:
        """The nodes that read the dequantised values, each once, QuantizeLinear among them."""
        uses = (use for node in self.dequantizes for use in node.outputs[0].uses())
        return list(dict.fromkeys(use.node for use in uses))


class QuantizedGraph:
    """All quantised activations of a model, and by each name why another tensor stays.

    An activation may be called by the names of its codes and of what is dequantised, too.
    """

    def __init__(self, model: ir.Model) -> None:
        self.tensors: list[QuantizedTensor] = []
        self.opset = model.opset_imports.get("", 0)
        # Several where a float tensor is quantised twice.
        self.by_name: dict[str, list[QuantizedTensor]] = {}
        self._by_value: dict[ir.Value, QuantizedTensor | Refusal] = {}
        self._written: dict[ir.Value, list[QuantizedTensor | Refusal]] = defaultdict(list)
        self._grid = functools.cache(read_grid)
        self.by_label: dict[str, list[ir.Node]] = {}
        constant_stays = Refusal(
            "ORP306", "it is a constant: what those are stored as is chosen when quantising"
        )
        self.stay: dict[str, Refusal] = {}
        for graph in model.graphs():
            self.stay.update(dict.fromkeys(graph.initializers, constant_stays))
            for node in graph:
                self.by_label.setdefault(label(node), []).append(node)
        for codes, dequantizes in _quantized_values(model).items():
            self._read(codes, tuple(dequantizes))

    def _read(self, codes: ir.Value, dequantizes: tuple[ir.Node, ...]) -> None:
        producer = codes.producer()
        quantize = producer if producer is not None and is_quantize_linear(producer) else None
        source = None if quantize is None else input_of(quantize, 0)
        if _is_weight(source, dequantizes):
            return
        name = _float_name(codes, source, dequantizes)
        values = (source, codes, *(node.outputs[0] for node in dequantizes))
        found = (value.name for value in values if value is not None)
        names = tuple(dict.fromkeys(filter(None, (name, *found))))
        readings: QuantizedTensor | Refusal
        try:
            if quantize is not None and source is None:
                raise Refusal("ORP204", f"{quantize.op_type} {label(quantize)!r} has no input")
            nodes = [node for node in (quantize, *dequantizes) if node is not None]
            grids = {self._grid(node) for node in nodes}
            if len(grids) > 1:
                listed = ", ".join(sorted(map(str, grids)))
                raise Refusal(
                    "ORP302", f"it is quantised and dequantised on different grids: {listed}"
                )
            grid = grids.pop()
            _check_value_type(source)
            tensor = QuantizedTensor(name, codes, quantize, dequantizes, grid)
        except Refusal as refusal:
            readings = refusal.with_traceback(None)
            self.stay.update(dict.fromkeys(names, refusal))
        else:
            readings = tensor
            self.tensors.append(tensor)
            for each in names:
                self.by_name.setdefault(each, []).append(tensor)
        for node in dequantizes:
            self._by_value[node.outputs[0]] = readings
        if source is not None:
            self._written[source].append(readings)

    def read_by(self, node: ir.Node) -> list[QuantizedTensor]:
        """The activations that a node reads, each once; refused if one has no description."""
        found = (self._by_value.get(value) for value in node.inputs if value is not None)
        return _described(node, "reads", found)

    def written_by(self, node: ir.Node) -> list[QuantizedTensor]:
        """The activations quantised from a node's outputs; refused as by :meth:`read_by`."""
        found = (item for value in node.outputs for item in self._written.get(value, ()))
        return _described(node, "writes", found)


def _described(
    node: ir.Node, does: str, found: Iterator[QuantizedTensor | Refusal | None]
) -> list[QuantizedTensor]:
    tensors: dict[QuantizedTensor, None] = {}
    for item in found:
        if isinstance(item, Refusal):
            raise Refusal(
                "ORP304", f"node {label(node)!r} {does} an activation that stays: {item}"
            )
        if item is not None:
            tensors[item] = None
    return list(tensors)


def _quantized_values(model: ir.Model) -> dict[ir.Value, list[ir.Node]]:
    """Each value of codes, with the nodes that dequantise it."""
    found: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph:
        # What lacks its input or its output is in no valid graph, and nobody's activation.
        if not node.outputs or not node.inputs:
            continue
        if is_quantize_linear(node):
            found.setdefault(node.outputs[0], [])
        elif (
            is_dequantize_linear(node)
            and (codes := node.inputs[0]) is not None
            and constant(codes) is None
        ):
            found.setdefault(codes, []).append(node)
    return found


def _float_name(
    codes: ir.Value, source: ir.Value | None, dequantizes: tuple[ir.Node, ...]
) -> str:
    for value in (source, codes):
        if value is not None and value.name:
            # A graph output keeps its name behind the pair.
            outputs = {node.outputs[0].name for node in dequantizes}
            plain = value.name.removesuffix(_RENAMED)
            return plain if plain in outputs else value.name
    return ""


def _is_weight(source: ir.Value | None, dequantizes: tuple[ir.Node, ...]) -> bool:
    return constant(source) is not None and not all(
        use.node.op_type in ELEMENTWISE_OPERATORS
        for node in dequantizes
        for use in node.outputs[0].uses()
    )


def _check_value_type(source: ir.Value | None) -> None:
    if source is not None and source.dtype not in (None, ir.DataType.FLOAT):
        raise Refusal(
            "ORP311",
            f"{source.name!r} is {source.dtype.name.lower()}, but its scale is float32; one "
            "type for both is rewritten",
        )
