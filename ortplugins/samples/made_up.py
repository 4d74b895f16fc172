# SPDX-License-Identifier: MIT
"""Inputs made up for a model whose user has no data at hand.

Only float inputs and token ids are random. A mask is all ones, positions count up, a cache is
empty: anything else would run, and show activations that no real input has. Dimensions that
the model leaves open get their sizes by what they count
(:mod:`rewrite_rules.facts.input_roles`):

    batch      1
    past       0     the length of a cache
    sequence  32     new tokens
    total      past + sequence
    source    32     what an encoder reads
    others    32     or what the model turns out to take, if it can be run

A model with a cache gets two feeds for each sample: tokens without a past, then one token
behind a past of as many, made up like all else.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import ModelFileError, UsageError
from rewrite_rules.closest_name import did_you_mean
from rewrite_rules.facts.input_roles import (
    Kind,
    Role,
    cache_sizes,
    is_open,
    role_of,
    rows_below,
)
from rewrite_rules.shapes.proved_shapes import ProvedShapes

Feed = dict[str, npt.NDArray[Any]]
Outputs = Mapping[str, npt.NDArray[Any]]
Run = Callable[[Feed], Outputs]
"""Runs a model: inputs by name to outputs by name."""

_DEFAULTS = {"batch": 1, "past": 0, "layers": 1}
_LENGTH = 32
# What axes count that has no default.
_FREE = ("", "heads", "head_size", "width")
# What images and windows of audio are tried with; 32 has failed when these are.
_CANDIDATES = (64, 224, 48, 320, 640, 1, 128, 256, 512, 576, 1536, 16000)
_MAX_ATTEMPTS = 60
_MAX_ELEMENTS = 1 << 21
# Ids stay below this where no table says how many rows it has.
_IDS = 10
_SAMPLES_PER_SECOND = 16000


class MadeUpInputs:
    """Sizes for the open dimensions of a model's inputs, and feeds of these sizes."""

    def __init__(
        self,
        graph: ir.Graph,
        dims: Mapping[str, int] | None = None,
        *,
        length: int = _LENGTH,
    ) -> None:
        """Choose sizes.

        Args:
            graph: Which has the inputs, and says how many rows a table and heads a cache has.
            dims: Sizes by name of the dimension, ``"x[1]"`` for the second axis of input x if
                it has none, or by what it counts: ``"sequence"``, ``"past"``.
            length: What ``sequence``, ``source`` and others are by default.
        """
        shapes = ProvedShapes(ir.Model(graph, ir_version=10), on_demand=True)
        self._inputs = [(value, role_of(value)) for value in fed_inputs(graph)]
        self._labels = {label for _, role in self._inputs for label in role.axes} - {*_FREE}
        # What each dimension without a size counts, and its size where readers have one: one
        # name is one size, also at inputs that do not say what it counts.
        self._counted: dict[str, str] = {}
        self._known: dict[str, int] = {}
        for value, role in self._inputs:
            known = cache_sizes(value, shapes) if role.kind is Kind.CACHE else {}
            for name, label in zip(_dimension_names(value), role.axes, strict=True):
                if name and (label not in _FREE or name not in self._counted):
                    self._counted[name] = label
                if name and label in known:
                    self._known.setdefault(name, known[label])
        self._given = dict(dims or {})
        self._check_given()
        self._length, self._tried = length, dict[str, int]()
        chosen = {
            label: self._given[name]
            for name, label in self._counted.items()
            if label and name in self._given
        }
        chosen |= {k: v for k, v in self._given.items() if k in self._labels}
        self._by_label = {**_DEFAULTS, "sequence": length, "source": length, **chosen}
        if "total" in chosen and "past" not in chosen:
            new = min(chosen["total"], self._by_label["sequence"])
            self._by_label |= {"past": chosen["total"] - new, "sequence": new}

    def feeds(self, count: int = 1, *, seed: int = 0, steps: bool = False) -> Iterator[Feed]:
        """Yield ``count`` samples, the same for a seed.

        With ``steps``, one more token comes behind each, where there is a cache and no size
        was given.
        """
        rng = np.random.default_rng(seed)
        past, new = self._by_label["past"], self._by_label["sequence"]
        step = copy.copy(self)
        step._by_label = {**self._by_label, "past": past + new, "sequence": 1}
        shapes = [[each._shape(value) for value, _ in self._inputs] for each in (self, step)]
        roles = (role for _, role in self._inputs)
        has_cache = any(role.kind is Kind.CACHE and "past" in role.axes for role in roles)
        has_steps = steps and has_cache and not self._given and shapes[0] != shapes[1]
        for _ in range(count):
            yield self._feed(rng)
            if has_steps:
                yield step._feed(rng)

    def fit(self, run: Run, attempts: int = _MAX_ATTEMPTS) -> tuple[Feed, Outputs]:
        """Find sizes that the model runs with, where nothing is known of them.

        Returns the first of :meth:`feeds` of these sizes, with seed 0, and its outputs.

        Raises:
            ModelFileError: If none is found, or an input takes strings.
        """
        for value, _ in self._inputs:
            if value.dtype is ir.DataType.STRING:
                raise ModelFileError(
                    f"input {value.name!r} takes strings, which cannot be made up: "
                    "give samples"
                )
        # Nothing is known of them, neither by their role nor by the user.
        open_names = [
            name
            for name, label in self._counted.items()
            if label in _FREE and name not in self._known and name not in self._given
        ]
        tries: list[tuple[int, ...]] = [()]
        tries += [(size,) * len(open_names) for size in _CANDIDATES if open_names]
        if len(open_names) > 1:
            few = (_LENGTH, *_CANDIDATES[:5])
            tries += list(itertools.product(few, repeat=min(len(open_names), 3)))
        error: Exception | None = None
        self._tried = dict.fromkeys(open_names, 1)
        limit = max(self._most_elements(), _MAX_ELEMENTS)  # known sizes are as they are
        for sizes in tries[:attempts]:
            self._tried = dict(zip(open_names, sizes, strict=False))
            if self._most_elements() > limit:
                continue
            try:
                feed = self._feed(np.random.default_rng(0))
                return feed, run(feed)
            except Exception as found:  # onnxruntime's own classes, none of them documented
                error = error or found
        named = [*open_names, *self._counted]
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = "" if error is None else f"; onnxruntime says: {lines[0][:300]}"
        ask = f"the size of {named[0]!r} (--dims {named[0]}=SIZE) or " if named else ""
        raise ModelFileError(f"made-up inputs do not run: give {ask}samples{why}") from error

    def _check_given(self) -> None:
        known = list(self._counted)
        for name, size in self._given.items():
            if name not in known and name not in self._labels:
                listed = ", ".join(map(repr, known)) or "no symbolic dimension"
                hint = did_you_mean(name, known) or f"; it has {listed}"
                raise UsageError(f"dimension {name!r} is in no input of the model{hint}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise UsageError(
                    f"dimension {name!r} is {size!r}; expected 0 or a positive int"
                )

    def _shape(self, value: ir.Value) -> tuple[int, ...]:
        if value.shape is None:
            return (1, self._length)
        sized = zip(value.shape, _dimension_names(value), strict=True)
        return tuple(
            self._size(name) if name or not isinstance(dim, int) else dim
            for dim, name in sized
        )

    def _most_elements(self) -> int:
        """Elements of the largest input."""
        return max((math.prod(self._shape(value)) for value, _ in self._inputs), default=0)

    def _size(self, name: str) -> int:
        if name in self._given:
            return self._given[name]
        label = self._counted[name]
        if label == "total":
            return self._by_label["past"] + self._by_label["sequence"]
        if label not in _FREE:
            return self._by_label[label]
        return self._known.get(name, self._tried.get(name, self._length))

    def _feed(self, rng: np.random.Generator) -> Feed:
        past, new = self._by_label["past"], self._by_label["sequence"]
        return {
            value.name or "": _values(value, role, self._shape(value), past, new, rng)
            for value, role in self._inputs
        }


