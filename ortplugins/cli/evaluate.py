# SPDX-License-Identifier: MIT
"""``ortplugins evaluate``: how good a model of text is, and how far from its float model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_table, progress_bar

if TYPE_CHECKING:
    from ortplugins.evaluation import Evaluation


def evaluate(
    model: opt.ModelOrFolder,
    /,
    *,
    against: Path | None = None,
    text: Path,
    tokenizer: Path | None = None,
    tokens: int = 4096,
    window: int = 512,
    texts: int = 500,
    providers: opt.Providers = opt.CPU,
    format: opt.Format = "text",
) -> None:
    """Measure the quality of a decoder or an encoder on a text, and its size.

    Args:
        against: The float model, or its folder, to compare with.
        text: The text, in UTF-8.
        tokenizer: tokenizer.json; by default the one next to the model.
        tokens: Language models: how many tokens of the text to read.
        window: Language models: tokens of one run.
        texts: Encoders: paragraphs to embed.
    """
    from ortplugins.evaluation import evaluate

    with progress_bar() as bar:
        found = evaluate(
            model,
            against,
            text=text,
            tokenizer=tokenizer,
            tokens=tokens,
            window=window,
            texts=texts,
            providers=providers,
            progress=bar,
        )
    if format == "json":
        print(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        print_evaluation(found)


def print_evaluation(found: Evaluation) -> None:
    """Print the figures that apply, with those of the float model."""

    def row(name: str, show: str, *values: float) -> tuple[str, ...]:
        shown = ["" if math.isnan(value) else format(value, show) for value in values]
        return (name, *shown, *[""] * (len(found.names) - len(shown)))

    rows = [
        row("perplexity", ".4f", *found.perplexity),
        row("KL divergence", ".4f", found.kl_divergence),
        row("top-1 agreement", ".2%", found.top1_agreement),
        row("cosine", ".4f", found.cosine),
        row("ranking agreement", ".4f", found.ranking_agreement),
        ("size", *map(decimal, found.bytes)),
    ]
    print_table(("", *found.names), [each for each in rows if any(each[1:])])
    print(f"{found.count:,} {'tokens' if found.perplexity else 'texts'}")
