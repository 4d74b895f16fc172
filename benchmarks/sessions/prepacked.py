# SPDX-License-Identifier: MIT
"""Packed weights in the file: start, private memory, four workers, speed, first build."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.child import run_child
from benchmarks.figures.bounds import Figure
from benchmarks.models.int4_chain import write_chain
from examples.smollm2 import demo

# Opens a session and runs it; prints seconds, private MB, milliseconds of each run.
SESSION = """
import json, sys, time
import numpy as np, onnxruntime as ort
def memory(path, field):
    with open(path) as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
job = json.loads(sys.argv[1])
so = ort.SessionOptions()
so.intra_op_num_threads = job["threads"]
if job["passes"]:
    import ortplugins
    passes = [getattr(ortplugins, name)(**options) for name, options in job["passes"].items()]
    ortplugins.configure(so, *passes, cache_dir=job["cache"], strict=True)
    make = ortplugins.InferenceSession
else:
    make = ort.InferenceSession
start = time.perf_counter()
session = make(job["model"], so, providers=["CPUExecutionProvider"])
seconds = time.perf_counter() - start
started = memory("/proc/self/status", "RssAnon:")
rng = np.random.default_rng(0)
times = {}
for name, sizes in job["feeds"].items():
    feeds = {}
    for item in session.get_inputs():
        shape = [sizes[size] if isinstance(size, str) else size for size in item.shape]
        feeds[item.name] = (
            np.ones(shape, np.int64) if "int64" in item.type
            else rng.standard_normal(shape).astype(np.float32)
        )
    runs = []
    for _ in range(job["runs"]):
        start = time.perf_counter()
        session.run(None, feeds)
        runs.append(time.perf_counter() - start)
    times[name] = sorted(runs)[len(runs) // 2] * 1e3
if job["wait"]:
    print("ready", flush=True)
    sys.stdin.readline()
result = {"start": seconds, "private": started, "times": times}
result["pss"] = memory("/proc/self/smaps_rollup", "Pss:")
print(json.dumps(result), flush=True)
if job["wait"]:
    sys.stdin.readline()
"""
PLAIN: dict[str, Any] = {}
FUSED: dict[str, Any] = {"DqMatMulNBitsFusion": {}}
PACKED: dict[str, Any] = {"DqMatMulNBitsFusion": {}, "PrepackedWeights": {}}
PARALLEL: dict[str, Any] = {**FUSED, "PrepackedWeights": {"parallel": True}}
WORKERS, RUNS = 4, 20


def measure_prepacked(folder: Path, rounds: int) -> list[Figure]:
    """Measure SmolLM2 int4 and a chain of 252 MB, every configuration interleaved."""
    smollm2 = next(
        model
        for model in demo.make_models(demo.WORK, Console(quiet=True))
        if model.layout == "axis0"
    )
    chain = folder / "chain" / "model.onnx"
    chain.parent.mkdir()
    write_chain(chain, 15, 2048, 8192, "axis0", "INT4")
    language = {
        "decode": {"batch": 1, "sequence": 1, "past": 127, "total": 128},
        "prefill": {"batch": 1, "sequence": 128, "past": 0, "total": 128},
    }
    rows = {"decode": {"rows": 1}, "prefill": {"rows": 128}}
    return [
        *_measure("SmolLM2", smollm2.path, language, folder / "a", rounds, private_bound=0.2),
        *_measure("chain of 252 MB", chain, rows, folder / "b", rounds, private_bound=0.08),
    ]


def _measure(
    name: str,
    model: Path,
    feeds: dict[str, dict[str, int]],
    cache: Path,
    rounds: int,
    private_bound: float,
) -> list[Figure]:
    job = {"model": str(model), "cache": str(cache), "threads": 2, "wait": False}
    idle = {**job, "feeds": {}, "runs": 0}
    first = run_child(SESSION, json.dumps({**idle, "passes": PACKED}))
    for passes in (FUSED, PARALLEL):
        run_child(SESSION, json.dumps({**idle, "passes": passes}))
    running = {**job, "feeds": feeds, "runs": RUNS}
    measured: dict[str, list[Any]] = {"plain": [], "fused": [], "packed": [], "parallel": []}
    peaks = []
    for _ in range(rounds):
        for key, passes in zip(measured, (PLAIN, FUSED, PACKED, PARALLEL), strict=True):
            cost = run_child(SESSION, json.dumps({**running, "passes": passes}))
            measured[key].append(cost.result)
        peaks.append(
            run_child(SESSION, json.dumps({**idle, "passes": PACKED})).peak_private_mb
        )

    def median(key: str, *path: str) -> float:
        values = []
        for result in measured[key]:
            for part in path:
                result = result[part]
            values.append(result)
        return statistics.median(values)

    # A worker that has made so many tokens holds a cache of that length.
    sizes = {**feeds["decode"], "past": RUNS}
    decoding = {**running, "feeds": {"decode": sizes}}
    plain, packed = (_workers({**decoding, "passes": passes}) for passes in (PLAIN, PACKED))
    return [
        Figure(
            f"{name}: start from the cache",
            median("packed", "start"),
            median("plain", "start"),
            "s",
            0.4,
        ),
        Figure(
            f"{name}: private memory after that start",
            median("packed", "private"),
            median("plain", "private"),
            "MB",
            private_bound,
        ),
        Figure(
            f"{name}: start, packing in parallel",
            median("parallel", "start"),
            median("plain", "start"),
            "s",
        ),
        Figure(
            f"{name}: private memory after that start",
            median("parallel", "private"),
            median("plain", "private"),
            "MB",
        ),
        Figure(
            f"{name}: PSS of {WORKERS} workers after {RUNS} tokens", packed, plain, "MB", 0.35
        ),
        *(
            Figure(
                f"{name}: PSS of {WORKERS} workers with a cache of 128 tokens",
                *(
                    _workers(
                        {**running, "feeds": {"decode": feeds["decode"]}, "passes": passes}
                    )
                    for passes in (PACKED, PLAIN)
                ),
                "MB",
            )
            for _ in range("past" in feeds["decode"])
        ),
        *(
            Figure(
                f"{name}: {phase}, beside the same graph without blobs",
                median("packed", "times", phase),
                median("fused", "times", phase),
                "ms",
                1.02,
            )
            for phase in feeds
        ),
        Figure(f"{name}: first build", first.result["start"], median("plain", "start"), "s"),
        Figure(
            f"{name}: private peak of a process that has it built, beside a warm start",
            first.peak_private_mb,
            statistics.median(peaks),
            "MB",
            1.1,
        ),
    ]


def _workers(job: dict[str, Any]) -> float:
    """Sum of the PSS of several processes that run one model at the same time, in MB."""
    command = [sys.executable, "-c", SESSION, json.dumps({**job, "wait": True, "threads": 1})]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(WORKERS)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    total = 0.0
    for worker in workers:
        # One after the other, while all are alive: PSS shares pages among those that are.
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
        total += json.loads(worker.stdout.readline())["pss"]
    for worker in workers:
        worker.communicate()
    return total
