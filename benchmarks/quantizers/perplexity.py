# SPDX-License-Identifier: MIT
"""How good quantised models still are: perplexity of SmolLM2-135M, cosine of MiniLM-L6.

python -m benchmarks.quantizers.perplexity [--only ROW]... [--block N]...
    [--tokens N] [--layers N]

Writes its section of docs/quantization-figures.md if nothing was left out; exits with 1 when a
bound is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

import ortplugins
from benchmarks.figures.bounds import Figure, report_missed, table
from benchmarks.figures.figures_page import PAGE, origin, write_section
from benchmarks.models.corpus import CACHE, float_smollm2, smollm2_samples, token_ids
from benchmarks.quantizers.minilm_cosine import cosine_table
from benchmarks.quantizers.peers import modelopt_smollm2
from benchmarks.quantizers.quantizer_peers import Samples
from ortplugins.quantization import QuantizeReport, quantize

Ids = npt.NDArray[np.int64]

TOKENS = 20_480
WINDOW = 512
# Two texts: methods are tuned on the first.
STARTS = (0, 40_000)
BLOCK_SIZES = (32, 128)
HEAD = "lm_head/MatMul"
_COMPARED_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A row of the tables.

    Attributes:
        name: As the table calls it.
        options: Of ``quantize``; None for a model that something else makes.
        bounds: Greatest perplexity allowed on the first text, by block size.
        head: Whether the output projection is quantised, too.
        eight_bits: Share of the elements that get 8 bits.
    """

    name: str
    options: Mapping[str, Any] | None = None
    bounds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    head: bool = False
    eight_bits: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is ours, symmetric, with 4 bits for all and the head in float."""
        return (
            self.options is not None
            and not self.head
            and not self.eight_bits
            and self.options.keys() <= {"method", "grid"}
        )


FLOAT = Recipe("float")
MODELOPT = Recipe("ModelOpt 0.47 awq_lite")
RECIPES = {
    "rtn_amax": Recipe("RTN, amax / 7", {"method": "rtn", "grid": "amax"}),
    "rtn": Recipe("RTN, searched scales", {"method": "rtn"}, {32: 28.3, 128: 31}),
    "rtn_asymmetric": Recipe("RTN, asymmetric", {"method": "rtn", "is_symmetric": False}),
    "modelopt_awq_lite": MODELOPT,
    "awq_lite": Recipe("awq_lite", {"method": "awq_lite"}, {32: 27.0, 128: 31.4}),
    "gptq": Recipe("gptq", {"method": "gptq"}, {32: 27.0, 128: 29.3}),
    "gptq_asymmetric": Recipe("gptq, asymmetric", {"method": "gptq", "is_symmetric": False}),
    "mixed": Recipe(
        "gptq, 3 % of the weights with 8 bits", {"method": "gptq"}, {32: 25.6}, eight_bits=0.03
    ),
    "rtn_head": Recipe("RTN, head too", {"method": "rtn"}, head=True),
    "gptq_head": Recipe("gptq, head too", {"method": "gptq"}, head=True),
}
BEST_BOUNDS = {32: 25.4, 128: 26.6}


@dataclasses.dataclass(frozen=True)
class Quality:
    """What was measured on one model.

    Attributes:
        recipe: How it was made.
        block_size: 0 for the float model.
        bits: Per quantised weight, scales (float32 here) and zero points included; NaN where
            not known.
        seconds: Of quantising, from the file to the file, calibration included.
        perplexities: One for each text.
        difference: Greatest difference of logits between our fusion and plain onnxruntime,
            over the greatest logit; NaN if not compared.
    """

    recipe: Recipe
    block_size: int
    bits: float
    seconds: float
    perplexities: tuple[float, ...]
    difference: float = math.nan


@dataclasses.dataclass(frozen=True)
class Task:
    """What all rows share: the float model, samples and texts."""

    floats: Path
    samples: Path
    texts: tuple[Ids, ...]

    def measure(self, recipe: Recipe, block_size: int) -> Quality:
        """Quantise by a recipe, and read the texts with the result."""
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="perplexity-") as folder:
            path = Path(folder, "model.onnx")
            if recipe is MODELOPT:
                path, seconds = modelopt_smollm2(self.floats, self.samples, block_size)
                # The same codes and scales as ours: of those it is known without doing them.
                bits = self._expected_bits(block_size)
            else:
                seconds, bits = self._quantize(recipe, block_size, path)
            session = plain_session(path)
            values = tuple(perplexity(session, text) for text in self.texts)
            logits = run(session, self.texts[0][:_COMPARED_TOKENS])
            del session  # its weights, before another gets them
            fused = run(fused_session(path, folder), self.texts[0][:_COMPARED_TOKENS])
            difference = float(np.abs(fused - logits).max() / np.abs(logits).max())
        return Quality(recipe, block_size, bits, seconds, values, difference)

    def _expected_bits(self, block_size: int) -> float:
        plan = quantize(
            self.floats, block_size=block_size, rules={HEAD: "float"}, dry_run=True
        )
        return bits_of_codes(plan.report)

    def _quantize(self, recipe: Recipe, block_size: int, path: Path) -> tuple[float, float]:
        options = dict(recipe.options or {})
        if options["method"] != "rtn":
            options["calibration_data_reader"] = Samples(str(self.samples))
        start = time.perf_counter()
        if recipe.eight_bits:
            options["share_of_8_bits"] = recipe.eight_bits
        result = quantize(
            self.floats,
            path,
            block_size=block_size,
            rules={} if recipe.head else {HEAD: "float"},
            **options,
        )
        return time.perf_counter() - start, bits_of_codes(result.report)


def bits_of_codes(report: QuantizeReport) -> float:
    """Return the bits of a quantised weight, scales included, floats left out."""
    rows = [row for row in report.quantized if row.bytes_after]
    return 8 * sum(row.bytes_after for row in rows) / sum(row.K * row.N for row in rows)


def plain_session(path: Path) -> ort.InferenceSession:
    """Open a model in plain onnxruntime, without int8 activations.

    Of three exact ways this one starts quickest; prompts take as long in all of them: the
    others are our fusion, and QDQ switched off, so that weights become float constants.
    """
    options = _options()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def fused_session(path: Path, cache: str) -> ort.InferenceSession:
    """Open a model through our fusion."""
    options = _options()
    passes = [ortplugins.DqMatMulNBitsFusion(accuracy_level=0)]
    ortplugins.configure(options, *passes, cache_dir=cache, strict=True)
    return ortplugins.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return options


def run(session: ort.InferenceSession, ids: Ids) -> npt.NDArray[np.float32]:
    """Return the logits ``[tokens, vocabulary]`` of a prompt."""
    feed = {"input_ids": ids[None], "position_ids": np.arange(len(ids))[None]}
    for value in session.get_inputs():
        if value.name not in feed:
            shape = [size if isinstance(size, int) else 0 for size in value.shape]
            feed[value.name] = np.zeros((1, *shape[1:]), np.float32)
    logits: npt.NDArray[np.float32] = session.run(["logits"], feed)[0][0]
    return logits


def perplexity(session: ort.InferenceSession, ids: Ids) -> float:
    """Of windows that don't overlap; the first token of each is only read."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - WINDOW + 1, WINDOW):
        window = ids[start : start + WINDOW]
        logits = run(session, window)[:-1]
        logits -= logits.max(axis=-1, keepdims=True)
        right = logits[np.arange(WINDOW - 1), window[1:]].astype(np.float64)
        np.exp(logits, out=logits)
        total += float((np.log(logits.sum(axis=-1, dtype=np.float64)) - right).sum())
        count += WINDOW - 1
    return math.exp(total / count)


