# SPDX-License-Identifier: MIT
"""onnxruntime's ``quantize_static``, and what of a model it is not given.

Nodes of which it would make other numbers than rounded ones, or which it fails on, stay in
float.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxruntime.quantization import QuantFormat, quantize_static

from ortplugins.errors import CalibrationError, QuantizationError
from ortplugins.model_io.names_aside import put_back, set_aside
from ortplugins.model_io.saving import save_with_data
from ortplugins.samples.made_up import Feed
from rewrite_rules.graph.nodes import input_of, is_dequantize_linear, label
from rewrite_rules.graph.parameters import constant, float_attribute, int_attribute


def quantize_to_eight_bits(
    model: ir.Model,
    scratch: Path,
    samples: Sequence[Feed],
    *,
    keep_relu: bool,
    nodes_to_exclude: Sequence[str],
    **settings: Any,
) -> tuple[ir.Model, list[str]]:
    """Quantise a model, by way of files in a folder; nodes without a name get one.

    A Relu or Clip whose range the 8 bits have goes, as in onnxruntime, unless ``keep_relu``.
    Return the QDQ graph, and notes on what stays in float.
    """
    graph = model.graph
    for node in graph:
        node.name = label(node)
    floats = {label(node): why for node, why in _kept_in_float(graph)}
    aside = set_aside(model)
    feeds = ({aside.get(name, name): x for name, x in feed.items()} for feed in samples)
    shared = _shared_weights(graph) if settings["per_channel"] else ()
    by_tensor = {name: [{"quant_type": settings["weight_type"]}] for name in shared}
    extra = {"QDQKeepRemovableActivations": keep_relu} | settings.pop("extra_options", {})
    extra["TensorQuantOverrides"] = by_tensor | extra.get("TensorQuantOverrides", {})
    path, output = scratch / "model.onnx", scratch / "quantized.onnx"
    save_with_data(model, path)
    try:
        # It prints what it does; its warnings go where the program's do.
        with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
            quantize_static(
                path,
                output,
                types.SimpleNamespace(get_next=functools.partial(next, feeds, None)),
                quant_format=QuantFormat.QDQ,
                use_external_data_format=True,
                nodes_to_exclude=[aside.get(n, n) for n in (*nodes_to_exclude, *floats)],
                extra_options=extra,
                **settings,
            )
    except Exception as error:  # anything, AssertionError among it
        if found := re.search(r"not specified for param (.*?)\. In static mode", str(error)):
            raise _no_range(found[1]) from error
        if "Histogram has not been collected" in str(error):  # as no tensor has a range
            _check_quantized(graph)
        raise QuantizationError(
            f"onnxruntime's quantiser failed: {type(error).__name__}: {error}"
        ) from error
    made = ir.load(output)
    ir.external_data.load_to_model(made)  # its folder goes
    put_back(made, aside)
    made.graph.sort()  # onnxruntime's own overlooks what subgraphs read
    _check_quantized(made.graph)
    return made, [f"{name!r} stays in float: {reason}" for name, reason in floats.items()]


def _kept_in_float(graph: ir.Graph) -> Iterator[tuple[ir.Node, str]]:
    """Yield nodes that onnxruntime's quantiser does not get right, and why."""
    for node in graph:
        x, half = input_of(node, 0), ir.DataType.FLOAT16
        makers = [None if value is None else value.producer() for value in node.inputs]
        if any(maker is not None and is_dequantize_linear(maker) for maker in makers):
            yield node, "it reads a tensor that is dequantised already"
        elif any(v and v.is_graph_input() and v.is_graph_output() for v in node.inputs):
            yield node, "an input that it reads is an output, too"
        elif node.op_type in ("Relu", "Clip") and x is not None:
            seen = any(use.node.graph is not graph for use in x.uses())
            if x.is_graph_output() or seen:
                yield node, f"its input {x.name!r} is read by others"
            elif constant(x) is not None:
                yield node, f"its input {x.name!r} is a constant"
            elif node.op_type == "Clip" and not _holds_zero(node):
                yield node, "its ends are no constants around 0"
        elif node.op_type == "Softmax" and half in (node.outputs[0].dtype, x and x.dtype):
            yield node, "its scale would be float32"
        elif node.op_type in ("Conv", "ConvTranspose", "Gemm") and not _fits_bias(node):
            yield node, "its bias is not one number for each channel of the weight"


def _holds_zero(clip: ir.Node) -> bool:
    """Whether the range of a Clip is constant and has 0 in it."""
    ends = []
    for index, name in enumerate(("min", "max")):
        if name in clip.attributes:  # before opset 11
            ends.append(clip.attributes[name].as_float())
        elif (end := input_of(clip, index + 1)) is not None:
            tensor = constant(end)
            ends.append(np.nan if tensor is None else float(tensor.numpy().item()))
        else:
            ends.append(0.0)
    return ends[0] <= 0 <= ends[1]


def _fits_bias(node: ir.Node) -> bool:
    """Whether a bias is added as it is, a number for each scale of the weight."""
    weight, bias = constant(input_of(node, 1)), constant(input_of(node, 2))
    if bias is None or weight is None:
        return True
    axis = 1 if node.op_type == "ConvTranspose" else 0
    if node.op_type == "Gemm":
        if float_attribute(node, "beta", 1.0) != 1:  # which is set to 1
            return False
        axis = 1 - int_attribute(node, "transB", 0)
    return tuple(bias.shape.numpy()) == (weight.shape.numpy()[axis],)


def _shared_weights(graph: ir.Graph) -> Iterator[str]:
    """Yield weights that can't have a scale for each channel.

    Their readers count the channels along other axes, or Gather takes the scales of.
    """
    for name, value in graph.initializers.items():
        kinds = {
            (use.node.op_type, use.idx, int_attribute(use.node, "transB", 0))
            for use in value.uses()
        }
        if len(kinds) > 1:
            yield name


def _check_quantized(graph: ir.Graph) -> None:
    """Refuse a result without any grid, or with one of no finite scale."""
    rounded = [node for node in graph if node.op_type == "QuantizeLinear"]
    if not rounded:
        raise QuantizationError(
            "nothing to quantise: no chosen node of the main graph has float32 or float16 "
            "inputs and an operator that onnxruntime quantises"
        )
    for node in rounded:
        scale = constant(input_of(node, 1))
        if scale is not None and not np.isfinite(scale.numpy()).all():
            raise _no_range(str(node.inputs[0] and node.inputs[0].name))


def _no_range(name: str) -> CalibrationError:
    name = name.removesuffix("_QuantizeLinear_Input")  # of an output of the graph
    advice = "name its nodes in nodes_to_exclude"
    return CalibrationError(f"tensor {name!r} has no finite range: {advice}")
