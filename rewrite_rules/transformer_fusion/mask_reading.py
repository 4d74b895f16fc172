# SPDX-License-Identifier: MIT
"""What a mask lets attention see, found by computing it on concrete inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.masks.graph_evaluator import GraphEvaluator
from rewrite_rules.masks.node_evaluator import Array
from rewrite_rules.transformer_fusion.decoder_runs import Run
from rewrite_rules.transformer_fusion.grouped_layout import GroupedLayout
from rewrite_rules.transformer_fusion.head_layout import ints

# What is added to a score that must not count; float16's lowest is -65504.
_LOW = -1e4


@dataclasses.dataclass(frozen=True)
class Mask:
    """A tensor that is added to scores, or says where a lowest number stands instead of one.

    Adding that number is the same: no score is large enough to change it.

    Attributes:
        value: The tensor.
        lowest: What stands instead of a score; None where the tensor is added.
        hides: Where: the value of a bool tensor that hides a score.
    """

    value: ir.Value
    lowest: float | None = None
    hides: bool = True

    def added(self, op: Any, missing: int) -> Any:
        """Emit what is added, with that many more axes."""
        value: Any = self.value
        if self.lowest is not None:
            numbers = [op.Constant(value_float=number) for number in (self.lowest, 0.0)]
            value = op.Where(value, *numbers[:: 1 if self.hides else -1])
        return op.Unsqueeze(value, ints(op, *range(missing))) if missing else value

    def computed(self, array: Array, rank: int) -> Array:
        """Return what is added, given the tensor."""
        array = array.reshape((1,) * (rank - array.ndim) + array.shape)
        return (
            array if self.lowest is None else np.where(array == self.hides, self.lowest, 0.0)
        )


@dataclasses.dataclass(frozen=True)
class MaskSight:
    """What a mask was seen to do.

    Attributes:
        kind: For remarks: "padding", "causal", "sliding window of 6", or what it is instead.
        causal: Whether no token sees a later one.
        full: Whether it has a row for each new token and a column for each key.
        infinite: Whether it holds -inf, of which Softmax makes NaN where nothing is seen.
        blind: Whether a token sees nothing, so that nodes mix all values, and kernels do not.
    """

    kind: str
    causal: bool
    full: bool
    infinite: bool
    blind: bool = False


class MaskReader:
    """Computes masks in made-up runs; each once.

    Args:
        runs: The runs, and what evaluates the graph in them.
    """

    def __init__(self, runs: Mapping[Run, GraphEvaluator]) -> None:
        self._runs = runs
        self._seen: dict[object, MaskSight] = {}

    def read(self, mask: Mask, layout: GroupedLayout) -> MaskSight:
        """Return what a mask of scores in a layout does.

        Raises:
            CannotEvaluate: If it cannot be computed.
            Refusal: If it differs among the query heads of a group.
        """
        if (mask, layout) not in self._seen:
            arrays = {
                run: layout.array(mask.computed(each.array(mask.value), layout.rank))
                for run, each in self._runs.items()
            }
            self._seen[mask, layout] = _sight(arrays)
        return self._seen[mask, layout]


def _sight(arrays: Mapping[Run, Array]) -> MaskSight:
    full = causal = plain = padding = True
    blind = False
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
        blind |= not sees.any(axis=1).all()
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
    return MaskSight(kind, causal, full, infinite, blind)
