# SPDX-License-Identifier: MIT
"""What a token and a prompt cost on SmolLM2-135M, with and without TransformerFusion."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir
from rich.console import Console

from benchmarks.figures.bounds import Figure
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


def measure_transformer_fusion(folder: Path, rounds: int) -> list[Figure]:
    """Measure tokens at three contexts and two prompts, int4 at accuracy level 4."""
    model = demo.make_models(demo.WORK, Console(quiet=True))[0].path
    inputs = DecoderInputs(ir.load(model))
    plain = Candidate(model, "plain onnxruntime", settings=_LEVEL)
    passes = ("dq_matmulnbits_fusion", "transformer_fusion")
    fused = Candidate(
        model, "fused", settings=_LEVEL, passes=passes, cache_dir=folder / "cache"
    )
    figures = []
    for what, run, bound in _RUNS:
        feeds = {str(value.name): array for value, array in inputs.feeds(run).items()}
        theirs, ours = measure([plain, fused], feeds, rounds=rounds, lockstep=True)
        times = [
            math.nan if one.run is None else one.run.median * _MS for one in (ours, theirs)
        ]
        figures.append(Figure(what, times[0], times[1], "ms", bound))
    return figures
