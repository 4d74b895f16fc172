# SPDX-License-Identifier: MIT
"""Types of values behind operators that onnx's inference does not know.

Types that are written down are right: onnxruntime opens no model in which they are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from rewrite_rules.graph.nodes import DOMAINS, input_of, is_constant, walk
from rewrite_rules.graph.parameters import constant

# Operators of onnxruntime, by the input whose type their results have.
_TABLE = """
0 BiasGelu DynamicQuantizeMatMul FastGelu FusedMatMul Gelu GroupQueryAttention MatMulBnb4
0 MatMulNBits MultiHeadAttention QuickGelu RotaryEmbedding SkipLayerNormalization
0 SkipSimplifiedLayerNormalization
1 DequantizeLinear SimplifiedLayerNormalization
2 EmbedLayerNormalization GatherBlockQuantized
"""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
_LIKE_INPUT = {name: int(index) for index, *names in _ROWS for name in names}
# Which of their results; others are statistics, caches and masks.
_RESULTS = (0, 3)
_NAMED_BY = ("to", "dtype", "output_dtype")


def derive_types(model: ir.Model) -> None:
    """Give values without a type the one that their operator makes, where it is known."""
    opset = model.opset_imports.get("", 0)
    for node in walk(model.graph):
        if all(value.dtype is not None for value in node.outputs):
            continue
        for value, dtype in zip(node.outputs, _types(node, opset), strict=False):
            if value.dtype is None and dtype is not None:
                value.dtype = dtype


def _types(node: ir.Node, opset: int) -> Iterator[ir.DataType | None]:
    """The types of a node's results, as far as they are known."""
    index, filled = _LIKE_INPUT.get(node.op_type), node.attributes.get("value")
    if node.domain not in DOMAINS:
        return
    if is_constant(node):
        tensor = constant(node.outputs[0])
        yield None if tensor is None else tensor.dtype
    elif node.op_type == "ConstantOfShape" and not node.domain:
        yield ir.DataType.FLOAT if filled is None else filled.as_tensor().dtype
    elif node.domain == "" and onnx.defs.has(node.op_type):
        yield from _by_schema(node, opset)
    elif index is not None:
        like = input_of(node, index)
        dtype = None if like is None else like.dtype
        yield from (dtype if place in _RESULTS else None for place in range(_RESULTS[-1] + 1))


def _by_schema(node: ir.Node, opset: int) -> Iterator[ir.DataType | None]:
    """Follow type variables from inputs to results that are tensors.

    The dtype of a sequence or an optional is that of what it holds.
    """
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return
    bound = dict[str, ir.DataType | None]()
    for formal, value in zip(_repeated(schema.inputs), node.inputs, strict=False):
        if value is not None and formal.is_homogeneous:
            is_tensor = isinstance(value.type, ir.TensorType)
            bound.setdefault(formal.type_str, value.dtype if is_tensor else None)
    named = next((node.attributes[n] for n in _NAMED_BY if n in node.attributes), None)
    for formal in _repeated(schema.outputs):
        if formal.type_str in bound:
            yield bound[formal.type_str]
        elif len(formal.types) == 1:
            (text,) = formal.types
            name = text.removeprefix("tensor(").removesuffix(")").upper()
            yield ir.DataType[name] if name in ir.DataType.__members__ else None
        elif named is None or not all(text.startswith("tensor(") for text in formal.types):
            yield None
        else:
            yield ir.DataType(named.as_int())


def _repeated(
    formals: Sequence[onnx.defs.OpSchema.FormalParameter],
) -> Iterator[onnx.defs.OpSchema.FormalParameter]:
    """Repeat the last parameter, which may stand for any number."""
    return itertools.chain(formals, itertools.repeat(formals[-1])) if formals else iter(())
