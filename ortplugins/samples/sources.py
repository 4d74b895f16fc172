# SPDX-License-Identifier: MIT
"""Calibration samples: read from what users give, checked against the model, kept for replay.

A sample is a dict, input name -> array. A source of samples is one of

    an object with get_next()    onnxruntime's and ModelOpt's readers; None ends the data
    an iterable                  of dicts, of paths, or of both; a generator will do
    a path, or several           of .npz files, an array for each input
    None                         random inputs, with a warning

A .npz file is one sample. Where every array has one axis more than the model's input, that
axis, the first, counts samples.

Arrays are taken as they are or refused: a cast that nobody asked for hides that a reader was
written for another model. Python numbers and lists get the input's type, if it holds them.
"""

from __future__ import annotations

__all__ = ["CalibrationReader", "CalibrationSource", "Feed", "KeptSamples", "feed_bytes"]

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import CalibrationError, OrtpluginsWarning
from ortplugins.samples.random import random_feeds
from rewrite_rules.closest_name import did_you_mean

Feed = dict[str, npt.NDArray[Any]]


@runtime_checkable
class CalibrationReader(Protocol):
    """What onnxruntime calls a CalibrationDataReader."""

    def get_next(self) -> Mapping[str, Any] | None:
        """Return the next sample; None after the last."""


CalibrationSource = (
    CalibrationReader
    | str
    | os.PathLike[str]
    | Iterable[Mapping[str, Any] | str | os.PathLike[str]]
    | None
)


class KeptSamples:
    """Samples that can be gone through more than once, while the source is read once.

    The first time, samples come from the source and are copied (readers may use their arrays
    again); later, the copies are replayed. Beyond ``memory_bytes`` copies go to files in
    ``scratch``, which has to stay as long as this object is used. An iterator that was given
    up half-way costs nothing: the next one replays and reads on from there.

    With ``rewind`` nothing is kept: each new iteration calls the reader's ``rewind()``.

    Attributes:
        count: How many samples there are; None until the source has come to its end.
        rewinds: Whether samples come from the source every time.
    """

    def __init__(
        self,
        source: CalibrationSource,
        model: ir.Model,
        *,
        scratch: Path,
        memory_bytes: int = 64 << 20,
        rewind: bool = False,
    ) -> None:
        """Check the source's kind; no sample is read.

        Args:
            source: Where samples come from, see the module.
            model: The model that they are for.
            scratch: An existing folder for what ``memory_bytes`` does not hold.
            memory_bytes: Bytes of arrays to keep in memory.
            rewind: Read again by ``source.rewind()`` instead of keeping samples.

        Raises:
            CalibrationError: If the source is no source of samples, cannot rewind where it is
                asked to, or the model has inputs that are no tensors.
        """
        self._source, self._model = source, model
        self._scratch, self._free = scratch, memory_bytes
        self._fresh: Iterator[Feed] | None = _checked_feeds(source, model)
        self._kept: list[Feed | _SpooledFeed] = []
        self._largest = (-1, 0)  # bytes, index
        self._failure: CalibrationError | None = None
        self.count: int | None = None
        self.rewinds = rewind
        if rewind and not callable(getattr(source, "rewind", None)):
            raise CalibrationError(
                f"rewind is asked for, but a {type(source).__name__} has no rewind(): add it, "
                "or let samples be kept"
            )

    def __iter__(self) -> Iterator[Feed]:
        """Yield every sample, in the source's order.

        Raises:
            CalibrationError: If the source fails, has no samples or a bad one; again at each
                attempt. In rewinding, if a later round has other samples than the first.
        """
        if self.rewinds:
            yield from self._from_the_start()
            return
        index = 0
        while index < len(self._kept) or self._pull():
            kept = self._kept[index]
            yield kept.load() if isinstance(kept, _SpooledFeed) else dict(kept)
            index += 1

    def read_all(self) -> int:
        """Read the source to its end and return how many samples it has.

        Raises:
            CalibrationError: As iterating; also if samples are rewound and not kept.
        """
        if self.rewinds:
            raise CalibrationError("samples that are rewound cannot be read ahead")
        while self._pull():
            pass
        return len(self._kept)

    def largest(self) -> Feed:
        """Return the sample of most bytes among those read, at least one; for planning memory.

        Where samples are rewound it is the first.

        Raises:
            CalibrationError: As iterating.
        """
        if not self.rewinds and self._kept:
            kept = self._kept[self._largest[1]]
            return kept.load() if isinstance(kept, _SpooledFeed) else dict(kept)
        return next(iter(self))

    def _pull(self) -> bool:
        """Keep one more sample of the source; False at its end."""
        if self._failure is not None:
            raise self._failure
        if self._fresh is None:
            return False
        try:
            feed = next(self._fresh)
        except StopIteration:
            self.count, self._fresh = len(self._kept), None
            return False
        except CalibrationError as error:
            self._failure = error
            raise
        size = feed_bytes(feed)
        if size > self._largest[0]:
            self._largest = (size, len(self._kept))
        if size <= self._free:
            self._free -= size
            self._kept.append({name: np.array(array) for name, array in feed.items()})
        else:
            path = self._scratch / f"sample-{len(self._kept)}.npz"
            self._kept.append(_SpooledFeed(path, feed))
        return True

    def _from_the_start(self) -> Iterator[Feed]:
        if self._fresh is None:
            self._source.rewind()  # type: ignore[union-attr]  # looked at in __init__
            fresh = _checked_feeds(self._source, self._model)
        else:
            fresh, self._fresh = self._fresh, None
        count = 0
        for feed in fresh:
            count += 1
            yield feed
        if self.count is not None and count != self.count:
            raise CalibrationError(
                f"the calibration reader gave {self.count} samples, and {count} after "
                "rewind(): a pass must see what the last one saw"
            )
        self.count = count


