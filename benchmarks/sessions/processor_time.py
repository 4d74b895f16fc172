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
# A process of a user, who has imported onnxruntime and nothing else. What the constructor of
# onnxruntime takes within ours counts for onnxruntime.
_STARTS = """
import sys, time
import onnxruntime
construct, native = onnxruntime.InferenceSession.__init__, []
def timed(*args, **kwargs):
    start = time.thread_time()
    construct(*args, **kwargs)
    native.append(time.thread_time() - start)
onnxruntime.InferenceSession.__init__ = timed
def made():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("ortplugins.cache_dir", sys.argv[2])
    for name in sys.argv[3].split():
        options.add_session_config_entry("ortplugins.enable_" + name, "1")
    return options
early = [made() for _ in range(3)] if sys.argv[5:] else []
for number in range(3):
    start = time.thread_time()
    import ortplugins
    options = early.pop() if early else made()
    providers = ["CPUExecutionProvider"]
    session = ortplugins.InferenceSession(sys.argv[1], options, providers=providers)
    print(time.thread_time() - start - sum(native))
    native.clear()
assert session.ortplugins_report.source == sys.argv[4], session.ortplugins_report
"""


def measure_processor_time(folder: Path, rounds: int) -> list[Figure]:
    """Measure first and later sessions of fresh processes, also of options made early."""
    model = folder / "chain.onnx"
    write_chain(model, _PAIRS, _WIDTH, _WIDTH, "axis0")
    time.sleep(SETTLED_SECONDS)
    figures = []
    for what, arguments in {
        "hit": ("dq_matmulnbits_fusion", "cache"),
        "packed weights": ("dq_matmulnbits_fusion prepacked_weights", "cache"),
        "nothing fires": ("trim_padding", "untouched"),
        "options older than the import": ("dq_matmulnbits_fusion", "cache", "early"),
    }.items():
        found = [_starts(model, folder / "cache", *arguments) for _ in range(_PROCESSES + 2)]
        first, later = (min(times) for times in zip(*found[2:], strict=True))
        for name, least, bound in zip(
            ("first", "later"), (first, later), _BOUNDS, strict=True
        ):
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
        arguments = model, cache, "dq_matmulnbits_fusion", "cache"
        found = [_starts(*arguments, reads_only=True) for _ in range(_PROCESSES // 2)]
        times.append(1e3 * min(first for first, _ in found))
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


def _starts(
    model: Path, cache: Path, *arguments: str, reads_only: bool = False
) -> tuple[float, float]:
    """Return the seconds of the first session of a process, and of a later one.

    Modes do not bind root: a process that only reads has no capabilities.
    """
    is_root = reads_only and hasattr(os, "geteuid") and os.geteuid() == 0
    alone = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if is_root else ()
    environment = child_environment("benchmark")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [*alone, sys.executable, "-c", _STARTS, str(model), str(cache), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, *others = map(float, done.stdout.split())
    return first, min(others)
