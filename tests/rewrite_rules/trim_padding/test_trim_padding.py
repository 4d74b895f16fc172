# SPDX-License-Identifier: MIT
"""TrimPadding: what is cut, what comes out, what is refused."""

import platform
import re

import numpy as np
import onnx
import pytest
from builders.encoders import ADDITIVE, BOOLEAN, FIRST, MEAN, TOKENS, UNMASKED, batch, encoder
from builders.exports import ENCODERS, exported, optimized
from builders.same_numbers import session
from builders.sessions import options, start

import ortplugins
from ortplugins.optimization.optimize import OptimizeResult
from ortplugins.quantization import quantize_encoder8


def trimmed(model: onnx.ModelProto, **options: object) -> OptimizeResult:
    return ortplugins.optimize(model, passes=[ortplugins.TrimPadding(**options)])


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray], *names: str) -> list[np.ndarray]:
    return session(model, optimised=True).run(list(names) or None, feed)


def computed_length(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> int:
    """How many positions the embedding is looked up for."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.append(onnx.helper.make_empty_tensor_value_info("embedded"))
    return run(shown, feed, "embedded")[0].shape[1]


def refusal(model: onnx.ModelProto, **options: object) -> str:
    result = trimmed(model, **options)
    assert not result.report.fired
    (remark,) = result.report.passes[0].remarks
    assert remark.outcome.value == "refused"
    names = [[node.output[0] for node in m.graph.node] for m in (result.model, model)]
    assert names[0] == names[1]  # left as it was
    return remark.reason


# Of other lengths, onnxruntime's kernels for aarch64 sum in another order.
SUMMED = {"rtol": 0} if platform.machine() == "x86_64" else {"rtol": 1e-6, "atol": 1e-6}


def declared(model: onnx.ModelProto) -> list[tuple[str, str, list[int | str | None]]]:
    opened = session(model)
    return [(v.name, v.type, v.shape) for v in opened.get_inputs() + opened.get_outputs()]


def assert_same(
    result: onnx.ModelProto, model: onnx.ModelProto, feed: dict[str, np.ndarray], **near: float
) -> None:
    """Where there is a token, unless positions were pooled."""
    real = feed["attention_mask"].astype(bool)
    for expected, found in zip(run(model, feed), run(result, feed), strict=True):
        assert found.shape == expected.shape
        if expected.shape[:2] == real.shape:
            expected, found = expected[real], found[real]
        np.testing.assert_allclose(found, expected, **{**SUMMED, **near})


# Masks, the length that they are padded to, and how many positions are computed.
MASKS = {
    "one": (["1"], 9, 1),
    "odd": (["111", "11111"], 9, 5),
    "full": (["111111111"], 9, 9),
    "holes": (["1", "1101", "10101"], 9, 5),
    "one begins with padding": (["1", "00101"], 9, 9),
    "left": (["000111", "111111"], 6, 6),
    "empty row": (["000000", "110000"], 6, 6),
    "all zero": (["000000"], 6, 6),
    "no batch": ([], 6, 6),
    "length 0": (["", ""], 0, 0),
}


@pytest.mark.parametrize(("rows", "length", "computed"), MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("mask", [ADDITIVE, BOOLEAN], ids=["additive", "boolean"])
def test_the_model_computes_as_far_as_the_longest_row(mask, rows, length, computed):
    model = encoder(mask)
    feed = batch(*rows, length=length)
    result = trimmed(model).model
    assert computed_length(result, feed) == computed
    assert_same(result, model, feed)
    assert not run(result, feed)[0][:, computed:].any()


MASK_TYPES = (
    "bool",
    "double",
    "float",
    "float16",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint64",
)
AT_1 = "Unsqueeze<axes = [1]>(real)"


@pytest.mark.parametrize(
    "given",
    [
        *[{"mask_type": name} for name in MASK_TYPES],
        {"shape": "batch, 12", "head": MEAN},
        {"head": MEAN},
        {"opset": 11, "mask": BOOLEAN.replace("Unsqueeze(real, middle)", AT_1)},
        {"head": FIRST},
        {"head": FIRST, "mask": BOOLEAN},
    ],
    ids=str,
)
def test_any_mask_shape_and_head(given):
    model = encoder(**given)
    kind = given.get("mask_type", "int64")
    dtype = {"float": np.float32}.get(kind, kind)
    feed = batch("111", "11111", length=12, dtype=dtype)
    result = trimmed(model).model
    assert declared(result) == declared(model)
    assert computed_length(result, feed) == 5
    assert_same(result, model, feed)


@pytest.mark.parametrize("head", [FIRST, MEAN, TOKENS])
def test_outputs_are_declared_as_they_were(head):
    model = encoder(head=head)
    sizes = ["rows", "places", "features"] if head == TOKENS else ["rows", "features"]
    shaped = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, sizes)
    model.graph.output[0].CopyFrom(shaped)
    assert declared(trimmed(model).model) == declared(model)


def test_few_nodes_are_added_and_lengths_inside_are_not_known():
    """With known lengths onnxruntime would plan buffers, and fuse, what is slower so."""
    model = trimmed(encoder()).model
    assert len(model.graph.node) - len(encoder().graph.node) <= 32
    values = {value.name: value for value in model.graph.value_info}
    shape = values["scores"].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in shape] == ["batch", 0, 0]


@pytest.mark.parametrize("numbers", [[2, 1, 0, 0], [-1, 1, 0, 0], [0.25, 0.5, 0, 0]])
def test_any_number_but_0_is_real(numbers):
    model = encoder(BOOLEAN, mask_type="float")
    mask = np.array([numbers], np.float32)
    feed = {"input_ids": np.array([[3, 4, 5, 6]]), "attention_mask": mask}
    result = trimmed(model).model
    assert computed_length(result, feed) == 2
    np.testing.assert_array_equal(run(result, feed)[0][:, :2], run(model, feed)[0][:, :2])


def test_a_batch_of_one_and_a_mask_of_length_1():
    model = encoder(shape="1, sequence")
    feed = batch("111", length=9)
    assert computed_length(trimmed(model).model, feed) == 3
    assert_same(trimmed(model).model, model, feed)
    # It stands for all positions.
    feed["attention_mask"] = np.ones((1, 1), np.int64)
    model = encoder(head=PROJECTED)
    for pack in (False, True):
        (found,), (expected,) = run(trimmed(model, pack=pack).model, feed), run(model, feed)
        np.testing.assert_array_equal(found, expected)


def test_a_mask_of_another_length_fails_as_before():
    feed = batch("111110000")
    feed["attention_mask"] = feed["attention_mask"][:, :7]
    for model in (encoder(), trimmed(encoder()).model):
        with pytest.raises(Exception, match="broadcast"):
            run(model, feed)


END = 31
EACH_ROW = """
    rows = Shape<end = 1>(input_ids)
    count = Squeeze(rows)
    each = Range(zero, count, unit)
"""
AT_END = (
    """
    hits = Equal(input_ids, end)
    numbers = Cast<to = 6>(hits)
    place = ArgMax<axis = -1, keepdims = 0>(numbers)
"""
    + EACH_ROW
)
BY_ROW_AND_PLACE = """
    row = Unsqueeze(each, middle)
    column = Unsqueeze(place, middle)
    at = Concat<axis = -1>(row, column)
    y = GatherND(hidden, at)
"""
FLATTENED = """
    long = Shape<start = 1, end = 2>(hidden)
    starts = Mul(each, long)
    at = Add(place, starts)
    flat = Reshape(hidden, rows_of_8)
    y = Gather(flat, at)
"""
BY_ELEMENT = """
    column = Unsqueeze(place, middle)
    wide_place = Unsqueeze(column, last)
    batch_size = Shape<end = 1>(input_ids)
    sizes = Concat<axis = 0>(batch_size, one_by_8)
    at = Expand(wide_place, sizes)
    picked = GatherElements<axis = 1>(hidden, at)
    y = Squeeze(picked, middle)
"""
END_CONSTANTS = {
    "end": np.int64(END),
    "unit": np.int64(1),
    "step": np.int64(1),
    "rows_of_8": np.array([-1, 8]),
    "one_by_8": np.array([1, 8]),
}


def test_attention_without_a_mask_is_refused():
    assert refusal(encoder(UNMASKED)) == "'attention_mask' masks nothing"


def test_a_table_as_long_as_the_sequence_is_refused():
    places = {"places": np.ones((9, 8), np.float32)}
    model = encoder(head="y = Add(hidden, places)", shape="batch, 9", extra=places)
    assert re.match("Add .*export with a dynamic one", refusal(model))


def test_a_model_without_a_mask_says_what_to_do():
    model = encoder(UNMASKED)
    del model.graph.input[1]
    del model.graph.node[[n.output[0] for n in model.graph.node].index("real")]
    assert "export the model with its attention mask" in refusal(model)


@pytest.mark.parametrize(
    ("kind", "axes"), [("int16", ["batch", "n"]), ("int64", ["batch", "choices", "n"])]
)
def test_a_mask_that_is_not_taken_is_named(kind, axes):
    model = encoder(mask_type=kind)
    info = model.graph.input[1].type.tensor_type
    dtype = onnx.TensorProto.DataType.Value(kind.upper())
    shaped = onnx.helper.make_tensor_value_info("attention_mask", dtype, axes)
    info.CopyFrom(shaped.type.tensor_type)
    found = f"it has type {kind}, shape [{','.join(axes)}]"
    assert refusal(model) == f"'attention_mask' is not a mask of [batch, sequence]: {found}"


def test_the_mask_is_found_by_its_use():
    model = encoder()
    names = {"attention_mask": "x", "input_ids": "mask"}
    for value in model.graph.input:
        value.name = names[value.name]
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    (fired,) = trimmed(model).report.fired
    assert fired.node == "x"


def test_the_mask_may_be_named():
    assert trimmed(encoder(), mask="attention_mask").report.fired
    assert "no input 'm'" in refusal(encoder(), mask="m")
    assert "no mask leaves padding out" in refusal(encoder(), mask="input_ids")


DECODER = """
    target = Gather(table, decoder_input_ids)
    target_q = MatMul(target, query)
    target_k = Transpose<perm = [0, 2, 1]>(target)
    target_scores = MatMul(target_q, target_k)
    target_real = Cast<to = 9>(decoder_attention_mask)
    target_wide = Unsqueeze(target_real, middle)
    target_masked = Where(target_wide, target_scores, lowest)
    target_weights = Softmax<axis = -1>(target_masked)
    target_mixed = MatMul(target_weights, target)
    source_k = Transpose<perm = [0, 2, 1]>(hidden)
    cross_scores = MatMul(target_mixed, source_k)
    cross_masked = Add(cross_scores, bias)
    cross_weights = Softmax<axis = -1>(cross_masked)
    cross = MatMul(cross_weights, hidden)
    y = Add(cross, target_mixed)
"""


def encoder_decoder() -> onnx.ModelProto:
    model = encoder(head=DECODER)
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", "target"])
        for name in ("decoder_input_ids", "decoder_attention_mask")
    )
    return onnx.shape_inference.infer_shapes(model)


def test_two_sequences_with_a_mask_each_are_refused_until_one_is_named():
    reason = refusal(encoder_decoder())
    assert reason == (
        "'attention_mask', 'decoder_attention_mask' may each be the mask: name it with "
        "trim_padding.mask"
    )


@pytest.mark.parametrize("mask", ["attention_mask", "decoder_attention_mask"])
def test_the_sequence_of_the_named_mask_is_trimmed(mask):
    model = encoder_decoder()
    result = trimmed(model, mask=mask)
    cut = {"attention_mask", "input_ids"}
    if mask.startswith("decoder"):
        cut = {f"decoder_{name}" for name in cut}
    (fired,) = result.report.fired
    assert {name for name in fired.reason.split("'") if name.endswith(("mask", "ids"))} == cut
    feed = batch("111", "11", length=9)
    feed |= {f"decoder_{name}": x for name, x in batch("1", "1111", length=6).items()}
    real = feed["decoder_attention_mask"].astype(bool)
    found, expected = run(result.model, feed)[0], run(model, feed)[0]
    assert computed_length(result.model, feed) == (9 if mask.startswith("decoder") else 3)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-6, atol=1e-6)


def test_old_opsets_are_refused():
    model = encoder()
    model.opset_import[0].version = 10
    assert "opset 10" in refusal(model)


def test_softmax_of_old_opsets_is_along_all_axes_behind_its_own():
    mask = ADDITIVE.replace("Unsqueeze(real, middle)", "Unsqueeze<axes = [1]>(real)")
    head = """one_head = Unsqueeze<axes = [1]>(hidden)
        shares = Softmax<axis = 1>(one_head)
        y = Squeeze<axes = [1]>(shares)"""
    assert "shares" in refusal(encoder(mask, head, opset=12))
    assert trimmed(encoder(mask, opset=12)).report.fired


def fed(model: onnx.ModelProto, *rows: str) -> dict[str, np.ndarray]:
    feed = batch(*rows, length=20)
    feed["input_ids"][range(len(rows)), [len(row) - 1 for row in rows]] = 39  # CLIP's end
    if len(model.graph.input) == 3:
        feed["token_type_ids"] = np.zeros_like(feed["input_ids"])
    return feed


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", [n for n in ENCODERS if n.endswith("dynamo-sdpa")])
def test_exports_compute_the_same(name, pack):
    model = exported(name)
    result = trimmed(model, pack=pack)
    assert result.report.fired
    assert declared(result.model) == declared(model)
    feed = fed(model, "1", "111", "1011101")
    assert_same(result.model, model, feed, rtol=1e-6, atol=1e-6)


O2 = ("bert", "bert-mean", "bert-reranker", "distilbert", "roberta", "xlmr", "cliptext")
O2_MASKS = (("11", "11111"), ("1", "111", "1011101"), ("0011", "11"), ("0000", "11"), ("1",))


@pytest.mark.parametrize(("mask", "pack"), [("mask", False), ("lengths", True)])
@pytest.mark.parametrize("name", O2)
def test_what_the_optimizer_of_onnxruntime_writes(name, mask, pack):
    model = optimized(f"{name}-torchscript-eager", mask)
    norm = next(node for node in model.graph.node if node.op_type == "SkipLayerNormalization")
    result = trimmed(model, pack=pack)
    (fired,) = result.report.fired
    for rows in O2_MASKS:
        assert_same(result.model, model, fed(model, *rows), rtol=1e-5, atol=1e-5)
    result.model.graph.output.append(onnx.helper.make_empty_tensor_value_info(norm.output[0]))
    (found,) = run(result.model, fed(model, *O2_MASKS[0]), norm.output[0])
    assert found.shape[:-1] == ((1, 2 + 5) if "real tokens only" in fired.reason else (2, 5))


def test_codes_are_packed():
    """encoder8's: one number scales all tokens."""
    model = exported("roberta-dynamo-sdpa")
    data = [fed(model, "1" * 12, "1" * 20)]
    quantized = quantize_encoder8(model, calibration_data_reader=data, least_cosine=0).model
    codes = next(node for node in quantized.graph.node if node.op_type == "QuantizeLinear")
    result = trimmed(quantized, pack=True)
    for rows in O2_MASKS:
        assert_same(result.model, quantized, fed(model, *rows), rtol=1e-4, atol=1e-4)
    result.model.graph.output.append(onnx.helper.make_empty_tensor_value_info(codes.output[0]))
    (found,) = run(result.model, fed(model, *O2_MASKS[0]), codes.output[0])
    assert found.shape[:-1] == (1, 2 + 5)


HEADS = {"row": BY_ROW_AND_PLACE, "flat": FLATTENED, "element": BY_ELEMENT}
COUNTED = f"""
    lengths = ReduceSum<keepdims = 0>(attention_mask, middle)
    place = Sub(lengths, unit)
    {EACH_ROW}
"""
BESIDE_END = AT_END.replace("place =", "end_place =") + "place = Add(end_place, step)"


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    ("place", "mask", "ends", "computed"),
    [
        # At the token that is looked for, in CLIP's way.
        (AT_END, ["111", "11111"], [[2], [4, 6, 8]], 5),
        (AT_END, ["111", "11111"], [[2, 3, 4], []], 5),
        (AT_END, ["111", "11111"], [[7], [4]], 9),
        (AT_END, ["111", "11111"], [[3], [4]], 9),
        (AT_END, ["1" * 9, "1"], [[8], [0]], 9),
        (AT_END, ["1", "10101"], [[0], [2, 3]], 5),
        (AT_END, ["1", "10101"], [[0], [1, 2]], 9),
        (AT_END, ["000"], [[2]], 9),
        (BESIDE_END, ["11111", "111"], [[2], [1]], 5),
        (BESIDE_END, ["111", "111"], [[2], [1]], 9),
        # At the last one, by the length.
        (COUNTED, ["111", "11111"], [[], []], 5),
        (COUNTED, ["10110", "11111"], [[], []], 5),
        (COUNTED, ["10111", "1101"], [[], []], 9),
        (COUNTED, ["000", "11"], [[], []], 9),
    ],
)
def test_pooling_at_a_position_that_is_computed(head, place, mask, ends, computed):
    """A batch is trimmed as long as the token there is a real one."""
    model = encoder(head=place + head, extra=END_CONSTANTS)
    feed = batch(*mask, length=9)
    feed["input_ids"] %= END
    for row, places in zip(feed["input_ids"], ends, strict=True):
        row[places] = END
    result = trimmed(model).model
    assert computed_length(result, feed) == computed
    np.testing.assert_allclose(run(result, feed)[0], run(model, feed)[0], atol=1e-6)


