# SPDX-License-Identifier: MIT
"""Settings that a user's ``SessionOptions`` have while one session is constructed.

onnxruntime's native constructor copies the options; the slow initialisation comes after it.
The options cannot be copied whole from Python (custom-op libraries stay behind), so they are
changed and put back. Every reader and writer here holds the lock of the object, so none of
them sees another one's settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnxruntime

from session_options.keys import parse_bool, stored

# Where the external data is of a model that is given as bytes.
DATA_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
# Names of optimisers that are left out, semicolons between them.
DISABLED_OPTIMIZERS_KEY = "optimization.disable_specified_optimizers"

# No setting of onnxruntime's: from how many bytes glibc returns memory to the system as soon
# as it is freed. It holds for the whole process, and stays.
MALLOC_THRESHOLD_KEY = "glibc.mmap_threshold"

# What entries that passes and hints set mean where they are not set.
_DEFAULTS = {
    "mlas.enable_gemm_fastmath_arm64_bfloat16": "0",
    DISABLED_OPTIMIZERS_KEY: "",
    "optimization.enable_gelu_approximation": "0",
    "session.dynamic_block_base": "0",
    "session.inter_op.allow_spinning": "1",
    "session.intra_op.allow_spinning": "1",
    "session.set_denormal_as_zero": "0",
    DATA_FOLDER_KEY: "",
}
# Of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def options_lock(options: onnxruntime.SessionOptions) -> threading.RLock:
    """Return the lock of one ``SessionOptions`` object."""
    with _locks_lock:
        return _locks.setdefault(options, threading.RLock())


@contextlib.contextmanager
def temporarily_set(
    options: onnxruntime.SessionOptions, settings: Mapping[str, str | int | bool]
) -> Iterator[None]:
    """Hold the lock of the user's options and change them; they come back as they were.

    In ``settings`` a key with a dot is an entry, one without an attribute, whose value may be
    the name of an enumeration's member, or "0" or "1" for a bool, digits for an int.
    """
    with options_lock(options):
        before = {name: _get(options, name) for name in settings}
        try:
            for name, value in settings.items():
                _set(options, name, value)
            yield
        finally:
            for name, value in before.items():
                if _get(options, name) != value:  # onnxruntime warns of entries set again
                    _set(options, name, value)


def construct_with(
    settings: Mapping[str, str | int | bool],
    construct: Callable[..., None],
    model: Any,
    options: onnxruntime.SessionOptions,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Construct a session with its options temporarily set.

    They come back, and the lock is released, as soon as the native constructor has copied the
    options: onnxruntime makes a set of ``disabled_optimizers`` between that and the slow
    initialisation. A version that does not gets the options for the whole constructor.
    """
    with contextlib.ExitStack() as until_copied:
        until_copied.enter_context(temporarily_set(options, settings))

        def disabled() -> Iterator[str]:
            until_copied.close()
            yield from kwargs.get("disabled_optimizers") or ()

        construct(model, options, *args, **{**kwargs, "disabled_optimizers": disabled()})


def given_entry(options: onnxruntime.SessionOptions, name: str) -> str | None:
    """Return a session entry; None where it was never set, or has been set back by us."""
    text = stored(options, name)
    return None if text == _DEFAULTS.get(name) else text


def _get(options: onnxruntime.SessionOptions, name: str) -> str | int | bool:
    if "." in name:
        # Entries cannot be removed again: one that was not set comes back as the default.
        return stored(options, name) or _DEFAULTS.get(name, "0")
    value = getattr(options, name)
    return str(value.name) if hasattr(value, "name") else value


def _set(options: onnxruntime.SessionOptions, name: str, value: str | int | bool) -> None:
    if name == MALLOC_THRESHOLD_KEY:
        libc = ctypes.CDLL(None)
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(parameter, int(value))
        return
    if "." in name:
        options.add_session_config_entry(name, str(value))
        return
    kind = type(getattr(options, name))
    if isinstance(value, str):
        if kind is int:
            value = int(value)
        else:
            value = parse_bool(name, value) if kind is bool else getattr(kind, value)
    setattr(options, name, value)
