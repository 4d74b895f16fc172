# SPDX-License-Identifier: MIT
"""What SmolLM2-135M and MiniLM-L6 cost with and without TransformerFusion."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
from rich.console import Console

from benchmarks.figures.bounds import Figure
from benchmarks.models.minilm import float_minilm
from examples.smollm2 import demo
from ortplugins.measurement.measure import Candidate, measure
from rewrite_rules.transformer_fusion.decoder_runs import DecoderInputs, Run

_LEVEL = {"session.qdq_matmulnbits_accuracy_level": "4"}
# What is run, and the greatest ratio to plain onnxruntime.
_RUNS = (
    ("a token at a context of 16", Run(1, 1, 16), 0.75),
    ("a token at a context of 512", Run(1, 1, 512), 0.62),
    ("a token at a context of 1,536", Run(1, 1, 1536), 0.5),
    ("a prompt of 512", Run(1, 512, 0), 1.0),
    ("a prompt of 1,536", Run(1, 1536, 0), 1.0),
)
_MS = 1e3


# Rows and tokens of an encoder's batch.
_BATCHES = ((8, 128), (1, 16))


def measure_transformer_fusion(folder: Path, rounds: int) -> list[Figure]:
    """Measure tokens and prompts, int4 at accuracy level 4; batches and starts of MiniLM."""
    model = demo.make_models(demo.WORK, Console(quiet=True))[0].path
    inputs = DecoderInputs(ir.load(model))
    passes = ("dq_matmulnbits_fusion", "transformer_fusion")
    both = _both(model, passes, folder, _LEVEL)
    figures = []
    for what, run, bound in _RUNS:
        feeds = {str(value.name): array for value, array in inputs.feeds(run).items()}
        figures += _figures(what, both, feeds, rounds, bound)
    encoder, _ = float_minilm()
    inputs, both = DecoderInputs(ir.load(encoder)), _both(encoder, passes[1:], folder, {})
    for rows, length in _BATCHES:
        feeds = {str(v.name): a for v, a in inputs.feeds(Run(rows, length, 0)).items()}
        what = f"MiniLM-L6, float, {rows} x {length} tokens"
        figures += _figures(what, both, feeds, rounds, 1.0, start=rows == 1)
    return figures


def _both(
    model: Path, passes: tuple[str, ...], folder: Path, settings: dict[str, str]
) -> list[Candidate]:
    plain = Candidate(model, "plain onnxruntime", settings=settings)
    cache = folder / "cache"
    return [
        plain,
        Candidate(model, "fused", settings=settings, passes=passes, cache_dir=cache),
    ]


def _figures(
    what: str,
    both: list[Candidate],
    feeds: dict[str, npt.NDArray[Any]],
    rounds: int,
    bound: float,
    start: bool = False,
) -> list[Figure]:
    theirs, ours = measure(both, feeds, rounds=rounds, lockstep=True)
    kinds = [(what, "run", bound)] + [("MiniLM-L6, a cached start", "start", 0.5)] * start
    figures = []
    for name, kind, most in kinds:
        spreads = [getattr(one, kind) for one in (ours, theirs)]
        times = [math.nan if one is None else one.median * _MS for one in spreads]
        figures.append(Figure(name, times[0], times[1], "ms", most))
    return figures
