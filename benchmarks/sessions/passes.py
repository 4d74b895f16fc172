# SPDX-License-Identifier: MIT
"""What each pass costs at most, with its default options, on nets it was not tuned for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.figures.bounds import Figure
from benchmarks.models.minilm import float_minilm
from benchmarks.models.real_nets import real_nets
from benchmarks.sessions.mixed_precision import int8_minilm
from examples.smollm2 import demo
from ortplugins.measurement.measure import Candidate, Measurement, measure
from ortplugins.quantization import quantize
from ortplugins.samples.made_up import Feed
from ortplugins.session.warming import warm
from session_options.plan import entries_of

_PASSES = (
    "dq_matmulnbits_fusion",
    "transformer_fusion",
    "conv_fusion",
    "trim_padding",
    "shape_size_reorder",
    "prepacked_weights",
)
_COSTS = {"run": "run", "start": "start, without 2 ms", "private": "memory"}
_PUBLISHED = ("run", "memory")
# Tokens of a prompt, and what a later step of a decoder looks back at.
_TOKENS, _LATER_TOKENS = 64, 512
# No net may be slower, or larger, by more.
_BOUND = 1.02


def _medians(name: str, aim: str, found: list[Measurement]) -> list[float]:
    """Return the medians of one figure; RuntimeError where a session has none."""
    spreads = [getattr(item, aim) for item in found]
    if not all(spreads):
        raise RuntimeError(f"{name}: {[item.failed or 'no figure' for item in found]}")
    return [spread.median for spread in spreads]


def hinted(path: Path, hint: str, folder: Path) -> Candidate:
    """Return a session with a hint, whose model is built already.

    Raises:
        RuntimeError: If that fails.
    """
    entries = {"ortplugins.hint": hint}
    (done,) = warm([path], (), cache_dir=folder / "cache", session_entries=entries)
    if done.report is None:
        raise RuntimeError(f"{path.name}: {done.error}")
    return Candidate(path, settings={**entries, "ortplugins.cache_dir": str(folder / "cache")})


def measure_passes(folder: Path, rounds: int) -> list[Figure]:
    """Measure every pass with its default options on every net: none may cost.

    One that seems to is measured again, in four times the rounds. What a pass leaves as it
    is runs as onnxruntime's own session, and is not measured. All figures are printed; those
    of the worst net are returned, by pass.
    """
    figures: dict[str, list[list[Figure]]] = {item: [] for item in _PASSES}
    cache = folder / "passes"
    for name, (path, feed) in nets_and_feeds(folder).items():
        for item in _PASSES:
            (done,) = warm([path], (item,), cache_dir=cache)
            if done.report is None:
                raise RuntimeError(f"{name}, {item}: {done.error}")
            if done.report.source == "untouched":
                continue
            ours = Candidate(path, settings=entries_of([item], cache_dir=str(cache)))
            found: list[Figure] = []
            for count in (rounds, 4 * rounds):
                found = _costs(f"{item}, {name}", Candidate(path), ours, feed, count)
                for figure in found:
                    print(figure.what, f"{figure.compared:.3f}", flush=True)
                if all(figure.holds for figure in found):
                    break
            figures[item].append(found)
    return [figure for item, found in figures.items() for figure in _worst(item, found)]


def _worst(item: str, measured: list[list[Figure]]) -> Iterator[Figure]:
    """Yield the figures of a pass on the nets where they are the worst."""
    for index, what in enumerate(_COSTS.values()):
        if measured and what in _PUBLISHED:
            worst = max((found[index] for found in measured), key=lambda one: one.compared)
            net = worst.what.removeprefix(f"{item}, ").removesuffix(f": {what}")
            name = f"{item}, {what}: {net}"
            yield dataclasses.replace(worst, what=name)


def _costs(
    name: str, plain: Candidate, ours: Candidate, feed: Feed, rounds: int
) -> list[Figure]:
    found = measure([ours, plain], feed, rounds=rounds, runs=20, seconds=1, lockstep=True)
    figures = []
    for aim, what in _COSTS.items():
        scale, unit = (1e-6, "MB") if aim == "private" else (1e3, "ms")
        one, other = (scale * median for median in _medians(name, aim, found))
        allowed = 2.0 if aim == "start" else 0.0
        figures.append(Figure(f"{name}: {what}", one - allowed, other, unit, bound=_BOUND))
    return figures


def nets_and_feeds(folder: Path) -> dict[str, tuple[Path, Feed]]:
    """Return real nets with inputs of a usual size, and int4 forms."""
    found: dict[str, tuple[Path, Feed]] = {
        net.name: (net.path, net.feeds()) for net in real_nets()
    }
    float_path, _ = float_minilm()
    int4 = folder / "minilm.int4.onnx"
    quantize(float_path, int4)
    texts = next(feed for path, feed in found.values() if path == float_path)
    found |= {
        "MiniLM-L6 int4": (int4, texts),
        "MiniLM-L6 int8 QDQ": (int8_minilm(folder), texts),
    }
    for model in demo.make_models(demo.WORK, Console(quiet=True)):
        for name, tokens, past in (
            (f"{_TOKENS} tokens", _TOKENS, 0),
            (f"one after {_LATER_TOKENS}", 1, _LATER_TOKENS),
        ):
            feed = _decoder_feed(model.path, tokens, past)
            found[f"SmolLM2 int4 {model.layout}, {name}"] = model.path, feed
    return found


def _decoder_feed(path: Path, tokens: int, past: int) -> Feed:
    """Return so many tokens behind a random past."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids = np.arange(tokens)[None]
    rng = np.random.default_rng(0)
    shapes = {item.name: item.shape for item in session.get_inputs()}
    feed = {
        name: rng.standard_normal([1, shape[1], past, shape[3]], np.float32)
        for name, shape in shapes.items()
        if name.startswith("past")
    }
    return {"input_ids": ids + 1000, "position_ids": ids + past, **feed}
