# SPDX-License-Identifier: MIT
"""Forms of attention, each beside what looks like it and means something else.

A form is fused or refused for the reason that is given; the numbers are those of the model.
"""

import itertools

import pytest
from builders.attention_forms import FORMS, form, form_feeds
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
    (1, 8, 8),
)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_fused_or_left_and_right(name: str):
    model = form(name)
    runs = [
        form_feeds(model, *sizes, seed) for sizes, seed in itertools.product(SIZES, range(6))
    ]
    taken, became = agrees(model, runs)
    assert taken > len(runs) / 3
    FORMS[name].expect(became)
