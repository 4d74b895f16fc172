# SPDX-License-Identifier: MIT
"""A file read without its tensors is the same model; whatever is not a model is left alone."""

import numpy as np
import onnx
import pytest
from builders.text_models import normal, proto_of
from onnx import TensorProto, helper

from ortplugins.errors import ModelFileError
from ortplugins.model_io import mapped_initializers as inline_tensors
from ortplugins.model_io.loading import load_path


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(inline_tensors, "_MIN_BYTES", 256)
    monkeypatch.setattr(inline_tensors, "_MIN_FILE_BYTES", 0)


def model(*, raw: bool = True) -> onnx.ModelProto:
    text = "g (float[b, 32] x) => (float[b, 32] y) { [mm] y = MatMul(x, W) }"
    weight = normal(32, 32)
    proto = proto_of(text, {"W": weight, "small": np.ones(4, np.float32)})
    if not raw:
        proto.graph.initializer[0].CopyFrom(
            helper.make_tensor("W", TensorProto.FLOAT, weight.shape, weight.reshape(-1))
        )
    proto.graph.doc_string = "kept"
    proto.metadata_props.add(key="k", value="v")
    return proto


@pytest.fixture
def path(tmp_path):
    onnx.save(model(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_large_tensors_stay_in_the_file(path):
    content = inline_tensors.read_without_tensors(path)
    reduced = onnx.ModelProto.FromString(content)
    large, small = reduced.graph.initializer
    assert large.data_location == TensorProto.EXTERNAL
    assert not large.raw_data
    assert small.raw_data
    onnx.load_external_data_for_model(reduced, str(path.parent))
    for tensor in reduced.graph.initializer:
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    assert reduced == model()


@pytest.mark.parametrize("linked", [False, True])
def test_the_loader_maps_them(path, linked):
    if linked:
        (path.parent / "blobs").mkdir()
        path.rename(path.parent / "blobs" / "3f5a")
        path.symlink_to("blobs/3f5a")
    loaded = load_path(path, map_inline=True)
    weight = loaded.model.graph.initializers["W"].const_value
    np.testing.assert_array_equal(weight.numpy(), normal(32, 32))
    assert linked or loaded.data_files == {"model.onnx": path}


def test_tensors_in_other_fields_are_left(path):
    onnx.save(model(raw=False), path)
    assert inline_tensors.read_without_tensors(path) is None
    onnx.save(model(), path, save_as_external_data=True, size_threshold=0, location="d")
    assert inline_tensors.read_without_tensors(path) is None


def test_a_file_cut_off_anywhere_is_no_other_model(path):
    """Either it is left to the parser, or its reduced form is what the parser sees."""
    content = path.read_bytes()
    for length in range(1, len(content), 37):
        path.write_bytes(content[:length])
        for map_inline in (False, True):
            with pytest.raises(ModelFileError):
                load_path(path, map_inline=map_inline)


def test_flipped_bits_do_no_more_harm_than_to_the_parser(path):
    content = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(content)
        damaged[random.integers(0, 200)] ^= 1 << random.integers(0, 8)
        path.write_bytes(damaged)
        mapped = outcome(path, map_inline=True)
        # Lengths in files are checked while loading, those in messages later.
        assert mapped is None or mapped == outcome(path, map_inline=False)


def outcome(path, *, map_inline):
    """The weight as it was read; None for a file that was refused."""
    try:
        loaded = load_path(path, map_inline=map_inline)
    except ModelFileError:
        return None
    tensors = {
        value.name: value.const_value.tobytes()
        for value in loaded.model.graph.initializers.values()
        if value.const_value is not None
    }
    return tensors
