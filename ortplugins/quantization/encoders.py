# SPDX-License-Identifier: MIT
"""Which models look like encoders, and what weights of few bits cost them: for a note.

An encoder reads all tokens of a text or an image at once, where weights of few bits take
longer than floats: only integers on both sides are faster.
"""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.facts.input_roles import Kind, role_of, rows_below
from rewrite_rules.graph.nodes import all_nodes
from rewrite_rules.graph.parameters import constant

_ATTENTION = frozenset({"Attention", "MultiHeadAttention", "PackedAttention"})
_PRODUCTS = frozenset({"Gemm", "MatMul"})
# Between a constant and a product, with the same numbers but for rounding.
_SAME = frozenset({"Cast", "DequantizeLinear", "Transpose"})

SLOWER = (
    "an encoder reads all tokens of a text or an image at once: with weights of few bits that "
    "takes longer than in float, short texts apart; quantize-encoder8 is faster"
)
"""Of a model that is one, and whose weights alone are quantised."""


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
