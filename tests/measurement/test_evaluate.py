# SPDX-License-Identifier: MIT
"""What ``evaluate`` says of a model, against float64 numpy on the same windows."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from builders.command_line import as_json, ortplugins_command, printed, refused
from builders.decoders import VOCABULARY, genai_decoder, genai_feeds
from builders.encoders import encoder
from builders.exports import exported
from builders.same_numbers import session
from builders.samples import write_tokenizer

import ortplugins
from ortplugins.errors import CalibrationError, ModelFileError, UsageError
from ortplugins.quantization import quantize

WORDS = ["[BOS]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(20))]
RNG = np.random.default_rng(5)
IDS = RNG.integers(3, len(WORDS), 100)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hold a decoder, its tokenizer and a text of 100 words."""
    monkeypatch.chdir(tmp_path)
    Path("float").mkdir()
    onnx.save(genai_decoder(), "float/model.onnx")
    write_tokenizer(Path("float/tokenizer.json"), WORDS)
    Path("text.txt").write_text(" ".join(WORDS[token] for token in IDS))
    return tmp_path


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def predictions(path: str, windows) -> np.ndarray:
    opened = session(path, optimised=True)
    logits = (opened.run(["logits"], genai_feeds(window))[0][0, :-1] for window in windows)
    return np.concatenate([log_softmax(rows) for rows in logits])


