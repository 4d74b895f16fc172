# SPDX-License-Identifier: MIT
"""A decoder of one layer with a cache, spelled out, in which any part can be exchanged."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

# Query heads, key and value heads, tokens that there are.
H, G, VOCABULARY, POSITIONS = 4, 2, 40, 48

_TEXT = """<ir_version: 10, opset_import: ["": 21]>
decoder (int64[B, S] input_ids, int64[B, T] attention_mask,
         float[B, {g}, P, {d}] past_key, float[B, {g}, P, {d}] past_value)
    => (float[B, S, {w}] y, float[B, {g}, U, {d}] key, float[B, {g}, U, {d}] value)
<int64[4] q_sizes = {{0, 0, {h}, {d}}}, int64[4] k_sizes = {{0, 0, {g}, {d}}},
 int64[3] flat = {{0, 0, {w}}}, int64[{h}] shared = {{0, 0, 1, 1}}, int64[1] last = {{-1}},
 int64[1] one_axis = {{1}}, int64[2] two_axes = {{1, 2}}, int64[2] first_axes = {{0, 1}},
 int64 zero = {{0}}, int64 one = {{1}}> {{
    hidden = Gather(table, input_ids)
    q_rows = MatMul(hidden, q_weight)
    q_split = Reshape(q_rows, q_sizes)
    q = Transpose<perm = [0, 2, 1, 3]>(q_split)
    k_rows = MatMul(hidden, k_weight)
    k_split = Reshape(k_rows, k_sizes)
    k = Transpose<perm = [0, 2, 1, 3]>(k_split)
    v_rows = MatMul(hidden, v_weight)
    v_split = Reshape(v_rows, k_sizes)
    v = Transpose<perm = [0, 2, 1, 3]>(v_split)
    past = Shape<start = 2, end = 3>(past_key)
    length = Shape<start = 1, end = 2>(input_ids)
    total = Add(past, length)
    past_number = Squeeze(past)
    total_number = Squeeze(total)
    columns = Range(zero, total_number, one)
    positions = Range(past_number, total_number, one)
    {rotary}
    key = Concat<axis = 2>(past_key, k_turned)
    value = Concat<axis = 2>(past_value, v)
    k_all = Gather<axis = 1>(key, shared)
    v_all = Gather<axis = 1>(value, shared)
    k_right = Transpose<perm = [0, 1, 3, 2]>(k_all)
    product = MatMul(q_turned, k_right)
    scaled = Mul(product, scale)
    rows = Unsqueeze(positions, one_axis)
    before = LessOrEqual(columns, rows)
    real = Cast<to = 9>(attention_mask)
    real_columns = Unsqueeze(real, two_axes)
    seen = And(real_columns, before)
    {mask}
    weights = Softmax<axis = -1>(masked)
    mixed = MatMul(weights, v_all)
    merged = Transpose<perm = [0, 2, 1, 3]>(mixed)
    y_rows = Reshape(merged, flat)
    y = MatMul(y_rows, o_weight)
}}"""
ADDED = """bias = Where(seen, nothing, lowest)
    masked = Add(scaled, bias)"""
UNTURNED = """q_turned = Identity(q)
    k_turned = Identity(k)"""
# Halves that are turned one by one, as gpt-oss does it.
HALVES = """cos_rows = Gather(cos_table, positions)
    sin_rows = Gather(sin_table, positions)
    cos = Unsqueeze(cos_rows, first_axes)
    sin = Unsqueeze(sin_rows, first_axes)
""" + "".join(
    f"""{x}_1, {x}_2 = Split<axis = -1, num_outputs = 2>({x})
    {x}_1_cos = Mul({x}_1, cos)
    {x}_2_sin = Mul({x}_2, sin)
    {x}_2_cos = Mul(cos, {x}_2)
    {x}_1_sin = Mul(sin, {x}_1)
    {x}_low = Sub({x}_1_cos, {x}_2_sin)
    {x}_high = Add({x}_2_cos, {x}_1_sin)
    {x}_turned = Concat<axis = -1>({x}_low, {x}_high)
    """
    for x in "qk"
)
# Halves exchanged, and the sign of the first in the sines.
SIGNED = """cos_half = Gather(cos_table, positions)
    sin_half = Gather(sin_table, positions)
    minus = Neg(sin_half)
    cos_rows = Concat<axis = -1>(cos_half, cos_half)
    sin_rows = Concat<axis = -1>(minus, sin_half)
    cos = Unsqueeze(cos_rows, first_axes)
    sin = Unsqueeze(sin_rows, first_axes)
""" + "".join(
    f"""{x}_1, {x}_2 = Split<axis = -1, num_outputs = 2>({x})
    {x}_swapped = Concat<axis = -1>({x}_2, {x}_1)
    {x}_cos = Mul({x}, cos)
    {x}_sin = Mul({x}_swapped, sin)
    {x}_turned = Add({x}_cos, {x}_sin)
    """
    for x in "qk"
)


def small_decoder(
    *changes: tuple[str, str],
    mask: str = ADDED,
    rotary: str = UNTURNED,
    size: int = 8,
    lowest: float = float(np.finfo(np.float32).min),
) -> onnx.ModelProto:
    """Return the decoder; its inputs are those of exported ones.

    Args:
        *changes: Parts of the text, and what stands there instead.
        mask: Nodes from ``scaled`` and ``seen`` to ``masked``.
        rotary: Nodes from ``q`` and ``k`` to ``q_turned`` and ``k_turned``.
        size: Of a head.
        lowest: What hides a score.
    """
    width = H * size
    text = _TEXT.format(h=H, g=G, d=size, w=width, mask=mask, rotary=rotary)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(4)
    angles = np.outer(np.arange(POSITIONS), 0.5 ** np.arange(size // 2))
    constants: dict[str, Any] = {
        "table": rng.standard_normal((VOCABULARY, width)),
        "q_weight": rng.standard_normal((width, width)) / 3,
        "k_weight": rng.standard_normal((width, G * size)) / 3,
        "v_weight": rng.standard_normal((width, G * size)) / 3,
        "o_weight": rng.standard_normal((width, width)) / 3,
        "sinks": rng.standard_normal((1, H, 1, 1)),
        "cos_table": np.cos(angles),
        "sin_table": np.sin(angles),
        "scale": np.float32(0.3),
        "nothing": np.float32(0),
        "lowest": np.float32(lowest),
    }
    dtype = ml_dtypes.bfloat16 if "bfloat16" in text else np.float32
    dtype = np.float16 if " float16" in text else dtype
    with np.errstate(over="ignore"):
        tensors = {name: array.astype(dtype) for name, array in constants.items()}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()
    )
    return model
