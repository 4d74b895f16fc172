# SPDX-License-Identifier: MIT
"""Files of others that lie or do not fit: one sentence, with the tensor and what to do."""

import json
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command
from builders.text_models import model_of, normal
from checkpoint_files import (
    DOWN,
    HEAD,
    NORM,
    UP,
    K,
    N,
    layer,
    mlp,
    near,
    renamed,
    write_folder,
)

pytest.importorskip("safetensors")
pytest.importorskip("gguf")


def refusal(folder: Path, model: ir.Model, *options: object) -> str:
    """What the command prints; it writes nothing and takes little memory."""
    ir.save(model, folder / "float.onnx")
    arguments = ["quantize", folder / "float.onnx", "-o", folder / "out.onnx", *options]
    tracemalloc.start()
    try:
        done = ortplugins_command(*arguments)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert done.returncode == 2 and not (folder / "out.onnx").exists()
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert len(done.stderr) < 500
    return done.stderr


ROUNDED = {"num_bits": 8}


def groups(*targets: str) -> dict[str, Any]:
    group = {"targets": targets, "input_activations": ROUNDED}
    return {"config": {"config_groups": {"group_0": group}}}


OTHER, _ = layer("gptq", 4, k=2 * K)
# Kind, what is written, and what is printed.
FOLDERS: list[tuple[str, dict[str, Any], str]] = [
    # Configurations.
    ("gptq", {"config": {"bits": 3}}, "gptq checkpoints of 3 bits are not read"),
    ("gptq", {"config": {"bits": 4.0}}, "gptq checkpoints of 4.0 bits are not read"),
    ("gptq", {"config": {"bits": [4]}}, r"gptq checkpoints of \[4\] bits are not read"),
    ("awq", {"config": {"version": "gemv"}}, "'awq'.*gemv.* is not read"),
    ("gptq", {"config": {"quant_method": "exl2"}}, "'exl2'.* is not read"),
    ("pack-quantized", groups("Linear"), f"'{UP}.weight'.*that are rounded.*W8A16.*--rule"),
    ("pack-quantized", groups("re:.*up_proj$"), f"'{UP}.weight'.*activations that are r"),
    ("pack-quantized", groups("re:("), r"target 're:\(' is no regular expression"),
    ("pack-quantized", groups("re:a{99999999999}"), "is no regular expression"),
    # Another model.
    ("gptq", {"parts": OTHER}, rf"layer '{UP}' .* is \[192, 48\], node 'up' .*\[96, 48\]: gi"),
    ("gptq", {"seed": 7, "other": True}, f"layer '{UP}'.*is not the weight of node 'up'.*gi"),
    (
        "gptq",
        {"tensors": {f"{HEAD}.weight": normal(K, K, seed=66)}},
        f"'{HEAD}'.*not the weight of node '/lm_head/MatMul'",
    ),
    ("awq", {"norm": "renamed"}, f"tensor '{NORM}' of the AWQ.*export the float model with"),
    ("gptq", {"norm": f"vision.{NORM}"}, f"'{NORM}' of the checkpoint is not 'vision.{NORM}'"),
    # Parts of a layer.
    ("gptq", {"without": "scales"}, f"tensor '{UP}.scales' of the checkpoint is missing: F64"),
    ("gptq", {"without": "qzeros"}, f"tensor '{UP}.qzeros' of the checkpoint is missing"),
    ("pack-quantized", {"without": "weight_scale"}, f"tensor '{UP}.weight_scale'.*is missing"),
    ("pack-quantized", {"without": "weight_shape"}, f"tensor '{UP}.weight_shape'.*is missing"),
    (
        "int-quantized",
        {"bits": 8, "without": "weight_scale"},
        f"tensor '{UP}.weight' of the checkpoint is stored as I8 without scales.*--rule",
    ),
    (
        "gptq",
        {"parts": {"qzeros": np.zeros((K // 16, 4), np.int32)}},
        f"layer '{UP}' .* 4 words of zero points for 48 columns: 2, 4 and 8 bits are read",
    ),
    (
        "gptq",
        {"parts": {"qweight": np.zeros((K // 8, 0), np.int32)}},
        f"layer '{UP}' of the checkpoint has 6 words of zero points for 0 columns",
    ),
    ("gptq", {"parts": {"scales": np.ones((5, N), np.float16)}}, rf"{UP}.scales'.*\[5, 48\]"),
    (
        "gptq",
        {"parts": {"g_idx": np.minimum(np.arange(K, dtype=np.int32) // 16, 4)}},
        f"layer '{UP}'.* blocks",
    ),
    (
        "awq",
        {"parts": {"qzeros": np.zeros((0, N // 8), np.int32)}},
        rf"model-1.safetensors, tensor '{UP}.qzeros' \[0, 6\], is damaged",
    ),
    (
        "pack-quantized",
        {"parts": {"weight_zero_point": np.zeros(N // 8, np.int32)}},
        rf"'{UP}.weight_zero_point' of the checkpoint is I32 \[6\]: .* of rank 2 is expected",
    ),
    ("pack-quantized", {"parts": {"weight_packed": np.zeros((N, K // 2), np.uint8)}}, "as U8"),
    (
        "pack-quantized",
        {"parts": {"weight_global_scale": np.ones(1, np.float32)}},
        f"tensor '{UP}.weight' .* is stored as I32.*W4A16",
    ),
    *(
        ("pack-quantized", {"middle": True, "parts": {name: array}}, match)
        for name, array, match in (
            ("weight_packed", np.zeros((N, 7), np.int32), r"\[48, 7\] words for \[48, 96\]"),
            ("weight_shape", np.array([N, 1 << 40]), r"words for \[48, 1099511627776\]"),
            ("weight_shape", np.array([-N, K]), r"\[-48, 96\]: N and K are expected"),
            ("weight_shape", np.array([N, K, 1]), r"\[3\]: N and K are expected"),
            ("weight_scale", np.ones((N, 0), np.float32), "0 blocks for K = 96"),
            ("weight_scale", np.ones((N, 95), np.float32), "95 blocks for K = 96"),
            ("weight_scale", np.ones((N + 1, 6), np.float32), r"\[6, 49\].*\[96, 48\]"),
            ("weight_scale", np.ones((N, 6), np.int32), r"weight_scale'.*is I32 \[48, 6\]"),
            ("weight_scale", np.full((N, 6), np.nan, np.float32), "not the weight of node"),
            ("weight_g_idx", np.zeros(K, np.int32), "6 blocks for K = 96"),
            ("weight_g_idx", np.arange(K - 1, dtype=np.int32) // 16, "numbers of rows"),
            ("weight_g_idx", (np.arange(K) // 16 % 5).astype(np.int32), "6 blocks for K"),
            ("weight_zero_point", np.full((N, 6), 90, np.int8), "zero_point'.*beyond 4 bits"),
            ("weight_zero_point", np.zeros((N, 5), np.int8), r"zero points \[5, 48\]"),
        )
    ),
    # The index.
    *(
        ("pack-quantized", {"index": index}, match)
        for index, match in (
            ({"weight_map": {"a": "../c/model-1.safetensors"}}, "not a file of its folder"),
            ({"weight_map": {"a": "/etc/passwd"}}, "names '/etc/passwd': not a file of its"),
            ({"weight_map": {"a": "..safetensors/../model-1.safetensors"}}, "not a file of"),
            ({"weight_map": {"a": "model-9.safetensors"}}, "model-9.safetensors: no such f"),
            ({"weight_map": {"a": "\0.safetensors"}}, "no such file"),
            ({"weight_map": ["a"]}, "no weight_map"),
            ([], "is not a JSON object"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "given", "match"), FOLDERS, ids=str)
def test_folders(tmp_path, kind, given, match):
    norm, other, without = (given.get(name) for name in ("norm", "other", "without"))
    written = {k: v for k, v in given.items() if k not in ("norm", "other", "without")}
    weights = write_folder(tmp_path / "c", kind, **written)
    if other:
        weights[UP] = normal(K, N, seed=77)
    if without:
        drop(tmp_path / "c" / "model-1.safetensors", f"{UP}.{without}")
    model = mlp(weights, norm or NORM)
    assert_matches(match, refusal(tmp_path, model, "--checkpoint", tmp_path / "c"))


@pytest.mark.parametrize("kind", ["gptq", "awq", "int-quantized", "float"])
def test_columns_behind_the_first(tmp_path, kind):
    """Of two that have changed places the cosine of rows says nothing."""
    if kind == "float":
        head = normal(K, K).T.copy()
        head[[70, 90]] = head[[90, 70]]
        weights = write_folder(tmp_path / "c", "gptq", tensors={f"{HEAD}.weight": head})
    else:
        bits = 8 if kind == "int-quantized" else 4
        weights = write_folder(tmp_path / "c", kind, bits=bits, n=160)
        weights[UP][:, [70, 150]] = weights[UP][:, [150, 70]]
    match = f"layer '{HEAD if kind == 'float' else UP}'.*column 70 .* is another"
    assert_matches(match, refusal(tmp_path, mlp(weights), "--checkpoint", tmp_path / "c"))


def assert_matches(match: str, text: str) -> None:
    assert re.search(match, " ".join(text.split())), text


def drop(path: Path, name: str) -> None:
    """Leave a tensor out of a file."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def header(
    dtype: str, shape: list[int], offsets: list[int], name: str = f"{UP}.weight"
) -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"damaged", "model-1.safetensors is damaged"),
        (b"", "model-1.safetensors is damaged"),
        (header("I8", [1 << 40, 1 << 40], [0, 16]), "is damaged"),
        (header("I8", [N, K], [0, N * K + 1]), "is damaged"),
        (header("I8", [4, 4], [-16, 0]), "is damaged"),
        (header("I8", [4, 4], [0, 16]) | header("I8", [4, 4], [8, 24], "b"), "is damaged"),
        (header("F8_E4M3", [4, 4], [0, 16]), f"'{UP}.weight'.*F8_E4M3"),
    ],
    ids=str,
)  # fmt: skip
def test_headers_of_safetensors(tmp_path, content, match):
    weights = write_folder(tmp_path / "c", "int-quantized", bits=8)
    if not isinstance(content, bytes):
        text = json.dumps(content).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(24 if "b" in content else 16)
    (tmp_path / "c" / "model-1.safetensors").write_bytes(content)
    assert_matches(match, refusal(tmp_path, mlp(weights), "--checkpoint", tmp_path / "c"))


def test_folders_without_a_checkpoint(tmp_path):
    folder, model = tmp_path / "c", mlp({UP: normal(K, N), DOWN: normal(N, K)})
    assert "no such file or folder" in refusal(tmp_path, model, "--checkpoint", folder)
    folder.mkdir()
    match = "neither config.json with quantization_config nor quantize_config.json"
    assert match in refusal(tmp_path, model, "--checkpoint", folder)
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    assert "no .safetensors file" in refusal(tmp_path, model, "--checkpoint", folder)


# GGUF files.

Q4 = {gguf_files.DOWN: "Q4_0"}
PARTS = (gguf_files.Q, gguf_files.KEY, gguf_files.VALUE)
FFN, ATTN_Q, ATTN_V = (f"'blk.0.{name}.weight'" for name in ("ffn_down", "attn_q", "attn_v"))


def of(*types: str) -> dict[str, str]:
    return dict(zip(PARTS, types, strict=True)) | Q4


@pytest.mark.parametrize(
    ("kinds_of", "change", "match"),
    [
        ({gguf_files.DOWN: "IQ2_XS"}, {}, rf"{FFN}.* is IQ2_XS.*llama-quantize.*--rule 'down"),
        ({gguf_files.DOWN: "TQ2_0"}, {}, rf"{FFN}.* is TQ2_0"),
        (Q4, {gguf_files.DOWN: (64, 256)}, f"{FFN}.*not the weight of node 'down'.*is -?0.0"),
        ({gguf_files.Q: "Q4_0"}, {gguf_files.Q: (64, 256)}, f"{ATTN_Q}.*not the weight of n"),
        (Q4, {gguf_files.DOWN: (96, 256)}, rf"{FFN} .* is \[256, 64\], node 'down' .*, 96\]"),
        (of("Q4_0", "Q4_0", "F16"), {}, "attn_v.weight' of the checkpoint is in parts.*float"),
        (of("Q4_0", "Q4_0", "IQ2_XS"), {}, f"{ATTN_V}.* is IQ2_XS"),
        (of("Q4_0", "Q4_0", "Q4_0"), {gguf_files.VALUE: (32, 256)}, f"{ATTN_V}.*not the w"),
        (of("Q4_0", "Q4_0", "Q4_0"), {gguf_files.VALUE: (24, 256)}, rf"{ATTN_V}.* \[256, 3"),
    ],
)  # fmt: skip
def test_gguf_files_of_another_model_or_type(tmp_path, kinds_of, change, match):
    path = tmp_path / "m.gguf"
    weights = gguf_files.write_gguf(path, kinds_of)
    weights |= {name: normal(*shape, seed=77) for name, shape in change.items()}
    build = gguf_files.joined_model if len(kinds_of) == 4 else gguf_files.attention
    assert_matches(match, refusal(tmp_path, build(weights), "--checkpoint", path))


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ("[down] y = MatMul(w, x)", "K is not the last axis"),
        ("[down] y = Gemm <transA = 1> (x, w)", "K is not the last axis"),
        ("[down] y = Gemm <alpha = 2.0> (x, w)", "multiplies by alpha"),
    ],
)
def test_products_that_offsets_do_not_suit(tmp_path, nodes, match):
    path = tmp_path / "m.gguf"
    weight = near(gguf_files.write_gguf(path, {gguf_files.DOWN: "Q4_K"})[gguf_files.DOWN])
    given = {"w": weight if "(w, x)" in nodes else weight.T}
    model = model_of(f"g (float[A, B] x) => (float[C, D] y) {{ {nodes} }}", given)
    model = renamed(model, {"w": f"{gguf_files.DOWN}.weight"})
    text = refusal(tmp_path, model, "--checkpoint", path)
    assert_matches(f"{FFN}.*'down'.*{match}.*--rule 'down=float'", text)


def test_a_vector_of_another_model(tmp_path):
    path, vectors = tmp_path / "m.gguf", {"blk.0.attn_norm.weight": normal(256, seed=8)}
    model = gguf_files.attention(gguf_files.write_gguf(path, Q4, vectors=vectors))
    match = f"'blk.0.attn_norm.weight'.*not '{gguf_files.NORM}.weight'.*give a checkpoint of"
    assert_matches(match, refusal(tmp_path, model, "--checkpoint", path))


def test_files_that_are_not_there_or_too_many(tmp_path):
    first, second = (tmp_path / f"{name}-00001-of-00002.gguf" for name in "mn")
    model = gguf_files.attention(gguf_files.write_gguf(first, Q4))
    gguf_files.write_gguf(second, Q4)
    for path, match in (
        (tmp_path / "none.gguf", "none.gguf: no such file"),
        (first, "1 of 00002 parts are beside it"),
        (tmp_path, "several .gguf files: name one of them"),
    ):
        assert match in refusal(tmp_path, model, "--checkpoint", path)


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def text(key: str) -> bytes:
    return packed(len(key)) + key.encode()


HUGE = packed(1 << 60)
NAME = text("blk.0.ffn_down.weight") + b"\2\0\0\0"
SIZES = packed(256, 64)
PLACE = SIZES + b"\2\0\0\0" + packed(0)  # of type 2, at the start
OTHER_NAME = text("blk.0.attn_k.weight")
TOKENS, SCORES = (
    text(f"tokenizer.ggml.{name}") + b"\x09\0\0\0" for name in ("tokens", "scores")
)
ARCHITECTURE = text("general.architecture")


@pytest.mark.parametrize(
    ("at", "old", "new", "match"),
    [
        (0, b"GGUF", b"GGML", "is no GGUF file"),
        (4, b"\3\0\0\0", b"\0\0\0\3", "version 50331648"),
        (8, packed(2), HUGE, "damaged"),
        (16, packed(6), HUGE, "damaged"),
        (24, packed(20), HUGE, "damaged"),
        (None, TOKENS + b"\x08\0\0\0" + packed(3), TOKENS + b"\x08\0\0\0" + HUGE, "damaged"),
        (None, SCORES + b"\x06\0\0\0" + packed(3), SCORES + b"\0\0\0\0" + HUGE, "damaged"),
        (None, SCORES + b"\x06", SCORES + b"\x09", "metadata of type 9"),
        (None, NAME, NAME[:-4] + b"\xff\0\0\0", "of rank 255"),
        (None, NAME + SIZES, NAME + packed(263, 64), "rows of 263 in blocks of 32"),
        (None, NAME + SIZES, NAME + packed(256, 1 << 60), "cut short: tensor 'blk.0.ffn_down"),
        (None, NAME + SIZES, NAME + packed(1 << 63, 1 << 63), "cut short: tensor 'blk.0.ffn"),
        (None, PLACE, PLACE[:-8] + packed(1 << 50), "cut short: tensor 'blk.0.ffn_down"),
        (None, PLACE, PLACE[:-8] + packed((1 << 64) - 32), "cut short: tensor 'blk.0.ffn"),
        (None, PLACE, PLACE[:-8] + packed(32), "'blk.0.ffn_down.weight' and 'blk.0.attn_k.we"),
        (None, PLACE, SIZES + b"\xc7\0\0\0" + packed(0), "is type 199"),
        (None, OTHER_NAME, text("blk.0.ffn_down.weight"), "damaged|comes twice"),
        (None, b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lloma", "architecture 'lloma'"),
        (None, ARCHITECTURE + b"\x08", ARCHITECTURE[:-1] + b"x\x08", "architecture 'None'"),
    ],
)  # fmt: skip
def test_headers_of_gguf_files(tmp_path, at, old, new, match):
    path = tmp_path / "m.gguf"
    model = gguf_files.attention(gguf_files.write_gguf(path, Q4 | {gguf_files.KEY: "Q4_0"}))
    data = path.read_bytes()
    at = data.index(old) if at is None else at
    assert data[at : at + len(old)] == old
    path.write_bytes(data[:at] + new + data[at + len(old) :])
    assert_matches(match, refusal(tmp_path, model, "--checkpoint", path))


@pytest.mark.parametrize("ninths", range(9))
def test_files_that_end_early(tmp_path, ninths):
    path = tmp_path / "m.gguf"
    model = gguf_files.attention(gguf_files.write_gguf(path, Q4))
    data = path.read_bytes()
    start = len(data) - 64 * 256 // 32 * 18
    for end in (start * ninths // 9, start + (len(data) - start) * ninths // 9):
        path.write_bytes(data[:end])
        text = refusal(tmp_path, model, "--checkpoint", path)
        assert_matches("damaged|cut short|no GGUF", text)


def test_many_blocks_take_no_more_memory_than_their_names(tmp_path):
    """gguf's own map of names has 700 entries for each block that there may be."""
    path = tmp_path / "m.gguf"
    gguf_files.write_gguf(path, Q4)
    floats = np.zeros(32, np.float32)
    many = {f"blk.{number}.attn_norm.weight": (floats, None) for number in range(3000)}
    gguf_files.save_gguf(path, many)
    model = mlp({UP: normal(K, N), DOWN: normal(N, K)})
    assert "" in refusal(tmp_path, model, "--checkpoint", path)
