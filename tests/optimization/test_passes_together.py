# SPDX-License-Identifier: MIT
"""Passes together give what each gives alone, and the numbers of the model."""

import collections

import numpy as np
import onnx
import pytest
from builders.encoders import batch
from builders.exports import DECODERS, ENCODERS, exported
from builders.same_numbers import session

import ortplugins
from session_options.registry import BUILTIN_PASSES

# The positions of its scores are sized by values that are cut apart.
LOSES_ATTENTION = {"deberta2-torchscript-eager"}
PACKED = {"trim_padding.pack": True}
MODELS = [name for name in ENCODERS if name.endswith("eager") and name.count("-") == 2]
MODELS.append("bert-torchscript-sdpa")


def fired(
    model: onnx.ModelProto, passes: list[str], options: dict[str, object] | None = None
) -> tuple[dict[str, collections.Counter[str]], onnx.ModelProto]:
    """Return how often each pass fired, by what it made, and the model."""
    result = ortplugins.optimize(model, passes=passes, options=options or {})
    counts = {
        item.name: collections.Counter(
            remark.reason.partition(" ")[0]
            for remark in item.remarks
            if remark.outcome.value == "fired"
        )
        for item in result.report.passes
    }
    return counts, result.model


@pytest.mark.parametrize("options", [{}, PACKED], ids=["cut", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_fuses_behind_trimmed_inputs(name: str, options: dict[str, object]):
    model = exported(name)
    both = ["trim_padding", "transformer_fusion"]
    alone = {item: fired(model, [item])[0][item] for item in both}
    together, result = fired(model, both, options)
    assert together["trim_padding"] == alone["trim_padding"]
    expected, found = alone["transformer_fusion"], together["transformer_fusion"]
    if name in LOSES_ATTENTION:
        expected = collections.Counter[str]()
    for kind in ("attention:", "RotaryEmbedding"):
        assert found[kind] == expected[kind]
    before, after = session(model), session(result)
    names = [value.name for value in before.get_inputs()]
    for rows in (["11111"], ["111", "1" * 9, "1"], ["1" * 7] * 2, ["1", "1" * 40]):
        given = batch(*rows)
        feeds = {key: given.get(key, np.zeros_like(given["input_ids"])) for key in names}
        real = feeds["attention_mask"].astype(bool)
        for one, other in zip(after.run(None, feeds), before.run(None, feeds), strict=True):
            assert one.shape == other.shape
            if one.shape[:2] == real.shape:
                one, other = one[real], other[real]
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("name", [name for name in DECODERS if name.endswith("dynamo-eager")])
def test_all_passes_give_a_decoder_what_each_gives(name: str):
    model = exported(name)
    passes = [item for item in BUILTIN_PASSES if item != "prepacked_weights"]
    together, _ = fired(model, passes)
    alone = fired(model, ["transformer_fusion"])[0]["transformer_fusion"]
    assert together["transformer_fusion"] == alone


def test_what_is_cut_alike_has_one_size():
    """Else the size of a part would be read of the part, which nothing earlier has."""
    passes = ["trim_padding", "transformer_fusion", "shape_size_reorder"]
    result = ortplugins.optimize(exported("bert-dynamo-eager"), passes=passes)
    remarks = [remark.reason for remark in result.report.remarks]
    assert not any("of 'token_type_ids_cut'" in reason for reason in remarks)
