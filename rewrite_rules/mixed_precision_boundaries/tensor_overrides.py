# SPDX-License-Identifier: MIT
"""What a user wants of the quantisation of single activations: overrides, checked.

The fields are those of ``TensorQuantOverrides`` in onnxruntime's quantiser, as plain values,
but for those of initializers: what weights are stored as is chosen for all of them. Checked
against what the model has, before anything changes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rewrite_rules.closest_name import did_you_mean

# onnx_ir is not imported when this module is: a session that comes from the cache reads its
# overrides, too.
if TYPE_CHECKING:
    import onnx_ir as ir

# What a fixed scale and zero point leave no room for.
_RANGE_FIELDS = ("symmetric", "rmin", "rmax")
_MAX_PROBLEMS = 10


class OverrideError(ValueError):
    """An override asks for what can't be; the text names the tensor or node and says why."""


@dataclasses.dataclass(frozen=True)
class TensorOverride:
    """How an activation is to be quantised; None: as it is.

    Attributes:
        quant_type: Type of the codes.
        scale: Step between two codes; with ``zero_point`` or not at all.
        zero_point: Code of the value 0.
        symmetric: Whether the range is made symmetric about 0.
        rmin: Smallest value, instead of the calibrated one.
        rmax: Greatest value.
        convert: The second type, for some of its consumers.
        recv_nodes: In a ``convert``: names of the consumers that get it (unnamed nodes are
            called by their first output); None: all.
    """

    quant_type: ir.DataType | None = None
    scale: float | None = None
    zero_point: int | None = None
    symmetric: bool | None = None
    rmin: float | None = None
    rmax: float | None = None
    convert: TensorOverride | None = None
    recv_nodes: frozenset[str] | None = None


# By tensor; those that ask for nothing are left out.
Overrides = Mapping[str, TensorOverride]


class Activation(NamedTuple):
    """A tensor that is, or will be, quantised per tensor, as overrides are checked against it.

    ``quant_type`` is that without an override, if known; Q and DQ are not among its consumers.
    """

    quant_type: ir.DataType | None
    consumers: frozenset[str]


def check_overrides(
    overrides: Overrides, activations: Mapping[str, Activation], nodes: Collection[str]
) -> None:
    """Check every entry against the model, by names of activations and nodes.

    Raises:
        OverrideError: With the first ten things wrong, a line each.
    """

    def problems_of(name: str, entry: TensorOverride) -> Iterator[str]:
        if (activation := activations.get(name)) is not None:
            yield from _problems(entry, activation, nodes)
        else:
            hint = did_you_mean(name, [*activations])
            yield f"no activation of that name is quantised in the model{hint}"

    problems = (
        f"override of tensor {name!r}: {problem}"
        for name, entry in overrides.items()
        for problem in problems_of(name, entry)
    )
    # Looking for close matches takes its time: of a hundred stale names, no more than these.
    if found := list(itertools.islice(problems, _MAX_PROBLEMS + 1)):
        more = ["and more"] if len(found) > _MAX_PROBLEMS else []
        raise OverrideError("\n".join(found[:_MAX_PROBLEMS] + more))


def _problems(
    entry: TensorOverride, activation: Activation, nodes: Collection[str]
) -> Iterator[str]:
    yield from _entry_problems(entry, activation.quant_type)
    if entry.recv_nodes is not None:
        yield "'recv_nodes' stands outside of 'convert': it says who reads the converted type"
    if (convert := entry.convert) is None:
        return
    problems = list(_entry_problems(convert, None))
    own = entry.quant_type or activation.quant_type
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


def _entry_problems(entry: TensorOverride, own: ir.DataType | None) -> Iterator[str]:
    """What is wrong with an entry by itself."""
    quant_type = entry.quant_type or own
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
