# SPDX-License-Identifier: MIT
"""Which sizes of encoders and of batches TransformerFusion makes slower, if any.

Nothing is timed when a user's session starts: whether a form is faster is decided by rules,
and this is what they rest on. Plain onnxruntime runs twice; what it differs by from itself is
noise, and comes on top of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnxruntime.quantization

from benchmarks.figures.bounds import Figure
from benchmarks.models.minilm import padded_batch, random_encoder
from ortplugins.measurement.measure import Candidate, measure
from session_options.plan import entries_of

_SETTINGS = {"intra_op_num_threads": 2}
_BOUND = 1.01
# Layers, heads, their size; greatest number of tokens in a batch.
_ENCODERS = {
    "2 x 64": ((2, 2, 32), 8192),
    "MiniLM's size": ((6, 12, 32), 4096),
    "bge-base's size": ((12, 12, 64), 4096),
}
# Texts and their length.
_BATCHES = (
    (1, 1), (1, 4), (1, 16), (1, 64), (1, 128), (1, 256), (1, 512), (1, 2048), (1, 8192),
    (4, 16), (4, 128), (8, 128), (8, 512), (32, 16), (32, 128), (32, 256),
)  # fmt: skip
_ROUNDS = 5


def measure_encoder_sizes(folder: Path, rounds: int) -> list[Figure]:
    """Measure runs of random weights, float and with int8 activations and weights."""
    return [
        figure
        for name, (sizes, most) in _ENCODERS.items()
        for kind in ("float", "int8")
        for figure in _encoder(f"{name}, {kind}", _model(folder, sizes, kind), most, folder)
    ]


def _model(folder: Path, sizes: tuple[int, int, int], kind: str) -> Path:
    path = random_encoder(folder / "encoders", *sizes)
    if kind == "float":
        return path
    quantised = path.with_name(f"int8-{path.name}")
    onnxruntime.quantization.quantize_dynamic(path, quantised)
    return quantised


def _encoder(name: str, path: Path, most: int, folder: Path) -> Iterator[Figure]:
    entries = entries_of(["transformer_fusion"], cache_dir=str(folder / "cache"))
    candidates = [
        Candidate(path, "fused", settings={**_SETTINGS, **entries}),
        Candidate(path, "plain", settings=_SETTINGS),
        Candidate(path, "plain again", settings=_SETTINGS),
    ]
    for texts, length in _BATCHES:
        if texts * length > most:
            continue
        feed = padded_batch([length] * texts, length, vocabulary=1000)
        found = measure(
            candidates, feed, rounds=_ROUNDS, runs=200, min_runs=1, seconds=0.4, lockstep=True
        )
        fused, plain, again = (
            math.nan if each.run is None else 1e3 * each.run.median for each in found
        )
        noise = abs(again / plain - 1)
        fastest = min(plain, again)
        what = f"{name}, {texts} x {length:,}"
        yield Figure.versus(what, (fused, fastest), "ms", _BOUND + noise)
