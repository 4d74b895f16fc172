# SPDX-License-Identifier: MIT
"""Copies of a user's ``SessionOptions``, and how they are changed.

The user's own object is never changed: another thread may create a session from it at any
moment. Python cannot copy options, but a native session holds a copy and returns copies of
it; with an empty model, this takes a tenth of a millisecond. Custom operator libraries and
devices that were added as providers are not copied.

Options have no getters for weights that the user has supplied. So we probe: options with
external weights refuse a model with one external tensor, and a copy refuses to add an
initializer that it has already. Hits import this module, so it imports little.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import onnxruntime
from onnxruntime.capi import _pybind_state, onnxruntime_pybind11_state

from session_options.entries import DATA_FOLDER_KEY, stored

# A model without nodes, and one whose node reads a byte of external data. Slashes pad its
# location to a fixed length.
_EMPTY_MODEL = b"\x08\x07:\x03\x12\x01gB\x04\n\x00\x10\r"
_EXTERNAL_MODEL = (
    b'\x08\x07:\xb1\x01\n\x10\n\x01a\x12\x01y"\x08Identity\x12\x01g*\x88\x01\x08\x01\x10\x02B\x01ajp'
    b"\n\x08location\x12d.%bj\x0b\n\x06length\x12\x011p\x01b\x0f\n\x01y\x12\n\n\x08\x08\x02\x12\x04\n"
    b"\x02\x08\x01B\x04\n\x00\x10\r"
)
_LOCATION_BYTES = 99  # and the dot


class CopiedOptions:
    """The ``SessionOptions`` of a user as they were when this was made."""

    def __init__(self, options: onnxruntime.SessionOptions) -> None:
        """Copy them; raises what any session with them would raise."""
        self._native = _pybind_state.InferenceSession(options, _EMPTY_MODEL, False, False)
        if options.enable_profiling:
            os.unlink(self._native.end_profiling())

    def copy(
        self, settings: Mapping[str, str | int | bool] = MappingProxyType({})
    ) -> onnxruntime.SessionOptions:
        """Return a new copy; see :func:`apply_settings`."""
        copied = self._native.session_options
        apply_settings(copied, settings)
        return copied

    def have_external_weights(self) -> bool:
        """Whether external initializers were added, by value or as files in memory.

        Then onnxruntime refuses a model that lacks one of their names, or whose data is in
        none of the files. Otherwise it reads the data from disk, here from its own library.
        """
        folder, model = _external_model()
        own = self._native.session_options
        own.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        own.intra_op_num_threads, own.log_severity_level = 1, 4
        own.enable_profiling, own.optimized_model_filepath = False, ""
        own.add_session_config_entry(DATA_FOLDER_KEY, folder)
        for key in ("session.disable_cpu_ep_fallback", "ep.context_enable"):
            own.add_session_config_entry(key, "0")
        probe = _pybind_state.InferenceSession(own, model, False, False)
        try:
            # Providers chosen by a policy may be slow to start.
            probe.initialize_session(["CPUExecutionProvider"], [{}], set())
        except Exception:  # onnxruntime's own classes, none of which is documented
            return True
        return False

    def added_initializer(self, names: Iterable[str]) -> str | None:
        """Return the first of these initializers that the user added; None if none was."""
        import numpy as np

        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((), np.float32))
        copied = self.copy()
        for name in names:
            try:
                copied.add_initializer(name, value)
            except RuntimeError:  # "has already been added"
                return name
        return None


@functools.cache
def _external_model() -> tuple[str, bytes]:
    """Return a model whose external data is a byte of a library, and the library's folder."""
    folder, name = os.path.split(os.path.realpath(onnxruntime_pybind11_state.__file__))
    return folder, _EXTERNAL_MODEL % os.fsencode(name).rjust(_LOCATION_BYTES, b"/")


def running_options(session: onnxruntime.InferenceSession) -> onnxruntime.SessionOptions:
    """Return a copy of the options in use; the session's own method returns the user's."""
    return session._sess.session_options


def apply_settings(
    options: onnxruntime.SessionOptions, settings: Mapping[str, str | int | bool]
) -> None:
    """Change options.

    In ``settings``, a key with a dot is an entry; any other is an attribute, whose value may
    be the name of an enumeration's member, "0" or "1" for a bool, or digits for an int.
    """
    for name, value in settings.items():
        if "." in name:
            if stored(options, name) != str(value):  # setting it twice causes a warning
                options.add_session_config_entry(name, str(value))
        else:
            setattr(options, name, _attribute(name, value, type(getattr(options, name))))


def _attribute(name: str, value: str | int | bool, kind: type[Any]) -> Any:
    if not isinstance(value, str) or kind is str:
        return value
    if kind is int:
        return int(value)
    if kind is bool:
        from session_options.keys import parse_bool

        return parse_bool(name, value)
    return getattr(kind, value)
