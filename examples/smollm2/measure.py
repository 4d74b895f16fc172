# SPDX-License-Identifier: MIT
"""Starts one session in a process of its own, measures it, prints the result as JSON.

A process of its own because memory that an earlier session gave back, and modules that it
imported, would count for the next one. The job comes as JSON in the only argument.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from examples.smollm2.generate import Decoder


@dataclasses.dataclass(frozen=True)
class Job:
    """What to start and what to run.

    Attributes:
        model: Path of the QDQ model.
        prompt: Token ids.
        tokens: How many to generate, whatever they are; 0 for none.
        reference: Path of the reference logits, .npy.
        make_reference: Run without any optimisation and write the reference.
        entries: Session entries, by onnxruntime's keys.
        cache_dir: Cache of ortplugins; None for plain onnxruntime.
        accuracy_level: Option of ortplugins' fusion.
    """

    model: str
    prompt: Sequence[int]
    tokens: int
    reference: str
    make_reference: bool = False
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cache_dir: str | None = None
    accuracy_level: int = 0


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What came out.

    Attributes:
        start_seconds: Time to create the session; importing onnxruntime is not in it.
        started_megabytes: Private memory of the process after the start; None without /proc.
        running_megabytes: The same after the last token.
        step_milliseconds: Median time per token after the first; None for no tokens.
        tokens: The tokens generated.
        difference: Greatest difference of the prompt's logits over the greatest reference.
        source: Where ortplugins' model came from; "" for plain onnxruntime.
    """

    start_seconds: float
    started_megabytes: float | None
    running_megabytes: float | None
    step_milliseconds: float | None
    tokens: Sequence[int]
    difference: float
    source: str


def run(job: Job) -> Measurement:
    """Starts a session, reads the memory, then runs the prompt and the tokens."""
    library = importlib.import_module("onnxruntime" if job.cache_dir is None else "ortplugins")
    options = _options(job)
    start = time.perf_counter()
    # What ortplugins imports when it is first used is within the time.
    session = library.InferenceSession(job.model, options, providers=["CPUExecutionProvider"])
    start_seconds = time.perf_counter() - start
    started = private_megabytes()
    report = getattr(session, "ortplugins_report", None)
    decoder = Decoder(session)
    difference = _difference(decoder.prefill(job.prompt), job)
    tokens, step = [], None
    if job.tokens:
        generation = decoder.greedy(job.prompt, job.tokens, stop_ids=())
        tokens, step = generation.tokens, 1e3 * float(np.median(generation.step_seconds))
    return Measurement(
        start_seconds=start_seconds,
        started_megabytes=started,
        running_megabytes=private_megabytes(),
        step_milliseconds=step,
        tokens=tokens,
        difference=difference,
        source=report.source if report else "",
    )


def private_megabytes() -> float | None:
    """Returns this process's memory that no file backs, or None if the system has no /proc."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    return None


def _options(job: Job) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = 2, 1
    options.log_severity_level = 3
    if job.make_reference:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in job.entries.items():
        options.add_session_config_entry(key, value)
    if job.cache_dir is not None:
        import ortplugins  # not at the top: plain onnxruntime shall not pay for it

        fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=job.accuracy_level)
        ortplugins.configure(options, fusion, cache_dir=job.cache_dir)
    return options


def _difference(logits: np.ndarray[Any, Any], job: Job) -> float:
    if job.make_reference:
        np.save(job.reference, logits)
    reference = np.load(job.reference)
    return float(abs(logits - reference).max() / abs(reference).max())


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(run(Job(**json.loads(sys.argv[1]))))))
