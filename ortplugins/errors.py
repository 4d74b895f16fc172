# SPDX-License-Identifier: MIT
"""What can go wrong, by name."""

from __future__ import annotations

__all__ = ["MissingFileError", "ModelFileError", "OrtpluginsWarning", "PassError"]


class ModelFileError(ValueError):
    """A model, or the external data it points to, cannot be used; names file and tensor."""


class MissingFileError(ModelFileError, FileNotFoundError):
    """A model file, or an external data file, is not there."""


class PassError(RuntimeError):
    """A pass failed; names the pass and, where it is known, the node."""


class OrtpluginsWarning(UserWarning):
    """Something did not work and the session runs without it."""
