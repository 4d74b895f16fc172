# SPDX-License-Identifier: MIT
"""Inputs that are made up: what they are, and that models run on them."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.command_line import ortplugins_command
from builders.decoders import HEAD_SIZE, HEADS, PLACES, VOCABULARY, decoder

import ortplugins
from ortplugins.comparison.models import InputChoice, comparison_feeds
from ortplugins.errors import ModelFileError, UsageError
from ortplugins.samples.made_up import MadeUpInputs


def feeds_of(model: onnx.ModelProto, folder: Path, **options):
    session = ort.InferenceSession(model.SerializeToString())
    return list(comparison_feeds(session, InputChoice(**options), folder))


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


@pytest.mark.parametrize("form", ["torch", "genai"])
def test_a_decoder_gets_tokens_and_then_one_more_with_the_past_it_returned(form, tmp_path):
    model = decoder(form)
    session = ort.InferenceSession(model.SerializeToString())
    first, second = feeds_of(model, tmp_path)
    names = [item.name for item in session.get_outputs()]
    returned = dict(zip(names, session.run(names, first), strict=True))
    assert first["input_ids"].shape == (1, 32)
    assert first["past_key_values_0_key"].shape == (1, HEADS, 0, HEAD_SIZE)
    assert second["input_ids"].shape == (1, 1)
    for part in ("key", "value"):
        past = second[f"past_key_values_0_{part}"]
        np.testing.assert_array_equal(past, returned[f"present_0_{part}"])
    if form == "torch":
        assert first["attention_mask"].tolist() == [[1] * 32]
        assert second["attention_mask"].tolist() == [[1] * 33]
        assert first["position_ids"].tolist() == [list(range(32))]
        assert second["position_ids"].tolist() == [[32]]
    else:
        assert (first["seqlens_k"].tolist(), first["total_sequence_length"]) == ([31], 32)
        assert (second["seqlens_k"].tolist(), second["total_sequence_length"]) == ([32], 33)
    session.run(None, second)


def test_the_second_token_continues_the_first_ones(tmp_path):
    # One run over all tokens gives the logits that two runs with a cache give.
    model = decoder("torch")
    session = ort.InferenceSession(model.SerializeToString())
    first, second = feeds_of(model, tmp_path)
    whole = dict(first)
    for name, axis in (("input_ids", 1), ("position_ids", 1)):
        whole[name] = np.concatenate([first[name], second[name]], axis)
    whole["attention_mask"] = second["attention_mask"]
    (expected,) = session.run(["logits"], whole)
    (found,) = session.run(["logits"], second)
    np.testing.assert_allclose(found[:, -1], expected[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_ids_and_positions_stay_below_the_rows_of_their_tables(seed, tmp_path):
    feeds = feeds_of(decoder("torch"), tmp_path, samples=8, seed=seed)
    ids = np.concatenate([feed["input_ids"].ravel() for feed in feeds])
    assert (ids.min() >= 0, 30 < ids.max() < VOCABULARY) == (True, True)
    assert max(feed["position_ids"].max() for feed in feeds) < PLACES


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [
        ({"s10": 3}, {"input_ids": (3, 32), "attention_mask": (3, 32)}),
        ({"batch": 2, "sequence": 5}, {"input_ids": (2, 5), "attention_mask": (2, 5)}),
        ({"s15": 7, "s70": 4}, {"input_ids": (1, 4), "attention_mask": (1, 11)}),
        ({"past": 6}, {"past_key_values_0_value": (1, HEADS, 6, HEAD_SIZE)}),
    ],
    ids=str,
)
def test_one_size_is_enough_for_all_dimensions_that_count_the_same(dims, shapes, tmp_path):
    feed = feeds_of(decoder("torch"), tmp_path, dims=dims)[0]
    assert {name: feed[name].shape for name in shapes} == shapes


@pytest.mark.filterwarnings("ignore:no calibration data")
@pytest.mark.parametrize("form", ["torch", "genai"])
def test_the_commands_take_a_decoder_as_it_is(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(decoder(form), "model.onnx")
    for arguments in (
        "check model.onnx",
        "compare model.onnx model.onnx --runs 1 --layers",
        "report model.onnx -o page.html --rounds 1 --layers",
        "memory model.onnx",
        "quantize model.onnx -o q.onnx --method awq_lite --block-size 16",
    ):
        done = ortplugins_command(*arguments.split())
        assert done.returncode == 0, (arguments, done.stderr)
        assert "failed" not in done.stderr, done.stderr


def test_memory_counts_one_row_and_an_empty_past(tmp_path):
    onnx.save(decoder("torch"), tmp_path / "model.onnx")
    done = ortplugins_command("memory", tmp_path / "model.onnx")
    assert "counted as s10=1, s70=128, s43=1, s53=128, s15=0, s89=0" in done.stdout
    done = ortplugins_command("memory", tmp_path / "model.onnx", "--dims", "s15=8,s70=1")
    assert "counted as s10=1, s43=1, s53=9, s89=8" in done.stdout


WINDOW = """g (float[batch, sequence] input, int64 sr) => (float[batch, 1, n] y)
    <int64[1] one = {1}, float[1, 1, 100] w> {
    x = Unsqueeze(input, one)
    c = Conv(x, w)
    rate = Cast <to = 1> (sr)
    y = Div(c, rate)
}"""


def test_audio_gets_a_window_that_the_model_takes(tmp_path):
    model = parsed(WINDOW.replace("float[1, 1, 100] w", "float[1] unused = {0}"))
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones((1, 1, 100), np.float32), "w")
    )
    (feed,) = feeds_of(model, tmp_path)
    assert (feed["input"].shape[0], feed["sr"]) == (1, 16000)
    assert feed["input"].shape[1] >= 100


def test_what_cannot_be_solved_names_one_dimension(tmp_path):
    model = parsed("""g (float[batch, points] cloud) => (float[batch, m, 77] y)
        <int64[3] shape = {0, -1, 77}> { y = Reshape(cloud, shape) }""")
    with pytest.raises(ModelFileError, match=r"give the size of 'points' \(--dims"):
        feeds_of(model, tmp_path)
    (feed,) = feeds_of(model, tmp_path, dims={"points": 154})
    assert feed["cloud"].shape == (1, 154)


def test_the_same_seed_gives_the_same_samples(tmp_path):
    once, again, other = (
        feeds_of(decoder("torch"), tmp_path, samples=2, seed=seed) for seed in (1, 1, 2)
    )
    ids = [[feed["input_ids"].tolist() for feed in feeds] for feeds in (once, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert len(once) == 4


@pytest.mark.parametrize("dims", [{"sequenze": 3}, {"s70": -1}, {"s70": True}])
def test_a_size_that_cannot_be_is_an_error(dims):
    inputs = ir.from_proto(decoder("torch")).graph.inputs
    with pytest.raises(UsageError, match=next(iter(dims))):
        MadeUpInputs(inputs, dims)


def test_a_decoder_is_compared_with_itself_through_the_api():
    found = ortplugins.compare(decoder("genai"), decoder("genai"), samples=2)
    assert (found.samples, max(d.max_abs for d in found.outputs)) == (4, 0)
