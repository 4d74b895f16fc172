# SPDX-License-Identifier: MIT
"""A decoder's KV cache in int8 vs. float: bytes, time of a token, perplexity.

python -m benchmarks.quantizers.kv_cache DECODER.onnx TOKENIZER.json [--contexts 512 4096]

DECODER is a float export with a cache, as torch writes it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import onnx_ir as ir

import ortplugins
from benchmarks.models.corpus import CACHE, read_text
from ortplugins.evaluation import evaluate
from ortplugins.measurement.measure import Candidate, SessionProcess
from ortplugins.quantization import quantize_kv_cache
from ortplugins.samples.text import TextSamples

_STEPS = "benchmarks.models.decoder_steps"
_SETTINGS = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
_TOKENS = 12


def forms(decoder: Path, tokenizer: Path, folder: Path) -> dict[str, Path]:
    """Return the decoder with a shared cache in float, and in int8."""
    shared, eight = folder / "shared.onnx", folder / "int8.onnx"
    passes = [ortplugins.TransformerFusion(kv_cache="shared")]
    ortplugins.optimize(decoder, shared, passes=passes)
    read_text("wiki_calib")
    source = TextSamples(CACHE / "wiki_calib.txt", tokenizer, window=256, count=16)
    samples = list(source.feeds(ir.load(shared).graph))
    quantize_kv_cache(shared, eight, calibration_data_reader=samples)
    return {"float cache": shared, "int8 cache": eight}


def main() -> None:
    """Print perplexities, and the milliseconds of a token in sessions that take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("decoder", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens", type=int, default=20480)
    given = parser.parse_args()
    read_text("wiki_eval")
    with tempfile.TemporaryDirectory() as name:
        found = forms(given.decoder, given.tokenizer, Path(name))
        for label, path in found.items():
            text = CACHE / "wiki_eval.txt"
            judged = evaluate(path, text=text, tokenizer=given.tokenizer, tokens=given.tokens)
            print(f"{label}: perplexity {judged.perplexity[0]:.3f}", flush=True)
        for context in given.contexts:
            for label, path in found.items():
                asked = {"context": context, "tokens": _TOKENS, "in_place": True}
                with SessionProcess(label) as process:
                    process.open(Candidate(path, label, settings=_SETTINGS))
                    times = process.call(f"{_STEPS}:time_tokens", **asked)
                token = 1e3 * statistics.median(times["tokens"])
                print(
                    f"{label}: prompt of {context} {times['prompt']:.2f} s, then a token "
                    f"{token:.1f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
