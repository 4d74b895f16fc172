# SPDX-License-Identifier: MIT
"""Samples from a text and a tokenizer.json."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.command_line import printed, refused
from builders.decoders import VOCABULARY, decoder
from builders.samples import write_tokenizer
from builders.text_models import model_of, normal

from ortplugins.errors import CalibrationError, UsageError
from ortplugins.quantization.statistics.accumulator import ActivationRequest
from ortplugins.quantization.statistics.collect import collect
from ortplugins.samples.roles import counted_tokens
from ortplugins.samples.sources import KeptSamples
from ortplugins.samples.text import TextSamples

WORDS = ["[BOS]", "[EOS]", "[UNK]", *"abcdefgh", "user:"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a tokenizer that puts [BOS] and [EOS] around a text, and 20 words of text."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(Path("tokenizer.json"), WORDS)
    Path("text.txt").write_text("a b c d e\n\nf g h a b\n\nc d e f g\n\nh a b c d")
    onnx.save(decoder("torch"), "model.onnx")
    return tmp_path


def feeds(**settings) -> list[dict[str, np.ndarray]]:
    model = ir.load("model.onnx")
    source = TextSamples("text.txt", "tokenizer.json", **settings)
    inputs = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    return list(source.feeds(inputs))


@pytest.mark.usefixtures("folder")
def test_windows_hold_the_text_between_the_tokens_around_it():
    found = feeds(window=6)
    rows = [feed["input_ids"].tolist() for feed in found]
    assert rows[0] == [[0, 3, 4, 5, 6, 1]] and len(rows) == 5
    words = [WORDS[token] for ((_, *inner, _),) in rows for token in inner]
    assert words == Path("text.txt").read_text().split()
    assert found[0]["attention_mask"].tolist() == [[1] * 6]
    assert found[0]["position_ids"].tolist() == [list(range(6))]
    assert found[0]["past_key_values_0_key"].shape[2] == 0
    # A rest is left out, and a short text is one window.
    assert [feed["input_ids"].shape for feed in feeds(window=10)] == [(1, 10)] * 2
    assert [feed["input_ids"].shape for feed in feeds(window=64)] == [(1, 22)]
    # A few are spread over the text.
    everything, some = feeds(window=4, count=None), feeds(window=4, count=3)
    ids = [feed["input_ids"].tolist() for feed in everything]
    assert [feed["input_ids"].tolist() for feed in some] == [ids[0], ids[4], ids[9]]


@pytest.mark.usefixtures("folder")
def test_chat_puts_each_paragraph_into_the_template():
    config = {"chat_template": "{% for m in messages %}user: {{ m.content }} {% endfor %}"}
    Path("tokenizer_config.json").write_text(json.dumps(config))
    (feed,) = feeds(window=64, chat=True)
    words = [WORDS[token] for token in feed["input_ids"][0]]
    assert words[:7] == ["user:", "a", "b", "c", "d", "e", "user:"]
    assert len(words) == 24


ESCAPE = json.dumps({"chat_template": "{{ messages.__class__.__base__.__subclasses__() }}"})


@pytest.mark.parametrize(
    ("file", "content", "settings", "message"),
    [
        ("text.txt", b"", {}, "text.txt: has no text"),
        ("text.txt", b"\xff", {}, "text.txt: cannot be read as text"),
        ("text.txt", None, {}, "text.txt: cannot be read"),
        ("tokenizer.json", b"{", {}, "cannot be read as tok"),
        ("other", b"", {"window": 2}, "a window of 2 tokens has no room"),
        ("other", b"", {"chat": True}, "no chat template"),
        ("tokenizer_config.json", ESCAPE.encode(), {"chat": True}, "chat template"),
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
        "check model.onnx",
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
    counted = counted_tokens(graph.graph.inputs, feed)
    assert counted is not None and counted.tolist() == [[True] * 5 + [False] * 7]

    samples = KeptSamples([feed], graph, scratch=Path())
    request = ActivationRequest("x", 8, gram=True)
    (part,) = collect(graph, [[request]], samples, scratch=Path())
    expected = np.abs(table[[0, 3, 4, 5, 1]]).mean(0)
    np.testing.assert_allclose(part["x"].mean_abs, expected, rtol=1e-5)
