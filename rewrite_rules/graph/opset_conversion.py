# SPDX-License-Identifier: MIT
"""Converts a model to a newer opset, or leaves it as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir

from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.int8_moves import OPSET as INT8_OPSET
from rewrite_rules.graph.int8_moves import move_int8_codes
from rewrite_rules.graph.nodes import all_nodes, inline_functions, input_of, label, walk
from rewrite_rules.graph.parameters import ints_attribute

_CONVERTER = "onnxscript.version_converter"
# onnxscript's converter says so where it hands a model of an older opset to ONNX's own.
_MIN_OPSET = 18
_HANDED_ON = "will be converted using the onnx C API"
# Of opset 13 to 18, in ONNX's definitions: other operators mean the same, or have new
# attributes whose defaults are what they did. RoiAlign's default is another since 16.
_FIRST_OPSET = 13
_AXES_BECOME_INPUTS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSumSquare",
})  # fmt: skip
# Operators that onnxruntime 1.32 computes up to opset 21 only.
_LOST_OPSET = 22
_LOST = frozenset({
    "Bernoulli", "GlobalLpPool", "MaxRoiPool", "Multinomial", "RandomNormal",
    "RandomNormalLike", "RandomUniform", "RandomUniformLike", "RoiAlign",
})  # fmt: skip
# Operators with another meaning from an opset on, which ONNX's own converter does not heed.
_REDEFINED = {"Hardmax": 13, "Resize": 11, "Upsample": 10}


def convert_opset(model: ir.Model, opset: int) -> str:
    """Convert a model in place, into other nodes and values; return why it stays as it is.

    That is empty where the model was converted. Its functions are inlined.
    """
    from onnxscript.version_converter import ConvertVersionPass

    graph = model.graph
    given = model.opset_imports.get("", _MIN_OPSET)
    if given < _LOST_OPSET <= opset:
        kinds = (node.op_type for node in all_nodes(model) if not node.domain)
        if lost := next(filter(_LOST.__contains__, kinds), None):
            return f"onnxruntime has no kernel for {lost} since opset {_LOST_OPSET}"
    # ONNX's own converter makes new nodes, and needs no copy.
    copied = bool(model.functions) or given >= _FIRST_OPSET
    converted = model.clone() if copied else ir.Model(graph, ir_version=model.ir_version or 1)
    inputs, weights = [*graph.inputs], {v: v.const_value for v in graph.initializers.values()}
    with _warnings() as found:
        try:
            if kept := inline_functions(converted):
                return next(iter(kept.values()))
            _check_converters(converted, given)
            keeps_nodes = _keeps_meaning(converted)
            if keeps_nodes and given < _MIN_OPSET:
                _spell_as_18(converted)
            # No public API converts alone: the whole pass also removes nodes that nothing
            # reads, custom operators among them, and inlines what has to stay.
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
    if not keeps_nodes:  # ONNX's own converter drops it
        noted = {label(node): node.metadata_props for node in walk(model.graph)}
        for node in walk(converted.graph):
            node.metadata_props.update(noted.get(label(node), {}))
    if given < INT8_OPSET <= opset:
        move_int8_codes(converted)
    model.graph = converted.graph
    model.functions.clear()
    return ""


def _check_converters(model: ir.Model, opset: int) -> None:
    """Raise a ValueError if a converter would make something else of a node."""
    for node in walk(model.graph):
        if not node.domain and _is_misread(node, opset):
            kind = node.op_type
            raise ValueError(f"converters misread {kind} {label(node)!r} of opset {opset}")


def _is_misread(node: ir.Node, opset: int) -> bool:
    """Whether ONNX's own converter, or from opset 13 on onnxscript's, misreads a node."""
    x, others = node.inputs[0] if node.inputs else None, node.outputs[1:]
    match node.op_type:
        case "Clip" | "Pad":  # numbers become inputs, of float32
            return opset < 11 and x is not None and x.dtype is not ir.DataType.FLOAT
        case "Dropout":  # its mask at inference is another one
            return opset < 12 and any(v.uses() or v.is_graph_output() for v in others)
        case "GroupNormalization":  # scales of groups become those of channels
            return opset < 21 and x is not None and not isinstance((x.shape or (0, 0))[1], int)
    return opset < _REDEFINED.get(node.op_type, 0)


def _keeps_meaning(model: ir.Model) -> bool:
    """Whether onnxscript's converter takes a model once it is spelt as in opset 18."""
    opset = model.opset_imports.get("", _MIN_OPSET)
    if opset >= _MIN_OPSET:
        return True
    nodes = [node for node in walk(model.graph) if not node.domain]
    known = all(onnx.defs.has(kind, opset) for kind in {node.op_type for node in nodes})
    # Statistics of a BatchNormalization that trains are other outputs since opset 14.
    trains = any(n.op_type == "BatchNormalization" and len(n.outputs) > 1 for n in nodes)
    aligns = opset < 16 and any(node.op_type == "RoiAlign" for node in nodes)
    return opset >= _FIRST_OPSET and known and not trains and not aligns


def _spell_as_18(model: ir.Model) -> None:
    """Give the nodes of opset 13 to 17 the inputs and attributes of opset 18."""
    names, made = FreshNames(model), dict[tuple[int, ...], ir.Value]()
    for node in walk(model.graph):
        if node.domain:
            continue
        node.version = None
        axes = ints_attribute(node, "axes") if node.op_type in _AXES_BECOME_INPUTS else None
        if axes is not None:
            if tuple(axes) not in made:
                tensor = ir.tensor(axes, ir.DataType.INT64, name=names.take("axes"))
                made[tuple(axes)] = new_initializer(model.graph, tensor)
            node.resize_inputs(2)
            node.replace_input_with(1, made[tuple(axes)])
            del node.attributes["axes"]
        elif node.op_type == "Split" and input_of(node, 1) is None:
            node.attributes.add(ir.AttrInt64("num_outputs", len(node.outputs)))
    model.graph.opset_imports[""] = _MIN_OPSET


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
