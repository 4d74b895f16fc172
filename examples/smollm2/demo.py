# SPDX-License-Identifier: MIT
"""SmolLM2-135M, quantised to int4 QDQ: plain onnxruntime beside ortplugins, a table each.

python -m examples.smollm2.demo [--work DIR] [--tokens N]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from examples.smollm2.checkpoint import load_checkpoint
from examples.smollm2.generate import STOP_IDS, chat_prompt
from examples.smollm2.llama import build_llama
from examples.smollm2.measure import Job, Measurement
from ortplugins.quantization import quantize

WORK = Path(__file__).resolve().parents[2] / ".cache" / "demo"
QUESTION = "What is the capital of France?"
LAYOUTS = {"axis0": "[K, N], blocks along axis 0", "transposed": "[N, K] + Transpose"}
FORMATS = {"axis0": "QDQ", "transposed": "QDQ_transposed"}

# What onnxruntime itself offers for such models, beside its defaults.
OWN_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "defaults": {},
    "fusion flag": {"session.enable_dq_matmulnbits_fusion": "1"},
    "accuracy level 0": {"session.qdq_matmulnbits_accuracy_level": "0"},
    "QDQ off, float": {"session.disable_quant_qdq": "1"},
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A quantised model and how to talk to it."""

    path: Path
    layout: str
    tokenizer: Tokenizer


# The rows of a table; the best of OWN_SETTINGS stands after the first.
PLAIN, FIRST, SECOND, INT8 = (
    "onnxruntime",
    "ortplugins, 1st start",
    "ortplugins, 2nd start",
    "ortplugins, 2nd, level 4",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=WORK, help="folder for what is made")
    parser.add_argument(
        "--tokens", type=int, default=14, help="tokens to generate, at least 2"
    )
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many runs")
    chosen = parser.parse_args(arguments)
    if chosen.tokens < 2 or chosen.rounds < 1:
        parser.error("--tokens must be 2 or more (the first is not timed), --rounds 1 or more")
    # Pipes and CI logs have no width of their own; 80 columns would fold every cell.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        results = {}
        for model in make_models(chosen.work, console):
            cache = chosen.work / f"ortplugins-{model.layout}"
            rows = measure_layout(model, cache, chosen.tokens, chosen.rounds, console)
            results[model.layout] = rows
            console.print(make_table(model, rows))
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(verdict(results["transposed"], results["axis0"]), soft_wrap=True)
    return 0


def make_models(work: Path, console: Console) -> list[Model]:
    """Returns the quantised models; what `work` holds already is not made again.

    Raises:
        RuntimeError: If the checkpoint cannot be downloaded.
        ValueError: If a file in `work` is damaged.
        OSError: If `work` cannot be written.
    """
    console.print(f"Files: {work}")
    checkpoint = load_checkpoint(work)
    floats = work / "float32" / "model.onnx"
    if not floats.exists():
        console.print("Writing the float32 model ...")
        with _new_folder(floats.parent) as folder:
            llama = build_llama(checkpoint.config, checkpoint.weights)
            ir.save(llama, folder / "model.onnx", external_data="model.onnx.data")
    models = []
    for layout in LAYOUTS:
        path = work / f"int4-block32-{layout}" / "model.onnx"
        if not path.exists():
            console.print(f"Quantising to int4, block 32, {LAYOUTS[layout]} ...")
            with _new_folder(path.parent) as folder:
                quantize(
                    floats,
                    folder / "model.onnx",
                    method="rtn",
                    block_size=32,
                    quant_format=FORMATS[layout],
                )
        models.append(Model(path, layout, checkpoint.tokenizer))
    return models


def measure_layout(
    model: Model, cache: Path, tokens: int, rounds: int, console: Console
) -> dict[str, Measurement]:
    """Measures every configuration on one model; returns medians, by the rows' names."""
    prompt = model.tokenizer.encode(chat_prompt(QUESTION)).ids
    reference = str(model.path.with_name("logits.npy"))
    job = Job(str(model.path), prompt, tokens, reference)

    def run(what: str, **changes: Any) -> Measurement:
        console.print(f"Measuring {LAYOUTS[model.layout]}: {what} ...", style="dim")
        return in_child(dataclasses.replace(job, **changes))

    run("reference, ORT_DISABLE_ALL", make_reference=True, tokens=0)
    settings = {name: {"entries": entries} for name, entries in OWN_SETTINGS.items()}
    own = {name: run(f"onnxruntime, {name}", **settings[name]) for name in settings}
    # A setting that is not clearly faster than the defaults differs from them by noise.
    handicap = dict.fromkeys(own, 1.1) | {"defaults": 1.0}
    best = min(own, key=lambda name: handicap[name] * (own[name].step_milliseconds or 0))
    ours, level4 = {"cache_dir": str(cache)}, {"accuracy_level": 4}
    configurations: dict[str, dict[str, Any]] = {
        PLAIN: settings["defaults"],
        f"onnxruntime, best own: {best}": settings[best],
        FIRST: ours,
        SECOND: ours,
        "ortplugins, 1st, level 4": ours | level4,
        INT8: ours | level4,
    }
    runs: dict[str, list[Measurement]] = {name: [] for name in configurations}
    # Round after round, so that a busy moment of the machine does not hit one row alone.
    for i in range(rounds):
        shutil.rmtree(cache, ignore_errors=True)  # or a first start would be a second one
        for name, changes in configurations.items():
            runs[name].append(run(f"{name}, round {i + 1}", **changes))
    del runs["ortplugins, 1st, level 4"]  # it only filled the cache
    return {name: median(measured) for name, measured in runs.items()}


