# SPDX-License-Identifier: MIT
"""What TransformerFusion and other fusers find in exports of transformers, and break.

python -m benchmarks.fusers FOLDER

FOLDER holds exports, ``<model>-<exporter>-<attention>.onnx``, each with a .json of its
``heads`` and ``hidden`` size, which transformers.optimizer takes as arguments. Every result
and the file run on the same made-up inputs: prompts, and single tokens after a cache. Prints
the table of docs/transformer-fusion.md, and a line for each result that is wrong or missing.
"""

from __future__ import annotations

import collections
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

from ortplugins.model_io.saving import save_with_data
from ortplugins.runtime.stock_session import open_model, quiet_runner
from ortplugins.samples.made_up import MadeUpInputs
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.transformer_fusion.fuse import fuse_transformer

_BOUND = 1e-4
# What transformers.optimizer calls them, by the beginning of a file's name; others are BERTs.
_GPTS = ("llama", "qwen2", "gemma3", "mistral", "falcon", "granite", "gpt2", "olmo2", "opt")
_TYPES = {
    **{name: name for name in ("vit", "t5", "clip", "qwen3", "bart")},
    **dict.fromkeys(_GPTS, "gpt2"),
    "phi3": "phi",
    "gptneox": "gpt_neox",
    "whisper": "bart",
}


def _ours(path: Path) -> ir.Model:
    model = ir.load(path)
    ShapeInferencePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True)(model)
    context = PassContext(Remarks("transformer_fusion"))
    fuse_transformer(model, context)
    return model


def _onnxscript(path: Path) -> ir.Model:
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, _ = optimize_for_ort(ir.load(path))
    return model


def _transformers(path: Path) -> ir.Model:
    from onnxruntime.transformers.optimizer import optimize_model

    kind = next((kind for name, kind in _TYPES.items() if path.name.startswith(name)), "bert")
    facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    sizes = {"num_heads": facts["heads"], "hidden_size": facts["hidden"]}
    return ir.from_proto(optimize_model(str(path), kind, opt_level=0, **sizes).model)


_FUSERS: dict[str, Callable[[Path], ir.Model]] = {
    "TransformerFusion": _ours,
    "onnxscript ort_fusions": _onnxscript,
    "onnxruntime.transformers.optimizer": _transformers,
}
_PARTS = ("attention", "RMS norms", "rotary")


def _parts(model: ir.Model, fused: ir.Model | None = None) -> dict[str, int]:
    """What an export is made of; with a fused one, how much of it became one node each."""
    nodes = collections.Counter(node.op_type for node in model.graph)
    rotary = 2 * nodes["Softmax"] if nodes["Cos"] else 0
    if fused is None:
        return dict(zip(_PARTS, (nodes["Softmax"], nodes["ReduceMean"], rotary), strict=True))
    left = collections.Counter(node.op_type for node in fused.graph)
    counts = [nodes[kind] - left[kind] for kind in ("Softmax", "ReduceMean")]
    return dict(zip(_PARTS, [*counts, left["RotaryEmbedding"]], strict=True))


def _failure(model: ir.Model, fused: ir.Model) -> str | None:
    """Say where a result differs from the export; None where it does not."""
    with tempfile.TemporaryDirectory() as name:
        runs = []
        for index, each in enumerate((model, fused)):
            path = Path(name, f"{index}.onnx")
            save_with_data(each.clone(), path)
            runs.append(quiet_runner(open_model(path, "all")))
        before, after = runs
        for feed in MadeUpInputs(model.graph).feeds(2, steps=True):
            found = after(feed)
            for key, array in before(feed).items():
                far = np.abs(array - found[key]).max(initial=0)
                if not far <= _BOUND * np.abs(array).max(initial=0):
                    return f"{key!r} differs by {far:.1e}"
    return None


def compare(folder: Path) -> str:
    """Return the table, in Markdown.

    Args:
        folder: Of exports.
    """
    scores = {name: collections.Counter[str]() for name in ("as exported", *_FUSERS)}
    paths = sorted(folder.glob("*.onnx"))
    for path in paths:
        model = ir.load(path)
        scores["as exported"].update(_parts(model))
        for name, fuse in _FUSERS.items():
            try:
                fused = fuse(path)
            except Exception as error:
                scores[name]["crashes"] += 1
                print(f"{path.stem}: {name}: {type(error).__name__}: {error}", flush=True)
                continue
            # An input that nothing reads may be gone.
            kept = {value.name for value in fused.graph.inputs}
            fused.graph.inputs.extend(
                ir.Value(name=value.name, type=value.type, shape=value.shape)
                for value in model.graph.inputs
                if value.name not in kept
            )
            failure = _failure(model, fused)
            if failure is None:
                scores[name].update(_parts(model, fused))
            else:
                scores[name]["wrong"] += 1
                print(f"{path.stem}: {name}: {failure}", flush=True)
    columns = (*_PARTS, "wrong", "crashes")
    lines = [
        " | ".join((f"| {len(paths)} exports", *columns)) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name, score in scores.items():
        lines.append(" | ".join((f"| {name}", *(str(score[one]) for one in columns))) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # a line of the optimizer for each thing it tries
    print(compare(Path(sys.argv[1])))
