# SPDX-License-Identifier: MIT
"""Small decoders with a cache, written as exporters write them."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser

from .text_models import add_weights

VOCABULARY, PLACES, HEADS, HEAD_SIZE = 48, 40, 2, 8
WIDTH = HEADS * HEAD_SIZE

# Dimensions that must agree have several names, as torch.onnx.export(dynamo=True) names them.
_TORCH = f"""<ir_version: 10, opset_import: ["": 21]>
g (int64[s10, s70] input_ids, int64[s43, s53] attention_mask, int64[s10, s70] position_ids,
   float[s10, {HEADS}, s15, {HEAD_SIZE}] past_key_values_0_key,
   float[s10, {HEADS}, s89, {HEAD_SIZE}] past_key_values_0_value)
=> (float[s10, s70, {VOCABULARY}] logits, float[s10, {HEADS}, t, {HEAD_SIZE}] present_0_key,
    float[s10, {HEADS}, t, {HEAD_SIZE}] present_0_value)
<int64[4] split = {{0, 0, {HEADS}, {HEAD_SIZE}}}, int64[3] merge = {{0, 0, {WIDTH}}},
 int64[2] rows = {{1, 2}}> {{
    word = Gather(table, input_ids)
    place = Gather(places, position_ids)
    x = Add(word, place)
    q2 = MatMul(x, wq)  q3 = Reshape(q2, split)  q = Transpose <perm = [0, 2, 1, 3]> (q3)
    k2 = MatMul(x, wk)  k3 = Reshape(k2, split)  k = Transpose <perm = [0, 2, 1, 3]> (k3)
    v2 = MatMul(x, wv)  v3 = Reshape(v2, split)  v = Transpose <perm = [0, 2, 1, 3]> (v3)
    present_0_key = Concat <axis = 2> (past_key_values_0_key, k)
    present_0_value = Concat <axis = 2> (past_key_values_0_value, v)
    kt = Transpose <perm = [0, 1, 3, 2]> (present_0_key)
    score = MatMul(q, kt)
    counts = Cast <to = 1> (attention_mask)
    mask = Unsqueeze(counts, rows)
    masked = Mul(score, mask)
    share = Softmax <axis = -1> (masked)
    mixed = MatMul(share, present_0_value)
    o3 = Transpose <perm = [0, 2, 1, 3]> (mixed)
    o = Reshape(o3, merge)
    logits = MatMul(o, head)
}}"""

# The size of a head has a name, too, as onnxruntime-genai's model builder writes it.
_GENAI = f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
g (int64[batch_size, sequence_length] input_ids, int32[batch_size] seqlens_k,
   int32 total_sequence_length,
   float[batch_size, kv_heads, past_sequence_length, kv_cache_dim] past_key_values_0_key,
   float[batch_size, kv_heads, past_sequence_length, kv_cache_dim] past_key_values_0_value)
=> (float[batch_size, sequence_length, {VOCABULARY}] logits,
    float[batch_size, kv_heads, total, kv_cache_dim] present_0_key,
    float[batch_size, kv_heads, total, kv_cache_dim] present_0_value) {{
    x = Gather(table, input_ids)
    q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)
    o, present_0_key, present_0_value = com.microsoft.GroupQueryAttention
        <num_heads = {HEADS}, kv_num_heads = {HEADS}> (
            q, k, v, past_key_values_0_key, past_key_values_0_value, seqlens_k,
            total_sequence_length)
    logits = MatMul(o, head)
}}"""

