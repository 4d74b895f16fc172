# SPDX-License-Identifier: MIT
"""Made-up runs of a transformer: which inputs hold tokens, mask, positions and cache.

The same runs serve to see what a mask computes, and to try the result beside the original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal, Trial
from rewrite_rules.shapes.dimensions import DeclaredNames
from rewrite_rules.shapes.proved_shapes import ProvedShapes

# Sizes of float inputs that a cache or tokens do not explain.
_OTHER = 5


@dataclasses.dataclass(frozen=True)
class Run:
    """Sizes of one run; row r is padded by 2 r positions, ``"left"``, ``"right"`` or not."""

    batch: int
    length: int
    past: int
    padding: str = ""

    def __str__(self) -> str:
        rows = f"{self.batch} x {self.length} tokens, {self.past} cached"
        return f"{rows}, {self.padding} padding" if self.padding else rows

    def kept(self) -> NDArray[np.bool_]:
        """Return which positions hold tokens, ``[batch, past + length]``."""
        total = self.past + self.length
        most = total - 1 - (self.past if self.padding == "right" else 0)
        count = np.minimum(2 * np.arange(self.batch), most)[:, None] * bool(self.padding)
        place = np.arange(total)[None]
        return place < total - count if self.padding == "right" else place >= count


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
# Long enough that attention shows; longer than some models take.
_TIMED = (Run(1, 16, 0), Run(4, 128, 0, "right"))
_TIMED_WITH_CACHE = (Run(1, 1, 63),)
# How far a mask is followed to the scores, and what adds it or hides scores by it.
_SCORE_AXES, _MAX_FOLLOWED = 4, 64
_BROADCASTS = frozenset({"Add", "And", "Mul", "Or", "Where"})
# Axes of inputs whose sizes a model may declare.
_DECLARED = {
    "tokens": {0: "batch", 1: "length"},
    "embeddings": {0: "batch", 1: "length"},
    "mask": {0: "batch"},
    "cache": {0: "batch", 2: "past"},
}


class DecoderInputs:
    """The inputs of a transformer by role, read by type, rank and name; others are refused."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        graph = model.graph
        self._roles: dict[ir.Value, str] = {}
        # Which axis of scores [B, H, S, T] each axis of a mask is.
        self._axes: dict[ir.Value, tuple[int, ...]] = {}
        facts = ProvedShapes(model, on_demand=True)
        for value in graph.inputs:
            if str(value.name) not in graph.initializers:
                axes = _axes_of_scores(value, facts) if "mask" in str(value.name) else ()
                self._roles[value] = _role(value, axes)
                self._axes[value] = axes or (0, 1, 2, 3)
        self.has_cache = "cache" in self._roles.values()
        self.has_mask = "mask" in self._roles.values()
        if not self.runs(RUNS):
            raise Refusal("no made-up run has the sizes that the inputs declare")

    def all(self, role: str) -> list[ir.Value]:
        """Return the inputs of a role, for instance ``"tokens"``, ``"mask"``, ``"cache"``."""
        return [value for value, one in self._roles.items() if one == role]

    def runs(self, wanted: Iterable[Run]) -> list[Run]:
        """Return runs in the sizes that inputs declare; without what no input can tell."""
        sizes: dict[str, Any] = {
            field: value.shape[axis]
            for value, role in self._roles.items()
            for axis, field in _DECLARED.get(role, {}).items()
            if value.shape is not None and isinstance(value.shape[axis], int)
        }
        found = dict[Run, None]()
        for run in wanted:
            if (self.has_cache or not run.past) and (self.has_mask or not run.padding):
                run = dataclasses.replace(run, **sizes)
                found[dataclasses.replace(run, padding=run.padding * (run.batch > 1))] = None
        totals = {value.shape[1] for value in self.all("mask") if value.shape is not None}
        numbers = {size for size in totals if isinstance(size, int)}
        return [run for run in found if numbers <= {run.past + run.length}]

    def names(self, run: Run) -> DeclaredNames:
        """Return what the names of the inputs' dimensions stand for in a run."""
        sizes = {
            dim.value: size
            for value, role in self._roles.items()
            for dim, size in zip(value.shape or (), self._sizes(value, role, run), strict=True)
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None
        }
        return DeclaredNames(sizes, _OTHER)

    def feeds(self, run: Run, seed: int = 0) -> dict[ir.Value, NDArray[Any]]:
        """Make up the inputs of a run."""
        rng, kept = np.random.default_rng(seed), run.kept()
        feeds = {}
        for value, role in self._roles.items():
            sizes = self._sizes(value, role, run)
            assert value.dtype is not None
            array: NDArray[Any]
            if role in ("mask", "all kept"):
                array = kept if role == "mask" else np.ones(sizes)
            elif role == "positions":
                positions = np.maximum(kept.cumsum(axis=1) - 1, 0)[:, run.past :]
                array = positions if len(sizes) == 2 else np.arange(run.past, kept.shape[1])
            elif role == "tokens":
                array = rng.integers(0, _limit(value), sizes)
            elif role == "biases" and not value.dtype.is_floating_point():
                array = rng.integers(0, 2, sizes)
            else:
                array = rng.standard_normal(sizes)
            feeds[value] = np.ascontiguousarray(array.astype(value.dtype.numpy()))
        return feeds

    def trials(self, bound: float, timed: bool, row_by_row: bool = False) -> list[Trial]:
        """Return the runs as trials, within ``bound``; what padding computes does not count.

        ``timed``: it has to be faster. ``row_by_row``: no chunks after a cache in batches.
        """
        found = []
        short = self.runs(RUNS)
        long = self.runs(_TIMED_WITH_CACHE if self.has_cache else _TIMED)
        for index, run in enumerate(short + long * timed):
            if row_by_row and run.batch > 1 and run.length > 1 and run.past > 0:
                continue
            feeds = {str(v.name): array for v, array in self.feeds(run, index).items()}
            kept = run.kept()
            by_rank = {3: kept[:, run.past :, None], 4: kept[:, None, :, None]}
            compared = {}
            for output in self._model.graph.outputs if run.padding else ():
                rank = 1 if output.shape is None else len(output.shape)
                # One row for each text may be that of padding.
                nothing = np.zeros((1,) * (rank or 1), np.bool_)
                compared[str(output.name)] = by_rank.get(rank, nothing)
            is_long = index >= len(short)
            found.append(Trial(str(run), feeds, compared, bound, True, is_long))
        return found

    def _sizes(self, value: ir.Value, role: str, run: Run) -> list[int]:
        total = run.past + run.length
        asked = {
            "tokens": (run.batch, run.length),
            "mask": (run.batch, total),
            "positions": (run.batch, run.length),
            "embeddings": (run.batch, run.length, _OTHER),
            # Whatever a caller adds to scores, or hides of them.
            "biases": [(run.batch, 1, run.length, total)[axis] for axis in self._axes[value]],
            "cache": (run.batch, 0, run.past, 0),
        }.get(role, (run.batch, _OTHER, _OTHER, _OTHER))
        assert value.shape is not None
        if role == "positions" and len(value.shape) == 1:
            asked = (run.length,)
        return [
            dim if isinstance(dim, int) else asked[axis]
            for axis, dim in enumerate(value.shape)
        ]


