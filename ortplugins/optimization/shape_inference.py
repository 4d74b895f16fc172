# SPDX-License-Identifier: MIT
"""Gives the values of a model the shapes that onnx can infer."""

from __future__ import annotations

import contextlib

import onnx_ir as ir
import onnx_ir.passes.common

from rewrite_rules.shapes.proved_shapes import unify_dimension_names


def infer_shapes(model: ir.Model) -> None:
    """Give intermediate values their shapes, as far as onnx can tell.

    Done on the user's graph, before it holds operators that onnx does not know. With shapes in
    the file, onnxruntime's memory planner finds a buffer to reuse at once instead of searching
    all of them for each node.
    """
    if _has_sequences(model):
        return  # onnx_ir's pass would call them tensors, and onnxruntime refuse the model
    from rewrite_rules.graph.nodes import check_inlined_size

    try:
        check_inlined_size(model)
    except ValueError:
        return  # functions that call each other would take minutes and fill the memory
    # Lenient: a node that can't be inferred must not cost the others their shapes, and a
    # model without shapes runs as well.
    with contextlib.suppress(Exception):
        onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
        unify_dimension_names(model)


# What makes values that are not tensors.
_SEQUENCES = frozenset({
    "Optional", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "SequenceMap", "SplitToSequence", "StringSplit", "ZipMap",
})  # fmt: skip


def _has_sequences(model: ir.Model) -> bool:
    """Whether values of the model are sequences, optionals or maps."""
    inputs = (value for graph in model.graphs() for value in graph.inputs)
    if any(value.type is not None and _is_other(value.type) for value in inputs):
        return True
    return any(node.op_type in _SEQUENCES for node in model.graph.all_nodes())


def _is_other(kind: ir.TypeProtocol) -> bool:
    return not isinstance(kind, (ir.TensorType, ir.SparseTensorType))
