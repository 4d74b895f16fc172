# SPDX-License-Identifier: MIT
"""Checkpoints of compressed-tensors, packed here by the definition of its pack_to_int32."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import printed
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, read
from builders.text_models import model_of, normal

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization import quantize

numpy_files = pytest.importorskip("safetensors.numpy")

K, N = 96, 40  # words of eight hold more rows than 36 would
UP, HEAD, NORM = (
    "model.layers.0.mlp.up_proj",
    "lm_head",
    "model.layers.0.input_layernorm.weight",
)
INDEX = "model.safetensors.index.json"


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n], signed, in words of 32 bits along the last axis, zeros behind them."""
    count = 32 // bits
    unsigned = np.pad(codes + 2 ** (bits - 1), [(0, 0), (0, -codes.shape[1] % count)])
    shifts = np.arange(count, dtype=np.uint64) * bits
    numbers = unsigned.astype(np.uint64).reshape(len(codes), -1, count) << shifts
    return numbers.sum(axis=2).astype(np.uint32).view(np.int32)


def layer(
    bits: int = 4,
    strategy: str = "group",
    *,
    symmetric: bool = True,
    packed: bool = True,
    act_order: bool = False,
    k: int = K,
    n: int = N,
    size: int = 32,
    scale_type: Any = ml_dtypes.bfloat16,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tensors of a layer, and its weight [N, K] in float64."""
    rng = np.random.default_rng(bits)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = rng.integers(low, high, (n, k))
    blocks = {"group": -(-k // size), "channel": 1, "tensor": 1}[strategy]
    shape = (1,) if strategy == "tensor" else (n, blocks)
    scales = rng.uniform(0.01, 0.02, shape).astype(scale_type)
    zeros = np.zeros(shape, int) if symmetric else rng.integers(low, high, shape)
    block_of = np.arange(k) // (size if strategy == "group" else k)
    if act_order:
        block_of = rng.permutation(block_of)
    grids = (
        np.broadcast_to(g, (n, blocks))[:, block_of] for g in (zeros, scales.astype(float))
    )
    zero, scale = grids
    tensors = {"weight_scale": scales}
    if packed:
        tensors |= {"weight_packed": words(codes, bits), "weight_shape": np.array([n, k])}
    else:
        tensors["weight"] = codes.astype(np.int8)
    if not symmetric and packed:
        tensors["weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
    elif not symmetric:
        tensors["weight_zero_point"] = zeros.astype(np.int8)
    if act_order:
        tensors["weight_g_idx"] = block_of.astype(np.int32)
    return tensors, (codes - zero) * scale


def checkpoint(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    others: Mapping[str, np.ndarray] = {},
    activations: Any = None,
    targets: Any = ("Linear",),
    index: Any = None,
) -> Path:
    """Write the layer's tensors, by parts, and others in a second file."""
    folder.mkdir()
    own = {f"{UP}.{part}": array for part, array in tensors.items()}
    numpy_files.save_file(own, folder / "model-1.safetensors")
    if others:
        numpy_files.save_file(dict(others), folder / "model-2.safetensors")
    group = {"targets": list(targets), "weights": {"num_bits": 4}}
    group["input_activations"] = activations
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    return folder


def near(weight: np.ndarray) -> np.ndarray:
    noise = 0.05 * weight.std() * normal(*weight.shape, seed=5)
    return (weight + noise).astype(np.float32)


def float_model(weight: np.ndarray, head: np.ndarray | None = None) -> ir.Model:
    """A normed product, and one behind it."""
    n, k = weight.shape
    model = model_of(
        f"""g (float[T, {k}] x) => (float[T, {n}] y, float[T, 8] z) {{
            h = Mul(x, norm)
            ["/model/layers.0/mlp/up_proj/MatMul"] y = MatMul(h, up)
            ["/lm_head/MatMul"] z = MatMul(y, head)
        }}""",
        {
            "norm": normal(k),
            "up": near(weight).T,
            "head": near(_head(n)).T if head is None else head,
        },
    )
    value = model.graph.initializers["norm"]
    value.name = value.const_value.name = NORM
    return model


def _head(n: int) -> np.ndarray:
    return normal(8, n, seed=6)


def outputs_are(result: Any, weight: np.ndarray, norm: np.ndarray, head: np.ndarray) -> None:
    x = normal(5, weight.shape[1], seed=3)
    y = (x * norm.astype(float)) @ weight.T
    for found, wanted in zip(run(result.model, {"x": x}), (y, y @ head.T), strict=True):
        assert relative_error(found, wanted) < 3e-6


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"symmetric": False},
        {"symmetric": False, "n": 36},
        {"bits": 8, "strategy": "channel"},
        {"bits": 8, "strategy": "channel", "symmetric": False},
        {"bits": 8, "packed": False, "strategy": "channel"},
        {"bits": 8, "packed": False, "symmetric": False},
        {"strategy": "tensor"},
        {"bits": 2, "size": 16},
        {"act_order": True},
        {"act_order": True, "symmetric": False, "scale_type": np.float32},
        {"k": 92, "scale_type": np.float16, "act_order": True},
    ],
    ids=str,
)
def test_codes_and_scales_are_those_of_the_checkpoint(tmp_path, given, layout):
    tensors, weight = layer(**given)
    head, norm = near(_head(len(weight))), normal(weight.shape[1], seed=9)
    others = {NORM: norm, f"{HEAD}.weight": head}
    folder = checkpoint(tmp_path / "c", tensors, others=others)
    result = quantize(float_model(weight), checkpoint=folder, quant_format=layout)
    (row,) = result.report.quantized
    assert (row.method, row.bits) == ("compressed-tensors", given.get("bits", 4))
    assert 0.01 < row.weight_error < 0.06
    (left,) = (row for row in result.report.refused if row.node == "/lm_head/MatMul")
    assert "float in the checkpoint" in left.reason
    outputs_are(result, weight, norm, head)