def _axes_of_scores(mask: ir.Value, facts: ProvedShapes) -> tuple[int, ...]:
    """Return which axis of scores ``[B, H, S, T]`` each axis of a mask is; empty if unknown.

    Found at the first value of four axes that it becomes, or that it is broadcast to.
    """
    dims, followed = facts.dims(mask), [mask]
    if dims is None or not 0 < len(dims) < _SCORE_AXES:
        return ()
    for value in followed:
        own = facts.dims(value)
        for node in value.consumers() if len(followed) < _MAX_FOLLOWED else ():
            made = facts.dims(node.outputs[0])
            if made is None or own is None:
                continue
            if len(made) == _SCORE_AXES and node.op_type in _BROADCASTS:
                made = ((1, ()),) * (_SCORE_AXES - len(own)) + own
            axes = list[int]()
            for dim in dims if len(made) == _SCORE_AXES else ():
                places = (i for i, size in enumerate(made) if size == dim and i not in axes)
                axes += [*places][:1]
            if len(axes) == len(dims):
                return tuple(axes)
            if dims[0] in made:
                followed.append(node.outputs[0])
    return ()


def _role(value: ir.Value, axes: tuple[int, ...]) -> str:
    name, shape = str(value.name), value.shape
    if value.dtype is None or shape is None:
        raise Refusal(f"input {name!r} has no declared type and shape")
    rank, encoder = len(shape), "encoder" in name
    if "mask" in name and (rank == _SCORE_AXES or (axes and rank != 2) or axes == (2, 3)):
        return "biases"
    if not value.dtype.is_floating_point():
        if "position" in name and rank in (1, 2):
            return "positions"
        if rank == 2:
            return "tokens" if "mask" not in name else "all kept" if encoder else "mask"
    elif "mask" in name:
        if rank == 2:
            return "mask"
    elif rank == 3 and "embeds" in name and not encoder:
        return "embeddings"
    elif rank <= _SCORE_AXES:
        sizes = [isinstance(size, int) for size in shape][1:]
        cached = sizes == [True, False, True] or ("past" in name and rank == _SCORE_AXES)
        return "cache" if cached and not encoder else "floats"
    raise Refusal(f"what input {name!r} of rank {rank} holds is not known")


def _limit(tokens: ir.Value) -> int:
    """How many rows the tables have that tokens choose from."""
    limit, pending = 1 << 16, [tokens]
    while pending:
        for node in pending.pop().consumers():
            if node.op_type in ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten"):
                pending += node.outputs
            elif node.op_type in ("Gather", "GatherBlockQuantized"):
                table = constant(node.inputs[0])
                if table is not None and table.shape.numpy():
                    limit = min(limit, int(table.shape.numpy()[0]))
    return limit if limit < 1 << 16 else 2
