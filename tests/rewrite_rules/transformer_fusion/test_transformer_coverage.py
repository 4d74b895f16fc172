# SPDX-License-Identifier: MIT
"""Which models and forms TransformerFusion takes, and that docs/transformer-fusion.md says so.

Run as a script, it prints the tables.
"""

from collections.abc import Iterator
from pathlib import Path

import onnx
from builders.attention_forms import form
from builders.decoders import changed
from builders.exports import DECODERS, ENCODERS, exported, fused
from builders.text_cases import assert_page_has, markdown

from ortplugins.reasons import code_of

PAGE = Path(__file__).parents[3] / "docs" / "transformer-fusion.md"
FAMILIES = {
    "bert": "BERT, MiniLM, BGE, GTE, E5",
    "distilbert": "DistilBERT",
    "mpnet": "MPNet",
    "modernbert": "ModernBERT",
    "deberta2": "DeBERTa v2 and v3",
    "cliptext": "CLIP, text",
    "t5": "T5, encoder",
    "llama": "Llama, Qwen, Mistral, SmolLM",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gptneox": "GPT-NeoX, Pythia",
    "gpt2": "GPT-2",
    "falcon": "Falcon",
    "bloom": "Bloom",
}
# Without a cache, rows of builders/attention_forms.txt.
FORMS = {
    "heads merged with the batch": "heads merged with the batch (Stable Diffusion, BART, OPT)",
    "heads merged, a mask of four axes": "the same, a mask of four axes in between",
    "heads merged, a bias of each head": "the same, a bias of each head (Bloom)",
    "one head, a mask": "one head (VAE)",
    "Einsum": "Einsum",
    "Einsum, heads behind tokens": "Einsum of `[B, S, H, D]` (Keras)",
    "a mask before the scale": "a mask before the scale",
    "a mask subtracted": "a mask subtracted",
    "a Where before the scale": "Where with the lowest number",
    "a Where of another low number": "Where with a number of -1e8 or less",
    "a Where of a number that scores may reach": "Where with a greater number",
    "a mask of each window": "a mask of each window (Swin)",
}
# With a cache, cases of builders/decoders.txt.
CACHED = {
    "ALiBi": "ALiBi, with grouped heads too",
    "ALiBi in two Adds": "ALiBi in two Adds (MPT)",
    "soft caps": "soft caps (Gemma 2)",
    "sinks, kept away from infinity": "sinks (gpt-oss)",
}
# Query heads that share keys in the graph, builders/decoders.py.
LAYOUTS = {
    "grouped on an axis": "query heads of a group on an axis",
    "grouped in rows": "query heads of a group as rows of one",
}


def outcome(model: onnx.ModelProto) -> str:
    """Return the kernels that compute attention, or the codes of refusals."""
    _, remarks, _ = fused(model)
    found = {text for text in remarks["fired"] if text.startswith("attention: ")}
    if found:
        return "; ".join(sorted(text.removeprefix("attention: ") for text in found))
    return ", ".join(sorted({code_of(reason) for reason in remarks["refused"]})) or "-"


def rows() -> Iterator[list[str]]:
    yield ["model", "by dynamo", "by torchscript"]
    yield ["---"] * 3
    for family, text in FAMILIES.items():
        names = [f"{family}-{exporter}-eager" for exporter in ("dynamo", "torchscript")]
        assert {*names} <= {*ENCODERS, *DECODERS}
        yield [text, *(outcome(exported(name)) for name in names)]
    yield []
    yield ["form", "outcome"]
    yield ["---"] * 2
    for table, build in ((FORMS, form), (CACHED, changed), (LAYOUTS, changed)):
        yield from ([text, outcome(build(name))] for name, text in table.items())


def test_the_page_has_the_tables():
    assert_page_has(PAGE, markdown(rows()))


if __name__ == "__main__":
    print(markdown(rows()))
