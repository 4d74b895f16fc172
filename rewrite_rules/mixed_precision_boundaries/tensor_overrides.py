# SPDX-License-Identifier: MIT
"""What a user wants of the quantisation of single tensors: onnxruntime's overrides, checked.

The fields are those of ``TensorQuantOverrides`` in onnxruntime's quantiser, as plain values.
onnxruntime checks the first entry and believes the others; here all are checked, against what
the model has, before anything changes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rewrite_rules.closest_name import did_you_mean

# onnx_ir is not imported when this module is: a session that comes from the cache reads its
# overrides, too.
if TYPE_CHECKING:
    import onnx_ir as ir

_ACTIVATION_TYPES = ("UINT8", "INT8", "UINT16", "INT16")
_INITIALIZER_TYPES = (*_ACTIVATION_TYPES, "UINT4", "INT4")
_FOR_INITIALIZERS = "is for initializers, and it is an activation"
_FOR_ACTIVATIONS = "is for activations, and it is an initializer"
# Fields that have no place in an entry, by its kind.
_MISPLACED = {
    "activation": {
        "reduce_range": _FOR_INITIALIZERS,
        "recv_nodes": "stands outside of 'convert': it says who reads the converted type",
    },
    "convert": {
        "reduce_range": _FOR_INITIALIZERS,
        "axis": _FOR_INITIALIZERS,
    },
    "initializer": {"convert": _FOR_ACTIVATIONS, "recv_nodes": _FOR_ACTIVATIONS},
}
# What a fixed scale and zero point leave no room for.
_RANGE_FIELDS = ("symmetric", "reduce_range", "rmin", "rmax")
# What all channels of an initializer have in common, and what each has for itself.
_COMMON_FIELDS = ("quant_type", "axis", "symmetric", "reduce_range")
_CHANNEL_FIELDS = ("scale", "zero_point", "rmin", "rmax")
_MAX_PROBLEMS = 10


class OverrideError(ValueError):
    """An override asks for what can't be; the text names the tensor or node and says why."""


@dataclasses.dataclass(frozen=True)
class TensorOverride:
    """How a tensor (or one channel of an initializer) is to be quantised; None: as it is.

    Attributes:
        quant_type: Type of the codes.
        scale: Step between two codes; with ``zero_point`` or not at all.
        zero_point: Code of the value 0.
        symmetric: Whether the range is made symmetric about 0.
        reduce_range: Whether one bit is left unused; initializers only.
        rmin: Smallest value, instead of the calibrated one.
        rmax: Greatest value.
        axis: Of an initializer quantised per channel.
        convert: The second type of an activation, for some of its consumers.
        recv_nodes: In a ``convert``: names of the consumers that get it (unnamed nodes are
            called by their first output); None: all.
    """

    quant_type: ir.DataType | None = None
    scale: float | None = None
    zero_point: int | None = None
    symmetric: bool | None = None
    reduce_range: bool | None = None
    rmin: float | None = None
    rmax: float | None = None
    axis: int | None = None
    convert: TensorOverride | None = None
    recv_nodes: frozenset[str] | None = None


# Per tensor: one entry, or one for each channel of an initializer; those that ask for nothing
# are left out.
Overrides = Mapping[str, tuple[TensorOverride, ...]]


class Activation(NamedTuple):
    """A tensor that is, or will be, quantised per tensor, as overrides are checked against it.

    ``quant_type`` is that without an override, if known; Q and DQ are not among its consumers.
    """

    quant_type: ir.DataType | None
    consumers: frozenset[str]


def check_overrides(
    overrides: Overrides,
    activations: Mapping[str, Activation],
    initializers: Mapping[str, Sequence[int]],
    nodes: Collection[str],
) -> None:
    """Check every entry against the model, by names of activations, initializers and nodes.

    Raises:
        OverrideError: With the first ten things wrong, a line each.
    """

    def problems_of(name: str, entries: tuple[TensorOverride, ...]) -> Iterator[str]:
        if (activation := activations.get(name)) is not None:
            yield from _activation_problems(entries, activation, nodes)
        elif name in initializers:
            yield from _initializer_problems(entries, tuple(initializers[name]))
        else:
            hint = did_you_mean(name, [*activations, *initializers])
            yield f"no tensor of that name is quantised in the model{hint}"

    problems = (
        f"override of tensor {name!r}: {problem}"
        for name, entries in overrides.items()
        for problem in problems_of(name, entries)
    )
    # Looking for close matches takes its time: of a hundred stale names, no more than these.
    if found := list(itertools.islice(problems, _MAX_PROBLEMS + 1)):
        more = ["and more"] if len(found) > _MAX_PROBLEMS else []
        raise OverrideError("\n".join(found[:_MAX_PROBLEMS] + more))