@pytest.mark.parametrize(("row", "computed"), [("11111", 5), ("11", 9)])
def test_a_constant_position_of_one_row_is_asked_to_be_real(row, computed):
    head, extra = "y = Gather<axis = 1>(hidden, three)", {"three": np.int64(3)}
    model = encoder(head=head, shape="1, sequence", extra=extra)
    result, feed = trimmed(model).model, batch(row, length=9)
    assert computed_length(result, feed) == computed
    assert_same(result, model, feed)


def test_pooling_at_the_end_token_takes_any_mask():
    model = encoder(head=AT_END + BY_ROW_AND_PLACE, extra=END_CONSTANTS)
    result = trimmed(model).model
    feed = batch("11111")
    feed["attention_mask"] = np.ones((1, 1), np.int64)
    feed["input_ids"][0, 3] = END
    nothing = batch(length=6)
    for one in (feed, nothing):
        np.testing.assert_array_equal(run(result, one)[0], run(model, one)[0])


PROJECTED = """
    a = MatMul(hidden, query)
    b = Tanh(a)
    c = MatMul(b, key)
    y = Add(c, hidden)
"""


@pytest.mark.parametrize(
    "rows", [["11", "1111", "1"], ["0011", "11"], ["00", "11"], []], ids=str
)
def test_packed_nodes_see_real_tokens_only(rows):
    model = encoder(head=PROJECTED, opset=13)
    result = trimmed(model, pack=True).model
    feed = batch(*rows, length=9)
    assert_same(result, model, feed, rtol=1e-5, atol=1e-6)
    result.graph.output.append(onnx.helper.make_empty_tensor_value_info("b"))
    if rows == ["11", "1111", "1"]:  # else some positions more
        assert run(result, feed, "b")[0].shape == (1, 2 + 4 + 1, 8)


def test_nothing_is_packed_where_padding_may_be_pooled():
    """Packing leaves copies of other tokens at padded positions."""
    head = AT_END + BY_ROW_AND_PLACE.replace("GatherND(hidden", "GatherND(projected")
    project = PROJECTED.replace("y =", "projected =")
    model = encoder(head=project + head, extra=END_CONSTANTS)
    result = trimmed(model, pack=True)
    feed = batch("111", "11111", length=9)
    feed["input_ids"] %= END
    feed["input_ids"][[0, 1], [7, 4]] = END
    found, expected = run(result.model, feed)[0], run(model, feed)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert "padding may be pooled: not packed" in {
        remark.reason for remark in result.report.passes[0].remarks
    }


@pytest.mark.parametrize("length", [None, 12])
def test_a_session_is_trimmed(tmp_path, length):
    model, path = encoder(head=MEAN), tmp_path / "model.onnx"
    onnx.save(model, path)
    so = options(ortplugins.TrimPadding())
    if length is not None:
        so.add_free_dimension_override_by_name("sequence", length)
    opened = start(path, so)
    feed = batch("11", "1111", length=12)
    assert length or opened.ortplugins_report.fired
    (found,), (expected,) = opened.run(None, feed), run(model, feed)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
