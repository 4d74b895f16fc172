# SPDX-License-Identifier: MIT
"""llama.cpp's importance matrix, written here as its two formats have it."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import printed
from builders.quantized_files import dequantised, read
from builders.text_models import model_of, normal
from gguf_files import save_gguf

from ortplugins.errors import MissingFileError, ModelFileError, QuantizationError
from ortplugins.quantization import quantize

gguf = pytest.importorskip("gguf")

K, N = 64, 32
ENERGY = (normal(K, seed=7) ** 4).astype(np.float32)
ENTRIES = {"blk.0.attn_q.weight": ENERGY, "blk.0.ffn_down.weight": np.ones(N, np.float32)}


def legacy(path: Path, entries: Mapping[str, np.ndarray]) -> Path:
    data = struct.pack("<i", len(entries))
    for name, energy in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", 3, len(energy)) + (3 * energy).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<i", 3) + struct.pack("<i", 4) + b"text")
    return path


def in_gguf(path: Path, entries: Mapping[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, energy in entries.items():
        writer.add_tensor(f"{name}.in_sum2", (512 * energy).astype(np.float32)[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), 512, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WRITERS = {"m.dat": legacy, "m.gguf": in_gguf}


def model(second: str = "/model/layers.0/mlp/down_proj/MatMul") -> ir.Model:
    return model_of(
        f"""g (float[T, {K}] x) => (float[T, 8] z) {{
            ["/model/layers.0/self_attn/q_proj/MatMul"] y = MatMul(x, q)
            r = Relu(y)
            ["{second}"] z = MatMul(r, down)
        }}""",
        {"q": normal(K, N, seed=1), "down": normal(N, 8, seed=2)},
    )


def matrices(**options: Any) -> list[np.ndarray]:
    return [*dequantised(read(quantize(model(), **options).model)).values()]


@pytest.mark.parametrize("name", WRITERS)
def test_nearest_codes_err_least_where_activations_are_large(tmp_path, name):
    path = WRITERS[name](tmp_path / name, ENTRIES)
    found, second = matrices(imatrix=path, block_size=32)
    plain, _ = matrices(block_size=32)
    wanted = normal(K, N, seed=1).astype(float)

    def errors(matrix: np.ndarray) -> np.ndarray:
        squares = ENERGY[:, None] * (matrix - wanted) ** 2
        return squares.reshape(2, 32, N).sum(axis=1)

    assert errors(found).sum() < 0.9 * errors(plain).sum()
    # Of equal energies the sum of squares counts, and not |w| times these.
    weight = normal(N, 8, seed=2)
    assert ((second - weight) ** 2).sum() <= ((matrices()[1] - weight) ** 2).sum()


@pytest.mark.parametrize("name", WRITERS)
def test_awq_finds_what_samples_of_such_channels_find(tmp_path, name):
    path = WRITERS[name](tmp_path / name, ENTRIES)
    samples = [{"x": np.diag(np.sqrt(K * ENERGY)).astype(np.float32)}]
    options = {"method": "awq_lite", "rules": {"*down_proj*": "float"}, "fold_scales": False}
    found = quantize(model(), imatrix=path, **options)
    same = quantize(model(), calibration_data_reader=samples, **options)
    plain = quantize(model(), **options | {"method": "rtn"})
    one, other, third = (
        dequantised(read(result.model)).popitem()[1] for result in (found, same, plain)
    )
    assert found.report.quantized[0].alpha == same.report.quantized[0].alpha > 0
    assert np.isclose(one, other, rtol=1e-5).mean() > 0.99  # a tie may fall either way
    assert not np.allclose(one, third, rtol=1e-2)


def test_what_has_no_entry_is_noted_and_rounded_to_nearest(tmp_path):
    path = legacy(tmp_path / "m.dat", {"blk.0.attn_q.weight": ENERGY})
    result = quantize(model("elsewhere"), imatrix=path, method="awq_lite")
    first, second = result.report.quantized
    assert (first.method, second.method) == ("awq_lite", "rtn")
    assert "no entry" in second.reason
    assert any("1 weights have no entry" in note for note in result.report.notes)
    np.testing.assert_array_equal(dequantised(read(result.model))["elsewhere"], matrices()[1])


DAMAGED = [
    (b"", "no importance matrix"),
    (b"\0\0\0\0", "it has no entry"),
    (struct.pack("<i", 1 << 30), "cut short"),
    (struct.pack("<ii", 1, -4), "cut short"),
    (struct.pack("<ii", 1, 1 << 30), "cut short"),
    (struct.pack("<ii1sii", 1, 1, b"a", 1, 1 << 30), "cut short"),
    (struct.pack("<ii1sii", 1, 1, b"a", 1, -1), "cut short"),
    (struct.pack("<ii1sii", 1, 1, b"\xff", 1, 0), "cut short"),
]


@pytest.mark.parametrize(("data", "match"), DAMAGED, ids=str)
def test_damaged_files_are_refused(tmp_path, data, match):
    (tmp_path / "m.dat").write_bytes(data)
    with pytest.raises(ModelFileError, match=match):
        quantize(model(), imatrix=tmp_path / "m.dat")


@pytest.mark.parametrize(
    ("entries", "options", "error", "match"),
    [
        ({"blk.0.attn_q.weight": ENERGY[:-1]}, {}, ModelFileError, "has 63 channels.* 64"),
        ({"blk.0.attn_q.weight": -ENERGY}, {}, ModelFileError, "attn_q.* no mean squares"),
        ({"blk.0.attn_q.weight": ENERGY * np.nan}, {}, ModelFileError, "no mean squares"),
        (
            {"blk.9.attn_q.weight": ENERGY},
            {},
            ModelFileError,
            "no entry.*'blk.9.attn_q.weight'",
        ),
        (ENTRIES, {"method": "gptq"}, QuantizationError, "too little for gptq"),
        (ENTRIES, {"share_of_8_bits": 0.1}, QuantizationError, "too little for share_of_8"),
        (ENTRIES, {"rules": {"*": {"method": "awq_clip"}}}, QuantizationError, "for awq_clip"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tmp_path, entries, options, error, match):
    path = legacy(tmp_path / "m.dat", entries)
    with pytest.raises(error, match=match):
        quantize(model(), imatrix=path, **options)


def test_other_gguf_files_and_none_are_refused(tmp_path):
    save_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (normal(N, K), None)})
    with pytest.raises(ModelFileError, match="it has no entry"):
        quantize(model(), imatrix=tmp_path / "m.gguf")
    with pytest.raises(MissingFileError, match=r"none\.dat: no such file"):
        quantize(model(), imatrix=tmp_path / "none.dat")


def test_the_command_and_the_run_folder_know_the_file(tmp_path):
    ir.save(model(), tmp_path / "float.onnx")
    path, run = legacy(tmp_path / "m.dat", ENTRIES), tmp_path / "run"
    arguments = ["quantize", tmp_path / "float.onnx", "-o", tmp_path / "o.onnx"]
    printed(*arguments, "--imatrix", path, "--method", "awq_lite", "--run-folder", run)
    first = dequantised(read(tmp_path / "o.onnx"))
    legacy(path, ENTRIES | {"blk.0.attn_q.weight": ENERGY[::-1]})
    printed(
        *arguments, "--force", "--imatrix", path, "--method", "awq_lite", "--run-folder", run
    )
    second = dequantised(read(tmp_path / "o.onnx"))
    assert not all(np.array_equal(first[name], second[name]) for name in first)