class _SpooledFeed:
    """A sample in a .npz file; names and types stay here, as files know fewer of either."""

    def __init__(self, path: Path, feed: Feed) -> None:
        self._path = path
        self._members = [(name, array.dtype) for name, array in feed.items()]
        arrays = {f"input{index}": array for index, array in enumerate(feed.values())}
        np.savez(path, allow_pickle=False, **arrays)

    def load(self) -> Feed:
        with np.load(self._path, allow_pickle=False) as file:
            return {
                # bfloat16 and its like come back as raw bytes
                name: file[f"input{index}"].view(dtype)
                for index, (name, dtype) in enumerate(self._members)
            }


def feed_bytes(feed: Feed) -> int:
    """Return how many bytes the arrays of a sample have."""
    return sum(array.nbytes for array in feed.values())


def _checked_feeds(source: CalibrationSource, model: ir.Model) -> Iterator[Feed]:
    """Return the samples of a source, each checked against the model's inputs as it is read.

    Args:
        source: Where samples come from, see the module. None warns (OrtpluginsWarning).
        model: The model; inputs that are initializers as well may be left out of a sample.

    Returns:
        An iterator of feeds; it raises CalibrationError, which names sample and input, if the
        source fails (chained), has no samples, or one that does not fit the model.

    Raises:
        CalibrationError: If the source is no source of samples, or the model has inputs that
            are no tensors.
    """
    inputs = _tensor_inputs(model)
    if source is None:
        warnings.warn(
            "there is no calibration data, so random inputs are used: they say little about "
            "the activations of real ones; give calibration_data_reader",
            OrtpluginsWarning,
            stacklevel=2,
        )
        required = [
            value for name, value in inputs.items() if name not in model.graph.initializers
        ]
        return random_feeds(required)
    return _checked(_samples(source), inputs, frozenset(model.graph.initializers))


def _tensor_inputs(model: ir.Model) -> dict[str, ir.Value]:
    inputs = {value.name or "": value for value in model.graph.inputs}
    for name, value in inputs.items():
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise CalibrationError(
                f"input {name!r} is a {type(value.type).__name__}: models whose inputs are "
                "all tensors can be calibrated"
            )
    return inputs


def _samples(source: CalibrationSource) -> Iterator[Any]:
    """Return the raw items of a source: samples, or paths of files with samples."""
    if isinstance(source, CalibrationReader):
        return iter(source.get_next, None)
    if isinstance(source, str | os.PathLike):
        return iter([source])
    if isinstance(source, Mapping):
        raise CalibrationError(
            "calibration data is a dict, which is one sample: give a list of samples"
        )
    if isinstance(source, Iterable):
        return iter(source)
    raise CalibrationError(
        f"calibration data is a {type(source).__name__}: an object with get_next(), an "
        "iterable of dicts (input name -> array) or paths of .npz files are expected"
    )