def _activation_problems(
    entries: tuple[TensorOverride, ...], activation: Activation, nodes: Collection[str]
) -> Iterator[str]:
    first = entries[0]
    if len(entries) > 1 or first.axis is not None:
        yield (
            "it has per-channel entries (several, or an 'axis'), but is not an initializer; "
            "activations are quantised per tensor"
        )
        return
    yield from _entry_problems(first, "activation", activation.quant_type)
    if (convert := first.convert) is None:
        return
    problems = list(_entry_problems(convert, "convert", None))
    own = first.quant_type or activation.quant_type
    if convert.quant_type is None:
        problems.append("'quant_type' is missing: say which type the consumers are to read")
    elif convert.quant_type == own:
        problems.append(
            f"'quant_type' is {_type_name(own)}, which is the tensor's own; it has to be "
            "another, or leave 'convert' out"
        )
    if convert.recv_nodes is not None:
        problems += _consumer_problems(convert.recv_nodes, activation, nodes)
    for problem in problems:
        yield f"'convert': {problem}"


def _consumer_problems(
    names: frozenset[str], activation: Activation, nodes: Collection[str]
) -> Iterator[str]:
    if not names:
        yield "'recv_nodes' is empty: leave it out to convert for all consumers"
    readers = ", ".join(map(repr, sorted(activation.consumers))) or "no node"
    for name in sorted(names - activation.consumers):
        if name in nodes:
            yield f"'recv_nodes': node {name!r} does not read the tensor; {readers} does"
        else:
            hint = did_you_mean(name, activation.consumers) or did_you_mean(name, nodes)
            yield f"'recv_nodes': the model has no node {name!r}{hint}; {readers} reads it"


def _initializer_problems(
    entries: tuple[TensorOverride, ...], shape: tuple[int, ...]
) -> Iterator[str]:
    first = entries[0]
    for index, entry in enumerate(entries):
        where = f"entry {index}: " if len(entries) > 1 else ""
        for problem in _entry_problems(entry, "initializer", first.quant_type):
            yield where + problem
    if first.axis is None:
        if len(entries) > 1:
            yield f"it has {len(entries)} entries, but the first has no 'axis' of the channels"
        return
    if not -len(shape) <= first.axis < len(shape):
        yield f"'axis' is {first.axis}, but the initializer's rank is {len(shape)}"
        return
    channels = shape[first.axis]
    if len(entries) not in (1, channels):
        yield (
            f"it has {len(entries)} entries, but axis {first.axis} of shape {list(shape)} has "
            f"{channels} channels: give one entry for each, or one for all"
        )
    if (first.rmin is None) != (first.rmax is None):
        yield "'rmin' and 'rmax' of channels come together or not at all"
    for index, entry in enumerate(entries[1:], 1):
        for problem in _channel_problems(entry, first, len(shape)):
            yield f"entry {index}: {problem}"


def _channel_problems(
    entry: TensorOverride, first: TensorOverride, rank: int
) -> Iterator[str]:
    """What channels have to share: types, and which parameters they give."""
    for field in _COMMON_FIELDS:
        ours, theirs = getattr(entry, field), getattr(first, field)
        same = ours == theirs or (field == "axis" and (ours or 0) % rank == theirs % rank)
        if ours is not None and not same:
            yield f"{field!r} differs from that of entry 0"
    for field in _CHANNEL_FIELDS:
        if (getattr(entry, field) is None) != (getattr(first, field) is None):
            yield f"{field!r} is given for all channels or for none"


def _entry_problems(
    entry: TensorOverride, kind: str, own: ir.DataType | None
) -> Iterator[str]:
    """What is wrong with an entry by itself."""
    for field, reason in _MISPLACED[kind].items():
        if getattr(entry, field) is not None:
            yield f"{field!r} {reason}"
    quant_type = entry.quant_type or own
    is_initializer = kind == "initializer"
    types = _INITIALIZER_TYPES if is_initializer else _ACTIVATION_TYPES
    if entry.quant_type is not None and entry.quant_type.name not in types:
        noun = "an initializer" if is_initializer else "an activation"
        yield (
            f"'quant_type' is {_type_name(entry.quant_type)}; {noun} is one of "
            f"{', '.join(types).lower()}"
        )
        quant_type = None
    if (entry.scale is None) != (entry.zero_point is None):
        given, missing = ("scale", "zero_point")[:: -1 if entry.scale is None else 1]
        yield f"{given!r} is given without {missing!r}: give both, or neither"
    beside = [field for field in _RANGE_FIELDS if getattr(entry, field) is not None]
    if beside and (entry.scale is not None or entry.zero_point is not None):
        fields = ", ".join(map(repr, beside))
        yield f"{fields} can't stand beside 'scale' and 'zero_point', which fix the range"
    # As float32, the widest type that models store scales in.
    if entry.scale is not None and not np.float32(entry.scale) > 0:
        yield f"'scale' is {entry.scale}; it has to be a positive float32"
    if entry.zero_point is not None and quant_type is not None:
        low, high = quant_type.min, quant_type.max
        if not low <= entry.zero_point <= high:
            yield (
                f"'zero_point' is {entry.zero_point}, outside of {_type_name(quant_type)}'s "
                f"range {low}..{high}"
            )
    if entry.rmin is not None and entry.rmax is not None and entry.rmin > entry.rmax:
        yield f"'rmin' is {entry.rmin}, above 'rmax' {entry.rmax}"


def _type_name(quant_type: ir.DataType | None) -> str:
    return "unknown" if quant_type is None else quant_type.name.lower()
