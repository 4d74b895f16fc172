# SPDX-License-Identifier: MIT
"""Tiny decoders with a cache from torch's exporters (data/make_decoder_exports.py)."""

import os
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.transformer_fusion.decoder_runs import DecoderInputs, Run

_DATA = os.environ.get("ORTPLUGINS_EXPORTS", Path(__file__).parents[1] / "data")
_ARCHIVE = Path(_DATA) / "decoder_exports.zip"
with zipfile.ZipFile(_ARCHIVE) as _archive:
    DECODERS = tuple(sorted(name.removesuffix(".onnx") for name in _archive.namelist()))


def exported_decoder(name: str) -> onnx.ModelProto:
    """Return one of :data:`DECODERS`."""
    with zipfile.ZipFile(_ARCHIVE) as archive:
        return onnx.load_from_string(archive.read(f"{name}.onnx"))


def decoder_feeds(model: onnx.ModelProto, run: Run, seed: int) -> dict[str, NDArray]:
    """Make up the inputs of a run."""
    feeds = DecoderInputs(ir.from_proto(model)).feeds(run, seed)
    return {str(value.name): array for value, array in feeds.items()}


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
