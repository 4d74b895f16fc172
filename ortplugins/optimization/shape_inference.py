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
    kinds = (value.type for graph in model.graphs() for value in graph.inputs)
    if any(not isinstance(kind, _TENSORS) for kind in kinds) or any(
        node.op_type in _SEQUENCES for node in model.graph.all_nodes()
    ):
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


# All other types are sequences, optionals and maps, which these operators make.
_TENSORS = ir.TensorType, ir.SparseTensorType, type(None)
_SEQUENCES = frozenset({
    "Optional", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "SequenceMap", "SplitToSequence", "StringSplit", "ZipMap",
})  # fmt: skip
