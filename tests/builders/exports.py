# SPDX-License-Identifier: MIT
"""Tiny encoders and decoders from torch (data/make_*_exports.py), and their fusion."""

import collections
import functools
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common
from numpy.typing import NDArray

from builders.token_batches import Run, token_feeds
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.transformer_fusion.fuse import fuse_transformer

# Sizes of a decoder's runs: prompts, tokens and chunks, padded or not.
RUNS = (
    Run(1, 1, 0),
    Run(1, 11, 0),
    Run(1, 1, 9),
    Run(2, 1, 14),
    Run(1, 6, 7),
    Run(2, 5, 7),
    Run(3, 6, 0, "left"),
    Run(3, 9, 0, "right"),
    Run(3, 6, 7, "left"),
    Run(3, 1, 7, "left"),
)
_DATA = Path(os.environ.get("ORTPLUGINS_EXPORTS", Path(__file__).parents[1] / "data"))


def _names(archive: Path) -> dict[str, Path]:
    with zipfile.ZipFile(archive) as opened:
        return {name.removesuffix(".onnx"): archive for name in sorted(opened.namelist())}


ENCODERS, DECODERS = (_names(_DATA / f"{kind}_exports.zip") for kind in ("encoder", "decoder"))


def exported(name: str) -> onnx.ModelProto:
    """Return one of :data:`ENCODERS` or :data:`DECODERS`."""
    with zipfile.ZipFile((ENCODERS | DECODERS)[name]) as archive:
        return onnx.load_from_string(archive.read(f"{name}.onnx"))


def decoder_feeds(model: onnx.ModelProto, run: Run, seed: int) -> dict[str, NDArray]:
    return token_feeds(model, run, seed)[0]


def greatest_difference(run: Run, actual: list[NDArray], expected: list[NDArray]) -> float:
    """How far outputs are apart where the mask keeps them, as a share of the greatest."""
    kept, far = run.kept(), 0.0
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        if one.ndim == 3:
            one, other = one[kept[:, run.past :]], other[kept[:, run.past :]]
        else:
            one, other = (array.swapaxes(1, 2)[kept] for array in (one, other))
        assert np.isfinite(other).all()
        greatest = np.abs(other).max(initial=1e-30)
        far = max(far, float(np.abs(one - other).max(initial=0) / greatest))
    return far


def fused(
    model: onnx.ModelProto, kv_cache: str = "exported"
) -> tuple[ir.Model, dict[str, list[str]], PassContext]:
    """The rewritten model, and the reasons of its remarks by outcome."""
    result, remarks = ir.from_proto(model), Remarks("transformer_fusion")
    onnx_ir.passes.common.ShapeInferencePass()(result)
    onnx_ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True)(result)
    context = PassContext(remarks)
    fuse_transformer(result, context, kv_cache)
    result.graph.sort()
    found = collections.defaultdict[str, list[str]](list)
    for remark in remarks:
        found[remark.outcome.value].append(remark.reason)
    return result, found, context


@functools.cache
def optimized(name: str, mask: str = "mask", model_type: str = "bert") -> onnx.ModelProto:
    """Return an export after onnxruntime's optimizer for transformers, which optimum calls O2.

    Attention, embeddings and norms are one operator each. ``mask``: ``mask`` for one of zeros
    and ones, ``lengths`` for how many ones rows have.
    """
    from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions(model_type)
    formats = {"mask": "AttentionMask", "lengths": "MaskIndexEnd"}
    options.attention_mask_format = getattr(AttentionMaskFormat, formats[mask])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(exported(name), path)
        sizes = {"num_heads": 2, "hidden_size": 16, "opt_level": 0}
        result = optimize_model(
            str(path), model_type=model_type, optimization_options=options, **sizes
        )
    model: onnx.ModelProto = result.model
    return model