def _checked(
    items: Iterator[Any], inputs: Mapping[str, ir.Value], optional: frozenset[str]
) -> Iterator[Feed]:
    count = 0
    while True:
        try:
            item = next(items)
        except StopIteration:
            break
        except Exception as error:  # the user's code: any exception
            raise CalibrationError(
                f"the calibration reader failed at sample {count}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(item, str | os.PathLike):
            samples, origin = _file_samples(item, inputs), f" of {os.fspath(item)!r}"
        else:
            samples, origin = iter([item]), ""
        for sample in samples:
            yield _checked_sample(sample, inputs, optional, f"sample {count}{origin}")
            count += 1
    if not count:
        raise CalibrationError(
            "calibration data is empty: at least one sample is needed; was the reader or "
            "generator used up before?"
        )


def _file_samples(
    path: str | os.PathLike[str], inputs: Mapping[str, ir.Value]
) -> Iterator[Feed]:
    name = os.fspath(path)
    try:
        with np.load(name, allow_pickle=False) as file:
            if not isinstance(file, Mapping):
                raise CalibrationError(
                    f"{name}: holds one array without a name: save with "
                    "numpy.savez(path, input_name=array)"
                )
            arrays = {key: file[key] for key in file}
    except CalibrationError:
        raise
    except Exception as error:  # OSError, BadZipFile, EOFError, ValueError for a pickle
        raise CalibrationError(
            f"{name}: cannot be read as .npz file of arrays: {error}"
        ) from error
    if not _is_stacked(arrays, inputs):
        yield arrays
        return
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise CalibrationError(
            f"{name}: the first axis counts samples, but the arrays disagree: {lengths}"
        )
    for index in range(next(iter(lengths.values()))):
        yield {key: array[index] for key, array in arrays.items()}


def _is_stacked(arrays: Feed, inputs: Mapping[str, ir.Value]) -> bool:
    """Whether every array has one axis more than its input; not where a rank is unknown."""
    for name, array in arrays.items():
        shape = inputs[name].shape if name in inputs else None
        if shape is None or array.ndim != len(shape) + 1:
            return False
    return bool(arrays)


def _checked_sample(
    sample: Any, inputs: Mapping[str, ir.Value], optional: frozenset[str], what: str
) -> Feed:
    if not isinstance(sample, Mapping):
        raise CalibrationError(
            f"{what} is a {type(sample).__name__}: a dict, input name -> array, is expected"
        )
    for name in sample:
        if name not in inputs:
            raise CalibrationError(
                f"{what} has {name!r}, which is no input of the model"
                f"{_closest(str(name), inputs)}"
            )
    missing = [name for name in inputs if name not in sample and name not in optional]
    if missing:
        raise CalibrationError(f"{what} lacks the inputs {', '.join(map(repr, missing))}")
    return {
        name: _checked_array(sample[name], value, f"{what}: input {name!r}")
        for name, value in inputs.items()
        if name in sample
    }


def _closest(name: str, inputs: Mapping[str, ir.Value]) -> str:
    if hint := did_you_mean(name, inputs):
        return hint
    return f"; it has {', '.join(map(repr, list(inputs)[:8]))}" if inputs else ""


def _checked_array(item: Any, value: ir.Value, what: str) -> npt.NDArray[Any]:
    array = _as_array(item, value.dtype, what)
    _check_dtype(array, value.dtype, what)
    _check_shape(array, value.shape, what)
    floating = value.dtype is not None and value.dtype.is_floating_point()
    if floating and not np.isfinite(array).all():
        raise CalibrationError(f"{what} holds NaN or infinite values")
    return array


def _as_array(item: Any, dtype: ir.DataType | None, what: str) -> npt.NDArray[Any]:
    # Tensors of other packages say that they are arrays; objects of any class do not.
    known = hasattr(item, "__array__") or isinstance(item, bool | int | float | str | list)
    try:
        if not known:
            raise TypeError
        array = np.asarray(item)
    except Exception:  # lists of unequal lengths, tensors on another device
        raise CalibrationError(
            f"{what} is a {type(item).__name__} that is no array: give a numpy array"
        ) from None
    if dtype is ir.DataType.STRING and array.dtype.kind == "O":
        return array.astype(np.str_)
    if hasattr(item, "__array__") or dtype in (None, ir.DataType.STRING):
        return array
    assert dtype is not None
    # Floats may be rounded, as they are wherever a float is written down; nothing else may.
    fits = array.dtype.kind in "biuf"
    if fits:
        with np.errstate(all="ignore"):
            typed: npt.NDArray[Any] = array.astype(dtype.numpy())
        fits = dtype.is_floating_point() or np.array_equal(typed, array)
    if not fits:
        raise CalibrationError(
            f"{what} is a list of {array.dtype}, which {dtype.name.lower()}, the model's "
            "type, does not hold"
        )
    return typed


def _check_dtype(array: npt.NDArray[Any], dtype: ir.DataType | None, what: str) -> None:
    if dtype is None or (dtype is ir.DataType.STRING and array.dtype.kind == "U"):
        return
    if dtype is ir.DataType.STRING or array.dtype != dtype.numpy():
        expected = "str" if dtype is ir.DataType.STRING else str(dtype.numpy())
        raise CalibrationError(
            f"{what} is {array.dtype}, but the model takes {expected}: convert it, as with "
            f"array.astype({expected!r})"
        )


def _check_shape(array: npt.NDArray[Any], shape: ir.Shape | None, what: str) -> None:
    if shape is None:
        return
    expected = "[" + ", ".join(str(dim) for dim in shape) + "]"
    if array.ndim != len(shape):
        hint = "; is the batch axis missing?" if array.ndim == len(shape) - 1 else ""
        raise CalibrationError(
            f"{what} has shape {list(array.shape)}, but the model takes {expected}{hint}"
        )
    for size, dim in zip(array.shape, shape, strict=True):
        # PaddlePaddle writes -1 for an open dimension.
        if isinstance(dim, int) and dim >= 0 and size != dim:
            raise CalibrationError(
                f"{what} has shape {list(array.shape)}, but the model takes {expected}"
            )
