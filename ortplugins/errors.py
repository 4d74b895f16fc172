# SPDX-License-Identifier: MIT
"""What can go wrong, by name."""

from __future__ import annotations


class UsageError(ValueError):
    """An argument is out of range, or has no effect with another one; names it."""


class ModelFileError(ValueError):
    """A model, or the external data it points to, cannot be used; names file and tensor."""


class MissingFileError(ModelFileError, FileNotFoundError):
    """A model file, or an external data file, is not there."""


class QuantizationError(ValueError):
    """A weight, an option or a pattern is invalid or cannot be quantised; names it."""


class CalibrationError(QuantizationError):
    """Calibration data cannot be used; names sample and tensor."""


class PassError(RuntimeError):
    """A pass failed; names the pass and, where it is known, the node."""


class OrtpluginsWarning(UserWarning):
    """Something did not work and the session runs without it."""
