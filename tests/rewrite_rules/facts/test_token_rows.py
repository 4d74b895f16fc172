# SPDX-License-Identifier: MIT
"""Which rows of activations are tokens: by the mask whose axis they have, and by no other."""

import numpy as np
import onnx_ir as ir
import pytest
from builders.exports import DECODERS, exported
from builders.text_models import model_of

from rewrite_rules.facts.token_rows import TokenRows
from rewrite_rules.shapes.proved_shapes import ProvedShapes

WEIGHTS = {
    "table": np.ones((50, 8), np.float32),
    "w": np.ones((8, 8), np.float32),
    "middle": np.array([1]),
    "none": np.float32(-np.inf),
    "flat": np.array([-1, 8]),
}
TWO_TEXTS = """
g (int64[b, s] input_ids, int64[b, s] attention_mask, int64[b, t] decoder_input_ids)
=> (float[b, s, 8] y, float[b, t, 8] z) {
    x = Gather(table, input_ids) d = Gather(table, decoder_input_ids)
    y = MatMul(x, w) z = MatMul(d, w) }"""


def joined(domain: str) -> str:
    norm = f"j = {domain}.SkipLayerNormalization(x, d, flat)"
    return TWO_TEXTS.replace("z = MatMul(d, w)", f"{norm} z = MatMul(j, w)")


CROSS = """g (int64[b, s] input_ids, int64[b, s] mask_x, int64[b, s] other_ids)
=> (float[b, u, 8] y) {
    d = Gather(table, input_ids) x = Gather(table, other_ids)
    k = Transpose<perm = [0, 2, 1]>(x) s0 = MatMul(d, k)
    m = Cast<to = 9>(mask_x) m3 = Unsqueeze(m, middle) s1 = Where(m3, s0, none)
    p = Softmax<axis = -1>(s1) y = MatMul(p, x) }"""
EMBEDDED = """g (float[b, s, 8] x, int64[b, s] attention_mask) => (float[b, s, 8] y) {
    y = MatMul(x, w) }"""
TURNED = """g (int64[b, s] input_ids, int64[b, s] attention_mask) => (float[s, b, 8] y) {
    e = Gather(table, input_ids) x = Transpose<perm = [1, 0, 2]>(e) y = MatMul(x, w) }"""
FLAT = TURNED.replace("y = MatMul(x, w)", "f = Reshape(x, flat) y = MatMul(f, w)")
ADDED = TURNED.replace("int64[b, s] attention", "float[b, s] attention")
# Text, name and shape of an activation, and which of its rows the mask is about.
CASES = {
    "two texts, of the mask": (TWO_TEXTS, "x", (4, 4, 8), "rows"),
    "two texts, the other": (TWO_TEXTS, "d", (4, 4, 8), ""),
    "two texts, joined by onnxruntime": (joined("com.microsoft"), "d", (4, 4, 8), "rows"),
    "two texts, joined by others": (joined("own"), "d", (4, 4, 8), ""),
    "attended to": (CROSS, "x", (4, 4, 8), "rows"),
    "attending": (CROSS, "d", (4, 4, 8), ""),
    "embeddings": (EMBEDDED, "x", (4, 4, 8), "rows"),
    "tokens first": (TURNED, "x", (4, 4, 8), "turned"),
    "as they are embedded": (TURNED, "e", (4, 4, 8), "rows"),
    "flat, tokens first": (FLAT, "f", (16, 8), "turned"),
    "added to scores": (ADDED, "x", (4, 4, 8), "turned"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mask_is_about_its_own_activations(case):
    """Both axes are of one size, which says nothing."""
    text, name, shape, expected = CASES[case]
    model = model_of(text, WEIGHTS)
    (mask,) = (value for value in model.graph.inputs if "mask" in str(value.name))
    kept = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    fed = np.where(kept, 0, -1e4) if text is ADDED else kept
    found = TokenRows(model).real(name, shape, {str(mask.name): fed})
    if not expected:
        assert found is None
        return
    wanted = kept.T if expected == "turned" else kept
    assert found is not None
    np.testing.assert_array_equal(found, wanted.reshape(shape[:-1]).astype(bool))
    if text is ADDED:  # of nothing but tokens
        assert TokenRows(model).real(name, shape, {str(mask.name): np.zeros((4, 4))}) is None


@pytest.mark.parametrize("name", [n for n in DECODERS if n.endswith("dynamo-sdpa")])
@pytest.mark.parametrize("past", [0, 5])
def test_the_new_tokens_of_decoders_are_the_last_of_the_mask(name, past):
    model = ir.from_proto(exported(name))
    rows = TokenRows(model)
    mask = np.ones((2, past + 7), np.int64)
    mask[0, : past + 3] = 0
    shapes = ProvedShapes(model)
    products = (node.inputs[0] for node in model.graph if node.op_type == "MatMul")
    of_tokens = [value for value in products if shapes.dims(value, 3)]
    for value in (of_tokens[0], of_tokens[-1]):
        found = rows.real(str(value.name), (2, 7, 8), {"attention_mask": mask})
        np.testing.assert_array_equal(found, mask[:, past:].astype(bool))
