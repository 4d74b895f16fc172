# SPDX-License-Identifier: MIT
"""A cache of keys and values in int8: its scales, its numbers, and where it cannot be."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.decoders import genai_decoder, genai_feeds
from builders.exports import exported
from builders.sessions import CPU
from builders.text_models import model_of, normal

import ortplugins
from ortplugins.errors import CalibrationError, ModelFileError
from ortplugins.quantization import quantize_kv_cache
from ortplugins.runtime.stock_session import open_model

ROWS, PROMPT, STEPS, CAPACITY = 2, 9, 4, 20


@pytest.fixture(scope="module")
def shared() -> ir.Model:
    model = exported("llama-dynamo-sdpa")
    passes = [ortplugins.TransformerFusion(kv_cache="shared")]
    return ir.from_proto(ortplugins.optimize(model, passes=passes).model)


def session_on(model: ir.Model) -> ort.InferenceSession:
    content = ir.to_proto(model).SerializeToString()
    return open_model(content, "disable")


def caches(session) -> list[tuple[str, list[int]]]:
    return [(i.name, i.shape) for i in session.get_inputs() if "past" in i.name]


def sample(session, seed=0, length=PROMPT):
    """A prompt and empty caches."""
    ids = np.random.default_rng(seed).integers(0, 20, (ROWS, length))
    feed = {
        "input_ids": ids,
        "attention_mask": np.ones((ROWS, length), np.int64),
        "position_ids": np.arange(length)[None].repeat(ROWS, 0),
    }
    feed = {i.name: feed[i.name] for i in session.get_inputs() if i.name in feed}
    return feed | {
        name: np.zeros((ROWS, shape[1], 0, shape[3]), np.float32)
        for name, shape in caches(session)
    }


def generated(model: ir.Model):
    """The logits of a prompt and of single tokens, and the buffers in the end."""
    session, binding, found = session_on(model), None, []
    binding, buffers = session.io_binding(), {}
    dtypes = {
        i.name: np.int8 if "int8" in i.type else np.float32 for i in session.get_inputs()
    }
    for name, shape in caches(session):
        empty = np.zeros((ROWS, shape[1], CAPACITY, shape[3]), dtypes[name])
        buffers[name] = ort.OrtValue.ortvalue_from_numpy(empty)
        binding.bind_ortvalue_input(name, buffers[name])
        present = name.replace("past_key_values", "present")
        binding.bind_ortvalue_output(present, buffers[name])
    whole = sample(session, 1, PROMPT + STEPS)
    for start, stop in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))):
        for name in whole.keys() - buffers.keys():
            first = 0 if name == "attention_mask" else start
            binding.bind_cpu_input(name, np.ascontiguousarray(whole[name][:, first:stop]))
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        found.append(binding.get_outputs()[-1].numpy().copy())
    return np.concatenate(found, 1), {
        name: value.numpy().copy() for name, value in buffers.items()
    }


def constants_of(model: ir.Model) -> dict[str, np.ndarray]:
    return {name: v.const_value.numpy() for name, v in model.graph.initializers.items()}


def test_codes_are_those_of_the_greatest_numbers_in_the_samples(shared):
    samples = [sample(session_on(shared), seed) for seed in range(3)]
    result = quantize_kv_cache(shared, calibration_data_reader=samples)
    expected, floats = generated(shared)
    found, codes = generated(result.model)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert (found != expected).any()
    scales = constants_of(result.model)
    session = session_on(shared)
    names = [output.name for output in session.get_outputs()][1:]
    runs = [session.run(names, feed) for feed in samples]
    for name, *arrays in zip(floats, *runs, strict=True):
        greatest = np.abs(np.concatenate(arrays)).max(axis=(0, 2))
        assert scales[f"{name}.scale"] == pytest.approx(greatest.reshape(-1) / 127)
        assert codes[name].nbytes * 4 == floats[name].nbytes
    # The first layer's keys and values depend on no cache.
    for name in list(floats)[:2]:
        steps = scales[f"{name}.scale"].reshape(1, floats[name].shape[1], 1, -1)
        stored = np.clip(np.rint(floats[name] / steps), -128, 127)
        assert np.abs(codes[name] - stored).max() <= 1  # a rounded tie
    assert any("int8" in note for note in result.report.notes)


def test_the_graph_of_onnxruntimes_builder_is_taken_and_a_session_with_passes_opens_it():
    model = ir.from_proto(genai_decoder())
    feed = genai_feeds(range(6))
    made = quantize_kv_cache(model, calibration_data_reader=[feed]).model
    empty = np.zeros((1, 2, 0, 8), np.int8)
    given = feed | {name: empty for name in feed if name.startswith("past")}
    expected = session_on(model).run(["logits"], feed)[0]
    so = ort.SessionOptions()
    ortplugins.configure(so, ortplugins.TransformerFusion(), ortplugins.TrimPadding())
    content = ir.to_proto(made).SerializeToString()
    session = ortplugins.InferenceSession(content, so, providers=CPU)
    (found,) = session.run(["logits"], given)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def with_reader(model: ir.Model) -> ir.Model:
    model = model.clone()
    (past,) = [value for value in model.graph.inputs if value.name == "past_key_values_0_key"]
    node = ir.node("Neg", [past], name="reader")
    node.outputs[0].name, node.outputs[0].dtype = "read", past.dtype
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    return model


def with_keys_of(number: float) -> ir.Model:
    model = GENAI.clone()
    value = model.graph.initializers["wk"]
    numbers = np.full(value.shape.numpy(), number, np.float32)
    value.const_value = ir.tensor(numbers, name="wk")
    return model


def in_a_branch() -> ir.Model:
    """As in a decoder whose branch without a cache was merged with the one that has it."""
    q, cache = "float[1, S, 16]", "float[1, 2, T, 8]"
    text = f"""g ({q} q, {cache} pk, {cache} pv, int32[1] l, int32 t, bool c) =>
        ({q} z, {cache} k, {cache} v) {{
        y, k, v = If (c) <
            then_branch = a () => ({q} y1, {cache} k1, {cache} v1) {{
                y1, k1, v1 = com.microsoft.GroupQueryAttention
                    <num_heads = 2, kv_num_heads = 2> (q, q, q, pk, pv, l, t) }},
            else_branch = b () => ({q} y2, {cache} k2, {cache} v2) {{
                y2 = Identity(q) h = Reshape(q, heads)
                k2 = Transpose <perm = [0, 2, 1, 3]> (h) v2 = Identity(k2) }}>
        z = MatMul(y, W) }}"""
    return model_of(text, {"W": normal(16, 16), "heads": np.array([0, 0, 2, 8])})


GENAI, FEED = ir.from_proto(genai_decoder()), genai_feeds([1, 2, 3])
EXPORTED = ir.from_proto(exported("gpt2-dynamo-eager"))


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        (EXPORTED, ModelFileError, "no GroupQueryAttention.*optimize the model"),
        (in_a_branch(), ModelFileError, "an input of the model to an output"),
        (with_reader(GENAI), ModelFileError, "'reader' reads"),
        (with_keys_of(np.nan), CalibrationError, "_key' holds NaN, infinity.*samples"),
        (with_keys_of(0), CalibrationError, "_key' holds .*only zeros"),
    ],
    ids=["as exported", "in a branch", "read by another node", "NaN", "zeros"],
)
def test_a_cache_that_cannot_be_int8_is_an_error(model, error, match):
    with pytest.raises(error, match=match):
        quantize_kv_cache(model, calibration_data_reader=[FEED])
