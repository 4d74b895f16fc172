# SPDX-License-Identifier: MIT
"""What is known of encoders in few bits, by figures of MiniLM-L6: notes, decided by looks.

An encoder reads all tokens of a text or an image at once, where weights of few bits take
longer than floats: only integers on both sides are faster.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import onnx_ir as ir

from rewrite_rules.facts.input_roles import Kind, role_of, rows_below
from rewrite_rules.graph.nodes import all_nodes, dequantizer
from rewrite_rules.graph.parameters import constant

# Operators that multiply codes.
INTEGER_PRODUCTS = frozenset({
    "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QAttention", "QGemm",
    "QLinearMatMul",
})  # fmt: skip
_ATTENTION = frozenset({"Attention", "MultiHeadAttention", "PackedAttention", "QAttention"})
_PRODUCTS = frozenset({"Gemm", "MatMul"})
# Between a constant and a product, with the same numbers but for rounding.
_SAME = frozenset({"Cast", "DequantizeLinear", "QuantizeLinear", "Transpose"})

SLOWER = (
    "an encoder reads all tokens of a text or an image at once: with weights of few bits that "
    "takes longer than in float, short texts apart; quantize-encoder8 is faster"
)
"""Of a model that is one, and whose weights alone are quantised."""

_FORMS = {
    "dynamic": (
        "take the ranges of activations from each batch: the numbers of a text depend on "
        "those beside it and on padding. MiniLM-L6 has a cosine of .994 to float like this, "
        "in .42 of its time"
    ),
    "static": (
        "read activations of 8 bits with one scale each. MiniLM-L6 has a cosine of .93 to "
        "float like this"
    ),
    "weights": (
        "have weights of few bits and activations in float. MiniLM-L6 takes 1.13 of float's "
        "time like this"
    ),
}
_OURS = "ortplugins quantize-encoder8, of the float model, has .999 and .41 of float's time"


def is_encoder(model: ir.Model) -> bool:
    """Whether a model looks like one: of ids or numbers, no cache, no words predicted."""
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    roles = {value: role_of(value) for value in inputs}
    kinds = {role.kind for role in roles.values()}
    rows = [rows_below(value) for value, role in roles.items() if role.kind is Kind.IDS]
    ends = [value.shape[-1] for value in model.graph.outputs if value.shape]
    if Kind.CACHE in kinds or any(row is not None and row in ends for row in rows):
        return False
    seen = (v for v in inputs if v.dtype is not None and v.dtype.is_floating_point())
    return bool(rows) or (any(len(v.shape or ()) > 2 for v in seen) and _attends(model))


def _attends(model: ir.Model) -> bool:
    """Whether rows are mixed by numbers that are computed of them."""
    return any(
        node.op_type in _ATTENTION
        or (node.op_type == "MatMul" and not any(map(_is_weight, node.inputs)))
        for node in all_nodes(model)
    )


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a constant, or made of one alone."""
    node = None if value is None else value.producer()
    if constant(value) is None and node is not None and node.op_type in _SAME:
        return _is_weight(node.inputs[0])
    return constant(value) is not None


def notes_on_codes(model: ir.Model) -> Iterator[str]:
    """Yield what quantize-encoder8 would gain for an encoder that is quantised already."""
    if is_encoder(model):
        counts = collections.Counter(map(_form, all_nodes(model)))
        for form, text in _FORMS.items():
            if counts[form]:
                yield f"{counts[form]} products {text}; {_OURS}"


def _form(node: ir.Node) -> str:
    """Return how a product is quantised; nothing if it is not, or as by encoder8."""
    sources = [None if value is None else value.producer() for value in node.inputs]
    makers = {maker.op_type for maker in sources if maker is not None}
    if node.op_type in INTEGER_PRODUCTS:
        if node.op_type == "DynamicQuantizeMatMul" or "DynamicQuantizeLinear" in makers:
            return "dynamic"
        return "" if node.op_type == "MatMulIntegerToFloat" else "static"
    if node.op_type == "MatMulNBits":
        return "weights"
    if node.op_type in _PRODUCTS and len(node.inputs) > 1:
        activation, weight = (dequantizer(value) for value in node.inputs[:2])
        if weight is not None and constant(weight.inputs[0]) is not None:
            return "static" if activation is not None else "weights"
    return ""
