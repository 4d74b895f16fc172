# SPDX-License-Identifier: MIT
"""SmolLM2-135M, quantised to int4 QDQ: plain onnxruntime and ortplugins, a table each.

python -m examples.smollm2.demo [--work DIR] [--tokens N]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import statistics
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
from ortplugins.measurement.measure import Candidate, SessionProcess
from ortplugins.quantization import quantize
from ortplugins.runtime.machine import process_memory
from session_options.plan import entries_of

FUSION = "dq_matmulnbits_fusion"
WORK = Path(__file__).resolve().parents[2] / ".cache" / "demo"
QUESTION = "What is the capital of France?"
LAYOUTS = {"axis0": "[K, N], blocks along axis 0", "transposed": "[N, K] + Transpose"}
FORMATS = {"axis0": "QDQ", "transposed": "QDQ_transposed"}

# What onnxruntime itself offers for such models, besides its defaults.
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


# The rows of a table; the best of OWN_SETTINGS stands after the first.
PLAIN, FIRST, SECOND, INT8 = (
    "onnxruntime",
    "ortplugins, 1st start",
    "ortplugins, 2nd start",
    "ortplugins, 2nd start, level 4",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=WORK, help="folder for the models")
    parser.add_argument(
        "--tokens", type=int, default=14, help="tokens to generate, at least 2"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs to take medians of")
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
        f"onnxruntime, best setting: {best}": settings[best],
        FIRST: ours,
        SECOND: ours,
        "ortplugins, 1st start, level 4": ours | level4,
        INT8: ours | level4,
    }
    runs: dict[str, list[Measurement]] = {name: [] for name in configurations}
    # Round after round, so that a busy moment of the machine does not hit one row alone.
    for i in range(rounds):
        shutil.rmtree(cache, ignore_errors=True)  # or a first start would be a second one
        for name, changes in configurations.items():
            runs[name].append(run(f"{name}, round {i + 1}", **changes))
    del runs["ortplugins, 1st start, level 4"]  # it only filled the cache
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
    """Measures in a process of its own.

    Raises:
        RuntimeError: If it fails.
    """
    settings: dict[str, str | int | bool] = {
        **job.entries,
        "intra_op_num_threads": 2,
        "inter_op_num_threads": 1,
    }
    if job.cache_dir:
        level = {f"{FUSION}.accuracy_level": str(job.accuracy_level)}
        settings |= entries_of([FUSION], level, cache_dir=job.cache_dir)
    if job.make_reference:
        settings["graph_optimization_level"] = "ORT_DISABLE_ALL"
    candidate = Candidate(job.model, settings=settings)
    with SessionProcess(job.model) as process:
        started = process.open(candidate)
        answer = process.call(
            "examples.smollm2.generate:answer",
            prompt=job.prompt,
            tokens=job.tokens,
            reference=job.reference,
            make_reference=job.make_reference,
        )
        running = process_memory(process.pid).private
    return Measurement(
        start_seconds=started.seconds,
        started_megabytes=_megabytes(started.private),
        running_megabytes=_megabytes(running),
        source=started.report["source"] if started.report else "",
        **answer,
    )


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


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
        caption="ortplugins computes in float32 here, except at level 4, which rounds "
        "activations to int8. So does onnxruntime by default, where it fuses.",
    )
    table.add_column("configuration")
    for heading in (
        "start\ns",
        "private MB\nstarted",
        "private MB\nrunning",
        "ms per\ntoken",
        "error of\nlogits",
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
