# SPDX-License-Identifier: MIT
"""Small decoders with a cache, written as exporters write them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser

from .text_cases import text_cases
from .text_models import add_weights

VOCABULARY, HEADS, HEAD_SIZE = 48, 2, 8
WIDTH = HEADS * HEAD_SIZE

# The size of a head has a name, too.
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


def genai_decoder() -> onnx.ModelProto:
    """Return a decoder of one layer, as onnxruntime-genai's model builder writes it."""
    model = onnx.parser.parse_model(_GENAI)
    rng = np.random.default_rng(0)
    shapes = {"table": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    shapes |= dict.fromkeys(("wq", "wk", "wv"), (WIDTH, WIDTH))
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    add_weights(model.graph, weights)
    return model


def genai_feeds(tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """Return what :func:`genai_decoder` takes for the first tokens."""
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
         float[B, {g}, P, {d}] past_key, float[B, {g}, P, {d}] past_value{inputs})
    => ({outputs}float[B, S, {w}] y, float[B, {g}, U, {d}] key, float[B, {g}, U, {d}] value)
<int64[4] q_sizes = {{0, 0, {h}, {d}}}, int64[4] k_sizes = {{0, 0, {g}, {d}}},
 int64[3] flat = {{0, 0, {w}}}, int64[1] last = {{-1}}, int64[1] after_heads = {{2}},
 int64[5] repeats = {{1, 1, 2, 1, 1}}, int64[1] heads = {{{h}}}, int64[1] head_size = {{{d}}},
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
    {repeated}
    k_right = Transpose<perm = [0, 1, 3, 2]>(k_all)
    product = MatMul(q_turned, k_right)
    scaled = Mul(product, scale)
    rows = Unsqueeze(positions, one_axis)
    before = LessOrEqual(columns, rows)
    real = Cast<to = 9>(attention_mask)
    real_columns = Unsqueeze(real, two_axes)
    seen = And(real_columns, before)
    bias = Where(seen, nothing, lowest)
    masked = Add(scaled, bias)
    weights = Softmax<axis = -1>(masked)
    mixed = MatMul(weights, v_all)
    merged = Transpose<perm = [0, 2, 1, 3]>(mixed)
    y_rows = Reshape(merged, flat)
    y = MatMul(y_rows, o_weight)
}}"""
# Each key and value head for several query heads.
_REPEATED = "\n    ".join(
    f"""{x}_texts = Shape<start = 0, end = 1>({whole})
    {x}_held = Shape<start = 2, end = 3>({whole})
    {x}_all_sizes = Concat<axis = 0>({x}_texts, heads, {x}_held, head_size)
    {x}_one = Unsqueeze({whole}, after_heads)
    {x}_many = Expand({x}_one, repeats)
    {x}_all = Reshape({x}_many, {x}_all_sizes)"""
    for x, whole in (("k", "key"), ("v", "value"))
)
UNTURNED = """q_turned = Identity(q)
    k_turned = Identity(k)"""
# As transformers turn halves.
TURNED = """cos_half = Gather(cos_table, positions)
    sin_half = Gather(sin_table, positions)
    cos_rows = Concat<axis = -1>(cos_half, cos_half)
    sin_rows = Concat<axis = -1>(sin_half, sin_half)
    cos = Unsqueeze(cos_rows, first_axes)
    sin = Unsqueeze(sin_rows, first_axes)
