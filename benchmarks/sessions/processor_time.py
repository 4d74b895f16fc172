# SPDX-License-Identifier: MIT
"""Processor time that a start adds to onnxruntime's constructor, imports included."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.int4_chain import write_chain
from ortplugins.cache.folder import SETTLED_SECONDS
from ortplugins.runtime.child_process import child_environment

_PAIRS, _WIDTH = 6, 64
_PROCESSES = 20
# Of models in an image: pairs of 1024 by 4096, about 5 and 300 MB.
_IMAGES = (1, 64)
_IMAGE_BOUND = 5.0  # milliseconds that 100 MB may add
# Milliseconds that the first session of a process may add, and a later one.
_BOUNDS = (5.0, 3.0)
# A process of a user, who has imported onnxruntime and nothing else: with passes, or plain, on
# the model that the others open in the end.
_STARTS = """
import sys, time
import onnxruntime
model, level, cache, passes, *early = sys.argv[1:]
def made():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.add_session_config_entry("ortplugins.cache_dir", cache)
    for name in passes.split():
        options.add_session_config_entry("ortplugins.enable_" + name, "1")
    return options
early = [made() for _ in range(3)] if early else []
for number in range(3):
    start = time.thread_time()
    made_by = onnxruntime
    if passes:
        import ortplugins as made_by
    options = early.pop() if early else made()
    session = made_by.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    print(time.thread_time() - start)
if passes:
    print(session.ortplugins_report.source, session.ortplugins_report.artifact)
"""


def measure_processor_time(folder: Path, rounds: int) -> list[Figure]:
    """Measure first and later sessions of fresh processes, also of options made early."""
    model = folder / "chain.onnx"
    write_chain(model, _PAIRS, _WIDTH, _WIDTH, "axis0")
    time.sleep(SETTLED_SECONDS)
    figures = []
    for what, (source, *arguments) in {
        "hit": ("cache", "dq_matmulnbits_fusion"),
        "packed weights": ("cache", "dq_matmulnbits_fusion prepacked_weights"),
        "nothing fires": ("untouched", "trim_padding"),
        "options older than the import": ("cache", "dq_matmulnbits_fusion", "early"),
    }.items():
        added = _added(_PROCESSES, source, model, folder / "cache", *arguments)
        for name, least, bound in zip(("first", "later"), added, _BOUNDS, strict=True):
            text = f"{what}, {name} session of a process"
            figures.append(Figure(text, 1e3 * least, unit="ms", bound=bound))
    return [*figures, *_in_images(folder)]


def _in_images(folder: Path) -> list[Figure]:
    """Measure warmed caches in layers of an image, which no process can write to."""
    sizes, times = [], []
    for pairs in _IMAGES:
        image = folder / f"image-{pairs}"
        image.mkdir()
        write_chain(model := image / "chain.onnx", pairs, 1024, 4096, "axis0")
        sizes.append(model.with_name("chain.onnx.data").stat().st_size / 1e8)
        cache = image / "cache"
        (result,) = ortplugins.warm([model], ["dq_matmulnbits_fusion"], cache_dir=cache)
        assert not result.error, result.error
        _copy_as_layer(image)
        time.sleep(SETTLED_SECONDS)
        arguments = model, cache, "dq_matmulnbits_fusion"
        first, _ = _added(_PROCESSES // 2, "cache", *arguments, reads_only=True)
        times.append(1e3 * first)
    (small, large), (less, more) = sizes, times
    each = (more - less) / (large - small)
    return [
        Figure("image, first session of a process", more, unit="ms"),
        Figure("image, for each 100 MB of data", each, unit="ms", bound=_IMAGE_BOUND),
    ]


def _copy_as_layer(image: Path) -> None:
    """Replace a folder by a copy: other inodes, times of whole seconds, nothing writable."""
    layer = image.with_suffix(".tar")
    with tarfile.open(layer, "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(image, image.name)
    image.rename(image.with_name(f"{image.name}-built"))
    with tarfile.open(layer) as archive:
        archive.extractall(image.parent, filter="tar")
    for path in (image, *image.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)


def _added(
    processes: int, source: str, model: Path, cache: Path, *arguments: str, **how: bool
) -> tuple[float, float]:
    """Return the seconds that the first session of a process takes longer than a plain one.

    And those of a later session. Processes take turns with plain ones; the least counts.
    """
    _starts(model, cache, *arguments, **how)  # which builds
    ours, plain = [], []
    for _ in range(processes):
        times, opened = _starts(model, cache, *arguments, **how)
        found, _, artifact = opened.partition(" ")
        assert found == source, opened
        ours.append(times)
        baked = {"level": "ORT_DISABLE_ALL"} if artifact else {}
        plain.append(_starts(Path(artifact or model), cache, "", **baked, **how)[0])
    first, later = (
        min(pair[number] for pair in ours) - min(pair[number] for pair in plain)
        for number in range(2)
    )
    return first, later


def _starts(
    model: Path,
    cache: Path,
    *arguments: str,
    level: str = "ORT_ENABLE_ALL",
    reads_only: bool = False,
) -> tuple[tuple[float, float], str]:
    """Return the seconds of the first and of a later session of a process, and what it opened.

    Modes do not bind root: a process that only reads has no capabilities.
    """
    is_root = reads_only and hasattr(os, "geteuid") and os.geteuid() == 0
    alone = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if is_root else ()
    environment = child_environment("benchmark")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [*alone, sys.executable, "-c", _STARTS, str(model), level, str(cache), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, third, *opened = done.stdout.splitlines()
    return (float(first), min(float(second), float(third))), "".join(opened)
