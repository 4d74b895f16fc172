# SPDX-License-Identifier: MIT
"""Switches passes on for sessions that other packages open.

``onnxruntime.InferenceSession.__init__`` is replaced in place: whoever imported the class
earlier, or derives from it, gets the new one. Nothing is replaced before :func:`enable` or
:func:`enabled` is called, and the very same function comes back afterwards.

What is switched on holds for the whole process: libraries open sessions in threads of their
own. Sessions of ``ortplugins.InferenceSession``, whose options say everything, are not
affected, and neither are those that our own modules and passes open while they work.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import onnxruntime

from ortplugins.session.opening import Start
from session_options import OptionError, Pass
from session_options.caller_warnings import is_ours
from session_options.environment import environment_entries
from session_options.plan import Plan, entries_of

# What one call has switched on, as session entries.
Entries = dict[str, str]


def enable(*passes: Pass, **general: bool | str) -> None:
    """Switch passes on for every session of ``onnxruntime`` that this process opens.

    This lasts until :func:`disable`. A second call replaces the first.

    Args:
        *passes: For instance ``DqMatMulNBitsFusion()``. When none are given, those of the
            environment variable ``ORTPLUGINS``, else ``DqMatMulNBitsFusion()`` unless there
            is a hint.
        **general: Options that belong to no pass, for instance ``strict=True``.

    Raises:
        OptionError: If a pass or an option, here or in the environment, is invalid. Then
            nothing changes.
    """
    _patch.set_base(_switched(passes, general))


def enable_entries(entries: Mapping[str, str]) -> None:
    """Do as :func:`enable` for passes that are given as session entries."""
    Plan.from_entries(entries)  # errors are reported now, not deep inside a library
    _patch.set_base({**entries})


def disable() -> None:
    """Undo :func:`enable`; does nothing if there is nothing to undo.

    Blocks of :func:`enabled` are not affected. Open sessions stay as they are.
    """
    _patch.set_base(None)


@contextlib.contextmanager
def enabled(*passes: Pass, **general: bool | str) -> Iterator[None]:
    """Switch passes on for the sessions that are opened inside a ``with`` block.

    This holds for all threads. Blocks can be nested; only the one entered last counts.

    Args:
        *passes: As for :func:`enable`.
        **general: As for :func:`enable`.

    Raises:
        OptionError: As for :func:`enable`.
    """
    switched = _switched(passes, general)
    _patch.push(switched)
    try:
        yield
    finally:
        _patch.remove(switched)


# From passes to entries.


def _switched(passes: Sequence[Pass], general: Mapping[str, bool | str]) -> Entries:
    if wrong := [item for item in passes if not isinstance(item, Pass)]:
        raise OptionError(
            f"{wrong[0]!r} is not a pass: DqMatMulNBitsFusion() is one, for instance"
        )
    # What a program names counts instead of its environment.
    entries = {} if passes or general.get("hint") else environment_entries()
    entries |= entries_of(passes, **general)
    Plan.from_entries(entries)  # errors are reported now, not deep inside a library
    return entries


# The replaced constructor.


class _Patch:
    """What is switched on; replaces the constructor while anything is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: Entries | None = None
        self._blocks: tuple[Entries, ...] = ()
        # Read by constructors without the lock.
        self.in_force: Entries | None = None

    def renew_lock(self) -> None:
        """Make a new lock that nobody holds."""
        self._lock = threading.Lock()

    def set_base(self, switched: Entries | None) -> None:
        with self._lock:
            self._base = switched
            self._update()

    def push(self, switched: Entries) -> None:
        with self._lock:
            self._blocks = (*self._blocks, switched)
            self._update()

    def remove(self, switched: Entries) -> None:
        """Remove a block; threads leave theirs in any order."""
        with self._lock:
            self._blocks = tuple(item for item in self._blocks if item is not switched)
            self._update()

    def _update(self) -> None:
        self.in_force = self._blocks[-1] if self._blocks else self._base
        cls = onnxruntime.InferenceSession
        if self.in_force is not None:
            if cls.__init__ not in _replacements:
                cls.__init__ = _replacement(cls.__init__)
            return
        # If somebody has replaced ours since then, it stays below theirs and passes through.
        while (original := _replacements.get(cls.__init__)) is not None:
            cls.__init__ = original


def _replacement(original: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that opens what is in force; ``original`` opens everything else."""

    @wraps(original)
    def __init__(  # noqa: N807
        self: onnxruntime.InferenceSession,
        path_or_bytes: Any,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        switched = _patch.in_force
        if (
            switched is None
            or getattr(_working, "now", False)
            or is_ours(sys._getframe().f_back)
        ):
            original(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            return
        # As onnxruntime does, because some applications replace these defaults.
        options = sess_options
        if options is None:
            options = onnxruntime.capi._pybind_state.get_default_session_options()
        given = path_or_bytes, options, providers, provider_options
        _working.now = True
        try:
            opened = Start(self, partial(original, self), given, kwargs, switched).open()
        finally:
            _working.now = False
        self.ortplugins_report = opened.to_report()

    _replacements[__init__] = original
    return __init__


# The original of each replacement. Kept apart from the functions: functools.wraps would copy
# an attribute to whatever wraps ours.
_replacements: weakref.WeakKeyDictionary[Any, Callable[..., None]] = (
    weakref.WeakKeyDictionary()
)
# ``now``: whether a thread is preparing a session; sessions that passes open then are plain.
_working = threading.local()
_patch = _Patch()
if hasattr(os, "register_at_fork"):  # another thread may hold the lock then
    os.register_at_fork(after_in_child=_patch.renew_lock)