@pytest.mark.usefixtures("folder")
def test_a_language_model_against_its_float_model():
    quantize("float/model.onnx", "int4.onnx", block_size=16)
    found = ortplugins.evaluate("int4.onnx", "float", text="text.txt", window=16, tokens=64)
    # Each window begins with BOS; none ends with EOS.
    windows = [[0, *IDS[start : start + 15]] for start in range(0, 60, 15)]
    targets = np.concatenate([window[1:] for window in windows])
    log_p, log_q = predictions("float/model.onnx", windows), predictions("int4.onnx", windows)

    def perplexity(logs):
        return np.exp(-logs[np.arange(len(logs)), targets].mean())

    assert found.count == 60 and found.names == ("int4.onnx", "float/model.onnx")
    assert found.perplexity[0] == pytest.approx(perplexity(log_q), rel=1e-4)
    assert found.perplexity[1] == pytest.approx(perplexity(log_p), rel=1e-4)
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    assert 0 < found.kl_divergence == pytest.approx(divergence, rel=1e-3)
    assert 0 < found.top1_agreement < 1
    assert found.top1_agreement == (log_p.argmax(-1) == log_q.argmax(-1)).mean()
    assert found.bytes[0] == Path("int4.onnx").stat().st_size

    # A session is judged as it is set.
    given = {"tokenizer": "float/tokenizer.json", "text": "text.txt", "window": 16}
    exact = ortplugins.evaluate(
        session("int4.onnx", optimised=True, accuracy_level=0), tokens=64, **given
    )
    assert exact.perplexity[0] != found.perplexity[0]

    # What has a number for each row of the table is logits, whatever its name.
    renamed = onnx.load("float/model.onnx")
    renamed.graph.output[0].name = renamed.graph.node[-1].output[0] = "scores"
    onnx.save(renamed, "renamed.onnx")
    other = ortplugins.evaluate("renamed.onnx", tokens=64, **given)
    assert other.perplexity == (found.perplexity[1],)

    for window, tokens, count in ((2, 2, 1), (16, 8, 15), (16, 47, 30)):
        given |= {"window": window, "tokens": tokens}
        assert ortplugins.evaluate("float", **given).count == count

    same = ortplugins.evaluate("float", "float", text="text.txt", window=16)
    assert (same.kl_divergence, same.top1_agreement) == (0, 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("folder")
def test_an_encoder_against_its_float_model():
    onnx.save(encoder(), "float/model.onnx")
    texts = [" ".join(row) for row in RNG.choice(WORDS[3:], (6, 60))]
    Path("text.txt").write_text("\n\n".join(["A short one.", *texts]))
    quantize("float/model.onnx", "int4.onnx", block_size=16)
    found = ortplugins.evaluate("int4.onnx", "float", text="text.txt")
    vectors = []
    for path in ("float/model.onnx", "int4.onnx"):
        opened, rows = session(path, optimised=True), []
        for text in texts:
            ids = [0, *map(WORDS.index, text.split()), 1]
            feed = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
            arrays = {name: np.array(array) for name, array in feed.items()}
            pooled = opened.run(None, arrays)[0][0].astype(np.float64).mean(0)
            rows.append(pooled / np.linalg.norm(pooled))
        vectors.append(np.stack(rows))
    floats, ours = vectors
    assert found.count == 6
    assert found.cosine == pytest.approx((floats * ours).sum(1).mean(), abs=1e-5)
    for texts, taken in ((3, [0, 2, 4]), (4, [0, 1, 3, 4])):
        few = ortplugins.evaluate("int4.onnx", "float", text="text.txt", texts=texts)
        assert few.cosine == pytest.approx((floats * ours).sum(1)[taken].mean(), abs=1e-6)
    two = ortplugins.evaluate("int4.onnx", "float", text="text.txt", texts=2)
    assert np.isnan(two.ranking_agreement)  # one similarity has no order
    ranks = [
        np.argsort(np.argsort([a @ b for a, b in itertools.combinations(rows, 2)]))
        for rows in vectors
    ]
    squares = float(((ranks[0] - ranks[1]) ** 2).sum())
    count = len(ranks[0])
    spearman = 1 - 6 * squares / (count * (count**2 - 1))
    assert found.ranking_agreement == pytest.approx(spearman, abs=1e-6)
    assert found.perplexity == () and np.isnan(found.kl_divergence)


def with_nan() -> onnx.ModelProto:
    model = genai_decoder()
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head")
    array = onnx.numpy_helper.to_array(head).copy()
    array[0, 0] = np.nan
    head.CopyFrom(onnx.numpy_helper.from_array(array, "head"))
    return model


def without_logits() -> onnx.ModelProto:
    model = genai_decoder()
    del model.graph.output[0]
    return model


def without_order() -> onnx.ModelProto:
    """A decoder in which each token sees the later ones, not the earlier ones."""
    model = exported("gpt2-dynamo-eager")
    (before,) = (node for node in model.graph.node if node.op_type == "LessOrEqual")
    before.op_type = "GreaterOrEqual"
    return model


GENAI, SHORT = genai_decoder(), {"window": 16}
TEXTS = {"window": 16, "text": "texts.txt"}  # several paragraphs


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (GENAI, {"window": 512}, CalibrationError, "has 101 tokens, fewer than a w"),
        (GENAI, {"tokens": 1}, UsageError, "tokens is 1; expected 2 or more"),
        (GENAI, {"share": 2}, UsageError, "share is 2; expected 0 to 1"),
        (GENAI, {**SHORT, "tokenizer": "large.json"}, CalibrationError, "not a row of"),
        (with_nan(), SHORT, ModelFileError, "output 'logits' has NaN"),
        (without_order(), SHORT, ModelFileError, "not a causal language model"),
        (without_logits(), SHORT, ModelFileError, "has no float output"),
        (encoder(), {}, ModelFileError, "judged against its float model"),
        (encoder(), {"against": encoder()}, CalibrationError, "1 of its paragraphs"),
        (GENAI, {**TEXTS, "against": encoder()}, ModelFileError, "compared: 48 .* and 8"),
        (encoder(), {**TEXTS, "against": GENAI}, ModelFileError, "compared: 8 numbers"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_evaluated_is_named(model, options, error, message):
    write_tokenizer(Path("large.json"), [*WORDS[:3], *map(str, range(VOCABULARY)), *WORDS[3:]])
    Path("texts.txt").write_text("\n\n".join(["w1 w2 w3 " * 20] * 3))
    onnx.save(model, "float/model.onnx")
    with pytest.raises(error, match=message):
        ortplugins.evaluate("float", **({"text": "text.txt"} | options))


@pytest.mark.usefixtures("folder")
def test_the_commands_take_folders_of_one_model():
    Path("float/onnx").mkdir()
    Path("float/model.onnx").rename("float/onnx/model.onnx")
    quantised = ["quantize", "float", "--block-size", "16", "-o", "int4.onnx"]
    printed(*quantised)
    arguments = ["evaluate", "float", "--text", "text.txt", "--window", "16", "--tokens", "32"]
    found = as_json(*arguments, "--against", "float/onnx/model.onnx")
    assert (found["count"], found["kl_divergence"], found["cosine"]) == (30, 0, None)
    shown = printed(*arguments)
    assert "perplexity" in shown and "KL" not in shown

    shutil.rmtree("float/onnx")
    for each in (arguments, quantised):
        assert "no .onnx file" in refused(*each)
    Path("float/tokenizer.json").unlink()
    assert "no tokenizer.json next to" in refused(*arguments)


@pytest.mark.usefixtures("folder")
def test_quantising_ends_with_figures_where_there_is_a_text(monkeypatch):
    Path("text.txt").write_text(" ".join(RNG.choice(WORDS[3:], 1800)))
    arguments = ["quantize", "float", "--block-size", "16", "--text", "text.txt", "-o"]
    shown = printed(*arguments, "int4.onnx")
    assert "perplexity" in shown and "top-1 agreement" in shown
    assert "float: Gather, 1 weights, " in shown
    assert "refused" not in shown  # a table that nobody asked for
    planned = printed("quantize", "float", "--block-size", "16", "--dry-run")
    assert "float: Gather, 1 weights, " in planned
    result = as_json(*arguments, "more.onnx", "--method", "gptq")
    found = result["evaluation"]
    (table, *_) = result["floats"]
    assert (table["op_type"], table["reason"]) == ("Gather", "Gather is not among op_types")
    # A third of the text is more than a window.
    assert found["count"] == 511 and found["kl_divergence"] > 0 and found["held_back"]
    assert "evaluated on the part of the text that calibration did not read" in shown
    # A tokenizer in a subfolder does as well, as some exports have it.
    Path("float/hf").mkdir()
    Path("float/tokenizer.json").rename("float/hf/tokenizer.json")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ortplugins.evaluation.evaluate", interrupted)
        done = ortplugins_command(*arguments, "stopped.onnx")
    assert done.returncode != 0 and "wrote stopped.onnx" in done.stdout
    Path("text.txt").write_text("w1 w2 w3 w4")
    expected = "not evaluated: text.txt: has "
    assert expected in printed(*arguments, "short.onnx")
