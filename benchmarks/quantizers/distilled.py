# SPDX-License-Identifier: MIT
"""What learning gains over GPTQ, on samples that neither has seen; needs torch.

python -m benchmarks.quantizers.distilled MODEL.onnx SAMPLES.npz [--block-size N]...
python -m benchmarks.quantizers.distilled MODEL.onnx TEXT --tokenizer FILE [--block-size N]...

Prints a row for each block size: the distance to the float model of GPTQ, of the recipe
distilled, and their ratio. That is the mean KL divergence of tokens where the model has
logits, else 1 - cosine of the mean hidden states. The last eighth of the samples is measured
on; GPTQ and learning get the others.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.model_io.loading import load_model
from ortplugins.quantization import Recipe, quantize
from ortplugins.quantization.distill import Learning, quantize_distilled, starting_samples
from ortplugins.runtime.stock_session import opened, stock_options
from ortplugins.samples.sources import Feed, read_samples
from ortplugins.samples.text import TextSamples

_MEASURED = 1 / 8
Array = npt.NDArray[np.float32]


def main() -> None:
    """Measure, and print a row for each block size."""
    parser = argparse.ArgumentParser(description="Measure the recipe distilled beside gptq.")
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path, help="an .npz file, or a text")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--count", type=int, help="windows of the text")
    parser.add_argument("--block-size", type=int, action="append", default=[])
    parser.add_argument("--epochs", type=int, default=Learning().epochs)
    chosen = parser.parse_args()
    source: Any = [chosen.samples]
    if chosen.tokenizer is not None:
        source = TextSamples(chosen.samples, chosen.tokenizer, chosen.window, chosen.count)
    samples = read_samples(source, load_model(chosen.model).model)
    count = max(1, round(_MEASURED * len(samples)))
    taken, measured = samples[:-count], samples[-count:]
    learning = Learning(epochs=chosen.epochs)
    print(f"{len(taken)} samples, {len(measured)} to measure on")
    exact = _answers(chosen.model, measured)
    for size in chosen.block_size or [32, 128]:
        recipe = Recipe(method="gptq", block_size=size)
        with tempfile.TemporaryDirectory() as folder:
            paths = Path(folder, "gptq.onnx"), Path(folder, "distilled.onnx")
            given = starting_samples(taken)
            quantize(chosen.model, paths[0], recipe=recipe, calibration_data_reader=given)
            start = time.perf_counter()
            quantize_distilled(
                chosen.model,
                paths[1],
                recipe=recipe,
                calibration_data_reader=taken,
                learning=learning,
            )
            seconds = time.perf_counter() - start
            gptq, ours = (_distance(exact, _answers(path, measured)) for path in paths)
        print(
            f"| {chosen.model.name}, blocks of {size} | {gptq:.3g} | {ours:.3g} | "
            f"{ours / gptq:.3f} | {seconds / 60:.0f} min |",
            flush=True,
        )


def _answers(path: Path, feeds: Sequence[Feed]) -> list[Array]:
    """Return logits, as logarithms of probabilities, or the mean hidden state of each feed."""
    options = stock_options("all")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = opened(str(path), options, ["CPUExecutionProvider"], str(path))
    names = [item.name for item in session.get_outputs()]
    name = next((name for name in names if "logits" in name), names[0])
    inputs = {item.name for item in session.get_inputs()}
    found = []
    for feed in feeds:
        taken = {key: array for key, array in feed.items() if key in inputs}
        (array,) = session.run([name], taken)
        if "logits" in name:
            array = array - array.max(-1, keepdims=True)
            found.append(array - np.log(np.exp(array).sum(-1, keepdims=True)))
        else:
            mask = taken.get("attention_mask", np.ones(array.shape[:2]))[..., None]
            found.append((array * mask).sum(1) / mask.sum(1))
    return found


def _distance(exact: Sequence[Array], found: Sequence[Array]) -> float:
    pairs = zip(exact, found, strict=True)
    if exact[0].ndim == 3:
        return float(np.mean([(np.exp(p) * (p - q)).sum(-1).mean() for p, q in pairs]))
    norms = np.linalg.norm
    return float(np.mean([1 - (p * q).sum() / (norms(p) * norms(q)) for p, q in pairs]))


if __name__ == "__main__":
    main()
