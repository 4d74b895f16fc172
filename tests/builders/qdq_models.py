# SPDX-License-Identifier: MIT
"""QDQ models from float ones, in text: each activation gets a pair, as a quantiser would."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from rewrite_rules.graph.nodes import is_quantize_linear
from rewrite_rules.mixed_precision_boundaries.place import place_boundaries
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.remarks import Outcome, PassContext, Remarks

from .text_models import proto_of


def grid(
    scale: float = 0.02,
    zero_point: int = 121,
    dtype: ir.DataType = ir.DataType.UINT8,
) -> QuantizationGrid:
    return QuantizationGrid(dtype, np.float32(scale), zero_point)


def parse(text: str, opset: int = 21) -> ir.Model:
    """A model from the text of its graph, with shapes."""
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto_of(text, opset=opset)))


def quantized(
    text: str,
    grids: Mapping[str, QuantizationGrid] | None = None,
    opset: int = 21,
    default: QuantizationGrid | None = None,
    zero_points: bool = True,
) -> ir.Model:
    """Put a pair behind every float activation; without zero points, grids are uint8 of 0.

    What the text dequantises stays as it is.
    """
    model = parse(text, opset)
    graph = model.graph
    real = ir.DataType.FLOAT
    values = [value for value in graph.inputs if value.dtype == real]
    for node in graph:
        if node.op_type != "DequantizeLinear":  # of a constant
            values += [value for value in node.outputs if value.dtype == real]
    for value in values:
        of = (grids or {}).get(value.name, default or grid())
        _put_pair(graph, value, of, zero_points)
    return ir.from_proto(ir.to_proto(model))


def _put_pair(
    graph: ir.Graph, value: ir.Value, of: QuantizationGrid, with_zero_point: bool
) -> None:
    name = value.name
    parameters = [np.asarray(of.scale)]
    if with_zero_point:
        parameters.append(np.asarray(of.zero_point, of.dtype.numpy()))
    initializers = []
    for array, kind in zip(parameters, ("scale", "zero_point"), strict=False):
        made = ir.Value(
            name=f"{name}_{kind}", const_value=ir.tensor(array, name=f"{name}_{kind}")
        )
        graph.register_initializer(made)
        initializers.append(made)
    quantize = ir.node("QuantizeLinear", [value, *initializers], name=f"{name}_QuantizeLinear")
    quantize.outputs[0].name = f"{name}_QuantizeLinear_Output"
    quantize.outputs[0].dtype = of.dtype
    dequantize = ir.node(
        "DequantizeLinear",
        [quantize.outputs[0], *initializers],
        name=f"{name}_DequantizeLinear",
    )
    behind = dequantize.outputs[0]
    behind.name = f"{name}_DequantizeLinear_Output"
    behind.type, behind.shape = value.type, value.shape
    value.replace_all_uses_with(behind, replace_graph_outputs=True)
    quantize.replace_input_with(0, value)
    if behind.is_graph_output():
        value.name = f"{name}_QuantizeLinear_Input"
        behind.name = name
    if (producer := value.producer()) is None:
        graph.insert_before(graph[0], [quantize, dequantize])
    else:
        graph.insert_after(producer, [quantize, dequantize])


def place(model: ir.Model, **options: Any) -> Remarks:
    """Run the rewrite; check the graph that it leaves."""
    remarks = Remarks("mixed_precision_boundaries")
    place_boundaries(model, PassContext(remarks), **options)
    onnx.checker.check_model(ir.to_proto(model))
    return remarks


def serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


def refused(model: ir.Model, words: str, **options: object) -> None:
    """Ask for what is refused, or has nothing to change, with one remark; nothing changes."""
    before = serialized(model)
    (remark,) = place(model, **options)
    outcome = Outcome.NOTE if words == "nothing to change" else Outcome.REFUSED
    assert remark.outcome is outcome and words in remark.reason, remark
    assert serialized(model) == before


def chains(model: ir.Model, constants: bool = False) -> set[str]:
    """Each path between operators over Q and DQ, as ``P>u8>u16>C``; inputs by their names."""
    short = {"UINT8": "u8", "INT8": "i8", "UINT16": "u16", "INT16": "i16"}
    found = set()

    def code_type(node: ir.Node) -> str:
        # Models in files often leave the types of values between nodes out.
        dtype = node.outputs[0].dtype or node.inputs[2].dtype
        return short[dtype.name]

    def follow(value: ir.Value, path: str) -> None:
        if value.is_graph_output():
            found.add(f"{path}>{value.name}")
        for node in value.consumers():
            if node.inputs[0] is not value and "Linear" in node.op_type:
                continue  # a scale or zero point from a Constant node
            if is_quantize_linear(node):
                follow(node.outputs[0], f"{path}>{code_type(node)}")
            elif node.op_type == "DequantizeLinear":
                follow(node.outputs[0], path)
            else:
                found.add(f"{path}>{node.name or node.op_type}")

    for graph in model.graphs():
        for value in graph.inputs:
            if not value.is_initializer():
                follow(value, value.name)
        for node in graph:
            if not is_quantize_linear(node) and node.op_type != "DequantizeLinear":
                for value in node.outputs:
                    follow(value, node.name or node.op_type)
            elif constants and node.inputs[0].is_initializer():
                dtype = node.inputs[0].const_value.dtype
                follow(node.outputs[0], f"constant>{short[dtype.name]}")
    return found


def count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for graph in model.graphs() for node in graph)
