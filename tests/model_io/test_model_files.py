# SPDX-License-Identifier: MIT
"""Bad models are refused by name, before anything is built from them."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import CPU, EXACT, check, save, start
from builders.text_models import normal, proto_of
from onnx import TensorProto, helper

import ortplugins
from ortplugins import MissingFileError, ModelFileError
from ortplugins.model_io import mapped_initializers as inline_tensors
from ortplugins.model_io.loading import load_model

CASE = DequantizedMatMul(128, 64, 32)

Spoil = Callable[[Path], object]  # of the folder that holds model.onnx and its data


def replaced(name: str, content: bytes) -> Spoil:
    return lambda folder: folder.joinpath(name).write_bytes(content)


def cut(name: str, size: int) -> Spoil:
    """Leave out the last bytes of a file."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - size)


def reported(dims: Sequence[int] = (), **entries: str | int | None) -> Spoil:
    """Change the sizes of the first external tensor, and what it says of its data."""

    def change(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.external_data)
        tensor.dims[:] = dims or tensor.dims
        given = {entry.key: entry.value for entry in tensor.external_data} | entries
        del tensor.external_data[:]
        for key, value in given.items():
            if value is not None:
                tensor.external_data.add(key=key, value=str(value))

    return changed(change)


def instead(make: Callable[[Path], object]) -> Spoil:
    """Put something else in the place of the data."""

    def spoil(folder: Path) -> None:
        (folder / DATA).unlink()
        make(folder / DATA)

    return spoil


