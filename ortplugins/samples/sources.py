# SPDX-License-Identifier: MIT
"""Samples: read from what users give, each checked against the model.

A sample is a dict, input name -> array. A source of samples is one of

    an object with get_next()    onnxruntime's and ModelOpt's readers; None ends the data
    an iterable                  of dicts, of paths, or of both; a generator will do
    a path, or several           of .npz files, each a sample: an array for each input
    TextSamples                  windows of a text, and a tokenizer
    None                         random inputs, with a warning
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import CalibrationError, OrtpluginsWarning
from ortplugins.samples.made_up import Feed, MadeUpInputs
from ortplugins.samples.text import TextSamples
from rewrite_rules.closest_name import did_you_mean


def read_samples(source: Any, model: ir.Model) -> list[Feed]:
    """Return the samples of a source, copied: readers may use their arrays again.

    Inputs that are initializers may be left out.

    Raises:
        CalibrationError: If the source has no samples, or one that does not fit the model's
            inputs; names sample and input.
    """
    inputs = _tensor_inputs(model)
    if source is None:
        warnings.warn(
            "no calibration data, so random inputs are used: they say little about "
            "the activations of real ones; give samples of real inputs [ORP911]",
            OrtpluginsWarning,
            stacklevel=2,
        )
        return list(MadeUpInputs(model.graph).feeds(8))
    if isinstance(source, TextSamples):
        source = source.feeds(model.graph)
    feeds, optional = list[Feed](), frozenset(model.graph.initializers)
    for index, item in enumerate(_samples(source)):
        what, sample = f"sample {index}", item
        if isinstance(item, str | os.PathLike):
            what, sample = f"{what} of {os.fspath(item)!r}", _in_file(item)
        checked = _checked_sample(sample, inputs, optional, what)
        feeds.append({name: np.array(array) for name, array in checked.items()})
    if not feeds:
        raise CalibrationError(
            "calibration data is empty: at least one sample is needed; was the reader or "
            "generator already exhausted?"
        )
    fixed = (0 in (value.shape or ()) for value in inputs.values())
    if not all(fixed) and not any(array.size for feed in feeds for array in feed.values()):
        raise CalibrationError("samples hold only empty arrays: give samples of real inputs")
    return feeds


def _tensor_inputs(model: ir.Model) -> dict[str, ir.Value]:
    inputs = {value.name or "": value for value in model.graph.inputs}
    for name, value in inputs.items():
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise CalibrationError(
                f"input {name!r} is a {type(value.type).__name__}: models whose inputs are "
                "all tensors can be calibrated"
            )
    return inputs


def _samples(source: Any) -> Iterator[Any]:
    """Yield the raw items of a source: samples, or paths of files with one."""
    if hasattr(source, "get_next"):
        while (item := source.get_next()) is not None:
            yield item
    elif isinstance(source, str | os.PathLike):
        yield source
    elif isinstance(source, Mapping):
        raise CalibrationError(
            "calibration data is a dict, which is one sample: give a list of samples"
        )
    elif isinstance(source, Iterable):
        yield from source
    else:
        raise CalibrationError(
            f"calibration data is a {type(source).__name__}; expected an object with "
            "get_next(), an iterable of dicts (input name -> array) or paths of .npz files"
        )


def _in_file(path: str | os.PathLike[str]) -> Feed:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # OSError, BadZipFile, EOFError, ValueError for a pickle
        raise CalibrationError(f"{path}: cannot be read as an .npz file: {error}") from error


def _checked_sample(
    sample: Any, inputs: Mapping[str, ir.Value], optional: frozenset[str], what: str
) -> dict[str, npt.NDArray[Any]]:
    """Return a sample whose arrays have the types and shapes of the inputs.

    Arrays are taken as they are or refused: a cast that nobody asked for hides that a reader
    was written for another model.
    """
    if not isinstance(sample, Mapping):
        raise CalibrationError(
            f"{what} is a {type(sample).__name__}; expected a dict, input name -> array"
        )
    for name in sample:
        if name not in inputs:
            hint = did_you_mean(str(name), inputs)
            raise CalibrationError(
                f"{what} has {name!r}, which is not an input of the model{hint}"
            )
    missing = [name for name in inputs if name not in sample and name not in optional]
    if missing:
        raise CalibrationError(f"{what} lacks the inputs {', '.join(map(repr, missing))}")
    return {
        name: _checked_array(sample[name], value, f"{what}: input {name!r}")
        for name, value in inputs.items()
        if name in sample
    }


def _checked_array(item: Any, value: ir.Value, what: str) -> npt.NDArray[Any]:
    dtype = value.dtype
    # Tensors of other packages say that they are arrays; objects of any class do not.
    if not hasattr(item, "__array__"):
        raise CalibrationError(
            f"{what} is a {type(item).__name__} that is not an array: give a numpy array"
        )
    array: npt.NDArray[Any] = np.asarray(item)
    if dtype is ir.DataType.STRING and array.dtype.kind in "OU":
        return array.astype(np.str_)
    if dtype is not None and array.dtype != dtype.numpy():
        raise CalibrationError(
            f"{what} is {array.dtype}, but the model takes {dtype.numpy()}: convert it"
        )
    if value.shape is not None and array.ndim != len(value.shape):
        raise CalibrationError(
            f"{what} has shape {list(array.shape)}, but the model takes {value.shape}"
        )
    floating = dtype is not None and dtype.is_floating_point()
    if floating and not np.isfinite(array).all():
        raise CalibrationError(f"{what} holds NaN or infinite values")
    return array
