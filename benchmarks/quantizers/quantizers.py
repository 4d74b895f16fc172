# SPDX-License-Identifier: MIT
"""Wall time and private peak of quantizers: ours, NVIDIA ModelOpt's, onnxruntime's.

python -m benchmarks.quantizers.quantizers [--rounds N] [--only CASE]... [--slow] [--gptq]

Every run has a process of its own on the same two cores; runs are interleaved; medians. Writes
its section of docs/quantization-figures.md if nothing was left out; exits with 1 when a bound
is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from benchmarks.figures.bounds import Figure, report_missed, table
from benchmarks.figures.figures_page import PAGE, origin, write_section
from benchmarks.models.corpus import CACHE, float_smollm2, smollm2_samples
from benchmarks.models.int4_chain import initializer, save_graph
from benchmarks.quantizers.peers import Cost, run_modelopt_on_smollm2, run_ours, run_peer
from benchmarks.quantizers.quantizer_peers import Job

BLOCK_SIZE = 32
CASES = ("chain_inline", "chain_external", "smollm2", "wide")
OURS = "ortplugins"
MODELOPT = "ModelOpt"
MODELOPT_SLOW = "ModelOpt, node by node"
ONNXRUNTIME = "onnxruntime"
OLIVE = "Olive"
_DEPTH = 13
# Of the layers that a 7-billion model has: the largest K that is usual.
_WIDE = (4096, 11008, 4096)
_WIDE_BOUND_MB = 1.3 * 2**30 / 1e6


@dataclasses.dataclass(frozen=True)
class Case:
    """A float model with its samples.

    Attributes:
        name: One of :data:`CASES`.
        title: As the table calls it.
        model: The file.
        samples: A .npz file whose first axis counts samples.
        external: Whether tensors go next to the result.
        head: The node that stays in float, if any.
    """

    name: str
    title: str
    model: Path
    samples: Path
    external: bool
    head: str = ""

    def ours(self, method: str, output: Path) -> Cost:
        """Run our quantizer."""
        return run_ours(
            model=str(self.model),
            output=str(output),
            method=method,
            block_size=BLOCK_SIZE,
            rules={self.head: "float"} if self.head else {},
            calibration_data_reader=None if method == "rtn" else str(self.samples),
        )

    def peer(self, tool: str, output: Path, fast: bool = False) -> Cost:
        """Run another quantizer."""
        return run_peer(
            Job(
                tool,
                str(self.model),
                str(output),
                external=self.external,
                calibration=str(self.samples),
                block_size=BLOCK_SIZE,
                exclude=(self.head,) if self.head else (),
                fast=fast,
            )
        )


@dataclasses.dataclass(frozen=True)
class Contender:
    """One quantizer on one case.

    Attributes:
        run: Quantises to a path.
        rounds: At most so many; some take a quarter of an hour.
    """

    run: Callable[[Path], Cost]
    rounds: int = sys.maxsize


@dataclasses.dataclass
class Measured:
    """What runs of one contender cost, and its model's error (NaN if not measured)."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)
    error: float = math.nan


def contests(case: Case, slow: bool, gptq: bool) -> dict[str, dict[str, Contender]]:
    """Return who competes in which method, ours first."""
    modelopt = "modelopt_awq_lite"
    if case.name == "smollm2":
        awq = {
            MODELOPT: Contender(
                lambda _: run_modelopt_on_smollm2(case.model, case.samples, BLOCK_SIZE), 1
            )
        }
    else:
        awq = {MODELOPT: Contender(lambda path: case.peer(modelopt, path, fast=True))}
    if slow or case.name != "smollm2":
        awq[MODELOPT_SLOW] = Contender(lambda path: case.peer(modelopt, path), 1)
    found = {
        "AWQ-lite": {OURS: Contender(lambda path: case.ours("awq_lite", path)), **awq},
        "RTN": {
            OURS: Contender(lambda path: case.ours("rtn", path)),
            ONNXRUNTIME: Contender(lambda path: case.peer("onnxruntime_rtn", path)),
            OLIVE: Contender(lambda path: case.peer("olive_rtn", path)),
        },
    }
    if gptq:
        found["GPTQ"] = {
            OURS: Contender(lambda path: case.ours("gptq", path)),
            ONNXRUNTIME: Contender(lambda path: case.peer("onnxruntime_gptq", path), 1),
        }
    return found


