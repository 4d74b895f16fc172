# SPDX-License-Identifier: MIT
"""A file read without its tensors is the same model; whatever is no model is left alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortplugins.errors import ModelFileError
from ortplugins.model_io import mapped_initializers as inline_tensors
from ortplugins.model_io.loading import load_path


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(inline_tensors, "_LEAST_BYTES", 256)
    monkeypatch.setattr(inline_tensors, "_LEAST_FILE_BYTES", 0)


def model(*, raw: bool = True) -> onnx.ModelProto:
    weight = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    if raw:
        large = numpy_helper.from_array(weight, "W")
    else:
        large = helper.make_tensor("W", TensorProto.FLOAT, weight.shape, weight.reshape(-1))
    small = numpy_helper.from_array(np.ones(4, np.float32), "small")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["y"], name="mm")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 32])],
        [large, small],
        doc_string="kept",
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    proto.metadata_props.add(key="k", value="v")
    return proto


def test_large_tensors_stay_in_the_file(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    content = inline_tensors.read_without_tensors(path)
    reduced = onnx.ModelProto.FromString(content)
    large, small = reduced.graph.initializer
    assert large.data_location == TensorProto.EXTERNAL
    assert not large.raw_data
    assert small.raw_data
    onnx.load_external_data_for_model(reduced, str(tmp_path))
    for tensor in reduced.graph.initializer:
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    assert reduced == model()


def test_the_loader_maps_them(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    loaded = load_path(path, map_inline=True)
    assert loaded.data_files == {"model.onnx": path}
    weight = loaded.model.graph.initializers["W"].const_value
    expected = numpy_helper.to_array(model().graph.initializer[0])
    np.testing.assert_array_equal(weight.numpy(), expected)


def test_a_file_under_a_link_is_found(tmp_path):
    folder = tmp_path / "blobs"
    folder.mkdir()
    onnx.save(model(), folder / "3f5a")
    (tmp_path / "model.onnx").symlink_to(folder / "3f5a")
    loaded = load_path(tmp_path / "model.onnx", map_inline=True)
    assert loaded.model.graph.initializers["W"].const_value.numpy().shape == (32, 32)


def test_tensors_in_other_fields_are_left(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model(raw=False), path)
    assert inline_tensors.read_without_tensors(path) is None
    onnx.save(model(), path, save_as_external_data=True, size_threshold=0, location="d")
    assert inline_tensors.read_without_tensors(path) is None


def test_a_file_cut_off_anywhere_is_no_other_model(tmp_path):
    """Either it is left to the parser, or its reduced form is what the parser sees."""
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    content = path.read_bytes()
    for length in range(1, len(content), 37):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            load_path(path)
        with pytest.raises(ModelFileError):
            load_path(path, map_inline=True)


def test_flipped_bits_do_no_more_harm_than_to_the_parser(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
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
