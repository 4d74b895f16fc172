# SPDX-License-Identifier: MIT
"""Forms of attention, each beside what looks like it and means something else.

A form is fused or refused for the reason that is given; the numbers are those of the model.
"""

import itertools
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from builders.attention_forms import FORMS, form, form_feeds
from builders.decoders import ADDED, small_decoder
from builders.exports import fused
from builders.text_models import normal, proto_of
from numpy.typing import NDArray
from test_attention_lookalikes import feeds_of, runs_taken

# Texts, queries and keys.
SIZES = (
    (1, 1, 1),
    (2, 3, 5),
    (3, 5, 3),
    (4, 1, 4),
    (1, 4, 1),
    (2, 4, 4),
    (0, 3, 3),
    (2, 0, 3),
)


def compared(model: onnx.ModelProto, runs: list[Mapping[str, NDArray]]) -> list[str]:
    """Compare a model with its fusion, in the runs that it takes; return the remarks."""
    result, remarks, _ = fused(model)
    for node in result.graph.all_nodes():
        for value in node.outputs:
            value.shape = None  # as in files, which write few down
    taken = 0
    for pairs in runs_taken(model, result, runs):
        taken += 1
        for actual, other in pairs:
            np.testing.assert_allclose(actual, other, rtol=1e-4, atol=1e-5)
    assert taken > len(runs) / 3
    fired = [text for text in remarks["fired"] if text.startswith("attention: ")]
    return fired or remarks["refused"]


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_fused_or_left_and_right(name: str):
    model, outcome = form(name), FORMS[name].outcome
    # onnxruntime dies in an Einsum of nothing.
    chosen = [sizes for sizes in SIZES if "Einsum" not in name or all(sizes)]
    runs = [
        form_feeds(model, *sizes, seed) for sizes, seed in itertools.product(chosen, range(6))
    ]
    reasons = " ".join(compared(model, runs))
    assert outcome.replace("fused", "attention: Attention") in reasons, reasons


FAR = """far0 = Sub(columns, rows)
    far = Cast<to = 1>(far0)
    slant = Mul(far, sinks)
    bias = Where(seen, nothing, lowest)
    """
ZERO = "int64 zero = {0}"
MASK = "int64[B, T] attention_mask,"
OF_ANY = (MASK, MASK + " float[1, N, 1, 1] n,")
# A score behind those of the keys, whose weight is left out.
SINKS = (
    ("Softmax<axis = -1>(masked)", "Softmax<axis = -1>(with_sinks)"),
    ("MatMul(weights, v_all)", "MatMul(kept, v_all)"),
    ("mixed =", "kept = Slice(weights, first, end, last)\n    mixed ="),
    (ZERO, ZERO + ", int64[1] first = {0}, int64[1] end = {-1}"),
)
SINK = """
    of_queries = Shape<end = 3>(q_turned)
    sink_sizes = Concat<axis = 0>(of_queries, one_axis)
    sink = Expand(sinks, sink_sizes)
    with_sinks = Concat<axis = -1>(masked, sink)
    """
