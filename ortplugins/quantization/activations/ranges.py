# SPDX-License-Identifier: MIT
"""Ranges of activations: what onnxruntime's calibrators see of samples."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortplugins.errors import CalibrationError
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.sources import Feed

CALIBRATION_METHODS = ("MinMax", "Entropy", "Percentile", "Distribution")

# Smallest and greatest value of each activation, of the activation's own type: from float16
# onnxruntime computes another scale than from the same number in float32.
Ranges = dict[str, tuple[np.generic, np.generic]]


def calibrate(
    path: Path,
    samples: KeptSamples,
    method: str,
    op_types: Sequence[str],
    providers: Sequence[Any],
) -> Ranges:
    """Run samples through a model and return the range of each activation.

    Args:
        path: The model, in a temporary folder: onnxruntime writes beside it.
        samples: What runs through it.
        method: One of :data:`CALIBRATION_METHODS`.
        op_types: Operators whose inputs and outputs are watched.
        providers: Execution providers that run the samples.

    Raises:
        CalibrationError: If a sample can't be used or there is none, or onnxruntime can't run
            the model.
    """
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    try:
        calibrator = create_calibrator(
            path,
            list(op_types),
            augmented_model_path=os.fspath(path.with_name("augmented.onnx")),
            calibrate_method=CalibrationMethod[method],
            use_external_data_format=True,
            providers=list(providers),
        )
        for feeds in _rounds(samples, method):
            take = functools.partial(next, iter(feeds), None)
            calibrator.collect_data(types.SimpleNamespace(get_next=take))
        found = calibrator.compute_data()
    except CalibrationError:
        raise
    except Exception as error:  # whatever the session or numpy raise
        raise CalibrationError(
            f"onnxruntime's {method} calibrator failed: {type(error).__name__}: {error}"
        ) from error
    return {
        name: tuple(np.asarray(end).reshape(-1)[0] for end in data.range_value)
        for name, data in found.items()
    }


def _rounds(samples: KeptSamples, method: str) -> Iterator[Iterable[Feed]]:
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
            yield from ([feed] for feed in samples)
            return
    yield samples


@contextlib.contextmanager
def quiet_quantizer() -> Iterator[list[str]]:
    """Keep onnxruntime's quantiser from printing.

    It writes to stdout and to the root logger; other loggers are left alone.

    Yields:
        What it warned of, filled as it does.
    """
    messages: list[str] = []

    def others(record: logging.LogRecord) -> bool:
        if os.path.join("onnxruntime", "quantization") not in record.pathname:
            return True
        if record.levelno >= logging.WARNING:
            messages.append(record.getMessage())
        return False

    root = logging.getLogger()
    # Without any handler, logging.warning() would give the root one that stays.
    handler = logging.NullHandler()
    root.addHandler(handler)
    root.addFilter(others)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield messages
    finally:
        root.removeFilter(others)
        root.removeHandler(handler)