def measure_perplexity(
    names: Sequence[str], block_sizes: Sequence[int], tokens: int, layers: int | None
) -> list[Quality]:
    """Measure the float model and the recipes of these names."""
    floats, tokenizer = float_smollm2(layers)
    samples = smollm2_samples(floats, tokenizer)
    texts = [token_ids(tokenizer, "wiki_eval", start, start + tokens) for start in STARTS]
    task = Task(floats, samples, tuple(texts))
    session = plain_session(floats)
    values = tuple(perplexity(session, text) for text in texts)
    del session
    found = [Quality(FLOAT, 0, 32.0, 0.0, values)]
    _tell(found[0])
    for block_size in block_sizes:
        for name in names:
            found.append(task.measure(RECIPES[name], block_size))
            _tell(found[-1])
    return found


def _tell(quality: Quality) -> None:
    values = " ".join(f"{value:.3f}" for value in quality.perplexities)
    print(
        f"{quality.recipe.name}, block {quality.block_size}: {values}, "
        f"{quality.bits:.2f} bits, {quality.seconds:.1f} s, fused {quality.difference:.1e}",
        flush=True,
    )


def perplexity_table(found: Sequence[Quality], block_size: int, tokens: int) -> str:
    """Return the rows of one block size as Markdown."""
    texts = [f"tokens {start:,} to {start + tokens:,}" for start in STARTS]
    lines = [
        f"| method | bits per weight | seconds | {texts[0]} | bound | {texts[1]} |",
        "|---|---|---|---|---|---|",
    ]
    for quality in found:
        if quality.block_size not in (0, block_size):
            continue
        bound = quality.recipe.bounds.get(block_size) if tokens == TOKENS else None
        first, *others = (f"{value:.2f}" for value in quality.perplexities)
        cells = (
            quality.recipe.name,
            "" if math.isnan(quality.bits) else f"{quality.bits:.2f}",
            "" if quality.recipe is FLOAT else f"{quality.seconds:.1f}",
            first,
            "" if bound is None else f"<= {bound:g}",
            *others,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def perplexity_figures(found: Sequence[Quality], whole: bool) -> list[Figure]:
    """Return what has a bound; perplexities only of the whole text and model."""
    figures = []
    if whole:
        for quality in found:
            size, first = quality.block_size, quality.perplexities[0]
            if size in quality.recipe.bounds:
                what = f"{quality.recipe.name}, block {size}: perplexity"
                figures.append(Figure(what, first, bound=quality.recipe.bounds[size]))
        for size, bound in BEST_BOUNDS.items():
            plain = [q for q in found if q.block_size == size and q.recipe.is_plain]
            if plain:
                best = min(plain, key=lambda quality: quality.perplexities[0])
                what = f"best with 4 bits, block {size} ({best.recipe.name}): perplexity"
                figures.append(Figure(what, best.perplexities[0], bound=bound))
    differences = [q.difference for q in found if not math.isnan(q.difference)]
    if differences:
        what = f"logits of {len(differences)} models, fused vs. plain onnxruntime"
        figures.append(Figure(what, max(differences), bound=1e-5))
    return figures


def check_sessions(layers: int | None) -> Figure:
    """Check the sessions that read the texts against one without any optimisation."""
    floats, tokenizer = float_smollm2(layers)
    ids = token_ids(tokenizer, "wiki_eval", 0, _COMPARED_TOKENS)
    options = _options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="perplexity-") as folder:
        path = Path(folder, "model.onnx")
        quantize(floats, path, rules={HEAD: "float"})
        untouched = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        expected = run(untouched, ids)
        difference = np.abs(run(plain_session(path), ids) - expected).max()
    what = "logits, plain onnxruntime as used here vs. ORT_DISABLE_ALL"
    return Figure(what, float(difference / np.abs(expected).max()), bound=1e-5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the page; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure what quantising costs in quality.")
    parser.add_argument("--only", action="append", choices=[*RECIPES, "minilm"], default=[])
    parser.add_argument("--block", action="append", type=int, default=[], help="block size")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each text")
    parser.add_argument("--layers", type=int, help="of SmolLM2; wrong, but quick")
    parser.add_argument("--output", type=Path, help="write the page in any case, to here")
    chosen = parser.parse_args(arguments)
    # onnxruntime's quantizer turns everybody's logging on: a line for each rewritten node.
    logging.getLogger("onnx_ir").setLevel(logging.WARNING)
    names = [name for name in chosen.only or RECIPES if name in RECIPES]
    block_sizes = chosen.block or BLOCK_SIZES
    parts, figures = [_introduction(chosen.tokens, chosen.layers)], []
    if names:
        found = measure_perplexity(names, block_sizes, chosen.tokens, chosen.layers)
        for size in block_sizes:
            rows = perplexity_table(found, size, chosen.tokens)
            parts.append(f"### SmolLM2-135M, blocks of {size}\n\n{rows}")
        whole = chosen.tokens == TOKENS and chosen.layers is None
        figures = [*perplexity_figures(found, whole), check_sessions(chosen.layers)]
        parts.append(f"### Bounds\n\n{table(figures)}")
    if not chosen.only or "minilm" in chosen.only:
        rows = cosine_table(block_sizes, 400 if chosen.tokens == TOKENS else 40)
        parts.append(f"### MiniLM-L6, a sentence encoder\n\n{_ABOUT_MINILM}\n\n{rows}")
    text = "\n\n".join(parts)
    print(text, flush=True)
    complete = not (chosen.only or chosen.block or chosen.layers) and chosen.tokens == TOKENS
    if complete or chosen.output:
        write_section("perplexity", text, chosen.output or PAGE)
        print(f"written: {chosen.output or PAGE}")
    return report_missed(figures)


_ABOUT_MINILM = """all-MiniLM-L6-v2 in true float32, its 36 linear layers quantised, calibrated
on 32 sentences of wiki_calib; cosines of the mean over all tokens to the float model's, for
sentences of wiki_eval. Seconds as above."""


def _introduction(tokens: int, layers: int | None) -> str:
    cut = "" if layers is None else f", only {layers} layers of it"
    return f"""## Quality

{origin("python -m benchmarks.quantizers.perplexity")}

SmolLM2-135M-Instruct in float32 (dequantized from the 4-bit file that is on PyPI{cut}), its
linear layers quantised, the head (`lm_head`) left in float but where the row says so.
Perplexity on {tokens:,} tokens of English Wikipedia at two places of the text, windows of
{WINDOW}. Methods that need samples get the same 32 of 256 tokens, of other articles. Codes are
symmetric with float32 scales, unless the row says so: with float16 scales it is half a bit
less in blocks of 32, an eighth in blocks of 128. The weights with 8 bits are chosen by what 4
bits do to their outputs (`share_of_8_bits`).

Every model ran in plain onnxruntime with `session.qdq_matmulnbits_accuracy_level` 0, and
again, for a few tokens, through our fusion. Seconds are those of `quantize()`, from file to
file, calibration and the error of every node included. Shared machine: compare them only with
each other. ModelOpt's row: as in the section on time and memory."""


if __name__ == "__main__":
    sys.exit(main())