def measure(
    case: Case, contenders: dict[str, Contender], rounds: int, what: str
) -> dict[str, Measured]:
    """Run the contenders in turns."""
    found = {name: Measured() for name in contenders}
    for i in range(rounds):
        for name, contender in contenders.items():
            if i >= contender.rounds:
                continue
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="quantizers-") as folder:
                path = Path(folder, "model.onnx")
                cost = contender.run(path)
                measured = found[name]
                measured.seconds.append(cost.result["seconds"])
                measured.megabytes.append(cost.peak_private_mb)
                if i == 0 and case.name == "chain_external":
                    measured.error = output_error(case, path)
            print(
                f"{case.title}, {what}, {name}: {measured.seconds[-1]:.2f} s, "
                f"{measured.megabytes[-1]:.0f} MB",
                flush=True,
            )
    return found


def compare(case: Case, method: str, found: dict[str, Measured]) -> list[Figure]:
    """Set ours against the others' best: their fastest, and their most frugal."""
    bounds = {"AWQ-lite": (0.1, 0.5), "RTN": (1.2, 0.5)}.get(method, (math.nan, math.nan))
    seconds = {name: statistics.median(item.seconds) for name, item in found.items()}
    megabytes = {name: statistics.median(item.megabytes) for name, item in found.items()}
    theirs = [name for name in found if name != OURS]
    fastest = min(theirs, key=lambda name: seconds[name])
    leanest = min(theirs, key=lambda name: megabytes[name])
    what = f"{case.title}, {method}"
    figures = [
        Figure(f"{what}: time, {fastest}", seconds[OURS], seconds[fastest], "s", bounds[0]),
        Figure(
            f"{what}: peak, {leanest}",
            megabytes[OURS],
            megabytes[leanest],
            "MB",
            bounds[1],
        ),
    ]
    # Only the best has a bound.
    for name in theirs:
        if name != fastest:
            figures.append(Figure(f"{what}: time, {name}", seconds[OURS], seconds[name], "s"))
        if name != leanest:
            figures.append(
                Figure(
                    f"{what}: peak, {name}",
                    megabytes[OURS],
                    megabytes[name],
                    "MB",
                )
            )
    errors = {name: item.error for name, item in found.items()}
    if not math.isnan(errors[OURS]):
        figures.append(
            Figure(f"{what}: error of the output, {fastest}", errors[OURS], errors[fastest])
        )
    return figures


def memory_of_gptq(case: Case) -> list[Figure]:
    """Run GPTQ; how much memory it takes."""
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="quantizers-") as folder:
        cost = case.ours("gptq", Path(folder, "model.onnx"))
    what = f"{case.title}, GPTQ: peak"
    print(f"{what} {cost.peak_private_mb:.0f} MB, {cost.result['seconds']:.0f} s", flush=True)
    return [Figure(what, cost.peak_private_mb, unit="MB", bound=_WIDE_BOUND_MB)]


def output_error(case: Case, path: Path) -> float:
    """Return the Frobenius norm of the chain's error over that of its output."""
    rng = np.random.default_rng(1)  # not what it was calibrated with
    outputs = []
    for each in (case.model, path):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        session = ort.InferenceSession(str(each), options, providers=["CPUExecutionProvider"])
        if not outputs:
            size = session.get_inputs()[0].shape[1]
            x = rng.standard_normal((64, size), np.float32)
        outputs.append(session.run(None, {"x": x})[0])
    expected, actual = outputs
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def make_cases(
    names: Sequence[str], folder: Path, width: int, layers: int | None
) -> Iterator[Case]:
    """Write the models and samples that are not there yet."""
    if any(name.startswith("chain") for name in names):
        samples = folder / "chain.npz"
        rng = np.random.default_rng(0)
        np.savez(samples, x=rng.standard_normal((32, 256, width), np.float32))
    for name in names:
        if name == "smollm2":
            model, tokenizer = float_smollm2(layers)
            calibration = smollm2_samples(model, tokenizer)
            title = "SmolLM2-135M" if layers is None else f"SmolLM2, {layers} layers"
            yield Case(name, title, model, calibration, external=True, head="lm_head/MatMul")
        elif name == "wide":
            path, samples = folder / "wide.onnx", folder / "wide.npz"
            rng = np.random.default_rng(0)
            np.savez(samples, x=rng.standard_normal((32, 256, _WIDE[0]), np.float32))
            write_float_chain(path, _WIDE, external=True)
            yield Case(name, "weights of 4096 x 11008", path, samples, external=True)
        else:
            external = name == "chain_external"
            path = folder / f"{name}.onnx"
            write_float_chain(path, (width,) * (_DEPTH + 1), external)
            megabytes = _DEPTH * width**2 * 4 / 1e6
            title = f"{megabytes:.0f} MB, {'external' if external else 'one file'}"
            yield Case(name, title, path, samples, external)


