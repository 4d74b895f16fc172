# SPDX-License-Identifier: MIT
"""Cosines of a quantised sentence encoder's embeddings to those of the float one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models.corpus import CACHE
from benchmarks.models.minilm import embeddings, feeds, float_minilm, sentences
from ortplugins.quantization import quantize

_METHODS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"method": name} for name in ("rtn", "awq_lite", "gptq")},
    "rtn, asymmetric": {"method": "rtn", "is_symmetric": False},
    "gptq, asymmetric": {"method": "gptq", "is_symmetric": False},
}


def cosine_table(block_sizes: Sequence[int], count: int) -> str:
    """Quantise MiniLM-L6 in several ways and compare it on ``count`` sentences; Markdown."""
    path, tokenizer = float_minilm()
    samples = feeds(tokenizer, sentences("wiki_calib", 32))
    texts = feeds(tokenizer, sentences("wiki_eval", count))
    expected = embeddings(path, texts)
    lines = [
        "| method | block | bits per weight | seconds | mean cosine | least |",
        "|---|---|---|---|---|---|",
    ]
    for block_size in block_sizes:
        for name, settings in _METHODS.items():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="minilm-") as folder:
                start = time.perf_counter()
                result = quantize(
                    path,
                    Path(folder, "model.onnx"),
                    block_size=block_size,
                    calibration_data_reader=None if settings["method"] == "rtn" else samples,
                    **settings,
                )
                seconds = time.perf_counter() - start
                cosines = (embeddings(Path(folder, "model.onnx"), texts) * expected).sum(
                    axis=1
                )
            cells = (
                name,
                str(block_size),
                f"{result.report.bits_per_weight:.2f}",
                f"{seconds:.1f}",
                f"{cosines.mean():.4f}",
                f"{cosines.min():.4f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)
