# SPDX-License-Identifier: MIT
"""Which rows of activations are tokens: those that a mask of their sizes keeps."""

import numpy as np
import pytest
from builders.text_models import model_of

from rewrite_rules.facts.token_rows import TokenRows

KEPT = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
REAL = KEPT.astype(bool)
ENCODER = "int64[b, s] input_ids, int64[b, s] attention_mask"
DECODER = f"{ENCODER}, int64[b, t] decoder_input_ids"
ADDED = ENCODER.replace("int64[b, s] attention", "float[b, s] attention")
CACHED = "int64[b, s] input_ids, float[b, 2, p, 4] past_key, int64[b, t] attention_mask"
EMBEDDED = "float[b, s, 8] inputs_embeds, int64[b, s] attention_mask"


def real(inputs: str, shape: tuple[int, ...], new: int = 5, mask: np.ndarray = KEPT):
    graph = model_of(f"g ({inputs}) => (int64[b, s] y) {{ y = Cast<to = 7>(attention_mask) }}")
    feed = {"attention_mask": mask, "input_ids": np.ones((3, new), np.int64)}
    if "decoder" in inputs:
        feed["decoder_input_ids"] = np.ones((3, 4), np.int64)
    return TokenRows(graph.graph).real(shape, feed)


@pytest.mark.parametrize(
    ("inputs", "shape", "new", "mask", "expected"),
    [
        (ENCODER, (3, 5, 8), 5, KEPT, REAL),
        (ENCODER, (5, 3, 8), 5, KEPT, REAL.T),
        (ENCODER, (15, 8), 5, KEPT, REAL.reshape(-1)),
        (ENCODER, (3, 5, 8), 5, KEPT.astype(bool), REAL),
        (EMBEDDED, (3, 5, 8), 5, KEPT, REAL),
        # Of other sizes, and of two texts the other.
        (ENCODER, (3, 7, 8), 5, KEPT, None),
        (DECODER, (3, 5, 8), 5, KEPT, REAL),
        (DECODER, (3, 4, 8), 5, KEPT, None),
        # Added to scores; zeros are added where all are tokens.
        (ADDED, (3, 5, 8), 5, np.where(KEPT, 0, -1e4), REAL),
        (ADDED, (3, 5, 8), 5, np.zeros((3, 5), np.float32), None),
        (ENCODER, (3, 5, 8), 5, np.ones_like(KEPT), None),
        # Of past tokens and new ones.
        (CACHED, (3, 4, 8), 4, KEPT[::-1, ::-1], REAL[::-1, ::-1][:, 1:]),
    ],
)  # fmt: skip
def test_a_mask_is_about_activations_of_its_sizes(inputs, shape, new, mask, expected):
    found = real(inputs, shape, new, mask)
    assert (found is None) == (expected is None)
    assert expected is None or (found == expected).all()
