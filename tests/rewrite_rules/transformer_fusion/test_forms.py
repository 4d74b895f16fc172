# SPDX-License-Identifier: MIT
"""Forms of attention, each beside what looks like it and means something else.

A form is fused or refused for the reason that is given; the numbers are those of the model.
"""

import itertools

import pytest
from builders.attention_forms import FORMS, form, form_feeds
from builders.text_models import normal, proto_of
from test_attention_lookalikes import agrees

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


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_fused_or_left_and_right(name: str):
    model = form(name)
    # onnxruntime dies in an Einsum of nothing.
    chosen = [sizes for sizes in SIZES if "Einsum" not in name or all(sizes)]
    runs = [
        form_feeds(model, *sizes, seed) for sizes, seed in itertools.product(chosen, range(6))
    ]
    taken, became = agrees(model, runs)
    assert taken > len(runs) / 3
    FORMS[name].expect(became)


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
    assert agrees(proto_of(INFERRED), runs)[0] == len(runs)
