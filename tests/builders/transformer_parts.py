# SPDX-License-Identifier: MIT
"""Text of attention on shared heads, of norms and of Gelu, as exporters spell them."""

import re
from pathlib import Path

import onnx
import onnx_ir as ir

from builders.text_cases import TextCase, text_cases
from builders.text_models import proto_of

# Query heads, key and value heads, size of a head.
H, G, D = 6, 2, 4


R = H // G


CASES = text_cases(Path(__file__).with_suffix(".txt"))


def _named(kind: str) -> dict[str, TextCase]:
    return {k.removeprefix(kind): case for k, case in CASES.items() if k.startswith(kind)}


REPEATS, LAYOUTS, STAYS = map(_named, ("repeat: ", "layout: ", "stays: "))


def parsed(text: str, *changes: tuple[str, str]) -> onnx.ModelProto:
    """Read a model from its text, with parts of it exchanged."""
    for change in changes:
        assert change[0] in text
        text = text.replace(*change)
    return proto_of(text)


def attention(
    repeat: str = "expand", layout: str = "transpose", *changes: tuple[str, str]
) -> onnx.ModelProto:
    """``Softmax(q @ k') @ v`` of ``q[B, H, S, D]`` and repeated heads of k and v."""
    nodes = REPEATS[repeat].nodes
    heads = [re.sub(r"\bX(?=_|\b)", name, nodes) for name in "kv"]
    text = f"""attention (float[B, {H}, S, {D}] q, float[B, {G}, T, {D}] k,
    float[B, {G}, T, {D}] v, float[C, {G}, U, {D}] other) => (float[B, {H}, S, {D}] y)
<int64[1] groups = {{{G}}}, int64[1] repeats = {{{R}}}, int64[1] heads = {{{H}}},
 int64[1] head_size = {{{D}}}, int64[1] two = {{2}}, int64[1] minus = {{-1}},
 int64[4] asked = {{0, {H}, -1, {D}}}, int64[5] tiles = {{1, 1, {R}, 1, 1}},
 float scale = {{0.5}}> {{
    {" ".join(heads)}
    {LAYOUTS[layout].nodes}
    scores = MatMul(q, k_right)
    weights = Softmax<axis = -1>(scores)
    y = MatMul(weights, v_all)
}}"""
    # The nodes are written in the order of reading.
    graph = ir.from_proto(parsed(text, *changes))
    graph.graph.sort()
    model = ir.to_proto(graph)
    onnx.checker.check_model(model)
    return model


def norm(*changes: tuple[str, str]) -> onnx.ModelProto:
    """The root-mean-square norm of ``a + b``; outputs ``y`` and the sum ``x``."""
    text = """n (float[2, 3, 8] a, float[2, 3, 8] b) => (float[B, S, 8] y, float[B, S, 8] x)
    <float two = {2}, float one = {1}, float epsilon = {1e-6}, int64[1] last = {-1},
     float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}> {
        x = Add(a, b)
        square = Pow(x, two)
        mean = ReduceMean<keepdims = 1>(square, last)
        shifted = Add(mean, epsilon)
        root = Sqrt(shifted)
        inverse = Reciprocal(root)
        normal = Mul(x, inverse)
        y = Mul(normal, weight)
    }"""
    return parsed(text, *changes)


def gelu(*changes: tuple[str, str]) -> onnx.ModelProto:
    """Gelu by tanh, as TorchScript's exporter writes it."""
    text = """gelu (float[B, 8] x) => (float[B, 8] y)
    <float one = {1}, float half = {0.5}, float cubic = {0.044715},
     float root = {0.7978845834732056}> {
        square = Mul(x, x) cube = Mul(x, square) c = Mul(cubic, cube) b = Add(x, c)
        a = Mul(root, b) t = Tanh(a) g = Add(one, t) h = Mul(x, g) y = Mul(half, h)
    }"""
    return parsed(text, *changes)
