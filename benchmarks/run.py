# SPDX-License-Identifier: MIT
"""Measures every figure that the README claims, side by side, and writes docs/benchmarks.md.

python -m benchmarks.run [--rounds N] [--only NAME]...

Each benchmark replaces its section of the page, and the picture with it; the others
stay. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import logging
import re
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
from benchmarks.sessions.large_models import measure_large_models
from benchmarks.sessions.long_texts import measure_long_texts
from benchmarks.sessions.mixed_precision import measure_mixed_precision
from benchmarks.sessions.order_peaks import measure_order_peaks
from benchmarks.sessions.passes import measure_passes
from benchmarks.sessions.prepacked import measure_prepacked
from benchmarks.sessions.processor_time import measure_processor_time
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
    "passes": measure_passes,
}
# Need other packages, and are run by name: make bench-quantizers, make bench-peers.
_WITH_PEERS = ("runtimes",)
TITLES = {
    "smollm2": "SmolLM2-135M-Instruct, int4 block 32: plain onnxruntime vs. ortplugins",
    "start_cost": "What the import and a first start cost",
    "processor_time": "Processor time that a start adds to onnxruntime's own",
    "exactness": "Greatest difference to ORT_DISABLE_ALL over the greatest output",
    "prepacked": "Packed weights in the file vs. onnxruntime on the QDQ file",
    "order_peaks": "Memory while a model runs vs. onnxruntime's two orders",
    "large_models": "1.34 GB of int4 weights: optimize vs. a session of onnxruntime",
    "mixed_precision": "8-bit QDQ models, a quarter of the activations promoted",
    "trim_padding": "Padded batches on MiniLM-L6 vs. plain onnxruntime",
    "transformer_fusion": "SmolLM2-135M and MiniLM-L6, fused vs. plain onnxruntime",
    "builder": "SmolLM2-135M, fused vs. the graph of onnxruntime-genai's builder",
    "encoder_sizes": "Encoders of three sizes, fused vs. plain onnxruntime: what is slower",
    "long_texts": "Layers of encoders on long texts, fused vs. plain onnxruntime",
    "encoder8": "Sentence encoders by encoder8 vs. float and other 8 bits",
    "runtimes": "Nets of six kinds, tuned for latency, vs. onnxruntime and OpenVINO",
    "conv_fusion": "Convolution nets, folded, vs. plain onnxruntime",
    "rapidocr": "rapidocr's pipeline under `ortplugins run`, a page of 14 lines, vs. plain",
    "passes": "Each pass with default options vs. plain onnxruntime",
}
# What has a section of its own: the pattern of its figures, and the section's name.
_APART = {"transformer_fusion": ("the builder's$", "builder")}
# What is printed alone: a table of the page has twelve rows at most.
_PRINTED = {
    "exactness": r"level 4",
    "prepacked": r"parallel|process that has it built|128 tokens|prefill|first build",
    "order_peaks": r"first run \(|real nets, .*first|^nodes |^Shapes|^20000|an order",
    "mixed_precision": r"time to plan",
    "encoder_sizes": r"int8|float, (?!(1 x (4|512|2,048)|8 x 128)$)",
    "transformer_fusion": r"shared cache, vs. o|of 512|nodes executed|differ|on 10,000|cached",
    "builder": r"prompt of 512|at 16, shared",
    "long_texts": r"1 x 16|x 512: memory",
    "conv_fusion": r"as it is|: start$|greatest difference|Reorder|vs. OpenVINO",
    "encoder8": r"ranking|of logits|right labels|vs. OpenVINO",
    "runtimes": r"error$|float32$|encoder8",
}
_ROWS = 12
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = "benchmarks"
HEAD = """# Benchmarks

Measured by `make bench`; each section gives the command, date and machine. Other quantisers:
[Quantising: figures](quantization-figures.md).

The machines are shared: compare ratios, not times. A table comes from one run.
Configurations take turns, each in a process of its own; figures are medians of the
rounds. Private memory is RssAnon.
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
    """Write the sections of a benchmark, and their pictures."""
    command = f"python -m benchmarks.run --only {name} --rounds {rounds}"
    pattern, other = _APART.get(name, ("$^", name))
    apart = [figure for figure in figures if re.search(pattern, figure.what)]
    for section, found in ((name, [x for x in figures if x not in apart]), (other, apart)):
        shown = listed(section, found)
        if not shown:
            continue
        parts = [f"## {TITLES[section]}", table(shown)]
        if (svg := ratio_plot(shown, TITLES[section])) is not None:
            picture = _picture(section, page)
            picture.write_text(svg, encoding="utf-8")
            parts.insert(1, f"![{TITLES[section]}]({PICTURES}/{picture.name})")
        write_section(section, "\n\n".join([*parts, origin(command)]), page, HEAD)


def listed(section: str, figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures that the page has."""
    pattern = _PRINTED.get(section, "$^")
    found = [figure for figure in figures if not re.search(pattern, figure.what)]
    if len(found) > _ROWS:
        raise ValueError(f"{section}: {len(found)} rows, {_ROWS} are allowed")
    return found


def _picture(name: str, page: Path) -> Path:
    path = page.parent / PICTURES / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
