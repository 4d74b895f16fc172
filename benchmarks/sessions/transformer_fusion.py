# SPDX-License-Identifier: MIT
"""What SmolLM2-135M and MiniLM-L6 cost with and without TransformerFusion.

ORTPLUGINS_SMOLLM2 names a folder of exports: ``plain-kv/model.onnx`` by torch.onnx.export; of
onnxruntime-genai's builder, if they are there, ``genai-fp32`` and ``genai-int4-unshared``; if
it is there, ``gemma/model.onnx`` as tests/data/make_gemma.py makes it.
Without it the demo's own graph is measured: it repeats no keys, and has no peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx.compose
import onnx_ir as ir
import onnx_ir.passes.common
from rich.console import Console

from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import CACHE
from benchmarks.models.decoder_steps import MIN_VOCABULARY
from benchmarks.models.minilm import float_minilm
from examples.smollm2 import demo
from examples.smollm2.generate import chat_prompt
from ortplugins.measurement.measure import Candidate, SessionProcess, measure
from ortplugins.quantization import quantize
from ortplugins.samples.made_up import MadeUpInputs
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.transformer_fusion.fuse import fuse_transformer
from session_options.plan import entries_of
from tests.builders.exports import exported

_SETTINGS = {
    "session.qdq_matmulnbits_accuracy_level": "4",
    "intra_op_num_threads": 2,
    "inter_op_num_threads": 1,
}
_STEPS = "benchmarks.models.decoder_steps"
_TOKENS, _WRITTEN = 12, 64
# 0.97 of its tokens per second.
_SAME = 1.03
# Context: greatest ratios of a token's time to plain onnxruntime and the builder's graph.
_CONTEXTS = {16: (0.75, 1.05), 512: (0.62, 0.85), 1536: (0.5, 0.65)}
_GEMMA_CONTEXTS = {16: (math.nan, math.nan), 512: (0.75, math.nan), 1536: (0.6, math.nan)}
_FLOAT_CONTEXTS = dict.fromkeys(_CONTEXTS, (math.nan, _SAME))
_UNBOUND = dict.fromkeys(_CONTEXTS, (math.nan, math.nan))
_PROMPTS = (512, 1536)
_MAX_NODES = 350
_OTHERS = {"plain": "onnxruntime", "builder": "the builder's"}
_MS = 1e3
# A session's threads spin for a while after a run, on the cores of the next one.
_PAUSE_SECONDS = 0.05
# Rows and tokens of an encoder's batch.
_BATCHES = ((8, 128), (1, 16))
_NODES = 10_000
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
        prompts: Whose answers are compared, as tokens.
        contexts: As :data:`_CONTEXTS`.
        builder: The builder's graph; None where there is none.
        shares: Whether it is also measured with kv_cache=shared.
    """

    name: str
    model: Path
    passes: tuple[str, ...]
    prompts: Sequence[Sequence[int]]
    contexts: Mapping[int, tuple[float, float]]
    builder: Path | None = None
    shares: bool = False


def measure_transformer_fusion(folder: Path, rounds: int) -> list[Figure]:
    """Measure tokens, prompts and text of decoders; batches and starts of MiniLM."""
    figures = []
    for decoder in _decoders():
        figures += _decoder_figures(decoder, folder / "cache", rounds)
    return [*figures, *_encoder_figures(folder, rounds), _cost_of_the_pass(rounds)]


def _decoders() -> list[_Decoder]:
    made, *_ = demo.make_models(demo.WORK, Console(quiet=True))
    prompts = [made.tokenizer.encode(chat_prompt(question)).ids for question in _QUESTIONS]
    fusion = "transformer_fusion"
    both = ("dq_matmulnbits_fusion", fusion)
    if not (given := os.environ.get("ORTPLUGINS_SMOLLM2")):
        floats = demo.WORK / "float32" / "model.onnx"
        return [
            _Decoder("int4", made.path, both, prompts, _UNBOUND),
            _Decoder("float", floats, (fusion,), prompts, _UNBOUND),
        ]
    exported, gemma = (Path(given, name, "model.onnx") for name in ("plain-kv", "gemma"))
    builders = [
        path if (path := Path(given, name, "model.onnx")).exists() else None
        for name in ("genai-int4-unshared", "genai-fp32")
    ]
    int4 = _int4(exported, "smollm2-export")
    found = [
        _Decoder("int4", int4, both, prompts, _CONTEXTS, builders[0], True),
        _Decoder("float", exported, (fusion,), prompts, _FLOAT_CONTEXTS, builders[1], True),
    ]
    if gemma.exists():
        text = np.random.default_rng(0).integers(100, MIN_VOCABULARY, (3, 12)).tolist()
        int4 = _int4(gemma, "gemma-export")
        found.append(_Decoder("Gemma-like int4", int4, both, text, _GEMMA_CONTEXTS))
    return found


