# SPDX-License-Identifier: MIT
"""What looks like attention, rotary embedding or a norm and means something else stays right.

Each case changes the text of a decoder that is fused, or feeds it what no made-up run does.
It may be fused, refused, or fused in part; the numbers are those of the model.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.decoders import ADDED, HALVES, SIGNED, small_decoder
from builders.exports import decoder_feeds, fused
from builders.same_numbers import session as opened
from builders.text_models import proto_of
from numpy.typing import NDArray

from rewrite_rules.facts.made_up_batches import Run

# Prompts, single tokens, chunks after a cache; rows that see nothing come from FEEDS.
SIZES = (Run(1, 6, 0), Run(3, 6, 0), Run(2, 6, 5), Run(1, 1, 5), Run(3, 1, 6), Run(1, 1, 0),
         Run(2, 33, 0), Run(1, 2, 31))  # fmt: skip


def runs_taken(
    model: onnx.ModelProto, result: ir.Model, feeds: Iterable[Mapping[str, NDArray]]
) -> Iterator[list[tuple[NDArray, NDArray]]]:
    """Yield what a result and its model compute, output by output, in runs the model takes."""
    before, after = opened(model), opened(result)
    for feed in feeds:
        try:
            expected = before.run(None, feed)
        except Exception:  # onnxruntime's own classes
            continue
        pairs = list(zip(after.run(None, feed), expected, strict=True))
        assert all(actual.shape == other.shape for actual, other in pairs)
        yield pairs


def agrees(model: onnx.ModelProto, feeds: list[Mapping[str, NDArray]]) -> int:
    """Compare the model with its fusion; return how many runs the model itself takes."""
    result, *_ = fused(model)
    taken = 0
    for pairs in runs_taken(model, result, feeds):
        taken += 1
        for a, b in pairs:
            greatest = np.abs(b[np.isfinite(b)]).max(initial=1)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * greatest)
    return taken


POSITION_INPUT = (
    "int64[B, T] attention_mask,",
    "int64[B, T] attention_mask, int64[B, S] position_ids,",
)
NUMBERS = "int64 zero = {0}"
# Places of keys: numbers of their own for cached ones, positions for new ones.
KEY_PLACES = """past_columns0 = Range(zero, past_number, one)
        rows_of = Shape<start = 0, end = 1>(input_ids)
        past_sizes = Concat<axis = 0>(rows_of, past)
        past_columns = Expand(past_columns0, past_sizes)
        key_places0 = Concat<axis = 1>(past_columns, position_ids)
        key_places = Unsqueeze(key_places0, two_axes)
        query_places = Unsqueeze(position_ids, pos_axes)
        """
# Tokens that open blocks: which columns are special, none of the cached ones.
SPECIAL = """rows_of = Shape<start = 0, end = 1>(input_ids)
        past_sizes = Concat<axis = 0>(rows_of, one_axis, length, past)
        is_special = Equal(input_ids, special)
        special_k = Unsqueeze(is_special, two_axes)
        special_q = Unsqueeze(is_special, pos_axes)
        pairs = {pairs}
        none = ConstantOfShape<value = int64[1] {{0}}>(past_sizes)
        none_bool = Cast<to = 9>(none)
        both = Concat<axis = 3>(none_bool, pairs)
        """
AXES = f"{NUMBERS}, int64[2] pos_axes = {{1, 3}}, int64 special = {{39}}"
SEEN = "seen = And(real_columns, before)"
BEFORE = "before = LessOrEqual(columns, rows)"


def special(pairs: str, seen: str) -> tuple[tuple[str, str], ...]:
    return (SEEN, SPECIAL.format(pairs=pairs) + seen), (NUMBERS, AXES)


# Changes to the decoder's text, its mask, its rotation.
MASKS: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "positions decide": (
        (
            POSITION_INPUT,
            (BEFORE, KEY_PLACES + "before = LessOrEqual(key_places, query_places)"),
            (NUMBERS, AXES),
        ),
        ADDED,
    ),
    "a window of positions": (
        (
            POSITION_INPUT,
            (
                BEFORE,
                KEY_PLACES
                + """limit = Sub(query_places, one)
        near = GreaterOrEqual(key_places, limit)
        earlier = LessOrEqual(key_places, query_places)
        before = And(near, earlier)""",
            ),
            (NUMBERS, AXES),
        ),
        ADDED,
    ),
    "ALiBi by positions": (
        (
            POSITION_INPUT,
            (
                BEFORE,
                KEY_PLACES
                + """far0 = Sub(key_places, query_places)
        far = Cast<to = 1>(far0)
        before = LessOrEqual(columns, rows)""",
            ),
            (NUMBERS, AXES),
        ),
        (
            "seen_bias = Where(seen, nothing, lowest)\nbias = Add(far, seen_bias)\n"
            "masked = Add(scaled, bias)"
        ),
    ),
    "special tokens see each other": (
        special(
            "And(special_q, special_k)",
            "either = Or(before, both)\nseen = And(real_columns, either)",
        ),
        ADDED,
    ),
    "all see special tokens": (
        special(
            "Or(special_k, special_k)",
            "rows_wide = Or(before, both)\nseen = And(real_columns, rows_wide)",
        ),
        ADDED,
    ),
    "special tokens hide from others": (
        special(
            "Or(special_q, special_k)",
            "unseen = Not(both)\nleft = And(before, unseen)\nseen = And(real_columns, left)",
        ),
        ADDED,
    ),
    "long prompts see all": (
        (
            (
                SEEN,
                """longer = Greater(total_number, limit)
        wider = Or(before, longer)
        seen = And(real_columns, wider)""",
            ),
            (NUMBERS, f"{NUMBERS}, int64 limit = {{30}}"),
        ),
        ADDED,
    ),
    "long prompts see nothing of the past": (
        (
            (
                SEEN,
                """near0 = Sub(rows, limit)
        near = Greater(columns, near0)
        window = And(before, near)
        seen = And(real_columns, window)""",
            ),
            (NUMBERS, f"{NUMBERS}, int64 limit = {{30}}"),
        ),
        ADDED,
    ),
    "later tokens": (((BEFORE, "before = GreaterOrEqual(columns, rows)"),), ADDED),
    "not the token itself": (((BEFORE, "before = Less(columns, rows)"),), ADDED),
    "one token ahead": (
        ((BEFORE, "next = Add(rows, one)\nbefore = LessOrEqual(columns, next)"),),
        ADDED,
    ),
    "a mask of small numbers": (
        (),
        ("real_bias = Where(seen, nothing, scale)\nmasked = Add(scaled, real_bias)"),
    ),
    "-100 hides little": (
        (),
        """hundred = Mul(lowest, tiny)
        bias = Where(seen, nothing, hundred)
        masked = Add(scaled, bias)""",
    ),
    "two masks": (
        (),
        """bias = Where(seen, nothing, lowest)
        once = Add(scaled, bias)
        masked = Add(once, bias)""",
    ),
    "two Wheres": (
        (),
        ("inner = Where(before, scaled, lowest)\nmasked = Where(real_columns, inner, lowest)"),
    ),
    "an Add behind a Where": (
        (),
        """inner = Where(before, scaled, lowest)
        bias = Where(real_columns, nothing, lowest)
        masked = Add(inner, bias)""",
    ),
    "a Where behind an Add": (
        (),
        """bias = Where(before, nothing, lowest)
        inner = Add(scaled, bias)
        masked = Where(real_columns, inner, lowest)""",
    ),
    "a mask before the scale": (
        (),
        """bias = Where(seen, nothing, lowest)
        added = Add(product, bias)
        masked = Mul(added, scale)""",
    ),
    "a mask multiplied": ((), "number = Cast<to = 1>(seen)\nmasked = Mul(scaled, number)"),
    "a mask subtracted": ((), "number = Cast<to = 1>(seen)\nmasked = Sub(number, scaled)"),
    "a scale of 0": (
        (
            ("Mul(product, scale)", "Mul(product, other)"),
            (NUMBERS, f"{NUMBERS}, float other = {{0}}"),
        ),
        ADDED,
    ),
    "a scale below 0": (
        (
            ("Mul(product, scale)", "Mul(product, other)"),
            (NUMBERS, f"{NUMBERS}, float other = {{-0.3}}"),
        ),
        ADDED,
    ),
    "a scale by data": (
        (),
        """peak = ReduceMax<keepdims = 1>(product, last)
        divided = Div(scaled, peak)
        bias = Where(seen, nothing, lowest)
        masked = Add(divided, bias)""",
    ),
    "hidden by Not": ((), "masked = Where(seen, lowest, scaled)"),
    "Softmax over queries": ((("Softmax<axis = -1>", "Softmax<axis = 2>"),), ADDED),
    "Softmax over heads": ((("Softmax<axis = -1>", "Softmax<axis = 1>"),), ADDED),
    "weights of ones": (
        (
            ("MatMul(weights, v_all)", "MatMul(seen_weights, v_all)"),
            ("mixed =", "seen_weights = Exp(weights)\nmixed ="),
        ),
        ADDED,
    ),
    "heads in another order": ((("{0, 0, 1, 1}", "{0, 1, 0, 1}"),), ADDED),
    "heads backwards": ((("{0, 0, 1, 1}", "{1, 1, 0, 0}"),), ADDED),
    "values of other heads": (
        (
            (
                "v_all = Gather<axis = 1>(value, shared)",
                "v_all = Gather<axis = 1>(value, others)",
            ),
            (NUMBERS, f"{NUMBERS}, int64[4] others = {{1, 1, 0, 0}}"),
        ),
        ADDED,
    ),
    "tokens and heads merged": (
        (
            ("Transpose<perm = [0, 2, 1, 3]>(mixed)", "Transpose<perm = [0, 1, 2, 3]>(mixed)"),
            ("flat = {0, 0, 32}", "flat = {0, -1, 32}"),
        ),
        ADDED,
    ),
    "keys are values": ((("MatMul(weights, v_all)", "MatMul(weights, k_all)"),), ADDED),
    "new before past": (
        (
            ("Concat<axis = 2>(past_key, k_turned)", "Concat<axis = 2>(k_turned, past_key)"),
            ("Concat<axis = 2>(past_value, v)", "Concat<axis = 2>(v, past_value)"),
        ),
        ADDED,
    ),
    "values the other way round": (
        (("Concat<axis = 2>(past_value, v)", "Concat<axis = 2>(v, past_value)"),),
        ADDED,
    ),
    "a cache that is scaled": (
        (
            (
                "key = Concat<axis = 2>(past_key, k_turned)",
                "less = Mul(past_key, scale)\nkey = Concat<axis = 2>(less, k_turned)",
            ),
        ),
        ADDED,
    ),
    "one key for all new tokens": (
        (
            ("k_turned = Identity(k)", "k_turned = ReduceMean<keepdims = 1>(k, middle)"),
            (
                "v_all = Gather<axis = 1>(value, shared)",
                "v_all = Gather<axis = 1>(value, shared)",
            ),
            (NUMBERS, f"{NUMBERS}, int64[1] middle = {{2}}"),
        ),
        ADDED,
    ),
    "a query for the whole text": (
        (
            ("q_turned = Identity(q)", "q_turned = ReduceMean<keepdims = 1>(q, middle)"),
            (NUMBERS, f"{NUMBERS}, int64[1] middle = {{2}}"),
        ),
        ADDED,
    ),
    "a query for all heads": (
        (("q_turned = Identity(q)", "q_turned = ReduceMean<keepdims = 1>(q, one_axis)"),),
        ADDED,
    ),
    "queries of the first text": (
        (
            ("q_turned = Identity(q)", "q_turned = Slice(q, begin, one_axis, begin)"),
            (NUMBERS, f"{NUMBERS}, int64[1] begin = {{0}}"),
        ),
        ADDED,
    ),
    "the mask of the first text": (
        (
            (
                "real = Cast<to = 9>(attention_mask)",
                (
                    "first_mask = Slice(attention_mask, begin, one_axis, begin)\n"
                    "real = Cast<to = 9>(first_mask)"
                ),
            ),
            (NUMBERS, f"{NUMBERS}, int64[1] begin = {{0}}"),
        ),
        ADDED,
    ),
    "texts change places": (
        (
            (
                "real = Cast<to = 9>(attention_mask)",
                (
                    "turned_mask = Slice(attention_mask, last, end, begin, last)\n"
                    "real = Cast<to = 9>(turned_mask)"
                ),
            ),
            (NUMBERS, f"{NUMBERS}, int64[1] begin = {{0}}, int64[1] end = {{-1000}}"),
        ),
        ADDED,
    ),
    "scores come out": ((("=> (", "=> (float[B, 4, S, T] scaled, "),), ADDED),
    "masked scores come out": ((("=> (", "=> (float[B, 4, S, T] masked, "),), ADDED),
    "the cache is read again": (
        (
            (
                "y = MatMul(y_rows, o_weight)",
                """peak = ReduceMax<keepdims = 0>(key)
        y0 = MatMul(y_rows, o_weight)
        y = Mul(y0, peak)""",
            ),
        ),
        ADDED,
    ),
}


def feeds_of(model: onnx.ModelProto) -> list[Mapping[str, NDArray]]:
    """What no made-up run holds: special tokens, shared positions, texts that are padding."""
    names = {value.name for value in model.graph.input}
    found, rng = list[Mapping[str, NDArray]](), np.random.default_rng(7)
    for sizes in SIZES:
        plain = decoder_feeds(small_decoder(), sizes, 5)
        plain["position_ids"] = np.tile(np.arange(sizes.length) + sizes.past, (sizes.batch, 1))
        ids = plain["input_ids"].copy()
        ids[:, : min(4, sizes.length)] = 39
        places = rng.integers(0, sizes.past + 3, plain["position_ids"].shape)
        holes = rng.integers(0, 2, plain["attention_mask"].shape)
        dead = plain["attention_mask"].copy()
        dead[-1] = 0
        left = plain["attention_mask"].copy()
        left[-1, : sizes.past + sizes.length // 2] = 0
        changes: list[dict[str, NDArray]] = [
            {}, {"input_ids": ids}, {"position_ids": places}, {"attention_mask": holes},
            {"attention_mask": dead}, {"attention_mask": left},
            {"position_ids": places[:, ::-1].copy(), "input_ids": ids},
        ]  # fmt: skip
        for change in changes:
            feed = plain | change
            found.append({name: feed[name] for name in names})
    return found


@pytest.mark.parametrize("case", MASKS)
def test_another_attention_is_right(case: str):
    changes, mask = MASKS[case]
    extra = (("float[B, 2, P, 8] past_key,", "float[B, 2, P, 8] past_key,"),)
    model = small_decoder(*changes, *extra, mask=mask)
    tiny = onnx.numpy_helper.from_array(np.float32(100 / np.finfo(np.float32).max), "tiny")
    model.graph.initializer.append(tiny)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    assert agrees(model, feeds_of(model))


# A rotation, what is changed in it, and how often.
TURNS: dict[str, tuple[str, str, str]] = {
    "halves: sine and cosine exchanged": (HALVES, "Gather(cos_table,", "Gather(sin_table,"),
    "halves: a sign": (HALVES, "Sub(q_1_cos, q_2_sin)", "Add(q_1_cos, q_2_sin)"),
    "halves: the other sign": (HALVES, "Add(q_2_cos, q_1_sin)", "Sub(q_2_cos, q_1_sin)"),
    "halves: both of the first": (HALVES, "Mul(sin, q_1)", "Mul(sin, q_2)"),
    "halves: the second first": (
        HALVES,
        "Concat<axis = -1>(q_low, q_high)",
        "Concat<axis = -1>(q_high, q_low)",
    ),
    "halves: of keys": (
        HALVES,
        "Split<axis = -1, num_outputs = 2>(k)",
        "Split<axis = -1, num_outputs = 2>(k_twice)",
    ),
    "halves: other places for sines": (
        HALVES,
        "Gather(sin_table, positions)",
        "Gather(sin_table, columns)",
    ),
    "signed: no sign": (SIGNED, "Neg(sin_half)", "Identity(sin_half)"),
    "signed: the sign behind": (
        SIGNED,
        "Concat<axis = -1>(minus, sin_half)",
        "Concat<axis = -1>(sin_half, minus)",
    ),
    "signed: twice": (
        SIGNED,
        "Concat<axis = -1>(minus, sin_half)",
        "Concat<axis = -1>(minus, minus)",
    ),
    "signed: other cosines": (
        SIGNED,
        "Concat<axis = -1>(cos_half, cos_half)",
        "Concat<axis = -1>(cos_half, sin_half)",
    ),
    "signed: cut off": (
        SIGNED,
        "Concat<axis = -1>(cos_half, cos_half)",
        "Concat<axis = -1>(cos_half, cos_cut)",
    ),
    "signed: not exchanged": (
        SIGNED,
        "Concat<axis = -1>(q_2, q_1)",
        "Concat<axis = -1>(q_1, q_2)",
    ),
    "signed: cut heads": (
        SIGNED,
        "Concat<axis = -1>(q_2, q_1)",
        "Concat<axis = -1>(q_cut, q_1)",
    ),
    "signed: of another text": (
        SIGNED,
        "Concat<axis = -1>(k_2, k_1)",
        "Concat<axis = -1>(k_else, k_1)",
    ),
    "signed: keys turned back": (SIGNED, "Add(k_cos, k_sin)", "Sub(k_cos, k_sin)"),
    "signed: long texts": (
        SIGNED,
        "Concat<axis = -1>(q_2, q_1)",
        "Concat<axis = -1>(q_long, q_1)",
    ),
}
# Values that some of the changes name; each cuts or moves what seeds seldom show.
CUTS = {
    "k_twice": "k_twice = Add(k, k)",
    "cos_cut": "cos_cut = Max(cos_half, floor)",
    "q_cut": "q_cut = Min(q_2, ceiling)",
    "k_else": "k_else = Slice(k_2, last, far, begin, last)",
    "q_long": """q_tail = Slice(q_2, begin, thirty, middle)
    q_rest = Slice(q_2, thirty, many, middle)
    q_back = Neg(q_rest)
    q_long = Concat<axis = 2>(q_tail, q_back)""",
}
CUT_NUMBERS = (
    f"{NUMBERS}, float floor = {{-0.99}}, float ceiling = {{2.5}}, int64[1] begin = {{0}}, "
    "int64[1] far = {-1000}, int64[1] thirty = {30}, int64[1] many = {1000}, "
    "int64[1] middle = {2}"
)


@pytest.mark.parametrize("case", TURNS)
def test_another_rotation_is_right(case: str):
    rotary, old, new = TURNS[case]
    assert old in rotary
    text = rotary.replace(old, new)
    for name, line in CUTS.items():
        if name in new:
            # Before the node that reads it.
            text = re.sub(rf"\n([^\n]*{re.escape(new)})", rf"\n{line}\n\1", text)
    model = small_decoder((NUMBERS, CUT_NUMBERS), rotary=text)
    assert agrees(model, feeds_of(model))


W = {
    name: np.random.default_rng(number).standard_normal((32, 32)).astype(np.float32) / 5
    for number, name in enumerate(("wq", "wk", "wv", "uq", "uk", "uv"))
} | {"scale": np.float32(0.35)}
LATENTS = {"latents": np.random.default_rng(9).standard_normal((1, 3, 32)).astype(np.float32)}


def heads(name: str, source: str, weight: str) -> str:
    return f"""{name}2 = MatMul({source}, {weight}) {name}3 = Reshape({name}2, s4)
        {name} = Transpose<perm = [0, 2, 1, 3]>({name}3) """


TAIL = """kt = Transpose<perm = [0, 1, 3, 2]>(k) sc = MatMul(q, kt) sc2 = Mul(sc, scale)
    {masked} w = Softmax<axis = -1>(sc3) o = MatMul(w, v)
    o3 = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(o3, flat) """
QUERY, SELF = heads("q", "x", "wq"), heads("k", "x", "wk") + heads("v", "x", "wv")
OTHER = heads("k", "t", "wk") + heads("v", "t", "wv")
JOINED = (
    heads("tk", "t", "uk") + heads("tv", "t", "uv") + heads("xk", "x", "wk")
    + heads("xv", "x", "wv") + "k = Concat<axis = 2>(tk, xk) v = Concat<axis = 2>(tv, xv) "
)  # fmt: skip
PLAIN, MASKED = "sc3 = Identity(sc2)", "sc3 = Add(sc2, m)"
# Nodes before the scores, what is added, and whether there is a mask.
BATCHES = {
    "queries of one batch": (heads("q", "latents", "wq") + OTHER, PLAIN),
    "keys of one batch": (
        QUERY + heads("k", "latents", "wk") + heads("v", "latents", "wv"),
        PLAIN,
    ),
    "values of one batch": (QUERY + heads("k", "t", "wk") + heads("v", "t", "wv"), PLAIN),
    "beams over one encoding": (QUERY + OTHER, PLAIN),
    "joint attention": (
        heads("tq", "t", "uq")
        + heads("xq", "x", "wq")
        + "q = Concat<axis = 2>(tq, xq) "
        + JOINED,
        PLAIN,
    ),
    "one query over a memory": (QUERY + JOINED, PLAIN),
    "any mask": (QUERY + SELF, MASKED),
    "any mask across": (QUERY + OTHER, MASKED),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_and_masks_that_broadcast_are_right(case: str):
    nodes, masked = BATCHES[case]
    text = f"""g (float[batch, sequence, 32] x, float[batch, tokens, 32] t,
        float[a1, a2, a3, a4] m) => (float[b0, b1, b2] y)
        <int64[4] s4 = {{0, 0, 4, 8}}, int64[3] flat = {{0, 0, 32}}> {{
        {nodes} {TAIL.format(masked=masked)} }}"""
    model = proto_of(text, W | LATENTS)
    rng, feeds = np.random.default_rng(3), list[Mapping[str, NDArray]]()
    for batches in ((1, 1), (2, 2), (4, 1), (1, 3), (0, 0)):
        for lengths in ((3, 5), (1, 1), (1, 4), (4, 1), (0, 1), (1, 0), (5, 5)):
            x, t = (
                rng.standard_normal((batch, length, 32)).astype(np.float32)
                for batch, length in zip(batches, lengths, strict=True)
            )
            count = lengths[1] if "across" in case else lengths[0]
            for shape in ((1, 1, 1, 1), (batches[0], 1, lengths[0], count),
                          (1, 4, lengths[0], count), (batches[0], 1, 1, count)):  # fmt: skip
                m = rng.standard_normal(shape).astype(np.float32)
                feeds.append({"x": x, "t": t, "m": m})
                hidden = np.full(shape, [-np.inf, np.finfo(np.float32).min][len(feeds) % 2])
                feeds.append({"x": x, "t": t, "m": hidden.astype(np.float32)})
                if masked == PLAIN:
                    break
    assert agrees(model, feeds)


@pytest.mark.parametrize("rotary", [HALVES, SIGNED])
@pytest.mark.parametrize("tables", [("cos",), ("sin",), ("cos", "sin")])
def test_a_table_of_one_row_serves_all_tokens(rotary: str, tables: tuple[str, ...]):
    for table in tables:
        rotary = rotary.replace(f"({table}_table, positions)", f"({table}_table, last)")
    model = small_decoder(rotary=rotary)
    feeds = [decoder_feeds(model, sizes, seed) for seed, sizes in enumerate(SIZES)]
    assert agrees(model, feeds) == len(SIZES)


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_one_row_split_for_a_batch_has_other_heads(part: str):
    """[1, S, 32] split as [2, S, -1, 8] has two heads, which a MatMul repeats or refuses."""
    model = proto_of(
        f"""g (float[B, S, 32] x, int64[C, T] ids) => (float[B, S, 32] y)
        <float scale = {{0.3}}, int64[2] rest = {{-1, 8}}, int64[1] zero = {{0}},
         int64[1] one = {{1}}, int64[3] flat = {{0, 0, -1}}> {{
            texts = Shape(ids) sizes = Concat<axis = 0>(texts, rest)
            row = Slice(x, zero, one, zero)
            q0 = Sin({"row" if part == "q" else "x"})
            k0 = Cos({"row" if part == "k" else "x"})
            v0 = Neg({"row" if part == "v" else "x"})
            q1 = Reshape(q0, sizes) k1 = Reshape(k0, sizes) v1 = Reshape(v0, sizes)
            q = Transpose<perm = [0, 2, 1, 3]>(q1)
            k = Transpose<perm = [0, 2, 3, 1]>(k1)
            v = Transpose<perm = [0, 2, 1, 3]>(v1)
            scores = MatMul(q, k) scaled = Mul(scores, scale)
            weights = Softmax<axis = -1>(scaled) mixed = MatMul(weights, v)
            out = Transpose<perm = [0, 2, 1, 3]>(mixed)
            y = Reshape(out, flat) }}"""
    )
    rng = np.random.default_rng(4)

    def feed(rows: int, length: int, texts: int, tokens: int) -> dict[str, NDArray]:
        x = rng.standard_normal((rows, length, 32)).astype(np.float32)
        return {"x": x, "ids": np.zeros((texts, tokens), np.int64)}

    runs = [(1, 4, 1, 4), (4, 5, 4, 5), (1, 6, 2, 3), (1, 6, 4, 6), (4, 3, 4, 3)]
    assert agrees(model, [feed(*sizes) for sizes in runs]) >= 3
