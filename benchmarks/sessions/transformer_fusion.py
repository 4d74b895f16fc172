# SPDX-License-Identifier: MIT
"""What SmolLM2-135M and MiniLM-L6 cost with and without TransformerFusion.

ORTPLUGINS_SMOLLM2 names a folder of exports: ``plain-kv/model.onnx`` by torch.onnx.export, and
of onnxruntime-genai's builder, if they are there, ``genai-fp32`` and ``genai-int4-unshared``.
Without it the demo's own graph is measured: it repeats no keys, and nothing stands beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import CACHE
from benchmarks.models.minilm import float_minilm
from examples.smollm2 import demo
from examples.smollm2.generate import chat_prompt
from ortplugins.measurement.measure import Candidate, SessionProcess, measure
from ortplugins.quantization import quantize
from rewrite_rules.transformer_fusion.decoder_runs import DecoderInputs, Run

_SETTINGS = {
    "session.qdq_matmulnbits_accuracy_level": "4",
    "intra_op_num_threads": 2,
    "inter_op_num_threads": 1,
}
_STEPS = "benchmarks.models.decoder_steps"
_TOKENS, _WRITTEN = 12, 64
# Context: greatest ratios of a token's time, beside plain onnxruntime and the builder's graph.
_CONTEXTS = {16: (0.75, 1.05), 512: (0.62, 0.85), 1536: (0.5, 0.65)}
_PROMPTS = (512, 1536)
_MAX_NODES = 350
# 0.97 of its tokens per second.
_SAME = 1.03
_BESIDE = {"plain": "onnxruntime", "builder": "the builder's graph"}
_MS = 1e3
# A session's threads spin for a while after a run, on the cores of the next one.
_PAUSE_SECONDS = 0.05
# Rows and tokens of an encoder's batch.
_BATCHES = ((8, 128), (1, 16))
_QUESTIONS = (
    "What is the capital of France?",
    "Write a poem on rain.",
    "Why is the sky blue?",
)


@dataclasses.dataclass(frozen=True)
class _Decoder:
    """A decoder in one precision.

    Attributes:
        name: In figures.
        model: The file as exported.
        passes: What ours runs.
        builder: The builder's graph; None where there is none.
        is_export: Whether an exporter repeated keys and values, so that the bounds hold.
    """

    name: str
    model: Path
    passes: tuple[str, ...]
    builder: Path | None
    is_export: bool


def measure_transformer_fusion(folder: Path, rounds: int) -> list[Figure]:
    """Measure tokens, prompts and text of decoders; batches and starts of MiniLM."""
    decoders, tokenizer = _decoders()
    figures = []
    for decoder in decoders:
        figures += _decoder_figures(decoder, folder / "cache", rounds, tokenizer)
    return figures + _encoder_figures(folder, rounds)


def _decoders() -> tuple[list[_Decoder], Tokenizer]:
    made, *_ = demo.make_models(demo.WORK, Console(quiet=True))
    fusion = "transformer_fusion"
    both = ("dq_matmulnbits_fusion", fusion)
    if not (given := os.environ.get("ORTPLUGINS_SMOLLM2")):
        floats = demo.WORK / "float32" / "model.onnx"
        return [
            _Decoder("int4", made.path, both, None, False),
            _Decoder("float", floats, (fusion,), None, False),
        ], made.tokenizer
    exported = Path(given, "plain-kv", "model.onnx")
    int4 = CACHE / "smollm2-export" / "model.onnx"
    if not int4.exists():
        int4.parent.mkdir(parents=True, exist_ok=True)
        quantize(exported, int4, method="rtn", block_size=32)
    builders = [
        path if (path := Path(given, name, "model.onnx")).exists() else None
        for name in ("genai-int4-unshared", "genai-fp32")
    ]
    return [
        _Decoder("int4", int4, both, builders[0], True),
        _Decoder("float", exported, (fusion,), builders[1], True),
    ], made.tokenizer


def _decoder_figures(
    decoder: _Decoder, cache: Path, rounds: int, tokenizer: Tokenizer
) -> list[Figure]:
    plain = Candidate(decoder.model, "plain", settings=_SETTINGS)
    ours = dataclasses.replace(plain, name="ours", passes=decoder.passes, cache_dir=cache)
    candidates = [plain, ours]
    if decoder.builder is not None:
        candidates.append(dataclasses.replace(plain, name="builder", model=decoder.builder))
    prompts = [tokenizer.encode(chat_prompt(question)).ids for question in _QUESTIONS]
    with contextlib.ExitStack() as stack:
        processes = {}
        for one in candidates:
            processes[one.name] = stack.enter_context(SessionProcess(one.name))
            processes[one.name].open(one)
        prefill, tokens = _times(processes, rounds)
        texts, logits = (
            [
                [
                    process.call(f"{_STEPS}:{what}", prompt=prompt, **asked)
                    for prompt in prompts
                ]
                for process in (processes["ours"], processes["plain"])
            ]
            for what, asked in (("greedy", {"tokens": _WRITTEN}), ("last_logits", {}))
        )
    figures = _time_figures(decoder, prefill, tokens)
    profile = {
        "enable_profiling": True,
        "profile_file_prefix": str(cache.with_name("profile")),
    }
    with SessionProcess("profile") as process:
        process.open(dataclasses.replace(ours, settings={**_SETTINGS, **profile}))
        count = process.call(f"{_STEPS}:executed_nodes", context=16)
    actual, expected = map(np.array, logits)
    error = float(np.abs(actual - expected).max() / np.abs(expected).max())
    differ = int((np.array(texts[0]) != np.array(texts[1])).sum())
    # Accuracy level 4 rounds activations: another order of sums is another rounding.
    name, is_float = decoder.name, decoder.name == "float"
    most, none = (1e-4, 0) if is_float else (math.nan, math.nan)
    return [
        *figures,
        Figure(f"{name}: nodes executed for a token", count, bound=_MAX_NODES),
        Figure(f"{name}: greatest error of logits", error, bound=most),
        Figure(f"{name}: tokens that differ, of {np.size(texts[0])}", differ, bound=none),
    ]


def _times(
    processes: dict[str, SessionProcess], rounds: int
) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """Seconds of prompts and of tokens, medians, by process and context."""
    prompts: dict[tuple[str, int], list[float]] = {}
    tokens: dict[tuple[str, int], list[float]] = {}
    # The first round is not counted: buffers are allocated, weights packed.
    for turn in range(rounds + 1):
        for context in _CONTEXTS:
            for name, process in processes.items():
                found = process.call(f"{_STEPS}:time_tokens", context=context, tokens=_TOKENS)
                if turn:
                    prompts.setdefault((name, context), []).append(found["prompt"])
                    tokens.setdefault((name, context), []).extend(found["tokens"])
                time.sleep(_PAUSE_SECONDS)
    medians = [
        {key: statistics.median(values) for key, values in one.items()}
        for one in (prompts, tokens)
    ]
    return medians[0], medians[1]


def _time_figures(
    decoder: _Decoder,
    prefill: dict[tuple[str, int], float],
    tokens: dict[tuple[str, int], float],
) -> list[Figure]:
    figures = []
    is_float = decoder.name == "float"
    others = ("plain", "builder") if decoder.builder else ("plain",)
    for index, other in enumerate(others):
        for context, bounds in _CONTEXTS.items():
            bound = _SAME if is_float and index else bounds[index]
            if not decoder.is_export or (is_float and not index):
                bound = math.nan
            what = f"{decoder.name}: a token at {context}, beside {_BESIDE[other]}"
            times = [tokens[name, context] * _MS for name in ("ours", other)]
            figures.append(Figure(what, times[0], times[1], "ms", bound))
        for context in _PROMPTS:
            what = f"{decoder.name}: a prompt of {context}, beside {_BESIDE[other]}"
            times = [prefill[name, context] * _MS for name in ("ours", other)]
            figures.append(Figure(what, times[0], times[1], "ms", _SAME if index else 1.0))
    return figures


def _encoder_figures(folder: Path, rounds: int) -> list[Figure]:
    encoder, _ = float_minilm()
    inputs = DecoderInputs(ir.load(encoder))
    both = [
        Candidate(encoder, "plain onnxruntime"),
        Candidate(
            encoder, "fused", passes=("transformer_fusion",), cache_dir=folder / "cache"
        ),
    ]
    figures = []
    for rows, length in _BATCHES:
        feeds = {str(v.name): a for v, a in inputs.feeds(Run(rows, length, 0)).items()}
        what = f"MiniLM-L6, float, {rows} x {length} tokens"
        theirs, ours = measure(both, feeds, rounds=rounds, lockstep=True)
        kinds = [(what, "run", 1.0)]
        kinds += [("MiniLM-L6, a cached start", "start", 0.5)] * (rows == 1)
        for name, kind, most in kinds:
            spreads = [getattr(one, kind) for one in (ours, theirs)]
            times = [math.nan if one is None else one.median * _MS for one in spreads]
            figures.append(Figure(name, times[0], times[1], "ms", most))
    return figures