def _values(
    value: ir.Value,
    role: Role,
    shape: Sequence[int],
    past: int,
    new: int,
    rng: np.random.Generator,
) -> npt.NDArray[Any]:
    """Make up what an input of this shape holds where ``new`` tokens follow ``past`` ones."""
    dtype = value.dtype or ir.DataType.FLOAT
    if dtype is ir.DataType.STRING:
        return np.full(shape, "text")
    floating = dtype.is_floating_point()
    fixed = {
        Kind.MASK: 1,
        Kind.BIAS: not floating,  # 0 lets a token count
        Kind.POSITIONS: np.arange(past, past + shape[-1]) if shape else past,
        Kind.ZEROS: 0,
        Kind.LAST: past + new - 1,
        Kind.TOTAL: past + new,
        Kind.RATE: _SAMPLES_PER_SECOND,
        Kind.HAS_PAST: past > 0,
    }
    array: npt.NDArray[Any]
    if role.kind in fixed:
        array = np.broadcast_to(fixed[role.kind], shape)
    elif floating:
        array = rng.standard_normal(shape, np.float32)
    elif dtype is ir.DataType.BOOL:
        array = np.ones(shape)
    else:
        array = rng.integers(0, rows_below(value) or _IDS, shape)
    return array.astype(dtype.numpy())


def _dimension_names(value: ir.Value) -> list[str]:
    """Names of a value's dimensions: ``"x[1]"`` for one without, empty for a size."""
    return [
        ""
        if not is_open(dim)
        else f"{value.name}[{axis}]"
        if isinstance(dim, int) or dim.value in (None, "", "?")
        else dim.value
        for axis, dim in enumerate(value.shape or ())
    ]


def fed_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs that have to be fed: older models list their weights, too."""
    return [value for value in graph.inputs if not value.is_initializer()]
