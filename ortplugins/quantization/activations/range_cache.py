# SPDX-License-Identifier: MIT
"""A file that keeps the ranges of activations.

It is the file that onnxruntime's own ``calibration_cache_path`` reads and writes, with the
digest of what the ranges are of, and of histograms only the ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ortplugins.errors import CalibrationError
from ortplugins.quantization.activations.ranges import Ranges

_ORIGIN = "ortplugins_digest"


@dataclasses.dataclass(frozen=True)
class RangeCache:
    """A JSON file with the ranges of one model's activations.

    Attributes:
        path: Where it is.
        method: How the ranges are found, as onnxruntime calls it.
        origin: What else they have to be of: digest of the model, operators watched.
    """

    path: Path
    method: str
    origin: str

    def read(self) -> Ranges | None:
        """Return the ranges; None if there are none, or those of another model.

        Raises:
            CalibrationError: If the file was not written by ortplugins: it must not be
                overwritten.
        """
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            origin = content[_ORIGIN], content["calibration_method"]["value"]
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
                f"{self.path}: is not a calibration cache that ortplugins wrote: delete it, "
                "or name another file"
            ) from error
        return ranges if origin == (self.origin, self._value) else None

    def write(self, ranges: Ranges) -> None:
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
            "calibration_method": {"CLS": "CalibrationMethod", "value": self._value},
            "smooth_quant": False,
            _ORIGIN: self.origin,
        }
        with tempfile.TemporaryDirectory(
            prefix=".ortplugins-", dir=self.path.absolute().parent
        ) as folder:
            scratch = Path(folder, self.path.name)
            scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(scratch, self.path)

    @property
    def _value(self) -> str:
        return f"CalibrationMethod.{self.method}"


def _entry(end: np.generic) -> dict[str, Any]:
    return {"data": end.item(), "dtype": str(end.dtype), "CLS": "numpy.array"}


def _scalar(entry: Mapping[str, Any]) -> np.generic:
    scalar: np.generic = np.dtype(entry["dtype"]).type(entry["data"])
    return scalar
