# SPDX-License-Identifier: MIT
"""Inputs made up for a model whose user has no data at hand.

Only float inputs and token ids are random. A mask is all ones, positions count up, a cache is
empty: anything else would run, and show activations that no real input has. Dimensions that
the model leaves open get their sizes by what they count (:mod:`.roles`):

    batch      1
    past       0     the length of a cache
    sequence  32     new tokens
    total      past + sequence
    source    32     what an encoder reads
    others    32     or what the model turns out to take, if it can be run

A model with a cache gets two feeds for each sample: tokens without a past, then one token
with the past that the model returned for them.
"""

from __future__ import annotations

__all__ = ["MadeUpInputs", "Run", "next_step"]

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import ModelFileError, UsageError
from ortplugins.samples.roles import Kind, Role, cache_sizes, is_open, role_of, rows_below
from rewrite_rules.closest_name import did_you_mean

_Feed = dict[str, npt.NDArray[Any]]
Run = Callable[[_Feed], Mapping[str, npt.NDArray[Any]]]
"""Runs a model: inputs by name to outputs by name."""

_DEFAULTS = {"batch": 1, "past": 0, "sequence": 32, "source": 32, "layers": 1}
_LENGTH = 32
# What axes count that has no default.
_FREE = ("", "heads", "head_size", "width")
# Ids stay below this where no table says how many rows it has.
_IDS = 10
_RATE = 16000
# What images and windows of audio are tried with; 32 has failed when these are.
_CANDIDATES = (64, 224, 48, 320, 640, 1, 128, 256, 512, 576, 1536, 16000)
_MAX_TRIALS = 60
_MAX_ELEMENTS = 1 << 21


