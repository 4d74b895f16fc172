# SPDX-License-Identifier: MIT
"""Calibration: samples are read once and checked, activations stream into statistics."""

import numpy as np
import onnx_ir as ir
import pytest
from builders.samples import Reader
from builders.text_models import matmul_chain, model_of, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins
from ortplugins.errors import CalibrationError, ModelFileError
from ortplugins.model_io.loading import load_model
from ortplugins.quantization.statistics import statistics_of
from ortplugins.quantization.walk import Walk
from ortplugins.samples.sources import read_samples

# The activations of a chain of MatMuls, and their widths.
WIDTHS = {"t0": 32, "t1": 48, "t2": 32}
NAMES = list(WIDTHS)


def chain():
    return matmul_chain("abcd", [24, *WIDTHS.values(), 8], "Tanh")


def by_numpy(model, feeds):
    """What the activations are, tokens of all feeds after each other."""
    x, weights = np.concatenate([feed["x"] for feed in feeds]), model.graph.initializers
    for name in NAMES:
        x = np.tanh(x @ weights[f"W{name[1:]}"].const_value.numpy())
        yield name, x


def walked(model, source, tmp_path, widths, *given, **options):
    """Return what is known of activations, by width, which are in the model's order."""
    walk = Walk(model, read_samples(source, model), tmp_path)
    return {name: walk.statistics(name, k, *given, **options) for name, k in widths.items()}


# Statistics


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    k=st.sampled_from([1, 7, 400, 800]),
    max_tokens=st.sampled_from([0, 1, 16, 300]),
)
def test_statistics_are_those_of_all_tokens(lengths, k, max_tokens):
    x = np.random.default_rng(0).standard_normal((sum(lengths) + 1, k)).astype(np.float32)
    portions = np.split(x[None], np.cumsum(lengths), axis=1)
    found = statistics_of(lambda: portions, "x", k, 2, max_tokens=max_tokens)
    assert found is not None
    assert found.count == len(x)
    np.testing.assert_allclose(found.mean_abs, np.abs(x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.gram, x.T @ x / len(x), atol=1e-5)
    np.testing.assert_array_equal(found.gram, found.gram.T)
    assert found.tokens.shape == (min(max_tokens, len(x)), k)
    if k > 1:  # the sample is in the order of the tokens, each once
        places = [np.flatnonzero((x == token).all(1))[0] for token in found.tokens]
        assert places == sorted(set(places))


def test_a_sample_of_tokens_is_uniform_and_does_not_depend_on_portions():
    x = np.arange(2000, dtype=np.float32)[:, None]
    splits = [x], np.split(x, [3, 499, 501, 1600])
    whole, parts = (
        statistics_of(lambda split=split: split, "x", 1, max_tokens=500).tokens
        for split in splits
    )
    np.testing.assert_array_equal(whole, parts)
    quarters, _ = np.histogram(whole, 4, (0, 2000))
    assert (abs(quarters - 125) < 40).all()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.full((2, 3), np.nan, np.float32), "'x' holds NaN or infinite"),
        (np.full((2, 3), np.inf, np.float32), "'x' holds NaN or infinite"),
        (np.full((2, 3), 1e20, np.float32), "'x' is too large: its squares leave float32"),
        (np.ones((3, 2), np.float32), r"'x' has shape \[3, 2\].*K = 3"),
    ],
)
def test_bad_activations_are_refused_by_name(x, message):
    with pytest.raises(CalibrationError, match=message):
        statistics_of(lambda: [x], "x", 3, 2)


# Samples


TWO_INPUTS = model_of(
    """g (int64[batch, n] ids, float[batch, 2] extra) => (float[batch, 2] y) {
        y = Identity(extra)
    }""",
    {},
)


def sample(**changes):
    arrays = {"ids": np.ones((1, 4), np.int64), "extra": np.ones((1, 2), np.float32)}
    return {name: array for name, array in {**arrays, **changes}.items() if array is not None}


def kept(source):
    return read_samples(source, TWO_INPUTS)


def test_a_reader_is_pulled_once_and_its_arrays_are_its_own():
    ids = np.zeros((1, 4), np.int64)

    def generate():
        for number in range(3):
            ids[:] = number  # the reader uses its array again
            yield sample(ids=ids)

    reader = Reader(generate())
    assert [feed["ids"][0, 0] for feed in kept(reader)] == [0, 1, 2]
    assert reader.pulls == 4