def test_an_index_says_which_files_count(tmp_path):
    tensors, weight = layer()
    norm = normal(K, seed=9)
    index = {"weight_map": {f"{UP}.weight_packed": "model-1.safetensors"}}
    folder = checkpoint(tmp_path / "c", tensors, others={NORM: norm}, index=index)
    outputs_are(
        quantize(float_model(weight), checkpoint=folder), weight, normal(K), near(_head(N))
    )
    index["weight_map"][NORM] = "model-2.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    outputs_are(quantize(float_model(weight), checkpoint=folder), weight, norm, near(_head(N)))


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (
            {"weight_map": {"a": "../c/model-1.safetensors"}},
            ModelFileError,
            "not a file of its",
        ),
        ({"weight_map": {"a": "/etc/passwd"}}, ModelFileError, "names '/etc/passwd'"),
        (
            {"weight_map": {"a": "model-9.safetensors"}},
            MissingFileError,
            "model-9.safetensors: no",
        ),
        ({"weight_map": ["a"]}, ModelFileError, "no weight_map"),
        ([], ModelFileError, "is not a JSON object"),
    ],
)
def test_an_index_names_files_beside_it(tmp_path, index, error, match):
    tensors, weight = layer()
    folder = checkpoint(tmp_path / "c", tensors, index=index)
    with pytest.raises(error, match=match):
        quantize(float_model(weight), checkpoint=folder)