class MadeUpInputs:
    """Sizes for the open dimensions of a model's inputs, and feeds of these sizes.

    Attributes:
        sizes: The size of each named dimension.
    """

    def __init__(
        self,
        inputs: Sequence[ir.Value],
        dims: Mapping[str, int] | None = None,
        *,
        length: int = _LENGTH,
    ) -> None:
        """Choose sizes.

        Args:
            inputs: Tensors that must be fed, with types and shapes; with their uses where the
                graph is at hand, which says how many rows a table and heads a cache has.
            dims: Sizes by name of the dimension, ``"x[1]"`` for the second axis of input x if
                it has none, or by what it counts: ``"sequence"``, ``"past"``. A sum of named
                dimensions ("past + seq") follows from its parts.
            length: What ``sequence``, ``source`` and others are by default.

        Raises:
            UsageError: If no input has such a dimension, or a size is not one.
        """
        self._inputs = list(inputs)
        self._roles = [role_of(value) for value in inputs]
        self._names = [_dimension_names(value) for value in inputs]
        self._given = dict(dims or {})
        self._check_given()
        self._by_label = dict.fromkeys(("sequence", "source"), length)
        self._length, self._tried = length, dict[str, int]()
        for names, role in zip(self._names, self._roles, strict=True):
            for name, label in zip(names, role.axes, strict=True):
                if name and label and name in self._given:
                    self._by_label[label] = self._given[name]
        self._by_label |= {k: v for k, v in self._given.items() if k in self._labels()}
        if "total" in self._by_label and "past" not in self._by_label:
            self._by_label["past"] = self._by_label["total"] - self._by_label["sequence"]
            if self._by_label["past"] < 0:
                self._by_label |= {"past": 0, "sequence": self._by_label["total"]}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each named dimension."""
        found = dict[str, int]()
        for value, names in zip(self._inputs, self._names, strict=True):
            shape = self._shape(value)
            found |= {n: s for n, s in zip(names, shape, strict=False) if n and "[" not in n}
        return found

    def feeds(
        self, count: int = 1, *, seed: int = 0, run: Run | None = None
    ) -> Iterator[_Feed]:
        """Yield ``count`` samples; the same ones for the same seed.

        Args:
            count: How many samples; of a model with a cache, two feeds for each.
            seed: Seed of numpy's default generator.
            run: Runs the model, for the past of second feeds; None for first feeds alone.
        """
        rng = np.random.default_rng(seed)
        for _ in range(count):
            feed = self._feed(rng)
            yield feed
            if run is not None and self._has_cache():
                roles = {
                    value.name or "": role
                    for value, role in zip(self._inputs, self._roles, strict=True)
                }
                step = next_step(feed, run(feed), roles, rng)
                if step is not None:
                    yield step

    def _has_cache(self) -> bool:
        return any(role.kind is Kind.CACHE and "past" in role.axes for role in self._roles)

    def fit(self, run: Run) -> None:
        """Find sizes that the model runs with, for dimensions of which nothing is known.

        Args:
            run: Runs the model; raises where it does not take the inputs.

        Raises:
            ModelFileError: If it takes none of the sizes that were tried; names the dimension
                to give.
        """
        open_names = self._free_names()
        trials: list[tuple[int, ...]] = [()]
        trials += [(size,) * len(open_names) for size in _CANDIDATES if open_names]
        if len(open_names) > 1:
            few = (_LENGTH, *_CANDIDATES[:5])
            trials += list(itertools.product(few, repeat=min(len(open_names), 3)))
        error: Exception | None = None
        for sizes in trials[:_MAX_TRIALS]:
            self._tried = dict(zip(open_names, sizes, strict=False))
            if any(np.prod(self._shape(value)) > _MAX_ELEMENTS for value in self._inputs):
                continue
            try:
                run(self._feed(np.random.default_rng(0)))
            except Exception as found:  # onnxruntime's own classes, none of them documented
                error = error or found
            else:
                return
        named = [*open_names, *(n for names in self._names for n in names if n)]
        why = "" if error is None else f"; onnxruntime says: {_first_line(error)}"
        ask = f"the size of {named[0]!r} (--dims {named[0]}=SIZE) or " if named else ""
        raise ModelFileError(f"made-up inputs do not run: give {ask}samples{why}") from error

    def _free_names(self) -> list[str]:
        """Dimensions that nothing is known of, neither by their role nor by the user."""
        free = dict[str, None]()
        for value, names, role in zip(self._inputs, self._names, self._roles, strict=True):
            known = self._known_sizes(value, role)
            for name, label in zip(names, role.axes, strict=True):
                if name and label in _FREE and label not in known:
                    free[name] = None
        return [name for name in free if self._given_size(name) is None]

    def _known_sizes(self, value: ir.Value, role: Role) -> dict[str, int]:
        return cache_sizes(value) if role.kind is Kind.CACHE else {}

    def _labels(self) -> set[str]:
        return {label for role in self._roles for label in role.axes if label not in _FREE}

    def _check_given(self) -> None:
        names = dict.fromkeys(
            part for found in self._names for name in found for part in (name, *_parts(name))
        )
        known = [name for name in names if name]
        for name, size in self._given.items():
            if name not in known and name not in self._labels():
                listed = ", ".join(map(repr, known)) or "no symbolic dimension"
                hint = did_you_mean(name, known) or f"; it has {listed}"
                raise UsageError(f"dimension {name!r} is in no input of the model{hint}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise UsageError(
                    f"dimension {name!r} is {size!r}: 0 or a positive int is expected"
                )

    def _shape(self, value: ir.Value) -> tuple[int, ...]:
        if value.shape is None:
            return (1, self._length)
        index = self._inputs.index(value)
        role, names = self._roles[index], self._names[index]
        known = self._known_sizes(value, role)
        return tuple(
            dim if isinstance(dim, int) and dim > 0 else self._size(name, label, known)
            for dim, name, label in zip(value.shape, names, role.axes, strict=True)
        )

    def _size(self, name: str, label: str, known: Mapping[str, int]) -> int:
        given = self._given_size(name)
        if given is not None:
            return given
        if label == "total":
            return self._label_size("past") + self._label_size("sequence")
        if label in _FREE:
            return known.get(label, self._tried.get(name, self._length))
        return self._label_size(label)

    def _label_size(self, label: str) -> int:
        return self._by_label.get(label, _DEFAULTS.get(label, self._length))

    def _given_size(self, name: str) -> int | None:
        """Size of a dimension that was given, or that follows from given parts of a sum."""
        if name in self._given:
            return self._given[name]
        parts = _parts(name)
        if any(part in self._given for part in parts) and all(
            part in self._given or part.isdecimal() or "past" in part.lower() for part in parts
        ):
            # A cache of which nothing is said is empty.
            return sum(
                self._given.get(part, int(part) if part.isdecimal() else 0) for part in parts
            )
        return None

    def _feed(self, rng: np.random.Generator) -> _Feed:
        past, new = self._label_size("past"), self._label_size("sequence")
        return {
            value.name or "": _array(value, role.kind, self._shape(value), past, new, rng)
            for value, role in zip(self._inputs, self._roles, strict=True)
        }


def _array(
    value: ir.Value,
    kind: Kind,
    shape: tuple[int, ...],
    past: int,
    new: int,
    rng: np.random.Generator,
) -> npt.NDArray[Any]:
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    floating = value.dtype is None or value.dtype.is_floating_point()
    array: npt.NDArray[Any]
    if value.dtype is ir.DataType.STRING:
        return np.full(shape, "text")
    if kind is Kind.MASK:
        # Of four axes, it is added to the scores: 0 lets a token count.
        array = np.zeros(shape) if floating and len(shape) == 4 else np.ones(shape)
    elif kind is Kind.POSITIONS:
        length = shape[-1] if shape else 1
        array = np.broadcast_to(np.arange(past, past + length), shape)
    elif kind is Kind.ZEROS:
        array = np.zeros(shape)
    elif kind is Kind.LAST:
        array = np.full(shape, past + new - 1)
    elif kind is Kind.TOTAL:
        array = np.full(shape, past + new)
    elif kind is Kind.RATE:
        array = np.full(shape, _RATE)
    elif kind is Kind.HAS_PAST:
        array = np.full(shape, past > 0)
    elif floating:
        array = rng.standard_normal(shape, np.float32)
    elif dtype == np.bool_:
        array = np.ones(shape)
    else:
        array = rng.integers(0, rows_below(value) or _IDS, shape)
    return array.astype(dtype)


def next_step(
    feed: Mapping[str, npt.NDArray[Any]],
    outputs: Mapping[str, npt.NDArray[Any]],
    roles: Mapping[str, Role],
    rng: np.random.Generator,
) -> _Feed | None:
    """Return the feed of one more token, with the past that the model returned.

    Args:
        feed: What was run.
        outputs: What the model returned for it, by name.
        roles: Roles of the inputs, by name.
        rng: Chooses the token.

    Returns:
        The feed; None where the outputs hold no past of the right length.
    """
    new = dict(feed)
    returned = {_cache_key(name): array for name, array in outputs.items()}
    lengths = set()
    for name, role in roles.items():
        if role.kind is Kind.CACHE and "past" in role.axes:
            array = returned.get(_cache_key(name))
            axis = role.axes.index("past")
            if array is None or array.ndim != feed[name].ndim or array is feed[name]:
                return None
            new[name] = array
            lengths.add(array.shape[axis])
    if len(lengths) != 1:
        return None
    past = lengths.pop()
    for name, role in roles.items():
        array = feed[name]
        if role.kind in (Kind.LAST, Kind.TOTAL):
            new[name] = np.full_like(array, past + (role.kind is Kind.TOTAL))
        elif role.kind is Kind.HAS_PAST:
            new[name] = np.ones_like(array)
        elif role.kind is Kind.POSITIONS:
            new[name] = np.full_like(array[..., :1], past)
        elif "sequence" in role.axes and role.kind is not Kind.CACHE:
            axis = role.axes.index("sequence")
            new[name] = np.take(array, [rng.integers(array.shape[axis])], axis)
        if "total" in role.axes:
            axis = role.axes.index("total")
            new[name] = np.repeat(np.take(new[name], [0], axis), past + 1, axis)
    return new


def _cache_key(name: str) -> tuple[str, ...]:
    """What of a name is common to a past and the present that becomes it."""
    rest = re.sub(r"(past|present)(_key_values)?", " ", name.lower())
    return tuple(re.findall(r"\d+|[a-z]+", rest))


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


def _parts(name: str) -> list[str]:
    return [part.strip() for part in name.split("+")] if "+" in name else []


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
