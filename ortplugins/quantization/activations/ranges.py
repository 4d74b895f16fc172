# SPDX-License-Identifier: MIT
"""Ranges of activations: what onnxruntime's calibrators see of samples, kept in a file.

The file is the one that onnxruntime's own ``calibration_cache_path`` reads and writes, with
two additions: the digest of what the ranges are of, and of histograms the ends alone.
"""

from __future__ import annotations

__all__ = [
    "CALIBRATION_METHODS",
    "Calibration",
    "RangeCache",
    "Ranges",
    "calibrate",
    "quiet_quantizer",
]

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortplugins.errors import CalibrationError
from ortplugins.samples.sources import Feed, KeptSamples

CALIBRATION_METHODS = ("MinMax", "Entropy", "Percentile", "Distribution")

# Smallest and greatest value of each activation, of the activation's own type: from float16
# onnxruntime computes another scale than from the same number in float32.
Ranges = dict[str, tuple[np.generic, np.generic]]

_CHUNK = 1 << 20
_DIGEST = "ortplugins_digest"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How ranges are found.

    Attributes:
        method: One of :data:`CALIBRATION_METHODS`.
        op_types: Operators whose inputs and outputs are watched.
        providers: Execution providers that run the samples.
        options: What onnxruntime's ``create_calibrator`` takes as ``extra_options``.
    """

    method: str
    op_types: Sequence[str]
    providers: Sequence[Any] = ("CPUExecutionProvider",)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the method.

        Raises:
            CalibrationError: If onnxruntime has none of that name.
        """
        if self.method not in CALIBRATION_METHODS:
            raise CalibrationError(
                f"calibrate_method is {self.method!r}: one of "
                f"{', '.join(CALIBRATION_METHODS)} is expected"
            )

    def digest(self, files: Sequence[Path]) -> str:
        """Return a digest of these settings and of a model's files, read in order."""
        what = (self.method, sorted(self.op_types), sorted(self.options.items()))
        result = hashlib.sha256(repr(what).encode())
        for path in files:
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    result.update(chunk)
        return result.hexdigest()


def calibrate(path: Path, samples: KeptSamples, how: Calibration) -> Ranges:
    """Run samples through a model and return the range of each activation.

    Args:
        path: The model, in a folder of ours: onnxruntime writes beside it.
        samples: What runs through it.
        how: The method and what belongs to it.

    Raises:
        CalibrationError: If a sample can't be used or there is none, or onnxruntime can't run
            the model.
    """
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    try:
        calibrator = create_calibrator(
            path,
            list(how.op_types),
            augmented_model_path=os.fspath(path.with_name("augmented.onnx")),
            calibrate_method=CalibrationMethod[how.method],
            use_external_data_format=True,
            providers=list(how.providers),
            extra_options=dict(how.options),
        )
        for reader in _rounds(samples, how.method):
            calibrator.collect_data(reader)
        found = calibrator.compute_data()
    except CalibrationError:
        raise
    except Exception as error:  # whatever the session or numpy raise
        raise CalibrationError(
            f"onnxruntime's {how.method} calibrator failed: {type(error).__name__}: {error}"
        ) from error
    return {
        name: tuple(np.asarray(end).reshape(-1)[0] for end in data.range_value)
        for name, data in found.items()
    }


class _Reader:
    """Samples as onnxruntime's calibrators take them."""

    def __init__(self, samples: Iterator[Feed]) -> None:
        self._samples = samples

    def get_next(self) -> Feed | None:
        return next(self._samples, None)


def _rounds(samples: KeptSamples, method: str) -> Iterator[_Reader]:
    """All samples in one go, as onnxruntime has it; of several shapes, one by one.

    Histograms are made of an array of all samples, which those of several shapes can't form.
    """
    if method != "MinMax":
        samples.read_all()
        shapes = {
            tuple((name, array.shape) for name, array in sorted(feed.items()))
            for feed in samples
        }
        if len(shapes) > 1:
            yield from (_Reader(iter([feed])) for feed in samples)
            return
    yield _Reader(iter(samples))


@contextlib.contextmanager
def quiet_quantizer() -> Iterator[list[str]]:
    """Keep onnxruntime's quantiser from printing.

    It writes to stdout and to the root logger; other loggers are left alone.

    Yields:
        What it warned of, filled as it does.
    """
    told: list[str] = []

    def others(record: logging.LogRecord) -> bool:
        if os.path.join("onnxruntime", "quantization") not in record.pathname:
            return True
        if record.levelno >= logging.WARNING:
            told.append(record.getMessage())
        return False

    root = logging.getLogger()
    # Without any handler, logging.warning() would give the root one that stays.
    handler = logging.NullHandler()
    root.addHandler(handler)
    root.addFilter(others)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield told
    finally:
        root.removeFilter(others)
        root.removeHandler(handler)


class RangeCache:
    """A JSON file with the ranges of one model's activations.

    Attributes:
        path: Where it is.
        digest: Of the model and the settings that ranges have to be of.
    """

    def __init__(self, path: str | os.PathLike[str], digest: str) -> None:
        self.path, self.digest = Path(path), digest

    def read(self) -> Ranges | None:
        """Return the ranges; None if there are none, or those of another model.

        Raises:
            CalibrationError: If the file is none of ours, so that it must not be overwritten.
        """
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            digest = content[_DIGEST]
            ranges: Ranges = {
                name: (_scalar(entry["lowest"]), _scalar(entry["highest"]))
                for name, entry in content["data"].items()
            }
        except FileNotFoundError:
            if not self.path.absolute().parent.is_dir():
                raise CalibrationError(f"{self.path}: its folder does not exist") from None
            return None
        except OSError as error:
            raise CalibrationError(f"{self.path}: cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CalibrationError(
                f"{self.path}: is no calibration cache that ortplugins wrote: delete it, or "
                "name another file"
            ) from error
        return ranges if digest == self.digest else None

    def write(self, ranges: Ranges, method: str) -> None:
        """Write the ranges; the file appears when it is complete.

        Raises:
            OSError: If it can't be written.
        """
        content = {
            "CLS": "TensorsData",
            "data": {
                name: {"lowest": _entry(low), "highest": _entry(high), "CLS": "TensorData"}
                for name, (low, high) in sorted(ranges.items())
            },
            "calibration_method": {
                "CLS": "CalibrationMethod",
                "value": f"CalibrationMethod.{method}",
            },
            "smooth_quant": False,
            _DIGEST: self.digest,
        }
        with tempfile.TemporaryDirectory(
            prefix=".ortplugins-", dir=self.path.absolute().parent
        ) as folder:
            scratch = Path(folder, self.path.name)
            scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(scratch, self.path)


def _entry(end: np.generic) -> dict[str, Any]:
    return {"data": end.item(), "dtype": str(end.dtype), "CLS": "numpy.array"}


def _scalar(entry: Mapping[str, Any]) -> np.generic:
    scalar: np.generic = np.dtype(entry["dtype"]).type(entry["data"])
    return scalar
