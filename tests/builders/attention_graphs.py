# SPDX-License-Identifier: MIT
"""Attention of query heads that share key and value heads, as exporters spell it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx

# Query heads, key and value heads, size of a head.
H, G, D = 6, 2, 4
R = H // G

# How ``k[B, G, T, D]`` becomes ``k_all[B, H, T, D]``.
_TARGET = """k_b = Shape<start = 0, end = 1>({sizes})
    k_t = Shape<start = 2, end = 3>({sizes})
    k_target = Concat<axis = 0>(k_b, groups, repeats, k_t, head_size)
    k_merged = Concat<axis = 0>(k_b, heads, k_t, head_size)
    k_one = Unsqueeze(k, two)"""
REPEATS = {
    "expand": _TARGET.format(sizes="k")
    + """
    k_many = Expand(k_one, k_target)
    k_all = Reshape(k_many, k_merged)""",
    # torch.onnx by tracing: sizes of -1 are replaced, though there is none.
    "expand where": _TARGET.format(sizes="k")
    + """
    k_rank = Shape(k_target)
    k_ones = ConstantOfShape<value = int64[1] {1}>(k_rank)
    k_minus = Mul(k_ones, minus)
    k_equal = Equal(k_target, k_minus)
    k_sizes = Where(k_equal, k_ones, k_target)
    k_many = Expand(k_one, k_sizes)
    k_all = Reshape(k_many, k_merged)""",
    # torch.onnx by export: sizes of another layer's cache.
    "expand elsewhere": _TARGET.format(sizes="other")
    + """
    k_many = Expand(k_one, k_target)
    k_all = Reshape<allowzero = 1>(k_many, k_merged)""",
    "tile": _TARGET.format(sizes="k")
    + """
    k_many = Tile(k_one, tiles)
    k_all = Reshape(k_many, k_merged)""",
    "concat": _TARGET.format(sizes="k")
    + """
    k_many = Concat<axis = 2>(k_one, k_one, k_one)
    k_all = Reshape(k_many, k_merged)""",
    "gather": "k_all = Gather<axis = 1>(k, interleaved)",
}
# How ``k_all`` becomes the right operand of the scores' MatMul.
LAYOUTS = {
    "transpose": "k_right = Transpose<perm = [0, 1, 3, 2]>(k_all)",
    "through three axes": """k_flat_sizes = Concat<axis = 0>(minus, k_t_now, head_size)
    k_b_now = Shape<start = 0, end = 2>(k_all)
    k_t_now = Shape<start = 2, end = 3>(k_all)
    k_flat = Reshape(k_all, k_flat_sizes)
    k_turned = Transpose<perm = [0, 2, 1]>(k_flat)
    k_back_sizes = Concat<axis = 0>(k_b_now, head_size, k_t_now)
    k_right = Reshape(k_turned, k_back_sizes)""",
    "scaled": """k_turned = Transpose<perm = [0, 1, 3, 2]>(k_all)
    k_right = Mul(scale, k_turned)""",
}


def parsed(text: str, change: tuple[str, str]) -> onnx.ModelProto:
    """Read a model from its text, with a part of it exchanged; ``""`` for none."""
    assert change[0] in text
    return onnx.parser.parse_model(text.replace(*change) if change[0] else text)


def attention(
    repeat: str = "expand", layout: str = "transpose", change: tuple[str, str] = ("", "")
) -> onnx.ModelProto:
    """Softmax(q @ k') @ v with repeated heads.

    Inputs ``q[B, H, S, D]``, ``k``, ``v`` and ``other`` of ``[B, G, T, D]``; output
    ``y[B, H, S, D]``.

    Args:
        repeat: A key of :data:`REPEATS`.
        layout: A key of :data:`LAYOUTS`.
        change: A part of the text, and what stands there instead.
    """
    keys = f"{REPEATS[repeat]}\n    {LAYOUTS[layout]}"
    values = REPEATS[repeat].replace("k_", "v_").replace("(k,", "(v,").replace("(k)", "(v)")
    text = f"""<ir_version: 10, opset_import: ["": 21]>
attention (float[B, {H}, S, {D}] q, float[B, {G}, T, {D}] k, float[B, {G}, T, {D}] v,
           float[C, {G}, U, {D}] other) => (float[B, {H}, S, {D}] y)
<int64[1] groups = {{{G}}}, int64[1] repeats = {{{R}}}, int64[1] heads = {{{H}}},
 int64[1] head_size = {{{D}}}, int64[1] two = {{2}}, int64[1] minus = {{-1}},
 int64[5] tiles = {{1, 1, {R}, 1, 1}}, float scale = {{0.5}},
 int64[{H}] interleaved = {{{", ".join(str(h // R) for h in range(H))}}}> {{
    {keys}
    {values}
    scores = MatMul(q, k_right)
    weights = Softmax<axis = -1>(scores)
    y = MatMul(weights, v_all)
}}"""
    model = parsed(text, change)
    onnx.checker.check_model(_sorted(model))
    return model


def feeds(batch: int, queries: int, keys: int, seed: int = 0) -> dict[str, npt.NDArray]:
    """Random inputs of :func:`attention`."""
    rng = np.random.default_rng(seed)

    def array(*sizes: int) -> npt.NDArray:
        return rng.standard_normal(sizes).astype(np.float32)

    cache = {name: array(batch, G, keys, D) for name in ("k", "v", "other")}
    return {"q": array(batch, H, queries, D), **cache}


def _sorted(model: onnx.ModelProto) -> onnx.ModelProto:
    """Put the nodes, which are written in the order of reading, into that of computing."""
    import onnx_ir as ir

    graph = ir.from_proto(model)
    graph.graph.sort()
    model.CopyFrom(ir.to_proto(graph))
    return model
