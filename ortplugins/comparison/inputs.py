# SPDX-License-Identifier: MIT
"""Inputs that two models are run on: the user's, or made up."""

from __future__ import annotations

__all__ = ["Inputs", "comparison_feeds", "example_feed", "quiet_runner"]

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from ortplugins.comparison.given_model import GivenModel
from ortplugins.errors import ModelFileError, UsageError
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.made_up import MadeUpInputs, Run
from ortplugins.samples.sources import CalibrationSource, Feed
from ortplugins.samples.text import TextSamples
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
            or None to make them up.
        scratch: An existing folder, to be kept as long as the feeds are used.
        dims: As for :class:`.MadeUpInputs`.
        samples: How many to make up; two feeds each of a model with a cache.
        seed: Of those that are made up.

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
        run = quiet_runner(session)
        made = MadeUpInputs(_with_uses(values, session), dims)
        made.fit(run)
        source = made.feeds(samples, seed=seed, run=run)
    elif dims:
        raise UsageError("dims are for random inputs, and inputs are given: leave one out")
    elif isinstance(inputs, TextSamples):
        source = inputs.feeds(_with_uses(values, session))
    else:
        source = [inputs] if isinstance(inputs, Mapping) else inputs
    optional = [_value(item) for item in session.get_overridable_initializers()]
    graph = ir.Graph([*values, *optional], [], nodes=[], name="inputs")
    for value in optional:  # may be left out of a sample
        graph.initializers[value.name or ""] = value
    return KeptSamples(source, ir.Model(graph, ir_version=10), scratch=scratch)


def example_feed(
    model: ir.Model, dims: Mapping[str, int], run: Run | None = None
) -> tuple[Feed, dict[str, int]]:
    """Make up an array for each input of a model.

    Args:
        model: The model.
        dims: As for :class:`.MadeUpInputs`.
        run: Runs the model, to find sizes that it takes.

    Returns:
        The arrays, and the size that each named dimension got.

    Raises:
        OptionError: If no input has a dimension of ``dims``.
        ModelFileError: If an input is not a tensor, or inputs that run cannot be made up.
    """
    inputs = []
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue  # may be left out
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise ModelFileError(f"input {value.name!r} is a {type(value.type).__name__}")
        inputs.append(value)
    try:
        made = MadeUpInputs(inputs, dims)
    except UsageError as error:
        raise OptionError(str(error)) from None
    if run is not None:
        made.fit(run)
    return next(made.feeds()), made.sizes


def _value(item: Any) -> ir.Value:
    kind = _kind(item)
    if not item.type.startswith("tensor(") or kind not in _TYPES:
        raise ModelFileError(
            f"input {item.name!r} is {item.type}: models whose inputs are tensors of numpy's "
            "types can be compared"
        )
    dtype = ir.DataType[_TYPES[kind]]
    return ir.Value(name=item.name, shape=ir.Shape(item.shape), type=ir.TensorType(dtype))


def quiet_runner(session: onnxruntime.InferenceSession) -> Run:
    """Return what runs a session, without onnxruntime's log where inputs do not fit."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    names = [item.name for item in session.get_outputs() if _kind(item) in _TYPES]
    if not names:  # [] would fetch the others, which numpy cannot hold
        return lambda feed: {}
    return lambda feed: dict(zip(names, session.run(names, feed, options), strict=True))


def _kind(item: Any) -> str:
    """Return ``float`` of ``tensor(float)``."""
    return str(item.type).removeprefix("tensor(").removesuffix(")")


def _with_uses(values: Sequence[ir.Value], session: Any) -> Sequence[ir.Value]:
    """Return the values as inputs of their graph, where the session's model is at hand."""
    try:
        graph = GivenModel(session).graph().graph
    except ModelFileError:
        return values
    inputs = {value.name: value for value in graph.inputs}
    return [inputs.get(value.name, value) for value in values]