def _int4(exported: Path, name: str) -> Path:
    path = CACHE / name / "model.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        quantize(exported, path, method="rtn", block_size=32)
    return path


def _decoder_figures(decoder: _Decoder, cache: Path, rounds: int) -> list[Figure]:
    plain = Candidate(decoder.model, "plain", settings=_SETTINGS)
    entries = entries_of(decoder.passes, cache_dir=str(cache))
    ours = Candidate(decoder.model, "ours", settings={**_SETTINGS, **entries})
    candidates = [plain, ours]
    if decoder.builder is not None:
        candidates.append(dataclasses.replace(plain, name="builder", model=decoder.builder))
    if decoder.shares:
        shared = {**ours.settings, "ortplugins.transformer_fusion.kv_cache": "shared"}
        candidates.append(dataclasses.replace(ours, name="shared", settings=shared))
    with contextlib.ExitStack() as stack:
        processes = {}
        for one in candidates:
            processes[one.name] = stack.enter_context(SessionProcess(one.name))
            processes[one.name].open(one)
        prefill, tokens = _times(processes, decoder.contexts, rounds)
        texts, logits = (
            [
                [
                    process.call(f"{_STEPS}:{what}", prompt=prompt, **asked)
                    for prompt in decoder.prompts
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
        process.open(dataclasses.replace(ours, settings={**ours.settings, **profile}))
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
    processes: dict[str, SessionProcess], contexts: Iterable[int], rounds: int
) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """Seconds of prompts and of tokens, medians, by process and context."""
    prompts: dict[tuple[str, int], list[float]] = {}
    tokens: dict[tuple[str, int], list[float]] = {}
    # The first round is not counted: buffers are allocated, weights packed.
    for turn in range(rounds + 1):
        for context in contexts:
            for name, process in processes.items():
                found = process.call(
                    f"{_STEPS}:time_tokens",
                    context=context,
                    tokens=_TOKENS,
                    in_place=name == "shared",
                )
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
    others = ("plain", "builder") if decoder.builder else ("plain",)
    for index, other in enumerate(others):
        for context, bounds in decoder.contexts.items():
            what = f"{decoder.name}: a token at {context}, vs. {_OTHERS[other]}"
            times = [tokens[name, context] * _MS for name in ("ours", other)]
            figures.append(Figure(what, times[0], times[1], "ms", bounds[index]))
            if decoder.shares:
                what = what.replace(",", ", shared cache,")
                shared = tokens["shared", context] * _MS
                figures.append(Figure(what, shared, times[1], "ms", bounds[index]))
        for context in _PROMPTS:
            what = f"{decoder.name}: a prompt of {context}, vs. {_OTHERS[other]}"
            times = [prefill[name, context] * _MS for name in ("ours", other)]
            figures.append(Figure(what, times[0], times[1], "ms", _SAME if index else 1.0))
    return figures


def _cost_of_the_pass(rounds: int) -> Figure:
    """Fuse many copies of a TorchScript export in one graph."""
    whole = one = exported("llama-torchscript-eager")
    while len(whole.graph.node) < _NODES:
        prefix = f"{len(whole.graph.node)}."
        whole = onnx.compose.merge_models(whole, one, io_map=[], prefix2=prefix)
    seconds = []
    gc.set_threshold(100_000)  # as in the process that builds
    for _ in range(rounds):
        model = ir.from_proto(whole)
        onnx_ir.passes.common.ShapeInferencePass()(model)
        start = time.perf_counter()
        fuse_transformer(model, PassContext(Remarks("benchmark")))
        seconds.append(time.perf_counter() - start)
    return Figure("the pass on 10,000 nodes", statistics.median(seconds), unit="s", bound=2)


def _encoder_figures(folder: Path, rounds: int) -> list[Figure]:
    encoder, _ = float_minilm()
    graph = ir.load(encoder).graph
    entries = entries_of(["transformer_fusion"], cache_dir=str(folder / "cache"))
    both = [
        Candidate(encoder, "plain onnxruntime"),
        Candidate(encoder, "fused", settings=entries),
    ]
    figures = []
    for rows, length in _BATCHES:
        (feeds,) = MadeUpInputs(graph, {"batch": rows}, length=length).feeds()
        what = f"MiniLM-L6, float, {rows} x {length} tokens"
        # A run of a few ms needs more of them than a token.
        theirs, ours = measure(
            both, feeds, rounds=4 * rounds, runs=20, seconds=1, lockstep=True
        )
        kinds = [(what, "run", 1.0)]
        kinds += [("MiniLM-L6, a cached start", "start", 0.5)] * (rows == 1)
        for name, kind, most in kinds:
            spreads = [getattr(one, kind) for one in (ours, theirs)]
            times = [math.nan if one is None else one.median * _MS for one in spreads]
            figures.append(Figure(name, times[0], times[1], "ms", most))
    return figures
