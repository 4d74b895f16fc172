# SPDX-License-Identifier: MIT
"""What looks like attention, rotary embedding or a norm and means something else stays right.

Each case is a form of attention, changes a decoder that is fused, or feeds it what no made-up
run does. It may be fused, refused, or fused in part; the numbers are those of the model.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.attention_forms import FORMS, form, form_feeds
from builders.decoders import CASES, changed, small_decoder
from builders.exports import decoder_feeds, fused
from builders.same_numbers import session as opened
from builders.text_models import normal, proto_of
from builders.token_batches import Run
from numpy.typing import NDArray

BOOL = onnx.TensorProto.BOOL
# Prompts, single tokens, chunks after a cache; rows that see nothing come from FEEDS.
SIZES = (Run(1, 6, 0), Run(3, 6, 0), Run(2, 6, 5), Run(1, 1, 5), Run(3, 1, 6), Run(1, 1, 0),
         Run(2, 33, 0), Run(1, 2, 31))  # fmt: skip


# Texts, queries and keys of forms.
FORM_SIZES = ((1, 1, 1), (2, 3, 5), (3, 5, 3), (4, 1, 4), (1, 4, 1), (2, 4, 4), (0, 3, 3),
              (2, 0, 3), (1, 8, 8))  # fmt: skip


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


def agrees(model: onnx.ModelProto, feeds: list[Mapping[str, NDArray]]) -> tuple[int, str]:
    """Compare the model with its fusion; return how many runs it takes, and what it became."""
    result, remarks, context = fused(model)
    onnx.checker.check_model(ir.to_proto(result))
    for node in result.graph.all_nodes():
        for value in node.outputs:
            value.shape = None  # as in files, which write few down
    taken = 0
    for pairs in runs_taken(model, result, feeds):
        taken += 1
        for a, b in pairs:
            greatest = np.abs(b[np.isfinite(b)]).max(initial=1)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * greatest)
    became = sorted({*remarks["fired"], *(x.code for x in context.remarks if x.code)})
    return taken, "; ".join(became) or "stays"


def feeds_of(model: onnx.ModelProto) -> list[Mapping[str, NDArray]]:
    """What no made-up run holds: special tokens, shared positions, texts that are padding."""
    found, rng = list[Mapping[str, NDArray]](), np.random.default_rng(7)
    for number, sizes in enumerate(SIZES):
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
        dims = {"B": sizes.batch, "S": sizes.length, "P": sizes.past, "N": (1, 4)[number % 2]}
        dims |= {"T": sizes.past + sizes.length, "E": (6, 1, 0)[number % 3]}
        dims["R"] = sizes.length if sizes.length > 1 else 2
        changes: list[dict[str, NDArray]] = [
            {}, {"input_ids": ids}, {"position_ids": places}, {"attention_mask": holes},
            {"attention_mask": dead}, {"attention_mask": left},
            {"position_ids": places[:, ::-1].copy(), "input_ids": ids},
        ]  # fmt: skip
        for change in changes:
            feed = plain | change
            for value in model.graph.input:
                kind = value.type.tensor_type
                shape = [dim.dim_value or dims[dim.dim_param] for dim in kind.shape.dim]
                array = feed.get(value.name)
                if array is None or [*array.shape] != shape:
                    array = normal(*shape)
                    array = array > -0.5 if kind.elem_type == BOOL else array
                dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
                feed[value.name] = array.astype(dtype)
            found.append({value.name: feed[value.name] for value in model.graph.input})
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_decoder_is_fused_or_stays_and_is_right(name: str):
    model = changed(name)
    taken, became = agrees(model, feeds_of(model))
    assert taken
    CASES[name].expect(became)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_fused_or_left_and_right(name: str):
    model = form(name)
    drawn = itertools.product(FORM_SIZES, range(6))
    runs = [form_feeds(model, *sizes, seed) for sizes, seed in drawn]
    taken, became = agrees(model, runs)
    assert taken > len(runs) / 3
    FORMS[name].expect(became)


def test_an_empty_cache_has_neither_heads_nor_a_batch():
    """onnxruntime's Concat skips it: what is appended may have other heads, or texts."""
    model = proto_of(
        """g (float[B, 4, S, 8] q, float[C, 4, P, 8] past_k, float[C, 4, P, 8] past_v,
            float[B, N, S, 8] k, float[B, N, S, 8] v, float[B, 1, S, T] mask)
            => (float[B, S, 32] y, float[B, N, U, 8] keys, float[B, N, U, 8] values)
        <float scale = {0.3}, int64[3] flat = {0, 0, 32}> {
            keys = Concat<axis = 2>(past_k, k) values = Concat<axis = 2>(past_v, v)
            turned = Transpose<perm = [0, 1, 3, 2]>(keys) product = MatMul(q, turned)
            scaled = Mul(product, scale) masked = Add(scaled, mask)
            weights = Softmax<axis = -1>(masked) mixed = MatMul(weights, values)
            out = Transpose<perm = [0, 2, 1, 3]>(mixed) y = Reshape(out, flat) }"""
    )

    def feed(texts: int, heads: int, length: int, past: int, held: int) -> dict[str, NDArray]:
        seen = np.tri(length, length + past, past, dtype=np.bool_)
        new, old = (texts, heads, length, 8), (held, 4, past, 8)
        mask = np.where(np.tile(seen, (texts, 1, 1, 1)), 0, -1e30).astype(np.float32)
        fed = {"q": (texts, 4, length, 8), "k": new, "v": new, "past_k": old, "past_v": old}
        return {"mask": mask} | {name: normal(*shape) for name, shape in fed.items()}

    sizes = [(2, 4, 3, 5, 2), (2, 4, 1, 5, 2)]
    sizes += [(2, n, s, 0, held) for n in (1, 4) for s in (1, 3) for held in (0, 2, 7)]
    taken, became = agrees(model, [feed(*one) for one in sizes])
    assert (taken, became) == (len(sizes), "attention: Attention, GroupQueryAttention")
