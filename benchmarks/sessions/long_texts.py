# SPDX-License-Identifier: MIT
"""What layers of encoders take on long texts with and without TransformerFusion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.minilm import padded_batch, random_encoder
from ortplugins.measurement.measure import Candidate, Measurement, measure
from session_options.plan import entries_of

_SETTINGS = {"intra_op_num_threads": 2}
_MS, _MB = 1e3, 1e6


class _Texts(NamedTuple):
    """A batch, by the length of each text; the greatest share of stock's memory."""

    what: str
    lengths: list[int]
    memory: float = math.nan
    rounds: int = 2  # at most: these runs take seconds


_RAGGED = np.random.default_rng(17).integers(256, 2048, 7).tolist()
_BATCHES = (
    _Texts("1 x 16", [16], rounds=5),
    _Texts("1 x 512", [512], rounds=5),
    _Texts("8 x 512", [512] * 8),
    _Texts("1 x 4,096", [4096], 0.2),
    _Texts("8 x 256 to 2,048, padded", [2048, *_RAGGED], 0.2),
)
# Layers, heads, their size; greatest shares of stock's time. With heads of 64, products take
# .97 of a layer's time at 8 x 512 and .86 at 1 x 4,096, and every form has them.
_ENCODERS = {
    "MiniLM's size": ((6, 12, 32), (1.01, 1.01, 0.9, 0.65, 0.65)),
    "bge-base's size": ((2, 12, 64), (1.01, 1.01, 1.01, 0.92, 0.9)),
}


def measure_long_texts(folder: Path, rounds: int) -> list[Figure]:
    """Measure time and memory of runs, of random weights."""
    return [
        figure
        for name, (sizes, bounds) in _ENCODERS.items()
        for path in [random_encoder(folder / "encoders", *sizes)]
        for figure in _encoder(name, path, bounds, folder, rounds)
    ]


def _encoder(
    name: str, path: Path, bounds: Sequence[float], folder: Path, rounds: int
) -> Iterator[Figure]:
    passes = [ortplugins.TransformerFusion.name]
    entries = entries_of(passes, cache_dir=str(folder / "cache"))
    candidates = [
        Candidate(path, "fused", settings={**_SETTINGS, **entries}),
        Candidate(path, "plain", settings=_SETTINGS),
    ]
    for texts, bound in zip(_BATCHES, bounds, strict=True):
        feed = padded_batch(texts.lengths, max(texts.lengths), vocabulary=1000)
        found = measure(
            candidates,
            feed,
            rounds=min(rounds, texts.rounds),
            runs=20,
            min_runs=1,
            seconds=1,
            lockstep=True,
        )
        times = [math.nan if each.run is None else each.run.median * _MS for each in found]
        yield Figure.versus(f"{name}, {texts.what}: run", times, "ms", bound)
        memory = map(_of_runs, found)
        yield Figure.versus(f"{name}, {texts.what}: memory", memory, "MB", texts.memory)


def _of_runs(found: Measurement) -> float:
    if found.peak_private is None or found.started_private is None:
        return math.nan
    return (found.peak_private.median - found.started_private.median) / _MB
