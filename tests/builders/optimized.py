# SPDX-License-Identifier: MIT
"""Exports after onnxruntime's optimizer for transformers, which optimum calls O2."""

import functools
import tempfile
from pathlib import Path

import onnx
from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from .exports import exported

_FORMATS = {
    "mask": AttentionMaskFormat.AttentionMask,
    "lengths": AttentionMaskFormat.MaskIndexEnd,
}


@functools.cache
def optimized(name: str, mask: str = "mask", model_type: str = "bert") -> onnx.ModelProto:
    """Return an export with attention, embeddings and norms as one operator each.

    ``mask``: ``mask`` for one of zeros and ones, ``lengths`` for how many ones rows have.
    """
    options = FusionOptions(model_type)
    options.attention_mask_format = _FORMATS[mask]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(exported(name), path)
        result = optimize_model(
            str(path),
            model_type=model_type,
            num_heads=2,
            hidden_size=16,
            opt_level=0,
            optimization_options=options,
        )
    model: onnx.ModelProto = result.model
    return model
