# SPDX-License-Identifier: MIT
"""Measures passes and session settings for one model on this machine: ``ortplugins tune``.

Each candidate is compared with plain onnxruntime on its own, then all successful ones are
together, in processes that take turns.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ortplugins.measurement.measure import Candidate, Measurement, measure, side_by_side
from ortplugins.measurement.models import comparison_feeds
from ortplugins.model_io.saving import Progress
from ortplugins.optimization.offline_optimizers import SLOW_OPTIMIZERS
from ortplugins.runtime.machine import host_cores, usable_cores
from ortplugins.runtime.stock_session import open_model
from ortplugins.samples.made_up import Feed
from session_options.entries import DISABLED_OPTIMIZERS_KEY
from session_options.plan import entries_of

# A smaller gain is not worth an entry.
_LEAST_GAIN = 0.02
_MAX_SAMPLES = 4
# The figure that counts for each aim: a name from side_by_side.
_FIGURES = {
    "latency": "run",
    "throughput": "run",
    "memory": "private memory after the runs",
    "start": "start",
}
_NO_RATIOS: Mapping[str, float] = MappingProxyType({})


class Tried(NamedTuple):
    """One candidate compared with plain onnxruntime.

    Attributes:
        name: The name of the pass or the setting; several are joined by " + ".
        settings: The session's settings, as names and texts to paste.
        ratios: For ``run``, ``start`` and memory, the median relative to plain onnxruntime.
        gains: Whether the figure that counts is smaller in every round, and its median by 2 %.
        failed: The reason, if it could not be measured.
    """

    name: str
    settings: Mapping[str, str]
    ratios: Mapping[str, float] = _NO_RATIOS
    gains: bool = False
    failed: str = ""


def tune(
    model: str | os.PathLike[str],
    hint: str,
    *,
    rounds: int = 5,
    dims: Mapping[str, int] | None = None,
    samples: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[list[Tried], Tried | None]:
    """Return what was tried, and what gains most; None if nothing gains.

    Args:
        model: Path of an .onnx file.
        hint: ``latency``, ``throughput``, ``memory`` or ``start``.
        rounds: Processes of each candidate.
        dims: Sizes of open dimensions, by name.
        samples: An .npz file with inputs; by default they are made up.
        progress: Called as by :func:`.measure`.

    Raises:
        MissingFileError, ModelFileError, CalibrationError, UsageError: As for ``compare``.
    """
    session = open_model(model, "all")
    feeds = comparison_feeds(session, inputs=samples, dims=dims)[:_MAX_SAMPLES]
    del session
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as cache:

        def tried(candidates: Mapping[str, Mapping[str, str]]) -> list[Tried]:
            return _tried(Path(model), hint, candidates, feeds, rounds, cache, progress)

        found = tried(dict(_candidates(hint)))
        gaining = [item for item in found if item.gains]
        if len(gaining) > 1:
            name = " + ".join(item.name for item in gaining)
            together: dict[str, str] = {}
            for item in gaining:
                together |= item.settings
            found += tried({name: together})
    figure = _FIGURES[hint]
    best = min(
        (item for item in found if item.gains),
        key=lambda item: item.ratios[figure],
        default=None,
    )
    return found, best


def _candidates(hint: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the name and the settings of each candidate; all candidates are exact."""
    passes = {
        "memory": ("dq_matmulnbits_fusion", "shape_size_reorder", "prepacked_weights"),
        "start": ("dq_matmulnbits_fusion", "conv_fusion", "prepacked_weights"),
    }
    speed = ("dq_matmulnbits_fusion", "transformer_fusion", "conv_fusion", "trim_padding")
    for name in passes.get(hint, speed):
        yield name, entries_of([name])
    settings = {"enable_cpu_mem_arena": "0"} if hint == "memory" else {"enable_mem_reuse": "0"}
    if hint == "start":
        settings["session.prepack.enable_parallel"] = "1"
    if hint in ("latency", "throughput"):
        settings[DISABLED_OPTIMIZERS_KEY] = ";".join(SLOW_OPTIMIZERS)
        settings["session.dynamic_block_base"] = "4"
    if hint == "throughput":
        settings["session.intra_op.allow_spinning"] = "0"
    yield from ((f"{key} = {text}", {key: text}) for key, text in settings.items())
    counts = {usable_cores(), 1} if hint == "throughput" else {usable_cores()}
    for count in sorted(counts - {host_cores()}) if hint in ("latency", "throughput") else ():
        yield f"threads: {count}", {"intra_op_num_threads": str(count)}


def _tried(
    model: Path,
    hint: str,
    candidates: Mapping[str, Mapping[str, str]],
    feeds: Sequence[Feed],
    rounds: int,
    cache: str,
    progress: Progress | None,
) -> list[Tried]:
    """Compare candidates with plain onnxruntime."""
    built = [Candidate(model, "plain onnxruntime")]
    for name, settings in candidates.items():
        kept = {"ortplugins.cache_dir": cache} if _has_passes(settings) else {}
        built.append(Candidate(model, name, settings={**settings, **kept}))
    plain, *found = measure(
        built,
        feeds,
        rounds=rounds,
        callers=usable_cores() if hint == "throughput" else 1,
        lockstep=hint in ("latency", "throughput"),
        progress=progress,
    )
    pairs = zip(candidates.items(), found, strict=True)
    return [_row(name, given, one, plain, _FIGURES[hint]) for (name, given), one in pairs]


def _row(
    name: str, settings: Mapping[str, str], ours: Measurement, plain: Measurement, figure: str
) -> Tried:
    if failed := ours.failed or plain.failed:
        return Tried(name, settings, failed=failed)
    costs = {cost.what: cost for cost in side_by_side(ours, plain)}
    ratios = {what: cost.ratio for what, cost in costs.items() if cost.ratio is not None}
    gains = costs[figure].differs is not False and ratios[figure] < 1 - _LEAST_GAIN
    return Tried(name, settings, ratios, gains)


def _has_passes(settings: Mapping[str, str]) -> bool:
    return any(key.startswith("ortplugins.") for key in settings)
