# SPDX-License-Identifier: MIT
"""Convolutions along one axis in the forms that have fast kernels on a CPU.

    DepthwiseLine   Conv(x[N, C, T], w[C, 1, k])  -> Squeeze(Conv(Unsqueeze(x), w[C, 1, 1, k]))
    FourierFrames   STFT(x[N, T] or x[N, T, 1], step, window)
                        -> Conv with the transform's own weights

onnxruntime's blocked kernels take two axes. Its STFT of frames whose length is no power of two
runs three transforms for each, and loses digits. Both rules go by measured sizes (onnxruntime
1.32, processor time of one thread):

    depthwise, C x k      64 x 7: .57   40 x 31: .34   512 x 31: .13 to .30   512 x 3: .95
    STFT, frame length    400: .07   1,000: .15   2,000: .31   4,000: .71   256: .28
                          1,024: .97
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.conv_fusion.affine import ANY
from rewrite_rules.conv_fusion.fold_rules import Differs, Folding, FoldingRule
from rewrite_rules.conv_fusion.linear import Float64, Linear, shape_of
from rewrite_rules.graph.nodes import input_of, label, producer
from rewrite_rules.graph.parameters import constant_ints, int_attribute

_LEAST_CHANNELS, _LEAST_KERNEL, _BLOCK = 32, 7, 16
_LONGEST_FRAME, _LONGEST_POWER = 2048, 256
_AXES_ARE_INPUTS = 13
# What a Conv along one axis says of it, and the same of an axis of one element before it.
_LISTS = frozenset({"dilations", "kernel_shape", "strides"})


class DepthwiseLine(FoldingRule):
    """A depthwise convolution along one axis -> along the second of two."""

    avoids_steps = False

    def pattern(self, op, x, w):  # type: ignore[no-untyped-def]
        return op.Conv(x, w, **ANY, _outputs=["out"])

    def find(self, out: ir.Value, **_: ir.Value) -> Linear:
        """Return the convolution, if it is a depthwise one that gains."""
        node = producer(out)
        if int_attribute(node, "group", 1) < _LEAST_CHANNELS:
            raise Differs("it has few groups")
        linear = self._folding.linears.read(node)
        if linear.rank != 3:
            raise Differs("it does not run along one axis")
        channels, each, kernel = shape_of(linear.weight.value)
        if each != 1 or linear.weight.groups != channels:
            raise Differs("it is not depthwise")
        if channels % _BLOCK or kernel < _LEAST_KERNEL:
            raise Differs("its channels are no blocks, or its kernel is short")
        return linear

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the three nodes."""
        linear, node = self._found, producer(out)
        channels, each, kernel = shape_of(linear.weight.value)
        attributes: dict[str, Any] = {
            name: attribute for name, attribute in node.attributes.items() if name != "pads"
        }
        for name in _LISTS & attributes.keys():
            attributes[name] = [1, *attributes[name].as_ints()]
        if (pads := node.attributes.get("pads")) is not None:
            begin, end = pads.as_ints()
            attributes["pads"] = [0, begin, 0, end]
        wide = _with_axis(self._folding, node, op.Unsqueeze, op, x)
        weight = self._folding.linears.new_weight(linear.weight, (channels, each, 1, kernel))
        made = op.Conv(wide, weight, *node.inputs[2:], **attributes, _name=node.name)
        self._folding.fired(node, "runs along two axes, the first of one element")
        return _with_axis(self._folding, node, op.Squeeze, op, made)


def _with_axis(folding: Folding, node: ir.Node, make: Any, op: Any, x: ir.Value) -> ir.Value:
    """Emit an Unsqueeze or Squeeze of axis 2, as the opset of a node has them."""
    if folding.shapes.opset(node) < _AXES_ARE_INPUTS:
        return make(x, axes=[2])  # type: ignore[no-any-return]
    return make(x, op.Constant(value_ints=[2]))  # type: ignore[no-any-return]


class FourierFrames(FoldingRule):
    """An STFT of real frames of constant length -> a convolution."""

    avoids_steps = False

    def pattern(self, op, x, c):  # type: ignore[no-untyped-def]
        return op.STFT(x, c, **ANY, _outputs=["out"])

    def find(self, out: ir.Value, **values: ir.Value) -> tuple[int, Float64]:
        """Return the step, and the window."""
        node, shapes = producer(out), self._folding.shapes
        is_real = any(shapes.match(values["x"], form) for form in ("N T", "N T 1"))
        if not is_real or out.dtype != ir.DataType.FLOAT:
            raise Differs("its input is not known to be float32 of [N, T] or [N, T, 1]")
        step = constant_ints(values["c"])
        window, stated = input_of(node, 2), constant_ints(input_of(node, 3))
        if input_of(node, 3) is not None and stated is None:
            raise Differs("the length of its frames is computed")
        weights = None if window is None else self._folding.affines.constant(window)
        length = weights.size if weights is not None else (stated or [0])[0]
        if step is None or len(step) != 1 or step[0] < 1:
            raise Differs("its step is computed")
        is_power = length & (length - 1) == 0
        if not 1 < length <= (_LONGEST_POWER if is_power else _LONGEST_FRAME):
            raise Differs("its frames are long, or of a length that has a fast transform")
        return step[0], np.ones(length) if weights is None else weights

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the convolution; real and imaginary parts are neighbours."""
        (step, window), node = self._found, producer(out)
        length, is_half = len(window), int_attribute(node, "onesided", 1)
        bins = length // 2 + 1 if is_half else length
        turns = 2 * np.pi / length * (np.arange(bins)[:, None] * np.arange(length) % length)
        parts = np.stack([np.cos(turns), -np.sin(turns)], axis=1) * window
        graph, linears = node.graph, self._folding.linears
        assert isinstance(graph, ir.Graph)
        weight = parts.reshape(2 * bins, 1, length)
        constant = linears.new_constant(graph, f"{label(node)}.frames", weight)
        if self._folding.shapes.match(x, "N T"):
            channels = op.Unsqueeze(x, op.Constant(value_ints=[1]))
        else:
            channels = op.Transpose(x, perm=[0, 2, 1])
        frames = op.Conv(channels, constant, strides=[step], _name=node.name)
        pairs = op.Transpose(frames, perm=[0, 2, 1])
        self._folding.fired(node, f"frames of {length} are a convolution")
        return op.Reshape(pairs, op.Constant(value_ints=[0, 0, bins, 2]))  # type: ignore[no-any-return]
