# SPDX-License-Identifier: MIT
"""Start, memory and milliseconds per token on SmolLM2-135M: plain onnxruntime and ours."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console

from benchmarks.figures.bounds import Figure
from examples.smollm2 import demo
from examples.smollm2.demo import PLAIN, SECOND, Job, Measurement
from examples.smollm2.generate import chat_prompt

MATMULNBITS = "onnxruntime's own MatMulNBits quantizer"
OURS_LONG = "ortplugins, longer text"
TOKENS = 14


def measure_smollm2(folder: Path, rounds: int) -> list[Figure]:
    """Measure both layouts, each configuration in a process of its own, interleaved."""
    models = {
        model.layout: model for model in demo.make_models(demo.WORK, Console(quiet=True))
    }
    direct = _quantised_by_onnxruntime(demo.WORK)
    rows = {
        layout: _measure(model, direct, folder / layout, rounds)
        for layout, model in models.items()
    }
    turned, axis0 = rows["transposed"], rows["axis0"]
    return [
        _figure("[N,K] + Transpose: ms per token", turned, "step_milliseconds", "ms", 0.1),
        _figure(
            "[N,K] + Transpose: ms per token, vs. MatMulNBits",
            turned,
            "step_milliseconds",
            "ms",
            1.1,
            ours=OURS_LONG,
            against=MATMULNBITS,
        ),
        _figure("[N,K] + Transpose: start", turned, "start_seconds", "s"),
        _figure(
            "[N,K] + Transpose: private memory running", turned, "running_megabytes", "MB"
        ),
        _figure(
            "[N,K] + Transpose: private memory after the start",
            turned,
            "started_megabytes",
            "MB",
        ),
        _figure("axis 0: second start", axis0, "start_seconds", "s", 0.6),
        _figure("axis 0: private memory after start", axis0, "started_megabytes", "MB", 0.75),
        _figure("axis 0: private memory running", axis0, "running_megabytes", "MB"),
        _figure(
            "axis 0: ms per token (ours level 0, theirs 4)", axis0, "step_milliseconds", "ms"
        ),
    ]


def _measure(
    model: demo.Model, direct: Path, folder: Path, rounds: int
) -> dict[str, Measurement]:
    prompt = model.tokenizer.encode(chat_prompt(demo.QUESTION)).ids
    job = Job(str(model.path), prompt, TOKENS, str(model.path.with_name("logits.npy")))
    demo.in_child(dataclasses.replace(job, make_reference=True, tokens=0))
    cache: dict[str, Any] = {"cache_dir": str(folder)}
    shutil.rmtree(folder, ignore_errors=True)
    demo.in_child(dataclasses.replace(job, tokens=0, **cache))  # the first start
    rows = _interleaved(job, {PLAIN: {}, SECOND: cache}, rounds)
    assert rows[SECOND].source == "cache"
    # Two that run the same kernels differ measurably over many tokens only.
    longer = dataclasses.replace(job, tokens=64)
    pair = {OURS_LONG: cache, MATMULNBITS: {"model": str(direct)}}
    return rows | _interleaved(longer, pair, 2 * rounds + 1)


def _interleaved(
    job: Job, configurations: dict[str, dict[str, Any]], rounds: int
) -> dict[str, Measurement]:
    runs: dict[str, list[Measurement]] = {name: [] for name in configurations}
    for _ in range(rounds):
        for name, changes in configurations.items():
            runs[name].append(demo.in_child(dataclasses.replace(job, **changes)))
    return {name: demo.median(measured) for name, measured in runs.items()}


def _quantised_by_onnxruntime(work: Path) -> Path:
    """The float model through onnxruntime's quantizer, once: int4, block 32, symmetric."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    path = work / "int4-block32-matmulnbits" / "model.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        logging.getLogger("onnxruntime").setLevel(logging.ERROR)  # a line for each node
        floats = onnx.load(work / "float32" / "model.onnx")
        quantizer = MatMulNBitsQuantizer(floats, block_size=32, is_symmetric=True)
        quantizer.process()
        quantizer.model.save_model_to_file(str(path), use_external_data_format=True)
    return path


def _figure(
    what: str,
    rows: dict[str, Measurement],
    field: str,
    unit: str,
    bound: float = float("nan"),
    ours: str = SECOND,
    against: str = PLAIN,
) -> Figure:
    mine, theirs = (getattr(rows[name], field) for name in (ours, against))
    return Figure(what, mine, theirs, unit, bound)
