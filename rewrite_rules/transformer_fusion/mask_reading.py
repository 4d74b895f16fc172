# SPDX-License-Identifier: MIT
"""What an additive mask lets attention see, found by computing it on concrete inputs."""

from __future__ import annotations

__all__ = ["MaskReader", "MaskSight"]

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from rewrite_rules.masks.graph_evaluator import GraphEvaluator
from rewrite_rules.masks.node_evaluator import Array
from rewrite_rules.transformer_fusion.decoder_runs import Run
from rewrite_rules.transformer_fusion.grouped_layout import GroupedLayout

# What is added to a score that must not count; float16's lowest is -65504.
_LOW = -1e4


@dataclasses.dataclass(frozen=True)
class MaskSight:
    """What a mask was seen to do.

    Attributes:
        kind: For remarks: "padding", "causal", "sliding window of 6", or what it is instead.
        causal: Whether no token sees a later one.
        full: Whether it has a row for each new token and a column for each key.
        infinite: Whether it holds -inf, of which Softmax makes NaN where nothing is seen.
    """

    kind: str
    causal: bool
    full: bool
    infinite: bool


class MaskReader:
    """Computes masks in made-up runs; each once.

    Args:
        runs: The runs, and what evaluates the graph in them.
    """

    def __init__(self, runs: Mapping[Run, GraphEvaluator]) -> None:
        self._runs = runs
        self._seen: dict[object, MaskSight] = {}

    def read(self, mask: ir.Value, layout: GroupedLayout) -> MaskSight:
        """Return what a mask of scores in a layout does.

        Raises:
            CannotEvaluate: If it cannot be computed.
            Refusal: If it differs among the query heads of a group.
        """
        if (mask, layout) not in self._seen:
            arrays = {run: layout.array(each.array(mask)) for run, each in self._runs.items()}
            self._seen[mask, layout] = _sight(arrays)
        return self._seen[mask, layout]


def _sight(arrays: Mapping[Run, Array]) -> MaskSight:
    full = causal = plain = padding = True
    infinite = any(np.isneginf(array).any() for array in arrays.values())
    windows = set()
    for run, array in arrays.items():
        total = run.past + run.length
        full &= array.ndim == 4 and array.shape[2:] == (run.length, total)
        try:
            added = np.broadcast_to(array, (run.batch, array.shape[1], run.length, total))
        except (IndexError, ValueError):
            return MaskSight("other keys", False, False, infinite)
        kept = run.kept()
        # Rows of padding see whatever the exporter found handy.
        sees = np.asarray(np.all(added > _LOW, axis=1))[kept[:, run.past :]]
        key = np.arange(total)[None]
        query = np.broadcast_to(np.arange(run.past, total), (run.batch, run.length))
        query = query[kept[:, run.past :]][:, None]
        causal &= not (sees & (key > query)).any()
        visible = np.repeat(kept, kept[:, run.past :].sum(axis=1), axis=0)
        padding &= np.array_equal(sees, visible)
        reach = int(np.max(np.where(sees, query - key, 0), initial=0)) + 1
        plain &= bool(np.isin(added, (0.0, added.min())).all())
        plain &= np.array_equal(sees, visible & (key <= query) & (key > query - reach))
        windows.add((reach, total))
    longest, most = (max(sizes) for sizes in zip(*windows, strict=True))
    windowed = longest < most and all(reach == min(longest, size) for reach, size in windows)
    if not causal:
        kind = "padding" if padding else "not causal"
    elif not plain:
        kind = "causal, with a bias"
    else:
        kind = f"sliding window of {longest}" if windowed else "causal"
    return MaskSight(kind, causal, full, infinite)
