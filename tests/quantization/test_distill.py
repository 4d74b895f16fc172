# SPDX-License-Identifier: MIT
"""Codes and scales that are learnt from the float model's answers."""

import dataclasses
import re

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.sessions import CPU
from builders.text_models import normal, proto_of

from ortplugins.errors import CalibrationError, ModelFileError, QuantizationError
from ortplugins.quantization import Recipe, quantize

pytest.importorskip("torch", reason="the extra distill is not installed")
from ortplugins.quantization.distill import Learning, learn_scales, quantize_distilled

ROWS, HIDDEN = 24, 32
# A norm and two products, of the tokens before.
LANGUAGE_MODEL = """g (int64[b, t] input_ids) => (float[b, t, 24] logits)
<int64 one = {1}> {
    h = Gather(table, input_ids)
    sum = CumSum(h, one)
    normed = LayerNormalization<axis = -1>(sum, gamma, beta)
    up = MatMul(normed, w)
    act = Tanh(up)
    logits = MatMul(act, v)
}"""
WEIGHTS = {
    "table": normal(ROWS, HIDDEN),
    "gamma": np.ones(HIDDEN, np.float32),
    "beta": np.zeros(HIDDEN, np.float32),
    "w": normal(HIDDEN, 2 * HIDDEN, seed=1) / 4,
    "v": normal(2 * HIDDEN, ROWS, seed=2) / 4,
}
LEARNING = Learning(epochs=4, samples=4, rate=3e-3)


def texts(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(0, ROWS, (1, 16))} for _ in range(count)]


@pytest.fixture
def models(tmp_path):
    """The float model, and its weights in 4 bits."""
    onnx.save(proto_of(LANGUAGE_MODEL, WEIGHTS), tmp_path / "float.onnx")
    quantize(tmp_path / "float.onnx", tmp_path / "int4.onnx", block_size=16)
    return tmp_path / "float.onnx", tmp_path / "int4.onnx"


def learnt(models, output, samples=40, learning=LEARNING, **more):
    original, int4 = models
    return learn_scales(
        int4,
        output,
        original=original,
        calibration_data_reader=texts(samples),
        learning=learning,
        **more,
    )


def divergence(original, path) -> float:
    """Mean KL divergence on texts that nobody has learnt from, in plain onnxruntime."""
    logs = []
    for model in (original, path):
        so = ort.SessionOptions()
        so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(model, so, providers=CPU)
        z = np.concatenate([session.run(None, feed)[0] for feed in texts(30, seed=9)])
        z = z - z.max(-1, keepdims=True)
        logs.append(z - np.log(np.exp(z).sum(-1, keepdims=True)))
    p, q = logs
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def constants(path) -> dict[str, np.ndarray]:
    return {
        str(name): value.const_value.numpy()
        for name, value in ir.load(path).graph.initializers.items()
    }


@pytest.mark.parametrize(
    "settings", [{}, {"is_symmetric": False}, {"quant_format": "QDQ_transposed"}]
)
def test_outputs_come_closer(models, tmp_path, settings):
    original, int4 = models
    quantize(original, int4, block_size=16, overwrite=True, **settings)
    found = {}
    for reach in (0, 0.5):
        output = tmp_path / f"{reach}.onnx"
        result = learnt(models, output, learning=dataclasses.replace(LEARNING, reach=reach))
        assert "learnt in" in result.report.notes[0]
        found[reach] = divergence(original, output)
        old, new = constants(int4), constants(output)
        changed = {name for name in old if not np.array_equal(old[name], new[name])}
        assert {"gamma", "beta"} <= changed and old.keys() == new.keys()
        codes = {name for name in changed if old[name].dtype != np.float32}
        assert bool(codes) == (reach > 0)
        for name in codes:  # each is next to what it was, and most are the same
            moved = np.abs(old[name].astype(int) - new[name].astype(int))
            assert moved.max() == 1 and moved.mean() < 0.5
    assert found[0.5] < found[0] < 0.9 * divergence(*models)


def test_the_recipe_starts_from_gptq_and_learns_on_the_same_samples(models, tmp_path):
    original, started, output = models[0], tmp_path / "gptq.onnx", tmp_path / "distilled.onnx"
    recipe = Recipe(method="gptq", block_size=16)
    quantize(original, started, recipe=recipe, calibration_data_reader=texts(200))
    result = quantize_distilled(
        original,
        output,
        calibration_data_reader=iter(texts(200)),
        recipe=recipe,
        learning=Learning(epochs=6, rate=3e-3, reach=0.1),
    )
    assert {node.method for node in result.report.nodes if node.quantized} == {"gptq"}
    assert "learnt in" in result.report.notes[-1]
    assert divergence(original, output) < 0.9 * divergence(original, started)
    assert constants(output).keys() == constants(started).keys()


@pytest.mark.parametrize("setting", [{"quant_format": "MatMulNBits"}, {"fuse_tables": True}])
def test_only_scales_of_dequantize_linear_are_learnt(models, tmp_path, setting):
    with pytest.raises(QuantizationError, match=f"{next(iter(setting))}: only scales"):
        quantize_distilled(
            models[0],
            tmp_path / "o.onnx",
            calibration_data_reader=texts(40),
            recipe=Recipe(method="gptq", **setting),
        )


def test_the_same_seed_gives_the_same_file(models, tmp_path):
    few = Learning(epochs=1)
    for name in ("a.onnx", "b.onnx"):
        learnt(models, tmp_path / name, learning=few)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_what_was_reached_is_written_after_an_interruption(models, tmp_path):
    def interrupt(done: int, total: int, what: str) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    learnt(models, tmp_path / "cut.onnx", progress=interrupt)
    assert divergence(models[0], tmp_path / "cut.onnx") < divergence(*models)


def test_hidden_states_are_learnt_where_there_are_no_logits(models, tmp_path):
    text = LANGUAGE_MODEL.replace("logits", "hidden")
    onnx.save(proto_of(text, WEIGHTS), tmp_path / "encoder.onnx")
    quantize(tmp_path / "encoder.onnx", tmp_path / "e4.onnx", block_size=16)
    result = learnt((tmp_path / "encoder.onnx", tmp_path / "e4.onnx"), None)
    found = re.search(
        r"were (\S+) from the float model's and are (\S+)$", result.report.notes[0]
    )
    assert found is not None and float(found[2]) < 0.9 * float(found[1])


STRANGE = LANGUAGE_MODEL.replace("act = Tanh(up)", "act = Softsign(up)")


@pytest.mark.parametrize(
    ("text", "samples", "error", "words"),
    [
        (LANGUAGE_MODEL, 9, CalibrationError, "9 samples: 10 or more are needed"),
        (STRANGE, 20, ModelFileError, "Softsign can't be differentiated here"),
    ],
)
def test_what_can_not_be_learnt_is_one_line(tmp_path, text, samples, error, words):
    onnx.save(proto_of(text, WEIGHTS), tmp_path / "float.onnx")
    quantize(tmp_path / "float.onnx", tmp_path / "int4.onnx", block_size=16)
    with pytest.raises(error, match=words):
        learnt((tmp_path / "float.onnx", tmp_path / "int4.onnx"), tmp_path / "o.onnx", samples)
    assert not (tmp_path / "o.onnx").exists()


def test_a_model_that_is_still_float_is_refused(models, tmp_path):
    with pytest.raises(ModelFileError, match="quantise the model first"):
        learnt((models[0], models[0]), tmp_path / "o.onnx")