def median(runs: Sequence[Measurement]) -> Measurement:
    """Returns the last run with the median of every time and memory."""

    def middle(field: str) -> float | None:
        values = [getattr(run, field) for run in runs]
        return None if None in values else statistics.median(values)

    fields = (field.name for field in dataclasses.fields(Measurement))
    middles: dict[str, Any] = {
        name: middle(name) for name in fields if name.endswith(("seconds", "megabytes"))
    }
    return dataclasses.replace(runs[-1], **middles)


def in_child(job: Job) -> Measurement:
    """Measures in a fresh interpreter.

    Raises:
        RuntimeError: If it fails; ends with its last line.
    """
    module = "examples.smollm2.measure"
    child = subprocess.run(
        [sys.executable, "-m", module, json.dumps(dataclasses.asdict(job))],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"{module} failed on {job.model}:\n{child.stderr.strip()}")
    return Measurement(**json.loads(child.stdout.splitlines()[-1]))


def verdict(transposed: Mapping[str, Measurement], axis0: Mapping[str, Measurement]) -> str:
    """Returns what a user wants to know, in one line."""
    plain, ours = transposed[PLAIN], transposed[SECOND]
    speed = (plain.step_milliseconds or 0) / (ours.step_milliseconds or 1)
    start = axis0[PLAIN].start_seconds / axis0[SECOND].start_seconds
    return (
        "Against plain onnxruntime, the 2nd start of ortplugins: [N, K] + Transpose "
        f"{speed:.1f} times faster per token{_memory(plain, ours)}; axis 0 starts "
        f"{start:.1f} times faster{_memory(axis0[PLAIN], axis0[SECOND])}."
    )


def _memory(plain: Measurement, ours: Measurement) -> str:
    """Compares private memory while running and after the start, where it is known."""
    changes = []
    for when in ("running", "started"):
        theirs, mine = (getattr(m, f"{when}_megabytes") for m in (plain, ours))
        if theirs is None or mine is None:
            return ""
        changes.append(f"{theirs:.0f} -> {mine:.0f} MB {when}")
    return f" (private memory {', '.join(changes)})"


def make_table(model: Model, rows: Mapping[str, Measurement]) -> Table:
    """Lays out the measurements on one model."""
    table = Table(
        title=f"SmolLM2-135M int4, {LAYOUTS[model.layout]}: {QUESTION}",
        caption="ortplugins computes in float32 here, but for level 4, which rounds "
        "activations to int8, as onnxruntime's defaults do where they fuse",
    )
    table.add_column("configuration")
    for heading in (
        "start\ns",
        "private MB\nstarted",
        "private MB\nrunning",
        "ms per\ntoken",
        "logits\ndiffer",
    ):
        table.add_column(heading, justify="right")
    table.add_column("text")
    for name, row in rows.items():
        memory = (row.started_megabytes, row.running_megabytes)
        table.add_row(
            name,
            f"{row.start_seconds:.2f}",
            *("n/a" if value is None else f"{value:.0f}" for value in memory),
            f"{row.step_milliseconds:.1f}",
            f"{row.difference:.1e}",
            _text(model.tokenizer, row.tokens),
        )
    return table


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Decodes up to the end of the answer; what comes after it was for the clock only."""
    ends = [i for i, token in enumerate(tokens) if token in STOP_IDS]
    text: str = tokenizer.decode(list(tokens[: ends[0]] if ends else tokens))
    return text.strip()


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Lends a folder to write to that becomes `path` only if no error comes up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="part-") as parent:
        folder = Path(parent, path.name)
        folder.mkdir()
        yield folder
        os.replace(folder, path)


if __name__ == "__main__":
    sys.exit(main())