ALL = "attention: grouped queries, GroupQueryAttention"
# Changes to a decoder with a cache, four query heads on two of keys, and what comes of it.
CACHED: dict[str, tuple[tuple[tuple[str, str], ...], str, str]] = {
    "ALiBi": ((), FAR + "slants = Add(slant, bias)\nmasked = Add(scaled, slants)", ALL),
    "ALiBi in two Adds": (
        (),
        FAR + "one_by = Add(scaled, slant)\nmasked = Add(one_by, bias)",
        ALL,
    ),
    "ALiBi, slopes of any heads": (
        (OF_ANY,),
        FAR.replace("sinks", "n") + "slants = Add(slant, bias)\nmasked = Add(scaled, slants)",
        "may differ from head to head",
    ),
    "ALiBi by a factor": (
        (),
        FAR + "some = Mul(scaled, slant)\nmasked = Add(some, bias)",
        "is not scaled scores",
    ),
    "soft caps": (
        (),
        """tight = Div(scaled, half)
        bent = Tanh(tight)
        capped = Mul(bent, half)
        bias = Where(seen, nothing, lowest)
        masked = Add(capped, bias)""",
        ALL,
    ),
    "soft caps behind the mask": (
        (),
        """bias = Where(seen, nothing, scale)
        added = Add(scaled, bias)
        bent = Tanh(added)
        masked = Mul(bent, half)""",
        "soft-capped behind a mask",
    ),
    "bent by another curve": (
        (),
        """bent = Sigmoid(scaled)
        bias = Where(seen, nothing, lowest)
        masked = Add(bent, bias)""",
        "is not scaled scores",
    ),
    "sinks": (SINKS, ADDED + SINK, ALL),
    "sinks, kept away from infinity": (
        SINKS,
        ADDED + SINK.replace("with_sinks =", "sunk =")
        + "peak = ReduceMax<keepdims = 1>(sunk, last)\nwith_sinks = Sub(sunk, peak)",
        ALL,
    ),
    "sinks, each key less its greatest score": (
        SINKS,
        ADDED + SINK.replace("with_sinks =", "sunk =")
        + "peak = ReduceMax<keepdims = 1>(sunk, first)\nwith_sinks = Sub(sunk, peak)",
        "is not scaled scores",
    ),
    "the first key is left out": (
        (*SINKS[:-1], (ZERO, ZERO + ", int64[1] first = {1}, int64[1] end = {999}")),
        ADDED + SINK,
        "is not scaled scores",
    ),
    "sinks of any heads": (
        (OF_ANY, *SINKS),
        ADDED + SINK.replace("sinks,", "n,"),
        "its sinks are not known",
    ),
    "bent twice": (
        (),
        """tight = Tanh(scaled)
        bent = Tanh(tight)
        bias = Where(seen, nothing, lowest)
        masked = Add(bent, bias)""",
        "soft-capped",
    ),
}  # fmt: skip


def cached(name: str) -> onnx.ModelProto:
    changes, mask, _ = CACHED[name]
    model = small_decoder(*changes, mask=mask)
    half = onnx.numpy_helper.from_array(np.float32(0.5), "half")
    model.graph.initializer.append(half)
    return model


@pytest.mark.parametrize("name", CACHED)
def test_a_form_with_a_cache_is_fused_or_left_and_right(name: str):
    model = cached(name)
    runs = [dict(feed) for feed in feeds_of(small_decoder())]
    for seed, feed in enumerate(runs):
        if "n" in {value.name for value in model.graph.input}:
            feed["n"] = normal(1, (1, 4)[seed % 2], 1, 1)
    assert CACHED[name][2] in " ".join(compared(model, runs))


# A Reshape takes what the mask has too many of as more texts: its softmax counts one key.
INFERRED = """
inferred (
    float[2, 2, 1, 4] q, float[2, 2, keys, 4] k, float[2, 2, values, 4] v,
    float[1, 1, 1, columns] m
) => (float[2, 1, 8] y)
<int64[1] first = {-1}, int64[1] one = {1}, int64[4] apart = {2, 2, 1, -1},
 int64[3] flat = {0, 0, 8}>
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    product = MatMul(q, kt)
    scores = Add(product, m)
    count = Shape<start = 2, end = 3>(k)
    sizes = Concat<axis = 0>(first, one, count)
    merged = Reshape(scores, sizes)
    weights = Softmax<axis = -1>(merged)
    weights4 = Reshape(weights, apart)
    mixed = MatMul(weights4, v)
    turned = Transpose<perm = [0, 2, 1, 3]>(mixed)
    y = Reshape(turned, flat)
}"""


def test_an_inferred_size_takes_what_a_mask_adds():
    runs = [
        {
            "q": normal(2, 2, 1, 4),
            "k": normal(2, 2, keys, 4),
            "v": normal(2, 2, columns, 4),
            "m": normal(1, 1, 1, columns),
        }
        for keys, columns in ((1, 1), (1, 2), (3, 3))
    ]
    compared(proto_of(INFERRED), runs)