def test_samples_come_from_files_and_dicts(tmp_path):
    np.savez(tmp_path / "one.npz", **sample())
    assert len(kept(tmp_path / "one.npz")) == 1
    both = [str(tmp_path / "one.npz"), tmp_path / "one.npz", sample()]
    assert [feed["ids"].shape for feed in kept(both)] == [(1, 4)] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"nonsense", "cannot be read"),
        ({"ids": np.array([None])}, "cannot be read.*allow_pickle"),
        ({"idz": np.ones((1, 4))}, "sample 0 of '.*bad.npz' has 'idz'.*did you mean 'ids'"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    with pytest.raises(CalibrationError, match=rf"(?s)bad\.npz.*|{message}") as caught:
        kept(path)
    assert caught.match(message)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (np.ones(2), "sample 1 is a ndarray; expected a dict"),
        (sample(extra=None), "sample 1 lacks the inputs 'extra'"),
        (sample(ixs=np.ones(1)), "sample 1 has 'ixs', which is not an .*did you mean 'ids'"),
        (sample(ids=np.ones((1, 4), np.int32)), r"'ids' is int32.*takes int64"),
        (sample(extra=np.ones((1, 2))), "'extra' is float64.*takes float32"),
        (sample(ids=np.ones(4, np.int64)), r"shape \[4\].*\[batch,n\]"),
        (sample(extra=np.array([[1, np.nan]], np.float32)), "'extra' holds NaN"),
        (sample(extra=object()), "'extra' is a object that is not an array"),
        (sample(extra=[[1.0], [2.0, 3.0]]), "'extra' is a list that is not an array"),
    ],
)
def test_bad_samples_are_refused_by_number_and_input(item, message):
    with pytest.raises(CalibrationError, match=message):
        kept(Reader([sample(), item]))


def test_a_failing_reader_differs_from_one_without_data():
    def failing():
        yield sample()
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        kept(failing())
    with pytest.raises(CalibrationError, match="is empty"):
        kept(Reader([]))
    with pytest.raises(CalibrationError, match="which is one sample: give a list"):
        kept(sample())
    with pytest.raises(CalibrationError, match="is a int"):
        kept(3)


def test_without_data_inputs_are_random_and_it_is_said():
    """test_samples.py says which."""
    with pytest.warns(ortplugins.OrtpluginsWarning, match="random inputs"):
        feed, *_ = kept(None)
    assert feed["ids"].shape[0] == feed["extra"].shape[0]
    assert feed["extra"].std() > 0


# Collecting


def test_weights_stay_in_their_files_and_the_model_as_it_was(tmp_path):
    model = chain()
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "model.onnx"
    ir.save(model, path, external_data="model.data", size_threshold_bytes=0)
    loaded = load_model(path).model
    before = ir.to_proto(loaded).SerializeToString()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    feeds = [{"x": normal(n, 24, seed=1)} for n in (5, 9, 11)]
    found = walked(loaded, feeds, scratch, WIDTHS, 2, max_tokens=100)
    assert ir.to_proto(loaded).SerializeToString() == before
    assert not [path for path in scratch.rglob("*.data") if path.stat().st_size]
    for name, x in by_numpy(model, feeds):
        assert found[name].count == 25
        np.testing.assert_allclose(found[name].tokens, x, atol=1e-5)
        np.testing.assert_allclose(found[name].mean_abs, np.abs(x).mean(0), rtol=1e-4)
        np.testing.assert_allclose(found[name].gram, x.T @ x / 25, atol=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("h = Exp(x) y = Neg(h)", "sample 1: activation 'h' holds NaN or inf"),
        ("h = Reshape(x, two) y = Neg(h)", "sample 1: onnxruntime failed"),
        ("h = NoSuchOperator(x) y = Neg(h)", "refuses it: .*NoSuchOperator"),
    ],
)
def test_runs_that_fail_name_the_sample(tmp_path, line, message):
    text = f"g (float[n, 2] x) => (float[m, 2] y) {{ {line} }}"
    model = model_of(text, {"two": np.array([2, 2])})
    feeds = [{"x": np.full((n, 2), size, np.float32)} for n, size in ((2, 1), (1, 500))]
    with pytest.raises((CalibrationError, ModelFileError), match=message):
        walked(model, feeds, tmp_path, {"h": 2})