def changed(change: Callable[[onnx.GraphProto], object]) -> Spoil:
    """Change the graph."""

    def spoil(folder: Path) -> None:
        proto = onnx.load(folder / "model.onnx", load_external_data=False)
        change(proto.graph)
        (folder / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def add_untyped_constant(graph: onnx.GraphProto) -> None:
    value = helper.make_tensor("", 1, [0], [])
    graph.node.append(helper.make_node("Constant", [], ["c"], value=value))
    graph.node[-1].attribute[0].type = onnx.AttributeProto.UNDEFINED


DATA = "model.onnx.data"


def removed(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


BAD: dict[str, tuple[Spoil, str]] = {
    "missing": (removed("model.onnx"), r"model\.onnx: no such model file"),
    "truncated": (cut("model.onnx", 40), r"model\.onnx: is not an ONNX model, or was cut off"),
    "empty": (
        replaced("model.onnx", b""),
        r"\.onnx: (the file is empty|has no graph outputs)",
    ),
    "text": (replaced("model.onnx", b"I am a readme"), r"model\.onnx: is not an ONNX model"),
    "ORT format": (replaced("model.onnx", bytes(4) + b"ORTM" + bytes(64)), "is in ORT format"),
    "without data": (removed(DATA), r"tensor 'w.*': external data file '.*\.data' is missing"),
    "short data": (cut(DATA, 1), r"tensor 'w.*': needs bytes .* is the file complete\?"),
    "wrong length": (reported(length=17), r"'w': external data is 17 bytes long, but shape"),
    "huge offset": (reported(offset=1 << 40), r"tensor 'w': needs bytes 1099511627776"),
    **{
        f"{key} {text!r}": (reported(**{key: text}), f"valid ONNX model: .*({text}|negative)")
        for key in ("offset", "length")
        for text in ("-1", "abc", "", "1e3")
    },
    "huge length": (reported(length=1 << 70), r"tensor 'w': external data is \d+ bytes long"),
    **{
        f"sizes {dims}": (reported(dims, length=None), r"tensor 'w': (has shape|needs bytes)")
        for dims in ((-128, -64), (-1, 64), (1 << 40, 64), (1 << 62, 1 << 62))
    },
    "parent folder": (
        reported(location="../secret"),
        r"location '\.\./secret' leaves the mod",
    ),
    "absolute": (reported(location=f"/{DATA}"), "leaves the model's folder"),
    "link outside": (
        instead(lambda data: data.symlink_to("../secret")),
        r"is a link to '.*secret', outside the model's folder",
    ),
    "constant without a type": (
        changed(add_untyped_constant),
        r"model\.onnx: a Constant node has no valid",
    ),
    "a value of no node": (
        changed(lambda graph: graph.node[-1].input.__setitem__(0, "gone")),
        r"node 'matmul' \(MatMul\) reads 'gone', which is neither an input",
    ),
    "an output of no node": (
        changed(lambda graph: graph.output[0].__setattr__("name", "gone")),
        "an output is 'gone', which is neither an input",
    ),
    "a value made twice": (
        changed(lambda graph: graph.node.append(graph.node[-1])),
        "not a valid ONNX model: Output '.*' is redeclared",
    ),
    "no opset": (
        replaced("model.onnx", onnx.ModelProto(graph=onnx.GraphProto()).SerializeToString()),
        "has no graph opset imports",
    ),
    "folder as data": (instead(Path.mkdir), "is not a regular file"),
    "pipe as data": (instead(os.mkfifo), "is not a regular file"),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_and_nothing_is_written(name: str, tmp_path: Path, cache_dir: Path):
    spoil, message = BAD[name]
    error = MissingFileError if name in ("missing", "without data") else ModelFileError
    path, output = save(CASE, tmp_path / "models" / "model.onnx"), tmp_path / "out"
    (tmp_path / "secret").write_bytes(bytes(1 << 16))
    spoil(path.parent)
    output.mkdir()
    with pytest.raises(error, match=message):
        ortplugins.optimize(path, output / "model.onnx")
    assert re.search(message, note_of_a_start(path))
    assert list(output.iterdir()) == []
    assert list(cache_dir.glob("entries/*")) == []
    assert list(cache_dir.glob("building/*")) == []


def note_of_a_start(path: Path) -> str:
    """What is added to onnxruntime's own error."""
    with pytest.raises(Exception) as plain:
        ort.InferenceSession(path, providers=CPU)
    with pytest.raises(type(plain.value)) as caught:
        start(path)
    return caught.value.__notes__[0]


def test_data_without_a_length_is_as_long_as_its_shape(model_path: Path):
    reported(length=None)(model_path.parent)
    check(start(model_path), CASE)


def test_an_old_model_lists_its_weights_among_the_inputs(model_path: Path, tmp_path: Path):
    """Nobody may feed them."""
    proto = onnx.load(model_path)
    proto.ir_version = 3
    for tensor in proto.graph.initializer:
        given = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        proto.graph.input.append(given)
    onnx.save(proto, model_path)
    result = ortplugins.optimize(model_path, tmp_path / "out.onnx", passes=[EXACT])
    assert [value.name for value in result.model.graph.inputs] == ["x"]
    assert len(result.report.fired) == 1
    check(ort.InferenceSession(result.path, providers=CPU), CASE)


def test_a_tensor_without_elements_may_be_in_the_data_file(tmp_path: Path):
    text = "g (float[n, 4] x) => (float[n, 4] y) { y = Concat <axis = 0> (x, none) }"
    proto = proto_of(text, {"none": np.zeros((0, 4), np.float32)})
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    tensor = load_model(tmp_path / "m.onnx").model.graph.initializers["none"].const_value
    assert isinstance(tensor, ir.ExternalTensor) and tensor.numpy().shape == (0, 4)


def test_hard_linked_data_is_read(model_path: Path, tmp_path: Path):
    os.link(model_path.with_name("model.onnx.data"), tmp_path / "another name")
    result = ortplugins.optimize(model_path, tmp_path / "out.onnx", passes=[EXACT])
    check(ort.InferenceSession(result.path, providers=CPU), CASE)


# A file read without its tensors is the same model; what is not a model is left alone.


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(inline_tensors, "_MIN_BYTES", 256)
    monkeypatch.setattr(inline_tensors, "_MIN_FILE_BYTES", 0)
    onnx.save(model(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


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


def test_large_tensors_stay_in_the_file(path):
    reduced = inline_tensors.read_without_tensors(path)
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
    loaded = load_model(path, map_inline=True)
    weight = loaded.model.graph.initializers["W"].const_value
    np.testing.assert_array_equal(weight.numpy(), normal(32, 32))
    assert linked or loaded.data_files == {"model.onnx": path}


def test_tensors_in_other_fields_are_left(path):
    onnx.save(model(raw=False), path)
    assert inline_tensors.read_without_tensors(path) == model(raw=False)
    onnx.save(model(), path, save_as_external_data=True, size_threshold=0, location="d")
    expected = onnx.load(path, load_external_data=False)
    assert inline_tensors.read_without_tensors(path) == expected


def test_a_file_cut_off_anywhere_is_no_other_model(path):
    """Either it is left to the parser, or its reduced form is what the parser sees."""
    content = path.read_bytes()
    for length in range(1, len(content), 37):
        path.write_bytes(content[:length])
        for map_inline in (False, True):
            with pytest.raises(ModelFileError):
                load_model(path, map_inline=map_inline)


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
        loaded = load_model(path, map_inline=map_inline)
    except ModelFileError:
        return None
    tensors = {
        value.name: value.const_value.tobytes()
        for value in loaded.model.graph.initializers.values()
        if value.const_value is not None
    }
    return tensors
