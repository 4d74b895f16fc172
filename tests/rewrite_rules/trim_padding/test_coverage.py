# SPDX-License-Identifier: MIT
"""Which models TrimPadding takes, and that the tables of docs/trim-padding.md say so.

``PYTHONPATH=.:tests python tests/rewrite_rules/trim_padding/test_coverage.py`` prints them.
"""

import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from builders.encoders import batch
from builders.exports import ENCODERS, exported, fused, optimized
from builders.layout_matrix import EXHAUSTIVE
from builders.text_cases import assert_page_has, markdown
from onnxruntime.quantization import quantize_dynamic
from test_trim_padding_attacks import attack, proved

from ortplugins.quantization import quantize_encoder8

PAGE = Path(__file__).parents[3] / "docs" / "trim-padding.md"
FAMILIES = {
    "bert": "BERT, MiniLM, BGE, GTE, E5",
    "bert-mean": "the same, mean of tokens in the graph",
    "bert-reranker": "reranker, classifier",
    "bert-answers": "answers in a text",
    "distilbert": "DistilBERT",
    "roberta": "RoBERTa",
    "xlmr": "XLM-R, multilingual E5",
    "mpnet": "MPNet",
    "modernbert": "ModernBERT",
    "deberta2": "DeBERTa v2 and v3",
    "cliptext": "CLIP, text",
    "t5": "T5, encoder",
}
# What stands behind or in place of an encoder of one layer: rows of attacks.txt.
PARTS = {
    "SPLADE": "SPLADE: the greatest of log(1 + relu) times the mask",
    "ColBERT": "ColBERT: a normalised vector for each token, times the mask",
    "the last token": "the last token, by the sum of the mask (GTE, E5 of Mistral)",
    "causal, the last token": "the same behind causal attention (Qwen3-Embedding)",
    "the last token by flip and ArgMax": "the last token, by flip (sentence-transformers)",
    "weights by ids, of padding too": "sparse weights by ids (bge-m3)",
    "tokens without the first": "token vectors without the first (bge-m3)",
    "tokens beside the next": "tokens beside their neighbours (MobileBERT)",
    "tokens of an id counted": "ids that are counted (ESM)",
    "Einsum of scores and values": "attention by Einsum",
    "rotary and gated": "rotary positions, gated feed-forward layers (nomic)",
    "standard attention under bools": "`Attention` of opset 23 and 24 under booleans",
    "standard attention under floats": "the same under floats",
    "standard attention of as many keys": "the same with a number of keys for each row",
    "heads by their mask": "`MultiHeadAttention`, a mask of ones and zeros",
    "heads by their lengths": "the same, a length for each row",
    "heads by a bias": "the same, a bias",
    "standard attention that is only causal": "causal attention without the mask",
    "Conv": "convolutions over the sequence (ConvBERT)",
    "LSTM": "recurrent layers",
    "DFT over the sequence": "Fourier transforms over the sequence (FNet)",
    "blocks of four tokens": "blocks of tokens (Longformer, BigBird)",
    "the last position": "the last position, whatever it is",
}


def outcome(model: onnx.ModelProto) -> str:
    """Return what becomes of a model: packed, cut, or the code of the refusal."""
    _, remark = proved(model, pack=True)
    if remark.outcome.value == "fired":
        return "packed" if "on real tokens only" in remark.reason else "cut"
    assert remark.code, remark.reason
    return remark.code


def forms(family: str) -> Iterator[tuple[str, list[Callable[[], onnx.ModelProto]]]]:
    """Yield the columns of a family, and the models that they are about."""
    names = [name for name in ENCODERS if name.rsplit("-", 2)[0] == family]
    yield "as exported", [functools.partial(exported, name) for name in names]
    eager = f"{family}-torchscript-eager"
    masks = ("mask", "lengths") if eager in names else ()
    yield "O2", [functools.partial(optimized, eager, mask) for mask in masks]
    chosen = [name for name in names if "torchscript" not in name]
    yield "after TransformerFusion", [functools.partial(_fused, name) for name in chosen]
    plain = exported(next(name for name in names if name.endswith("dynamo-eager")))
    yield "encoder8", [functools.partial(_encoder8, plain)]
    yield "quantize_dynamic", [functools.partial(_dynamic, plain)]


def _fused(name: str) -> onnx.ModelProto:
    return ir.to_proto(fused(exported(name))[0])


def _encoder8(model: onnx.ModelProto) -> onnx.ModelProto:
    feed = batch("1" * 12, "1" * 9)
    if len(model.graph.input) == 3:
        feed["token_type_ids"] = np.zeros_like(feed["input_ids"])
    made = quantize_encoder8(model, calibration_data_reader=[feed], least_cosine=0)
    assert isinstance(made.model, onnx.ModelProto)
    return made.model


def _dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        quantize_dynamic(model, path)
        return onnx.load(path)


def rows(families: Iterable[str] = FAMILIES) -> Iterator[list[str]]:
    for family in families:
        made = {
            column: sorted({outcome(build()) for build in builds})
            for column, builds in forms(family)
        }
        if family == "bert":
            yield ["model", *made]
            yield ["---"] * (len(made) + 1)
        yield [FAMILIES[family], *(", ".join(found) or "-" for found in made.values())]
    yield []
    yield ["part of a model", "outcome"]
    yield ["---", "---"]
    for name, text in PARTS.items():
        yield [text, outcome(attack(name))]


def test_the_page_has_the_tables():
    families = FAMILIES if EXHAUSTIVE else list(FAMILIES)[::4]
    assert_page_has(PAGE, markdown(rows(families)))


if __name__ == "__main__":
    print(markdown(rows()))
