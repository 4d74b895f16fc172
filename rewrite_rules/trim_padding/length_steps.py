# SPDX-License-Identifier: MIT
"""Where what a model computes from its length takes another branch.

    length / 256 -> Max(that, 1)     the same below 256, and another above
    Slice(x, 0, 512)                 all of x up to 512
    Greater(length, 200)             false up to 200

The runs that values are compared in have a few lengths. Between those, and beyond, numbers of
the length follow from these as long as nothing branches: they are sums and products of it, so
it is known where a branch changes. What is computed from the length in any other way is
refused, unless no two lengths give the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.parameters import axis_of
from rewrite_rules.remarks import Refusal
from rewrite_rules.trim_padding.token_axes import Runs

Arrays = tuple[NDArray[Any], ...]

_STEPS = "takes steps as the length grows: its results at other lengths are not known"
# Which inputs give numbers to the result, not sizes alone; all of operators not named here.
_NUMBERS = {
    "ConstantOfShape": (), "Expand": (0,), "Range": (0, 2), "Reshape": (0,),
    "Slice": (0, 1, 4), "Squeeze": (0,), "Tile": (0,), "Unsqueeze": (0,),
}  # fmt: skip
_LINEAR = frozenset({
    "Add", "And", "Concat", "ConstantOfShape", "Expand", "Flatten", "Identity", "Mean", "Mul",
    "Neg", "Not", "Or", "Range", "ReduceMean", "ReduceProd", "ReduceSum", "Reshape", "Shape",
    "Size", "Slice", "Split", "Squeeze", "Sub", "Sum", "Tile", "Transpose", "Unsqueeze",
    "Where", "Xor",
})  # fmt: skip
# Exact where they have nothing to round.
_ROUNDING = frozenset({"Cast", "CastLike", "Ceil", "Floor", "Round"})
_COMPARING = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sign"})
_BRANCHING = frozenset({"Abs", "Clip", "Max", "Min", "Relu"})
_SMOOTH = frozenset({"Cos", "Div", "Exp", "Log", "Pow", "Reciprocal", "Sin", "Sqrt"})
_REDUCING = frozenset({
    "ArgMax", "ArgMin", "MatMul", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum",
})  # fmt: skip
_LOOKING_UP = frozenset({"Gather", "GatherElements", "GatherND"})
_MAX_NUMBERS = 64
_TINY = 1e-6
# Sizes that mean "to the end".
NO_END = 1 << 31


@dataclasses.dataclass
class LengthSteps:
    """Lengths at which a branch changes: within those of the runs, and the first beyond.

    Attributes:
        within: Those that two runs of a pair have to lie beside.
        longest: Greatest length up to which no branch changes that the runs do not show.
    """

    runs: Runs
    within: set[float] = dataclasses.field(default_factory=set)
    longest: int = NO_END

    def counts(
        self,
        node: ir.Node,
        inputs: Sequence[Arrays | None],
        counted: Sequence[bool],
        results: Sequence[Arrays],
    ) -> bool:
        """Return whether the numbers of a result depend on the length; note where it steps.

        ``counted`` says so of the inputs. Refused if they may step where nothing is known.
        """
        kind = node.op_type
        sized = _NUMBERS.get(kind, range(len(inputs)))
        depends = any(counted[i] for i in sized if i < len(counted))
        if kind == "Slice":
            depends |= self._slice(inputs)
        elif kind == "Range" and (any(counted) or depends):
            start, limit, _ = inputs
            assert start is not None and limit is not None
            self._compare(limit, start, continuous=True)
        elif kind in _LOOKING_UP:
            depends |= self._looks_up(inputs, counted)
        elif kind in _REDUCING and not depends:
            depends = self._reduces_positions(inputs, results)
            return depends and self.varies(results)
        if not depends:
            return False
        self._check(node, inputs, results)
        return self.varies(results)

    def varies(self, results: Sequence[Arrays]) -> bool:
        """Whether the runs of a pair differ, where both have numbers."""
        return any(
            not np.array_equal(*_common(whole, cut), equal_nan=whole.dtype.kind == "f")
            for arrays in results
            for whole, cut in zip(arrays[::2], arrays[1::2], strict=True)
        )

    def slice(self, sizes: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Note up to where a Slice of an axis, given in each run, takes the same part."""
        length = np.array(sizes)
        for ends_at in (starts, ends):
            bound = np.array(ends_at)
            if abs(bound).max(initial=0) < NO_END:
                from_end = np.where(bound < 0, bound + length, length - bound)
                self._zeros([from_end], continuous=True)

    def _check(
        self, node: ir.Node, inputs: Sequence[Arrays | None], results: Sequence[Arrays]
    ) -> None:
        kind, given = node.op_type, [arrays for arrays in inputs if arrays is not None]
        first = given[0]
        if kind in _COMPARING or kind in _BRANCHING:
            others = given[1:] or [tuple(np.zeros_like(array) for array in first)]
            for other in others:
                self._compare(first, other, continuous=kind in _BRANCHING)
        elif kind in _ROUNDING:
            self._round(first, results[0])
        elif kind == "Div" and first[0].dtype.kind in "iu":
            if any((a % b).any() for a, b in zip(first, given[1], strict=True)):
                raise Refusal(_STEPS)
        elif kind in _SMOOTH:
            pairs = zip(results[0][::2], results[0][1::2], strict=True)
            if any((one == other).all() for one, other in (_common(*pair) for pair in pairs)):
                raise Refusal(_STEPS)
        elif kind not in _LINEAR | _LOOKING_UP:
            raise Refusal(_STEPS)

    def _round(self, before: Arrays, after: Arrays) -> None:
        if after[0].dtype.kind == "b":
            zeros = tuple(np.zeros_like(array) for array in before)
            self._compare(before, zeros, continuous=False)
        elif not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
            raise Refusal(_STEPS)

    def _slice(self, inputs: Sequence[Arrays | None]) -> bool:
        """Note the bounds of a Slice; return whether it takes a part counted from the end."""
        data, starts, ends, *rest = inputs
        assert data is not None and starts is not None and ends is not None
        given = None if not rest or rest[0] is None else rest[0][0].tolist()
        axes = range(starts[0].size) if given is None else given
        from_end = False
        for i, axis in enumerate(axes):
            along = axis_of(int(axis), data[0].ndim)
            sizes = [array.shape[along] for array in data]
            first, last = ([int(n.reshape(-1)[i]) for n in each] for each in (starts, ends))
            self.slice(sizes, first, last)
            from_end |= len(set(sizes)) > 1 and min(first) < 0
        return from_end

    def _looks_up(self, inputs: Sequence[Arrays | None], counted: Sequence[bool]) -> bool:
        """Whether numbers are taken from the end; refused if the length says which."""
        if counted[1]:
            raise Refusal(_STEPS)
        indices = inputs[1]
        assert indices is not None
        return any((array < 0).any() for array in indices)

    def _reduces_positions(
        self, inputs: Sequence[Arrays | None], results: Sequence[Arrays]
    ) -> bool:
        """Whether a reduction of other numbers is along the length, which it then counts."""
        data = inputs[0]
        assert data is not None
        return len({array.size for array in data}) > len({a.size for a in results[0]})

    def _compare(self, one: Arrays, other: Arrays, continuous: bool) -> None:
        wide = (np.asarray(a, np.float64) - b for a, b in zip(one, other, strict=True))
        differences = tuple(wide)
        if not self.varies([differences]):
            return
        if len({array.shape for array in differences}) == 1:
            numbers = np.stack([array.reshape(-1) for array in differences], axis=1)
            if len(numbers) <= _MAX_NUMBERS:
                self._zeros(numbers, continuous)
                return
        ends = [[f(array) for array in differences] for f in (np.min, np.max)]
        if min(ends[0]) > 0 or max(ends[1]) < 0:
            self._zeros(np.array(ends), continuous)
        # Else the runs show it: at some position the branch changes with any length.

    def _zeros(self, numbers: Iterable[Any], continuous: bool) -> None:
        """Note for which lengths numbers, given in each run, become 0."""
        length, batch = np.array(self.runs.length), np.array(self.runs.batch)
        terms = np.stack([length, np.ones_like(length), batch, batch * length], axis=1)
        for each in np.asarray(list(numbers), np.float64):
            if np.array_equal(each[::2], each[1::2]):
                continue  # whatever it depends on, not the length
            (slope, start, *rows), *_ = np.linalg.lstsq(terms, each, rcond=None)
            if not np.allclose(terms @ [slope, start, *rows], each, rtol=_TINY, atol=_TINY):
                raise Refusal(_STEPS)
            sign = math.copysign(1, each[0])
            grows = min(sign * n for n in (slope, *rows)) > -_TINY
            if grows and np.all(np.sign(each) == sign):
                continue
            if max(map(abs, rows)) > _TINY:
                raise Refusal(_STEPS)
            self._step(-start / slope, continuous)

    def _step(self, length: float, continuous: bool) -> None:
        length = round(length, 4)
        if length <= max(self.runs.length):
            self.within.add(length)
            return
        last = math.floor(length) if continuous else math.ceil(length) - 1
        self.longest = min(self.longest, last)


def _common(one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the parts of two arrays that both have, counted from the front."""
    if one.ndim != other.ndim:
        return one, other
    part = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return one[part], other[part]