""" + "".join(
    f"""{x}_1, {x}_2 = Split<axis = -1, num_outputs = 2>({x})
    {x}_minus = Neg({x}_2)
    {x}_swapped = Concat<axis = -1>({x}_minus, {x}_1)
    {x}_cos = Mul({x}, cos)
    {x}_sin = Mul({x}_swapped, sin)
    {x}_turned = Add({x}_cos, {x}_sin)
    """
    for x in "qk"
)


# Of a small decoder: what its cache becomes where there is none.
UNCACHED = """past = Sub(one_axis, one_axis)
    key = Identity(k_turned)
    value = Identity(v)"""


LOWEST = float(np.finfo(np.float32).min)
# Numbers that changes may read.
_SPARE: dict[str, Any] = {
    "begin": [0],
    "middle": [2],
    "eight": [8],
    "thirty": [30],
    "many": [1000],
    "far_back": [-1000],
    "any_rows": [0, -1, 32],
    "any_width": [0, 0, -1],
    "in_turn": [0, 1, 0, 1],
    "backwards": [1, 1, 0, 0],
    "axis_sizes": [0, 2, 2, -1, 8],
    "apart_sizes": [0, 4, -1, 8],
    "mixed_sizes": [0, -1, 4, 8],
    "behind_groups": [1, 2, 4],
    "pos_axes": [1, 3],
    "special": 39,
    "three": 3,
    "thirty_tokens": 30,
    "half": 0.5,
    "negative": -0.3,
    "floor": -0.99,
    "ceiling": 2.5,
    "tiny": 100 / float(np.finfo(np.float32).max),
}


def _replaced(text: str, nodes: str) -> str:
    """Put nodes in the place of those that make the same values, new ones before the next."""
    lines, waiting = text.splitlines(), list[str]()
    for node in nodes.splitlines():
        waiting.append(node)
        made = _made(node)
        if old := [line for line in lines if made & _made(line)]:
            at = lines.index(old[0])
            lines[at : at + 1], waiting = waiting, []
    assert not waiting, waiting
    return "\n".join(lines)


def _made(line: str) -> set[str]:
    names, is_node, _ = line.strip().partition(" = ")
    return set(names.split(", ")) if is_node else set()


def small_decoder(
    *changes: tuple[str, str] | str,
    rotary: str = UNTURNED,
    inputs: str = "",
    outputs: str = "",
    size: int = 8,
    lowest: float = LOWEST,
) -> onnx.ModelProto:
    """Return the decoder of exported ones' inputs, and more, with parts of its text changed.

    A change is a text and what takes its place, or nodes, each on a line, which take the
    place of those that make the same values.
    """
    width = H * size
    ends = {"inputs": inputs and f", {inputs}", "outputs": outputs and f"{outputs}, "}
    parts = {"rotary": rotary, "repeated": _REPEATED}
    text = _TEXT.format(h=H, g=G, d=size, w=width, **parts, **ends)
    for change in changes:
        if isinstance(change, str):
            text = _replaced(text, change)
            continue
        assert change[0] in text, change
        text = text.replace(*change)
    model = onnx.parser.parse_model(text)
    read = {value.name for value in model.graph.output}
    for node in reversed(list(model.graph.node)):
        if read.isdisjoint(node.output) and str in map(type, changes):
            model.graph.node.remove(node)
        else:
            read.update(node.input)
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
        "cos_both": np.cos(np.tile(angles, 2)),
        "sin_both": np.sin(np.tile(angles, 2)),
        "scale": np.float32(0.3),
        "nothing": np.float32(0),
        "lowest": np.float32(lowest),
        **{name: number for name, number in _SPARE.items() if name in read},
    }
    dtype = np.float16 if " float16" in text else np.float32
    arrays = {name: np.asarray(given) for name, given in constants.items()}
    with np.errstate(over="ignore"):
        tensors = {k: a.astype(dtype) if a.dtype.kind == "f" else a for k, a in arrays.items()}
    add_weights(model.graph, tensors)
    return model


ROTARIES = {"UNTURNED": UNTURNED, "TURNED": TURNED}
CASES = text_cases(Path(__file__).with_suffix(".txt"))


def changed(name: str) -> onnx.ModelProto:
    """Return the small decoder as one of :data:`CASES` changes it."""
    given = {**CASES[name].settings}
    given.pop("page", None)  # what docs/transformer-fusion.md calls it
    exchanged = ("float[", f"{given.pop('type', 'float')}[")
    model = small_decoder(
        CASES[name].nodes,
        exchanged,
        rotary=ROTARIES[given.pop("rotary", "UNTURNED")],
        size=int(given.pop("size", 8)),
        lowest=float(given.pop("lowest", LOWEST)),
        **given,
    )
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return model
