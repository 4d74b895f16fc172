# SPDX-License-Identifier: MIT
"""What a hint chooses in a fifth of the time of Olive's OrtSessionParamsTuning, beside it."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.figures.bounds import Figure
from benchmarks.quantizers.peers import run_script
from benchmarks.sessions.hints import nets_and_feeds, tune
from ortplugins.measurement.measure import Candidate, measure

_NETS = (
    "silero_vad_16k_op15",
    "ch_ppocr_mobile_v2.0_cls_infer",
    "MiniLM-L6-v2",
    "SmolLM2 int4 transposed, one after 512",
)
_OLIVE = Path(__file__).parent / "children" / "olive_session_params.py"
_SHARE = 0.2
_MODES = {0: "ORT_SEQUENTIAL", 1: "ORT_PARALLEL"}


def measure_olive_tuning(folder: Path, rounds: int) -> list[Figure]:
    """Tune nets with Olive and with a hint; measure both choices in new processes.

    Raises:
        RuntimeError: If Olive fails, or its environment can't be made.
    """
    figures = []
    for name, (path, feed) in nets_and_feeds(folder).items():
        if name not in _NETS:
            continue
        job = {
            "model": str(path),
            "shapes": {key: array.shape for key, array in feed.items()},
            "types": {key: str(array.dtype) for key, array in feed.items()},
            "folder": str(folder / f"olive-{len(figures)}"),
        }
        theirs = run_script(_OLIVE, job).result
        found = theirs["session_options"]
        settings = {
            "execution_mode": _MODES[found["execution_mode"]],
            "intra_op_num_threads": found["intra_op_num_threads"],
            "inter_op_num_threads": found["inter_op_num_threads"],
        }
        allowed = max(1, int(_SHARE * theirs["seconds"]))
        start = time.perf_counter()
        tuned, report = tune(
            name, path, feed, "latency", folder / "olive", hint_seconds=allowed
        )
        seconds = time.perf_counter() - start
        print(name, settings, report.notes, flush=True)
        other, ours = measure(
            [Candidate(path, settings=settings), tuned], feed, rounds=rounds, lockstep=True
        )
        if ours.run is None or other.run is None:
            raise RuntimeError(f"{name}: {ours.failed or other.failed}")
        figures += [
            Figure(f"{name}: time to tune", seconds, theirs["seconds"], "s", bound=_SHARE),
            Figure(
                f"{name}: run", 1e3 * ours.run.median, 1e3 * other.run.median, "ms", bound=1.02
            ),
        ]
    return figures
