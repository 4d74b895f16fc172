# SPDX-License-Identifier: MIT
"""Inputs that are made up, or come from a text; and that models run on them."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.command_line import printed, refused
from builders.decoders import genai_decoder
from builders.exports import exported
from builders.samples import write_tokenizer
from builders.text_models import model_of, normal, proto_of

from ortplugins.errors import CalibrationError, ModelFileError, UsageError
from ortplugins.measurement.models import comparison_feeds
from ortplugins.quantization.walk import Walk
from ortplugins.samples.text import TextSamples
from rewrite_rules.facts.token_rows import TokenRows


def feeds_of(model: onnx.ModelProto, **options):
    session = ort.InferenceSession(model.SerializeToString())
    return comparison_feeds(session, **options)


# Of this many words and positions; heads of a cache, and their size.
VOCABULARY, PLACES, HEADS, HEAD_SIZE = 40, 48, 4, 8


def test_a_decoder_gets_tokens_and_then_one_more_with_a_past():
    model = exported("gpt2-dynamo-eager")
    first, second = feeds_of(model)
    assert first["input_ids"].shape == (1, 32)
    assert first["past_key_values.0.key"].shape == (1, HEADS, 0, HEAD_SIZE)
    assert second["input_ids"].shape == (1, 1)
    for part in ("key", "value"):
        assert second[f"past_key_values.0.{part}"].shape == (1, HEADS, 32, HEAD_SIZE)
    assert first["attention_mask"].tolist() == [[1] * 32]
    assert second["attention_mask"].tolist() == [[1] * 33]
    assert first["position_ids"].tolist() == [list(range(32))]
    assert second["position_ids"].tolist() == [[32]]
    ort.InferenceSession(model.SerializeToString()).run(None, second)
    first, second = feeds_of(genai_decoder())
    assert (first["seqlens_k"].tolist(), first["total_sequence_length"]) == ([31], 32)
    assert (second["seqlens_k"].tolist(), second["total_sequence_length"]) == ([32], 33)


@pytest.mark.parametrize("seed", range(3))
def test_ids_and_positions_stay_below_the_rows_of_their_tables(seed):
    feeds = feeds_of(exported("gpt2-dynamo-eager"), samples=8, seed=seed)
    ids = np.concatenate([feed["input_ids"].ravel() for feed in feeds])
    assert (ids.min() >= 0, 30 < ids.max() < VOCABULARY) == (True, True)
    assert max(feed["position_ids"].max() for feed in feeds) < PLACES


def test_a_named_dimension_has_one_size_at_all_inputs():
    """What input_ids says of B and S counts for an input that says nothing."""
    model = proto_of(
        """g (int64[B, S] input_ids, float[B, S, 4] extra) => (float[B, S, 4] y) {
            e = Gather (table, input_ids)  y = Add (e, extra)
        }""",
        {"table": normal(9, 4)},
    )
    (feed,) = feeds_of(model)
    assert feed["extra"].shape == (*feed["input_ids"].shape, 4)


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [
        ({"s10": 3}, {"input_ids": (3, 32), "attention_mask": (3, 32)}),
        ({"batch": 2, "sequence": 5}, {"input_ids": (2, 5), "attention_mask": (2, 5)}),
        ({"s15": 7, "s70": 4}, {"input_ids": (1, 4), "attention_mask": (1, 11)}),
        ({"past": 6}, {"past_key_values.0.value": (1, HEADS, 6, HEAD_SIZE)}),
    ],
    ids=str,
)
def test_one_size_is_enough_for_all_dimensions_that_count_the_same(dims, shapes):
    feed = feeds_of(exported("gpt2-dynamo-eager"), dims=dims)[0]
    assert {name: feed[name].shape for name in shapes} == shapes


def test_an_input_without_a_shape_is_a_row():
    model = proto_of("g (float[n, m] x) => (float[n, m] y) { y = Relu(x) }")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert feeds_of(model)[0]["x"].shape == (1, 32)


def test_a_size_of_0_is_one_that_onnxruntime_insists_on():
    model = proto_of("g (float[n, 0] x) => (float[n, 0] y) { y = Relu(x) }")
    assert feeds_of(model)[0]["x"].shape == (32, 0)


@pytest.mark.parametrize(
    ("kind", "array", "words"),
    [
        ("float", np.array([1.0], object), "'x' is object, but the model takes float32"),
        ("string", np.array([1.0]), "'x' is float64, but the model takes"),
        ("float", np.array(1, np.float32), r"'x' has shape \[\], but the model takes"),
    ],
)
def test_a_sample_of_another_type_is_refused(kind, array, words):
    model = proto_of(f"g ({kind}[n] x) => ({kind}[n] y) {{ y = Identity(x) }}")
    with pytest.raises(CalibrationError, match=words):
        feeds_of(model, inputs={"x": array})


def test_what_cannot_be_solved_names_one_dimension():
    model = proto_of("""g (float[batch, seq] cloud) => (float[batch, m, 77] y)
        <int64[3] shape = {0, -1, 77}> { y = Reshape(cloud, shape) }""")
    with pytest.raises(ModelFileError, match=r"'seq' \(--dims .* says: \[ONNXRuntimeError\]"):
        feeds_of(model)
    (feed,) = feeds_of(model, dims={"seq": 154})
    assert feed["cloud"].shape == (1, 154)


# From a text and a tokenizer.json.


WORDS = ["[BOS]", "[EOS]", "[UNK]", *"abcdefgh", "user:"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a tokenizer that puts [BOS] and [EOS] around a text, and 20 words of text."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(Path("tokenizer.json"), WORDS)
    Path("text.txt").write_text("a b c d e\n\nf g h a b\n\nc d e f g\n\nh a b c d")
    onnx.save(exported("gpt2-dynamo-eager"), "model.onnx")
    return tmp_path


def feeds(**settings) -> list[dict[str, np.ndarray]]:
    source = TextSamples("text.txt", "tokenizer.json", **settings)
    return list(source.feeds(ir.load("model.onnx").graph))


@pytest.mark.usefixtures("folder")
def test_windows_hold_the_text_between_the_tokens_around_it():
    found = feeds(window=6)
    rows = [feed["input_ids"].tolist() for feed in found]
    assert rows[0] == [[0, 3, 4, 5, 6, 1]] and len(rows) == 5
    words = [WORDS[token] for ((_, *inner, _),) in rows for token in inner]
    assert words == Path("text.txt").read_text().split()
    assert found[0]["attention_mask"].tolist() == [[1] * 6]
    assert found[0]["position_ids"].tolist() == [list(range(6))]
    assert found[0]["past_key_values.0.key"].shape[2] == 0
    assert len(feeds(window=3)) == 20
    # A rest is left out, and a short text is one window.
    assert [feed["input_ids"].shape for feed in feeds(window=10)] == [(1, 10)] * 2
    assert [feed["input_ids"].shape for feed in feeds(window=64)] == [(1, 22)]
    # A few are spread over the text.
    everything, some = feeds(window=4, count=None), feeds(window=4, count=3)
    ids = [feed["input_ids"].tolist() for feed in everything]
    assert [feed["input_ids"].tolist() for feed in some] == [ids[0], ids[4], ids[9]]


@pytest.mark.usefixtures("folder")
def test_no_window_is_taken_from_what_is_held_back():
    source = TextSamples("text.txt", "tokenizer.json", window=4, held_back=0.5)
    taken = source.feeds(ir.load("model.onnx").graph)
    words = [WORDS[token] for feed in taken for token in feed["input_ids"][0][1:-1]]
    assert words == Path("text.txt").read_text().split()[:10]


@pytest.mark.parametrize(
    ("file", "content", "settings", "message"),
    [
        ("text.txt", b"", {}, "text.txt: has no text"),
        ("text.txt", b"\xff", {}, "text.txt: cannot be read as text"),
        ("text.txt", None, {}, "text.txt: cannot be read"),
        ("tokenizer.json", b"{", {}, "cannot be read as tok"),
        ("other", b"", {"window": 2}, "a window of 2 tokens has no room"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_used_is_named(file, content, settings, message):
    Path(file).unlink(missing_ok=True)
    if content is not None:
        Path(file).write_bytes(content)
    with pytest.raises((CalibrationError, UsageError), match=message):
        feeds(**settings)


@pytest.mark.usefixtures("folder")
def test_a_tokenizer_of_another_model_is_refused():
    tokenizer = json.loads(Path("tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"] = VOCABULARY
    Path("tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CalibrationError, match=f"token {VOCABULARY} is not a row"):
        feeds()


@pytest.mark.parametrize(
    "arguments",
    [
        "compare model.onnx model.onnx --runs 0",
        "quantize model.onnx -o q.onnx --method gptq --block-size 16",
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_commands_take_text(arguments):
    text = ["--text", "text.txt", "--tokenizer", "tokenizer.json", "--count", "3"]
    printed(*arguments.split(), *text)
    Path("tokenizer.json").rename("elsewhere.json")
    assert "--tokenizer" in refused(*arguments.split(), *text[:2])
    assert "--samples" in refused(*arguments.split(), *text, "--samples", "x.npz")


FIXED = """g (int64[batch, 12] input_ids, int64[batch, 12] attention_mask)
=> (float[batch, 12, 8] y) { x = Gather(table, input_ids) y = MatMul(x, w) }"""


@pytest.mark.usefixtures("folder")
def test_padding_never_counts_in_statistics():
    table = normal(VOCABULARY, 8)
    graph = model_of(FIXED, {"table": table, "w": normal(8, 8)})
    ir.save(graph, "model.onnx")
    Path("text.txt").write_text("a b c")
    (feed,) = feeds()
    assert feed["input_ids"].tolist() == [[0, 3, 4, 5, 1] + [0] * 7]
    assert feed["attention_mask"].tolist() == [[1] * 5 + [0] * 7]
    counted = TokenRows(graph.graph).real((1, 12, 8), feed)
    assert counted is not None and counted.tolist() == [[True] * 5 + [False] * 7]

    part = Walk(graph, [feed], Path().absolute()).statistics("x", 8, 2)
    expected = np.abs(table[[0, 3, 4, 5, 1]]).mean(0)
    assert part is not None
    np.testing.assert_allclose(part.mean_abs, expected, rtol=1e-5)
