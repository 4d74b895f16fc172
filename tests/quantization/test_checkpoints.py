# SPDX-License-Identifier: MIT
"""Checkpoints of GPTQ, AWQ and AutoRound, packed here by their definition from known codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command, printed
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, dequantised, read
from builders.text_models import model_of, normal
from onnx import numpy_helper

from ortplugins.errors import MissingFileError, ModelFileError, QuantizationError
from ortplugins.quantization import quantize

numpy_files = pytest.importorskip("safetensors.numpy")

K, N = 64, 32
LAYERS = {"model.layers.0.mlp.up_proj": (K, N), "model.layers.0.mlp.down_proj": (N, K)}
NORM = "model.layers.0.input_layernorm.weight"
KINDS = {
    "gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "gptq_v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_gptq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    "awq": {"quant_method": "awq", "version": "gemm"},
    "auto_awq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
}


def words(numbers: np.ndarray, bits: int, order: list[int]) -> np.ndarray:
    """Numbers [rows, n] in words of 32 bits along the last axis, one after the other."""
    count = 32 // bits
    packed = np.zeros((len(numbers), numbers.shape[1] // count), np.uint64)
    for row, column in np.ndindex(packed.shape):
        for place, within in enumerate(order or range(count)):
            number = int(numbers[row, column * count + within])
            packed[row, column] |= np.uint64(number << (place * bits))
    return packed.astype(np.uint32).view(np.int32)


def packed_layer(kind: str, k: int, n: int, bits: int, size: int, middle: bool, seed: int):
    """Tensors of a layer, and its weight in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (k, n))
    zeros = rng.integers(0, 2**bits, (k // size, n))
    if middle:
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    rows = np.arange(k) // size
    weight = (codes - zeros[rows]) * scales[rows].astype(np.float64)
    if "awq" in kind:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": words(codes, bits, order), "qzeros": words(zeros, bits, order)}
    else:
        stored = zeros if kind == "gptq_v2" else (zeros - 1) % 2**bits
        packed = np.ascontiguousarray(words(codes.T, bits, []).T)
        tensors = {"qweight": packed, "qzeros": words(stored, bits, [])}
        tensors["g_idx"] = rows.astype(np.int32)
    return tensors | {"scales": scales}, weight


def checkpoint(
    folder: Path,
    kind: str,
    *,
    bits: int = 4,
    middle: bool = False,
    config: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a checkpoint in two files, blocks of 16; return the weights by layer."""
    folder.mkdir()
    weights = {}
    for number, (name, (k, n)) in enumerate(LAYERS.items()):
        parts, weights[name] = packed_layer(kind, k, n, bits, 16, middle, number)
        content = {f"{name}.{part}": array for part, array in parts.items()}
        if number == 0:
            content |= {NORM: normal(K, seed=9)} | (tensors or {})
        numpy_files.save_file(content, folder / f"model-{number}.safetensors")
    settings = KINDS[kind] | {"bits": bits, "group_size": 16} | (config or {})
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return weights


NODES = ("up", "/model/layers.0/mlp/down_proj/MatMul")


def float_model(weights: dict[str, np.ndarray], norm: str = NORM) -> ir.Model:
    """The same layers in float: one by the name of its weight, one by that of its node."""
    up, down = (
        (w + 0.1 * w.std() * normal(*w.shape, seed=8)).astype(np.float32)
        for w in weights.values()
    )
    model = model_of(
        f"""g (float[T, {K}] x) => (float[T, {K}] z) {{
            h = Mul(x, norm)
            [up] i = MatMul(h, up)
            ["{NODES[1]}"] j = Gemm <transB = 1> (i, down)
            [head] z = MatMul(j, head)
        }}""",
        {"norm": normal(K), "up": up, "down": down.T, "head": normal(K, K)},
    )
    for old, new in (("norm", norm), ("up", f"{next(iter(LAYERS))}.weight")):
        value = model.graph.initializers[old]
        value.name = value.const_value.name = new
    return model


@pytest.mark.parametrize("middle", [True, False])
@pytest.mark.parametrize(
    ("kind", "bits"), [*((kind, 4) for kind in KINDS), ("gptq", 2), ("gptq", 8)]
)
def test_codes_scales_and_norms_are_those_of_the_checkpoint(tmp_path, kind, bits, middle):
    weights = checkpoint(tmp_path / "c", kind, bits=bits, middle=middle)
    up, down = weights.values()
    x = normal(5, K, seed=3)
    expected = (x * normal(K, seed=9).astype(float)) @ up @ down @ normal(K, K)
    for layout in FORMATS:
        result = quantize(float_model(weights), checkpoint=tmp_path / "c", quant_format=layout)
        (left,) = result.report.refused
        assert (left.node, left.reason) == ("head", "not in the checkpoint")
        for row in result.report.quantized:
            method = "awq" if "awq" in kind else "gptq"
            assert (row.method, row.bits, row.block_size) == (method, bits, 16)
        matrices = dequantised(read(result.model))
        for node, weight in zip(NODES, weights.values(), strict=True):
            np.testing.assert_allclose(matrices[node], weight, rtol=1e-7)
        assert relative_error(run(result.model, {"x": x})[0], expected) < 1e-5


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_wrapper_around_the_model_does_not_matter(tmp_path, kind):
    weights = checkpoint(tmp_path / "c", kind)
    model = float_model(weights, f"model.{NORM}")
    result = quantize(model, checkpoint=tmp_path / "c")
    norms = [tensor for tensor in read(result.model).graph.initializer if NORM in tensor.name]
    np.testing.assert_array_equal(numpy_helper.to_array(*norms), normal(K, seed=9))


@pytest.mark.parametrize("kind", ["gptq", "auto_gptq"])
def test_layers_may_have_bits_of_their_own(tmp_path, kind):
    parts, weight = packed_layer(kind, K, N, 8, 16, False, 5)
    parts = {f"{next(iter(LAYERS))}.{part}": array for part, array in parts.items()}
    weights = checkpoint(tmp_path / "c", kind, tensors=parts)
    weights[next(iter(LAYERS))] = weight
    result = quantize(float_model(weights), checkpoint=tmp_path / "c")
    assert [row.bits for row in result.report.quantized] == [8, 4]
    found = dequantised(read(result.model))
    for node, expected in zip(NODES, weights.values(), strict=True):
        np.testing.assert_allclose(found[node], expected, rtol=1e-7)


@pytest.mark.parametrize("layout", FORMATS)
def test_rows_that_act_order_scattered(tmp_path, layout):
    name, (k, n) = next(iter(LAYERS.items()))
    scattered = np.random.default_rng(6).permutation(np.arange(K) // 16).astype(np.int32)
    parts, _ = packed_layer("gptq", k, n, 4, 16, False, 0)
    weights = checkpoint(tmp_path / "c", "gptq", tensors={f"{name}.g_idx": scattered})
    # The same codes, each with the scale and zero point of another block.
    unsigned = unpacked_codes(parts["qweight"])
    stored = (unpacked_codes(parts["qzeros"].T).T + 1) % 16
    scales = parts["scales"].astype(float)
    weights[name] = (unsigned - stored[scattered]) * scales[scattered]
    result = quantize(float_model(weights), checkpoint=tmp_path / "c", quant_format=layout)
    x = normal(5, K, seed=3)
    up, down = weights.values()
    expected = (x * normal(K, seed=9).astype(float)) @ up @ down @ normal(K, K)
    assert relative_error(run(result.model, {"x": x})[0], expected) < 1e-5


def unpacked_codes(packed: np.ndarray) -> np.ndarray:
    """Codes of 4 bits, eight to a word along the first axis."""
    parts = [packed.view(np.uint32) >> (4 * place) & 15 for place in range(8)]
    return np.stack(parts, axis=1).reshape(-1, packed.shape[1]).astype(int)


UP = next(iter(LAYERS))


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (
            "gptq",
            {"tensors": {f"{UP}.g_idx": np.minimum(np.arange(K, dtype=np.int32) // 16, 2)}},
            ModelFileError,
            rf"layer '{UP}'.*blocks of different numbers of rows",
        ),
        ("gptq", {"config": {"bits": 3}}, ModelFileError, "gptq checkpoints of 3 bits"),
        ("awq", {"config": {"version": "gemv"}}, ModelFileError, "'awq'.*gemv.* is not read"),
        ("gptq", {"config": {"quant_method": "exl2"}}, ModelFileError, "'exl2'"),
        ("awq", {"norm": "renamed"}, ModelFileError, rf"tensor '{NORM}'.*no initializer"),
        (
            "gptq",
            {"tensors": {f"{UP}.qweight": np.zeros((K // 4, N), np.int32)}},
            ModelFileError,
            rf"layer '{UP}' of the checkpoint is \[128, 32\], node 'up'.*\[64, 32\]",
        ),
        (
            "gptq",
            {"tensors": {f"{UP}.qzeros": np.zeros((K // 16, 3), np.int32)}},
            ModelFileError,
            f"layer '{UP}' of the checkpoint has 3 bits: 2, 4 and 8 are read",
        ),
        ("gptq", {"method": "gptq"}, QuantizationError, "brings its own codes"),
        ("gptq", {"file": b"damaged"}, ModelFileError, "model-0.safetensors is damaged"),
    ],
    ids=str,
)
def test_what_is_not_read_is_reported_by_name(tmp_path, kind, options, error, message):
    known = {key: options[key] for key in ("config", "tensors") if key in options}
    weights = checkpoint(tmp_path / "c", kind, **known)
    if "file" in options:
        (tmp_path / "c" / "model-0.safetensors").write_bytes(options["file"])
    model = float_model(weights, options.get("norm", NORM))
    with pytest.raises(error, match=message):
        quantize(
            model,
            tmp_path / "out.onnx",
            checkpoint=tmp_path / "c",
            method=options.get("method", "rtn"),
        )
    assert not (tmp_path / "out.onnx").exists()


def test_the_command_takes_a_checkpoint(tmp_path):
    weights = checkpoint(tmp_path / "c", "gptq")
    ir.save(float_model(weights), tmp_path / "float.onnx")
    source, folder, out = (tmp_path / name for name in ("float.onnx", "c", "out.onnx"))
    arguments = ["quantize", source, "--checkpoint", folder, "-o", out]
    done = ortplugins_command(*arguments, "--block-size", "32")
    assert done.returncode == 2
    assert "has no effect with --checkpoint" in " ".join(done.stderr.split())
    printed(*arguments)
    result = quantize(float_model(weights), checkpoint=folder)
    written, expected = dequantised(read(out)), dequantised(read(result.model))
    for node in NODES:
        np.testing.assert_array_equal(written[node], expected[node])


def test_a_folder_without_a_checkpoint_is_reported(tmp_path):
    model = float_model({name: normal(*shape) for name, shape in LAYERS.items()})
    with pytest.raises(
        MissingFileError, match=r"neither config\.json with quantization_config"
    ):
        quantize(model, checkpoint=tmp_path)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(MissingFileError, match=r"no \.safetensors file"):
        quantize(model, checkpoint=tmp_path)