def write_float_chain(path: Path, widths: Sequence[int], external: bool) -> None:
    """Write x -> MatMul -> Tanh -> ... -> MatMul, a weight between each two widths."""
    rng = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", widths[0]])
    value, nodes, initializers = x, [], []
    last = len(widths) - 2
    for i, shape in enumerate(itertools.pairwise(widths)):
        array = rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
        weight = initializer(ir.tensor(array, name=f"w{i}"))
        initializers.append(weight)
        nodes.append(ir.node("MatMul", [value, weight], name=f"matmul{i}"))
        if i < last:
            nodes.append(ir.node("Tanh", nodes[-1].outputs, name=f"tanh{i}"))
        value = nodes[-1].outputs[0]
        value.name = f"y{i}" if i < last else "y"
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["rows", widths[-1]])
    save_graph(path, x, value, nodes, initializers, external)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the page; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure what quantising costs.")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many runs")
    parser.add_argument("--only", action="append", choices=CASES, default=[])
    parser.add_argument("--method", action="append", help="AWQ-lite, RTN or GPTQ", default=[])
    parser.add_argument(
        "--slow", action="store_true", help="ModelOpt's other way on SmolLM2, too: an hour"
    )
    parser.add_argument("--gptq", action="store_true", help="GPTQ, too: minutes")
    parser.add_argument("--layers", type=int, help="of SmolLM2; for a quick run")
    parser.add_argument("--width", type=int, default=2048, help="of the chain, likewise")
    parser.add_argument("--output", type=Path, help="write the page in any case, to here")
    chosen = parser.parse_args(arguments)
    # onnxruntime's quantizer turns everybody's logging on: a line for each rewritten node.
    logging.getLogger("onnx_ir").setLevel(logging.WARNING)
    figures = []
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="quantizers-") as folder:
        for case in make_cases(
            chosen.only or CASES, Path(folder), chosen.width, chosen.layers
        ):
            if case.name == "wide":
                figures += memory_of_gptq(case)
                continue
            for method, contenders in contests(case, chosen.slow, chosen.gptq).items():
                if not chosen.method or method in chosen.method:
                    found = measure(case, contenders, chosen.rounds, method)
                    figures += compare(case, method, found)
    text = f"{_introduction(chosen.rounds)}\n\n{table(figures)}"
    print(text, flush=True)
    whole = chosen.layers is None and chosen.width == 2048
    if chosen.output or (whole and not chosen.only and not chosen.method):
        write_section("quantizers", text, chosen.output or PAGE)
        print(f"written: {chosen.output or PAGE}")
    return report_missed(figures)


def _introduction(rounds: int) -> str:
    peers = ("peers: nvidia-modelopt 0.47.0, torch 2.13.0 and the same onnxruntime",)
    return f"""## Time and memory

{origin("python -m benchmarks.quantizers.quantizers", peers)}

From a float file to a quantised one, QDQ, symmetric int4 in blocks of {BLOCK_SIZE}; reading,
calibration and writing included, imports not. Each run in a process of its own on the same two
cores, in turns, medians of {rounds} rounds (one where ModelOpt takes longest). Memory is the
peak of RssAnon, imports included. Calibrated on 32 samples: of 256 rows in the chain (13
MatMul 2048 x 2048 with Tanh between), of 256 tokens in SmolLM2, whose head stays in float.
ModelOpt runs on its CPU path (`awqlite_fuse_nodes=False`), in the chain in both of its ways:
all activations of all samples at once, or a run for each node and sample."""


if __name__ == "__main__":
    sys.exit(main())