# Four query heads share two of keys; the cache holds a token for each position before.
_GROUPED = f"""<ir_version: 10, opset_import: ["": 21]>
g (int64[B, S] input_ids, int64[B, S] position_ids,
   float[B, {HEADS}, P, {HEAD_SIZE}] past_key_values_0_key,
   float[B, {HEADS}, P, {HEAD_SIZE}] past_key_values_0_value)
=> (float[B, S, {VOCABULARY}] logits, float[B, {HEADS}, T, {HEAD_SIZE}] present_0_key,
    float[B, {HEADS}, T, {HEAD_SIZE}] present_0_value)
<int64[4] split = {{{{0, 0, -1, {HEAD_SIZE}}}}},
 int64[4] heads = {{{{0, 4, -1, {HEAD_SIZE}}}}},
 int64[3] merge = {{{{0, 0, {4 * HEAD_SIZE}}}}},
 float scale = {{{{0.25}}}}, float no = {{{{-1e9}}}}, float yes = {{{{0}}}},
 int64 zero = {{{{0}}}}, int64 one = {{{{1}}}}, int64[1] two = {{{{2}}}},
 {{sizes}}> {{{{
    x = Gather(table, input_ids)
    q2 = MatMul(x, wq)  q3 = Reshape(q2, split)  q = Transpose <perm = [0, 2, 1, 3]> (q3)
    k2 = MatMul(x, wk)  k3 = Reshape(k2, split)  k = Transpose <perm = [0, 2, 1, 3]> (k3)
    v2 = MatMul(x, wv)  v3 = Reshape(v2, split)  v = Transpose <perm = [0, 2, 1, 3]> (v3)
    present_0_key = Concat <axis = 2> (past_key_values_0_key, k)
    present_0_value = Concat <axis = 2> (past_key_values_0_value, v)
    past = Shape <start = 2, end = 3> (past_key_values_0_key)
    new = Shape <start = 1> (input_ids)
    length = Add(past, new)
    count = Squeeze(length)
    places = Range(zero, count, one)
    kt = Transpose <perm = [0, 1, 3, 2]> (present_0_key)
    groups = Reshape(q, sizes)
    {{rows}}
    later = Greater(places, rows)
    mask = Where(later, no, yes)
    product = MatMul(groups, {{keys}})
    scaled = Mul(product, scale)
    masked = Add(scaled, mask)
    share = Softmax <axis = -1> (masked)
    mixed = MatMul(share, {{values}})
    each = Reshape(mixed, heads)
    o3 = Transpose <perm = [0, 2, 1, 3]> (each)
    o = Reshape(o3, merge)
    logits = MatMul(o, head)
}}}}"""
# Query heads on an axis of their own, and as rows of one matrix.
_LAYOUTS = {
    "grouped on an axis": {
        "sizes": f"int64[5] sizes = {{0, 2, 2, -1, {HEAD_SIZE}}}, int64[3] axes = {{1, 2, 4}}",
        "rows": """keys = Unsqueeze(kt, two)  values = Unsqueeze(present_0_value, two)
    rows = Unsqueeze(position_ids, axes)""",
        "keys": "keys",
        "values": "values",
    },
    "grouped in rows": {
        "sizes": f"int64[4] sizes = {{0, 2, -1, {HEAD_SIZE}}}, int64[2] axes = {{1, 3}}",
        "rows": """twice = Concat <axis = 1> (position_ids, position_ids)
    rows = Unsqueeze(twice, axes)""",
        "keys": "kt",
        "values": "present_0_value",
    },
}
FORMS = {"torch": _TORCH, "genai": _GENAI} | {
    name: _GROUPED.format(**layout) for name, layout in _LAYOUTS.items()
}


def decoder(form: str) -> onnx.ModelProto:
    """Return a decoder of one layer, in one of :data:`FORMS`."""
    model = onnx.parser.parse_model(FORMS[form])
    rng = np.random.default_rng(0)
    shapes = {"table": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    shapes |= dict.fromkeys(("wq", "wk", "wv"), (WIDTH, WIDTH))
    if form.startswith("grouped"):
        shapes |= {"wq": (WIDTH, 4 * HEAD_SIZE), "head": (4 * HEAD_SIZE, VOCABULARY)}
    if form == "torch":
        shapes["places"] = (PLACES, WIDTH)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    add_weights(model.graph, weights)
    return model


def genai_feeds(tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """Return what the decoder of onnxruntime-genai's form takes for the first tokens."""
    cache = np.zeros((1, HEADS, 0, HEAD_SIZE), np.float32)
    return {
        "input_ids": np.array([tokens]),
        "seqlens_k": np.array([len(tokens) - 1], np.int32),
        "total_sequence_length": np.array(len(tokens), np.int32),
        "past_key_values_0_key": cache,
        "past_key_values_0_value": cache,
    }


# One of a layer, spelled out, in which any part can be exchanged: query heads, key and value
# heads, tokens and positions that there are.
H, G, TOKENS, POSITIONS = 4, 2, 40, 48

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


# Of a small decoder: what its cache becomes where there is none.
UNCACHED = (
    ("past = Shape<start = 2, end = 3>(past_key)", "past = Sub(one_axis, one_axis)"),
    ("Concat<axis = 2>(past_key, k_turned)", "Identity(k_turned)"),
    ("Concat<axis = 2>(past_value, v)", "Identity(v)"),
)


def small_decoder(
    *changes: tuple[str, str],
    mask: str = ADDED,
    rotary: str = UNTURNED,
    size: int = 8,
    lowest: float = float(np.finfo(np.float32).min),
) -> onnx.ModelProto:
    """Return the decoder of exported ones' inputs, with parts of its text exchanged."""
    width = H * size
    text = _TEXT.format(h=H, g=G, d=size, w=width, mask=mask, rotary=rotary)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(4)
    angles = np.outer(np.arange(POSITIONS), 0.5 ** np.arange(size // 2))
    constants: dict[str, Any] = {
        "table": rng.standard_normal((TOKENS, width)),
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
    add_weights(model.graph, tensors)
    return model
