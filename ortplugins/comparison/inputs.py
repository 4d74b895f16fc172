# SPDX-License-Identifier: MIT
"""Inputs that two models are run on: the user's, or random ones of the right kind."""

from __future__ import annotations

__all__ = ["Inputs", "comparison_feeds", "example_feed", "with_sizes"]

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import ModelFileError, UsageError
from ortplugins.samples.random import random_feeds
from ortplugins.samples.sources import CalibrationSource, KeptSamples
from rewrite_rules.closest_name import did_you_mean
from session_options import OptionError

Inputs = Mapping[str, Any] | CalibrationSource

_TYPES = {
    "float": "FLOAT", "float16": "FLOAT16", "double": "DOUBLE", "bool": "BOOL",
    "string": "STRING", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32",
    "uint64": "UINT64",
}  # fmt: skip


def comparison_feeds(
    session: onnxruntime.InferenceSession,
    inputs: Inputs,
    *,
    scratch: Path,
    dims: Mapping[str, int] | None = None,
    samples: int = 1,
    seed: int = 0,
) -> KeptSamples:
    """Return feeds of a model, each checked against its inputs.

    Args:
        session: A session on the model.
        inputs: A sample (input name -> array), an iterable of them, the path of an .npz file,
            or None for random ones.
        scratch: An existing folder, to be kept as long as the feeds are used.
        dims: As for :func:`with_sizes`, of random inputs. Other dimensions are guessed as in
            :mod:`.random`.
        samples: How many random samples.
        seed: Of the random samples.

    Raises:
        CalibrationError: If a given input does not fit, when the feeds are read; names it.
        ModelFileError: If no input of a kind can be made up or given.
        UsageError: If ``dims`` names no dimension, has a size that is none, or comes with
            given inputs; if ``samples`` is not positive.
    """
    values = [_value(item) for item in session.get_inputs()]
    if samples < 1:
        raise UsageError(f"samples is {samples}: 1 or more is expected")
    source: Any
    if inputs is None:
        for value in values:
            if value.dtype is ir.DataType.STRING:
                raise ModelFileError(
                    f"input {value.name!r} takes strings, which cannot be made up: give inputs"
                )
        source = random_feeds(with_sizes(values, dims or {}), count=samples, seed=seed)
    elif dims:
        raise UsageError("dims are for random inputs, and inputs are given: leave one out")
    else:
        source = [inputs] if isinstance(inputs, Mapping) else inputs
    optional = [_value(item) for item in session.get_overridable_initializers()]
    graph = ir.Graph([*values, *optional], [], nodes=[], name="inputs")
    for value in optional:  # may be left out of a sample
        graph.initializers[value.name or ""] = value
    return KeptSamples(source, ir.Model(graph, ir_version=10), scratch=scratch)


def example_feed(
    model: ir.Model, dims: Mapping[str, int]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, int]]:
    """Make an input for each input of a model, random where that makes sense.

    Args:
        model: The model.
        dims: Sizes of symbolic dimensions; others are guessed as
            :mod:`.random` says.

    Returns:
        The arrays, and the size that each named dimension got.

    Raises:
        OptionError: If no input has a dimension of ``dims``.
        ModelFileError: If an input is no tensor.
    """
    inputs = []
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue  # may be left out
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise ModelFileError(f"input {value.name!r} is a {type(value.type).__name__}")
        inputs.append(value)
    try:
        sized = with_sizes(inputs, dims)
    except ValueError as error:
        raise OptionError(str(error)) from None
    feed = next(iter(random_feeds(sized, count=1)))
    sizes = {
        dim.value: size
        for value in inputs
        for dim, size in zip(value.shape or (), feed[value.name or ""].shape, strict=False)
        if isinstance(dim, ir.SymbolicDim) and dim.value
    }
    return feed, sizes


def _value(item: Any) -> ir.Value:
    kind = item.type.removeprefix("tensor(").removesuffix(")")
    if not item.type.startswith("tensor(") or kind not in _TYPES:
        raise ModelFileError(
            f"input {item.name!r} is {item.type}: models whose inputs are tensors of numpy's "
            "types can be compared"
        )
    dtype = ir.DataType[_TYPES[kind]]
    return ir.Value(name=item.name, shape=ir.Shape(item.shape), type=ir.TensorType(dtype))


def with_sizes(values: Sequence[ir.Value], dims: Mapping[str, int]) -> list[ir.Value]:
    """Copy values with numbers for the dimensions that are named.

    Args:
        values: Inputs of a model; not changed.
        dims: Sizes by name, ``"x[1]"`` for the second axis of input x if it has none; a sum of
            named dimensions ("past + seq") follows from its parts.

    Raises:
        UsageError: If no input has such a dimension, or a size is none.
    """
    names = dict.fromkeys(part for value in values for part in _parts(value))
    for name, size in dims.items():
        if name not in names:
            hint = did_you_mean(name, names) or f"; it has {_listed(names)}"
            raise UsageError(f"dimension {name!r} is in no input of the model{hint}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise UsageError(
                f"dimension {name!r} is {size!r}: 0 or a positive int is expected"
            )
    return [
        ir.Value(name=value.name, type=value.type, shape=_sizes(value, dims))
        for value in values
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "no symbolic dimension"


def _symbols(value: ir.Value) -> list[str]:
    """Names of a value's dimensions: ``"x[1]"`` for one without, empty for a number."""
    return [
        # PaddlePaddle writes -1 for an open dimension.
        ("" if dim >= 0 else f"{value.name}[{axis}]")
        if isinstance(dim, int)
        else dim.value or f"{value.name}[{axis}]"
        for axis, dim in enumerate(value.shape or ())
    ]


def _parts(value: ir.Value) -> list[str]:
    """Names of a value's dimensions, and those that a sum is made of."""
    return [
        name
        for symbol in _symbols(value)
        for name in dict.fromkeys([symbol, *map(str.strip, symbol.split("+"))])
        if name
    ]


def _sizes(value: ir.Value, dims: Mapping[str, int]) -> ir.Shape | None:
    if value.shape is None:
        return None
    chosen = [_size(symbol, dims) for symbol in _symbols(value)]
    return ir.Shape(
        [dim if size is None else size for dim, size in zip(value.shape, chosen, strict=True)]
    )


def _size(symbol: str, dims: Mapping[str, int]) -> int | None:
    """Size of a dimension; None where nothing is said of it."""
    if symbol in dims:
        return dims[symbol]
    parts = [part.strip() for part in symbol.split("+")]
    if any(part in dims for part in parts) and all(
        part in dims or part.isdecimal() or "past" in part.lower() for part in parts
    ):
        # A cache of which nothing is said is empty, as it is where inputs are made up.
        return sum(dims.get(part, int(part) if part.isdecimal() else 0) for part in parts)
    return None
