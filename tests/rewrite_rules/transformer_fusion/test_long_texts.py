# SPDX-License-Identifier: MIT
"""Long texts are computed one by one, where a mask adds the same for all queries."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.attention_forms import form
from builders.decoders import UNCACHED, small_decoder
from builders.exports import decoder_feeds, fused
from builders.order_graphs import profile
from builders.same_numbers import session as opened
from builders.token_batches import Run
from numpy.typing import NDArray

from rewrite_rules.transformer_fusion import attention_kernels

TEXTS, LENGTH = 3, 6
LOWEST = float(np.finfo(np.float32).min)


def attention(
    axes: str = "batch, 1, rows, columns", name: str = "a mask added"
) -> onnx.ModelProto:
    """Return one of the forms, whose mask has these axes."""
    model = form(name)
    sizes = [int(size) if size.isdigit() else size for size in axes.split(", ")]
    mask = onnx.helper.make_tensor_value_info("m", onnx.TensorProto.FLOAT, sizes)
    model.graph.input[2].CopyFrom(mask)
    return model


def feeds_of(mask: NDArray, rows: int = LENGTH, texts: int = TEXTS) -> dict[str, NDArray]:
    rng = np.random.default_rng(1)
    x, t = (
        rng.standard_normal((texts, length, 32)).astype(np.float32)
        for length in (rows, mask.shape[-1])
    )
    return {"x": x, "t": t, "m": mask.astype(np.float32)}


def is_by_text(model: onnx.ModelProto, folder: Path, *feeds: dict[str, NDArray]) -> list[bool]:
    """Compare the model with its fusion; return which runs took the form of long texts."""
    result, taken = ir.to_proto(fused(model)[0]), []
    before, after = opened(model), opened(result)
    for feed in feeds:
        expected = before.run(None, feed)
        for actual, wanted in zip(after.run(None, feed), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
        events = profile(result, folder, inputs=feed)
        taken.append("MultiHeadAttention" in {one["args"]["op_name"] for one in events})
    return taken


@pytest.fixture(autouse=True)
def _few_tokens_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_LONG", LENGTH * LENGTH)
    monkeypatch.setattr(attention_kernels, "_HEADS", 1)


def hiding(*hidden: tuple[Any, ...], value: float = LOWEST, rows: int = 1) -> NDArray:
    mask = np.zeros((TEXTS, 1, rows, LENGTH), np.float32)
    for place in hidden:
        mask[place] = value
    return mask


ALL, KEYS, PAIRS = slice(None), "batch, 1, 1, columns", "batch, 1, rows, columns"
RIGHT, LEFT, HOLE = ((1, ..., slice(4, 6)), (0, ..., slice(0, 3)), (2, ..., slice(2, 4)))
CAUSAL = np.where(np.tri(LENGTH, dtype=np.bool_), 0, -1e30)
RANDOM = np.random.default_rng(2).standard_normal((TEXTS, 1, LENGTH, LENGTH))
# The axes of a mask, what it adds, and whether texts are computed one by one.
MASKS = {
    "nothing": (KEYS, hiding(), True),
    "nothing, for each query": (PAIRS, hiding(rows=LENGTH), True),
    "padding of some texts": (KEYS, hiding(RIGHT, LEFT), True),
    "padding, for each query": (PAIRS, hiding(RIGHT, LEFT, HOLE, rows=LENGTH), True),
    "infinity": (KEYS, hiding(RIGHT, LEFT, HOLE, value=-np.inf), True),
    "a low number": (KEYS, hiding(RIGHT, LEFT, HOLE, value=-1e4), True),
    "one mask of all texts": ("columns", hiding(LEFT)[0, 0, 0], True),
    "rows of one mask": ("rows, columns", hiding(LEFT, rows=LENGTH)[0, 0], True),
    "one key": (KEYS, hiding((ALL, ..., slice(1, 6))), True),
    "a bias of keys": (KEYS, RANDOM[:, :, :1], True),
    "a bias of keys, some hidden": (KEYS, np.minimum(RANDOM[:, :, :1], hiding(RIGHT)), True),
    "all keys of a text": (KEYS, hiding((1,)), False),
    "all keys of a text, by infinity": (KEYS, hiding((1,), value=-np.inf), False),
    "all keys of a text, for each query": (PAIRS, hiding((1,), rows=LENGTH), False),
    "all keys of a query": (PAIRS, hiding((1, 0, 2), rows=LENGTH), False),
    "one pair": (PAIRS, hiding((2, 0, 5, 0), rows=LENGTH), False),
    "pairs by infinity": (PAIRS, hiding((2, 0, 5, 0), value=-np.inf, rows=LENGTH), False),
    "later keys and padding": (PAIRS, hiding(LEFT, rows=LENGTH, value=-1e30) + CAUSAL, False),
    "a bias of pairs": (PAIRS, RANDOM, False),
    "a bias of each head": ("batch, 4, 1, columns", RANDOM[:, :, :4].swapaxes(1, 2), False),
    "not a number": (KEYS, hiding(RIGHT, (1, 0, 0, 1), value=np.nan), False),
    "not a number, hidden": (PAIRS, hiding((1, 0, 2, 1), value=np.nan, rows=LENGTH), False),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_of_keys_alone_are_taken(case: str, tmp_path: Path):
    axes, mask, taken = MASKS[case]
    assert is_by_text(attention(axes), tmp_path, feeds_of(mask)) == [taken]


def test_texts_are_long_by_queries_and_keys(tmp_path: Path):
    """Their number does not count; empty ones are left to nodes."""
    sizes = [(6, 6, 1), (6, 5, 4), (4, 9, 2), (1, 36, 1), (1, 35, 1), (36, 1, 1), (36, 0, 1)]
    sizes += [(0, 36, 1), (6, 6, 0)]
    feeds = [feeds_of(np.zeros((texts, 1, 1, t)), s, texts) for s, t, texts in sizes]
    found = is_by_text(attention(KEYS), tmp_path, *feeds)
    assert found == [s * t >= 36 and texts > 0 for s, t, texts in sizes]


def test_texts_of_few_heads_are_long_later(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_HEADS", 8)  # there are four
    feeds = [feeds_of(np.zeros((2, 1, 1, 8)), rows, 2) for rows in (8, 9)]
    assert is_by_text(attention(KEYS), tmp_path, *feeds) == [False, True]


def test_long_texts_hold_no_mask_for_each_query():
    result = fused(attention(KEYS))[0]
    (mask,) = (node.outputs[0] for node in result.graph if node.op_type == "Expand")
    mask.dtype = ir.DataType.FLOAT
    result.graph.outputs.append(mask)
    session = opened(ir.to_proto(result))
    for size, rows in ((5, 5), (7, 0)):
        found = session.run(None, feeds_of(np.zeros((2, 1, 1, size)), size, 2))[-1]
        assert found.shape == (2, 1, rows, size)


def test_attention_without_a_mask(tmp_path: Path):
    model = attention(name="no mask")
    short, long = (feeds_of(np.zeros((2, 1, 1, size)), size, 2) for size in (5, 7))
    assert is_by_text(model, tmp_path, short, long) == [False, True]


def test_sizes_that_are_declared_short_have_one_form():
    for size, forms in ((5, 1), (6, 2)):
        model = attention()
        for value in model.graph.input[:2]:
            value.type.tensor_type.shape.dim[1].dim_value = size
        fired = fused(model)[1]["fired"]
        assert [text.count("Attention") for text in fired] == [forms]


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("infinite", ["kv", "v"])
def test_numbers_of_padding_reach_others_if_infinite(
    infinite: str, guard: bool, tmp_path: Path
):
    """Nodes make NaN of what is hidden and infinite."""
    model = attention(KEYS, "a mask added, guarded" if guard else "a mask added")
    if infinite == "v":  # keys are those of tanh(t)
        node = next(node for node in model.graph.node if node.output[0] == "k1")
        model.graph.node.insert(0, onnx.helper.make_node("Tanh", ["t"], ["bent"]))
        node.input[0] = "bent"
    runs = [feeds_of(hiding(RIGHT)) for _ in range(4)]
    for feeds, number in zip(runs, (1e12, np.inf, -np.inf, np.nan), strict=True):
        feeds["t"][1, 4:] = number
    assert is_by_text(model, tmp_path, *runs) == [True, False, False, False]


def test_query_heads_may_share_keys(tmp_path: Path):
    fed = """, int64[B, T] attention_mask,
         float[B, 2, P, 8] past_key, float[B, 2, P, 8] past_value"""
    model = small_decoder(
        (fed, ", int64[B, S] attention_mask"),
        UNCACHED,
        "before = GreaterOrEqual(columns, zero)",
    )
    feeds = [decoder_feeds(model, Run(3, 7, 0, side), 1) for side in ("left", "right")]
    assert is_by_text(model, tmp_path, *feeds) == [True, True]
