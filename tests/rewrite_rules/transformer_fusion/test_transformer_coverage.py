# SPDX-License-Identifier: MIT
"""Which models and forms TransformerFusion takes, and that docs/transformer-fusion.md says so.

Run as a script, it prints the tables.
"""

import collections
from collections.abc import Iterator
from pathlib import Path

import onnx
from builders.attention_forms import FORMS
from builders.decoders import CASES
from builders.exports import DECODERS, ENCODERS, exported, fused
from builders.text_cases import assert_page_has

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


def outcome(model: onnx.ModelProto) -> str:
    """Return the kernels that compute attention, or the codes of refusals."""
    _, remarks, context = fused(model)
    found = {text for text in remarks["fired"] if text.startswith("attention: ")}
    if found:
        return "; ".join(sorted(text.removeprefix("attention: ") for text in found))
    return ", ".join(sorted({x.code for x in context.remarks if x.code})) or "-"


def lines() -> Iterator[str]:
    """Yield the lists of the page, a line for each outcome."""
    models = collections.defaultdict[tuple[str, ...], list[str]](list)
    for family, text in FAMILIES.items():
        names = [f"{family}-{exporter}-eager" for exporter in ("dynamo", "torchscript")]
        assert {*names} <= {*ENCODERS, *DECODERS}
        models[tuple(outcome(exported(name)) for name in names)].append(text)
    for (dynamo, torchscript), names in models.items():
        found = dynamo if dynamo == torchscript else f"{dynamo} (torchscript: {torchscript})"
        yield f"- {found}: {'; '.join(names)}"
    forms = collections.defaultdict[str, list[str]](list)
    for case in (*FORMS.values(), *CASES.values()):
        if page := case.settings.get("page"):
            forms[case.expected.removeprefix("attention: ")].append(page)
    yield from (f"- {found}: {'; '.join(names)}" for found, names in forms.items())


def test_the_page_has_the_lists():
    assert_page_has(PAGE, "\n".join(lines()))


if __name__ == "__main__":
    print(*lines(), sep="\n")
