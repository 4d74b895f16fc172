# SPDX-License-Identifier: MIT
"""Graphs with branches, on which the order decides the peak of live memory.

    unet       encoder and decoder with skip connections; sizes for Resize come from early maps
    detection  a pyramid of features, with heads for class, box and mask on every level
    gradient   forward, then backward; most of backward needs only shapes of early tensors
    experts    every expert reads the same tokens; a gate weighs them

Nodes lie in the file as an exporter writes them that walks the levels one by one: each kind of
node for all branches, then the next kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Builder:
    """A graph that grows; every node is named after its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def __call__(self, op: str, *inputs: str, **attributes: object) -> str:
        """Add a node and return its output."""
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def ints(self, *numbers: int) -> str:
        """Return an int64 initializer."""
        name = "ints_" + "_".join(map(str, numbers))
        self.initializers[name] = numpy_helper.from_array(np.array(numbers, np.int64), name)
        return name

    def weight(self, *shape: int) -> str:
        """Return a float32 initializer of a shape."""
        name = f"weight_{len(self.initializers)}"
        # Small, so that nothing overflows on the way.
        data = np.full(shape, 0.01, np.float32)
        self.initializers[name] = numpy_helper.from_array(data, name)
        return name

    def conv(self, x: str, channels: int, out: int, kernel: int = 1, stride: int = 1) -> str:
        """Add a convolution and a Relu."""
        pad = [kernel // 2] * 4
        weight = self.weight(out, channels, kernel, kernel)
        made = self("Conv", x, weight, pads=pad, strides=[stride, stride])
        return self("Relu", made)

    def resize_like(self, x: str, like_shape: str, channels: int) -> str:
        """Resize to the height and width of an earlier map, read from its shape."""
        size = self("Slice", like_shape, self.ints(2), self.ints(4))
        batch = self("Slice", like_shape, self.ints(0), self.ints(1))
        target = self("Concat", batch, self.ints(channels), size, axis=0)
        return self("Resize", x, "", "", target, mode="nearest")

    def model(
        self, inputs: dict[str, Sequence[int | str]], outputs: Sequence[str]
    ) -> onnx.ModelProto:
        """Return what has grown, with shapes."""
        graph = helper.make_graph(
            self.nodes,
            "branching",
            [
                helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
                for n, s in inputs.items()
            ],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
            list(self.initializers.values()),
        )
        opset = [helper.make_opsetid("", 21)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=10)
        return onnx.shape_inference.infer_shapes(model, data_prop=True)


def unet(size: int = 512, channels: int = 16, depth: int = 4) -> onnx.ModelProto:
    """A U-Net whose skips are computed again on both sides, as attention gates do."""
    g = Builder()
    x = g.conv("image", 3, channels)
    skips: list[tuple[str, str, int]] = []
    for level in range(depth):
        width = channels << level
        x = g.conv(x, width, width, 3)
        # A side branch for the deep supervision, and the map that the decoder takes.
        wide = g.conv(x, width, 2 * width)
        skip = g.conv(wide, 2 * width, width // 4)
        skips.append((skip, g("Shape", x), width))
        x = g.conv(x, width, 2 * width, 3, stride=2)
    for skip, shape, width in reversed(skips):
        x = g.resize_like(x, shape, 2 * width)
        x = g.conv(x, 2 * width, width)
        x = g("Concat", x, skip, axis=1)
        x = g.conv(x, width + width // 4, width)
    return g.model({"image": [1, 3, size, size]}, [g.conv(x, channels, 1)])


def detection(size: int = 512, channels: int = 32, levels: int = 4) -> onnx.ModelProto:
    """Heads on a pyramid: each is wide inside and small at its end."""
    g = Builder()
    x = g.conv("image", 3, channels, 3, stride=2)
    maps, ends = [x], []
    for _ in range(levels - 1):
        maps.append(g.conv(maps[-1], channels, channels, 3, stride=2))
    shapes = [g("Shape", level) for level in maps]
    # Kind by kind, as a module list is traced: all first layers, all second ones.
    heads = [(level, out) for level in range(levels) for out in (20, 4, 8)]
    first = [g.conv(maps[level], channels, 2 * channels) for level, _ in heads]
    second = [g.conv(value, 2 * channels, 2 * channels, 3) for value in first]
    third = [
        g.conv(value, 2 * channels, out) for value, (_, out) in zip(second, heads, strict=True)
    ]
    for value, (level, out) in zip(third, heads, strict=True):
        pooled = g("MaxPool", value, kernel_shape=[4, 4], strides=[4, 4])
        count = g("Gather", shapes[level], g.ints(0), axis=0)
        target = g("Concat", count, g.ints(out), g.ints(-1), axis=0)
        ends.append(g("Reshape", pooled, target))
    joined = [g("Concat", *ends[kind::3], axis=2) for kind in range(3)]
    return g.model({"image": [1, 3, size, size]}, joined)


def gradient(rows: int = 2048, width: int = 512, layers: int = 8) -> onnx.ModelProto:
    """Layers and their gradients; sums over broadcasts need the shapes of early tensors."""
    g = Builder()
    x, kept, grads = "x", [], []
    for _ in range(layers):
        weight = g.weight(width, width)
        before = g("MatMul", x, weight)
        shape = g("Shape", before)
        after = g("Tanh", before)
        # Only a small statistic of the activation is needed later.
        scale = g("ReduceMean", g("Mul", after, after), g.ints(0), keepdims=1)
        kept.append((weight, shape, scale))
        x = after
    loss = g("ReduceMean", x, g.ints(0), keepdims=1)
    grad = g("Expand", loss, g("Shape", x))
    for weight, shape, scale in reversed(kept):
        grad = g("Mul", grad, g("Expand", scale, shape))
        turned = g("Transpose", weight, perm=[1, 0])
        grads.append(g("ReduceSum", g("Mul", grad, grad), g.ints(0), keepdims=0))
        grad = g("MatMul", grad, turned)
    return g.model({"x": [rows, width]}, [*grads, grad])


def experts(tokens: int = 2048, width: int = 256, count: int = 8) -> onnx.ModelProto:
    """All experts on all tokens, weighed by a gate; wide inside, narrow outside."""
    g = Builder()
    x = g("LayerNormalization", "tokens", g.weight(width), axis=-1)
    gate = g("Softmax", g("MatMul", x, g.weight(width, count)), axis=-1)
    up = [g("MatMul", x, g.weight(width, 4 * width)) for _ in range(count)]
    side = [g("MatMul", x, g.weight(width, 4 * width)) for _ in range(count)]
    act = [g("Mul", value, g("Sigmoid", value)) for value in up]
    both = [g("Mul", a, b) for a, b in zip(act, side, strict=True)]
    down = [g("MatMul", value, g.weight(4 * width, width)) for value in both]
    total = "tokens"
    for index, value in enumerate(down):
        share = g("Gather", gate, g.ints(index), axis=1)
        total = g("Add", total, g("Mul", value, share))
    shape = g("Shape", x)
    return g.model({"tokens": [tokens, width]}, [g("Reshape", total, shape)])


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "unet": unet,
    "unet, deeper": lambda: unet(size=768, channels=8, depth=5),
    "detection": detection,
    "detection, many levels": lambda: detection(size=1024, channels=16, levels=6),
    "gradient": gradient,
    "gradient, wide": lambda: gradient(rows=8192, width=256, layers=12),
    "experts": experts,
    "experts, many": lambda: experts(tokens=1024, width=256, count=24),
}
