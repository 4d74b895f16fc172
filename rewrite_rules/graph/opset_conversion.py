# SPDX-License-Identifier: MIT
"""Converts a model to a newer opset, or leaves it as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

from rewrite_rules.graph.nodes import inline_functions, label

_CONVERTER = "onnxscript.version_converter"
# onnxscript's converter says so where it hands a model of an older opset to ONNX's own.
_MIN_OPSET = 18
_HANDED_ON = "will be converted using the onnx C API"


def convert_opset(model: ir.Model, opset: int) -> str:
    """Convert a model in place, into other nodes and values; return why it stays as it is.

    That is empty where the model was converted. Its functions are inlined.
    """
    from onnxscript.version_converter import ConvertVersionPass

    graph = model.graph
    # ONNX's own converter makes new nodes; a copy for it would take longer than its work.
    copied = bool(model.functions) or model.opset_imports.get("", _MIN_OPSET) >= _MIN_OPSET
    converted = model.clone() if copied else ir.Model(graph, ir_version=model.ir_version or 1)
    inputs, weights = [*graph.inputs], {v: v.const_value for v in graph.initializers.values()}
    with _warnings() as found:
        try:
            kept = inline_functions(converted) if model.functions else {}
            if kept:
                return next(iter(kept.values()))
            # Without what the whole pass does around it: inline, and remove unused nodes.
            ConvertVersionPass(opset, fallback=True)._convert_pass(converted)
        except Exception as error:  # whatever a converter of another project raises
            # One that fails to write the model leaves its weights among its inputs.
            graph.inputs[:] = inputs
            for value, tensor in weights.items():
                value.const_value = tensor
                graph.register_initializer(value)
            return str(error) or repr(error)
    if found:  # it goes on behind a node that it could not convert
        return found[0]
    if converted.graph.opset_imports.get("", 0) < opset:
        return "onnx.version_converter gave up"
    noted = {label(node): node.metadata_props for node in model.graph.all_nodes()}
    for node in converted.graph.all_nodes():  # ONNX's own converter drops it
        node.metadata_props.update(noted.get(label(node), {}))
    model.graph = converted.graph
    model.functions.clear()
    return ""


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what a converter warns of, instead of logging it."""
    found = list[str]()

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if _HANDED_ON not in record.getMessage():
                found.append(record.getMessage())

    logger, handler = logging.getLogger(_CONVERTER), _Collector(logging.WARNING)
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
