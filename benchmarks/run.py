# SPDX-License-Identifier: MIT
"""Measures every figure that the README claims, side by side, and writes docs/benchmarks.md.

python -m benchmarks.run [--rounds N] [--only NAME]...

Each benchmark replaces its section of the page, and the picture beside it; the others
stay. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.figures.bounds import Figure, report_missed, table
from benchmarks.figures.figures_page import origin, write_section
from benchmarks.figures.overview import overview
from benchmarks.figures.ratio_plot import ratio_plot
from benchmarks.runtimes import measure_runtimes
from benchmarks.sessions.conv_fusion import measure_conv_fusion, measure_rapidocr
from benchmarks.sessions.encoder8 import measure_encoder8
from benchmarks.sessions.encoder_sizes import measure_encoder_sizes
from benchmarks.sessions.exactness import measure_exactness
from benchmarks.sessions.hints import (
    HINTS,
    measure_hint,
    measure_passes,
)
from benchmarks.sessions.large_models import measure_large_models
from benchmarks.sessions.layout_score import measure_layout_score
from benchmarks.sessions.layout_times import measure_layout_times
from benchmarks.sessions.long_texts import measure_long_texts
from benchmarks.sessions.mixed_precision import measure_mixed_precision
from benchmarks.sessions.order_peaks import measure_order_peaks
from benchmarks.sessions.prepacked import measure_prepacked
from benchmarks.sessions.processor_time import measure_processor_time
from benchmarks.sessions.rewrite_speed import measure_rewrite_speed
from benchmarks.sessions.smollm2_sessions import measure_smollm2
from benchmarks.sessions.start_cost import measure_start_cost
from benchmarks.sessions.transformer_fusion import measure_transformer_fusion
from benchmarks.sessions.trim_padding import measure_trim_padding

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS: dict[str, Callable[[Path, int], list[Figure]]] = {
    "smollm2": measure_smollm2,
    "start_cost": measure_start_cost,
    "processor_time": measure_processor_time,
    "exactness": measure_exactness,
    "layout_score": measure_layout_score,
    "layout_times": measure_layout_times,
    "rewrite_speed": measure_rewrite_speed,
    "prepacked": measure_prepacked,
    "large_models": measure_large_models,
    "order_peaks": measure_order_peaks,
    "mixed_precision": measure_mixed_precision,
    "trim_padding": measure_trim_padding,
    "transformer_fusion": measure_transformer_fusion,
    "encoder_sizes": measure_encoder_sizes,
    "long_texts": measure_long_texts,
    "conv_fusion": measure_conv_fusion,
    "rapidocr": measure_rapidocr,
    "encoder8": measure_encoder8,
    "runtimes": measure_runtimes,
    **{f"hint_{hint}": functools.partial(measure_hint, hint) for hint in HINTS},
    "passes": measure_passes,
}
# Need other packages, and are run by name: make bench-quantizers, make bench-peers.
_WITH_PEERS = ("runtimes",)
TITLES = {
    "smollm2": "SmolLM2-135M-Instruct, int4 block 32, plain onnxruntime beside ortplugins",
    "start_cost": "What a start costs beside onnxruntime's own",
    "processor_time": "Processor time that a start adds to onnxruntime's own",
    "exactness": "Greatest difference to ORT_DISABLE_ALL over the greatest output",
    "layout_score": "The matrix of weight layouts: what becomes of each",
    "layout_times": "The matrix of weight layouts with default options, beside onnxruntime",
    "rewrite_speed": "Time of the fusion",
    "prepacked": "Packed weights in the file, beside onnxruntime on the QDQ file",
    "order_peaks": "Memory while a model runs, beside onnxruntime's two orders",
    "large_models": "1.34 GB of int4 weights, peak private memory of the process",
    "mixed_precision": "8-bit QDQ models, a quarter of the activations promoted",
    "trim_padding": "Padded batches on MiniLM-L6, beside plain onnxruntime",
    "transformer_fusion": "SmolLM2-135M and MiniLM-L6, fused beside plain onnxruntime",
    "encoder_sizes": "Encoders of three sizes, fused beside plain onnxruntime: what is slower",
    "long_texts": "Layers of encoders on long texts, fused beside plain onnxruntime",
    "encoder8": "Sentence encoders by encoder8, beside float and other 8 bits",
    "runtimes": "Nets of six kinds, tuned for latency, beside onnxruntime and OpenVINO",
    "conv_fusion": "Convolution nets, folded, beside plain onnxruntime",
    "rapidocr": "rapidocr's pipeline under `ortplugins run`, a page of 14 lines, beside plain",
    "hint_latency": "The hint latency beside plain onnxruntime: time of a run",
    "hint_memory": "The hint memory beside plain onnxruntime: private memory",
    "hint_start": "The hint start beside plain onnxruntime: time of a start",
    "passes": "Each pass with default options, beside plain onnxruntime",
}
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = "benchmarks"
HEAD = """# Benchmarks

Made by `make bench`; every section tells when and on what. Beside other quantisers:
[Quantising: figures](quantization-figures.md).

Shared machines: compare the ratios, not the times. Everything in one table was measured in one
run, configurations interleaved, each in a process of its own, medians of the rounds. Private
memory is resident memory that no file backs (RssAnon), in 10**6 bytes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the README's figures.")
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many runs")
    parser.add_argument("--only", action="append", choices=sorted(BENCHMARKS), default=[])
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args(arguments)
    # onnxruntime's quantizer turns everybody's logging on: a line for each rewritten node.
    logging.getLogger("onnx_ir").setLevel(logging.WARNING)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="ortplugins-bench-") as folder:
        for name in chosen.only or [name for name in BENCHMARKS if name not in _WITH_PEERS]:
            print(f"{TITLES[name]} ...", flush=True)
            found = BENCHMARKS[name](Path(folder), chosen.rounds)
            print(table(found), flush=True)
            _publish(name, found, chosen.rounds, chosen.page)
            figures += found
    if chosen.page == PAGE:  # another may lack sections
        picture = overview(PAGE.read_text(encoding="utf-8"))
        _picture("overview", PAGE).write_text(picture, encoding="utf-8")
    print(f"written: {chosen.page}")
    return report_missed(figures)


def _publish(name: str, figures: Sequence[Figure], rounds: int, page: Path) -> None:
    """Write a section of the page, and its picture."""
    parts = [f"## {TITLES[name]}", table(figures)]
    if (svg := ratio_plot(figures, TITLES[name])) is not None:
        picture = _picture(name, page)
        picture.write_text(svg, encoding="utf-8")
        parts.insert(1, f"![{TITLES[name]}]({PICTURES}/{picture.name})")
    command = f"python -m benchmarks.run --only {name} --rounds {rounds}"
    write_section(name, "\n\n".join([*parts, origin(command)]), page, HEAD)


def _picture(name: str, page: Path) -> Path:
    path = page.parent / PICTURES / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