INT8 = {"num_bits": 8}


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ({}, {"activations": INT8}, rf"'{UP}.weight'.*activations that are rounded.*W8A16"),
        ({}, {"activations": INT8, "targets": ["re:.*up_proj$"]}, "activations that are"),
        ({"weight_packed": np.zeros((N, K // 2), np.uint8)}, {}, rf"'{UP}.weight'.*as U8"),
        ({"weight_global_scale": np.ones(1, np.float32)}, {}, "is stored as I32.*W4A16"),
        ({"weight_packed": np.zeros((N, 7), np.int32)}, {}, r"\[40, 7\] words for \[40, 96\]"),
        ({"weight_shape": np.array([N, 1 << 40])}, {}, r"is \[1099511627776, 40\], node"),
        ({"weight_shape": np.array([-N, K])}, {}, "weight_shape.*N and K are expected"),
        ({"weight_shape": np.array([N, K, 1])}, {}, "weight_shape.*N and K are expected"),
        ({"weight_scale": np.ones((N, 0), np.float32)}, {}, "0 blocks for K = 96"),
        ({"weight_scale": np.ones((N, 95), np.float32)}, {}, "95 blocks for K = 96"),
        ({"weight_scale": np.ones((N + 1, 3), np.float32)}, {}, "each of its 40 rows"),
        ({"weight_scale": np.ones((N, 3), np.int32)}, {}, r"weight_scale'.*is I32 \[40, 3\]"),
        ({"weight_scale": np.full((N, 3), np.nan, np.float32)}, {}, "not the weight of node"),
        ({"weight_g_idx": np.zeros(K, np.int32)}, {}, "3 blocks for K = 96"),
        ({"weight_g_idx": np.arange(K, dtype=np.int32)[:-1] // 32}, {}, "numbers of rows"),
        ({"weight_g_idx": (np.arange(K) // 32 > 0).astype(np.int32)}, {}, "numbers of rows"),
        ({"weight_g_idx": np.zeros(K - 1, np.int32)}, {}, "3 blocks for K = 96"),
        ({"weight_zero_point": np.full((N, 3), 90, np.int8)}, {}, "zero points beyond 4 bits"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_by_name(tmp_path, change, options, match):
    tensors, weight = layer()
    folder = checkpoint(tmp_path / "c", tensors | change, **options)
    with pytest.raises(ModelFileError, match=match):
        quantize(float_model(weight), checkpoint=folder)


@pytest.mark.parametrize("targets", [["re:.*down_proj"], ["Conv2d"]])
def test_activations_of_other_layers_do_not_matter(tmp_path, targets):
    tensors, weight = layer()
    folder = checkpoint(tmp_path / "c", tensors, activations=INT8, targets=targets)
    outputs_are(
        quantize(float_model(weight), checkpoint=folder), weight, normal(K), near(_head(N))
    )


def test_float8_is_refused_by_name(tmp_path):
    _, weight = layer()
    folder = checkpoint(tmp_path / "c", {"weight_scale": np.ones((N, 1), np.float32)})
    about = {f"{UP}.weight": {"dtype": "F8_E4M3", "shape": [N, K], "data_offsets": [0, N * K]}}
    head = json.dumps(about).encode()
    (folder / "model-2.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + bytes(N * K)
    )
    with pytest.raises(ModelFileError, match=rf"'{UP}.weight'.*stored as F8_E4M3"):
        quantize(float_model(weight), checkpoint=folder)


def test_float_weights_of_another_model_are_refused(tmp_path):
    tensors, weight = layer()
    others = {f"{HEAD}.weight": normal(8, N, seed=66)}
    folder = checkpoint(tmp_path / "c", tensors, others=others)
    with pytest.raises(ModelFileError, match=f"'{HEAD}'.*not the weight of node '/lm_head"):
        quantize(float_model(weight), checkpoint=folder)


def test_a_square_float_matrix_keeps_its_orientation(tmp_path):
    tensors, weight = layer(n=8)
    square = normal(8, 8, seed=4)
    others = {f"{HEAD}.weight": near(square)}
    folder = checkpoint(tmp_path / "c", tensors, others=others)
    result = quantize(float_model(weight, square.T), checkpoint=folder)
    outputs_are(result, weight, normal(K), near(square))


def test_the_command_writes_the_same(tmp_path):
    tensors, weight = layer(act_order=True)
    folder = checkpoint(tmp_path / "c", tensors)
    ir.save(float_model(weight), tmp_path / "float.onnx")
    printed(
        "quantize", tmp_path / "float.onnx", "--checkpoint", folder, "-o", tmp_path / "o.onnx"
    )
    given, found = quantize(float_model(weight), checkpoint=folder), read(tmp_path / "o.onnx")
    x = {"x": normal(3, K)}
    for one, other in zip(run(given.model, x), run(ir.from_proto(found), x), strict=True):
        np.testing.assert_array_equal(one, other)
