# SPDX-License-Identifier: MIT
"""The interpreter and the environment of child processes."""

from __future__ import annotations

import os
import sys

from session_options.environment import VARIABLE

_PYTHON = f"{VARIABLE}_PYTHON"
# Lists the purposes of this process and its ancestors.
_MARKER = f"{VARIABLE}_CHILD_OF"


def child_python(purpose: str) -> str | None:
    """Return the interpreter for a child process.

    This is ``ORTPLUGINS_PYTHON``, else the one from ``multiprocessing.set_executable``, else
    this process's own, unless that is a program: frozen by PyInstaller, or embedding Python,
    such as uWSGI. None if there is none, or in a child with the same purpose, where a program
    was mistaken for an interpreter.
    """
    if purpose in _purposes():
        return None
    if chosen := os.environ.get(_PYTHON):
        return chosen
    if "multiprocessing.spawn" in sys.modules:
        given = os.fsdecode(sys.modules["multiprocessing.spawn"].get_executable() or "")
        if given and given != sys.executable:
            return given
    own = os.path.basename(sys.executable or "").lower()
    is_python = own.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)
    return sys.executable if is_python else None


def child_environment(
    purpose: str, scratch: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """Return an environment for a child that imports from the same places as this process.

    Its sessions are plain, whatever is switched on here. Its temporary files go to
    ``scratch``, which the caller removes even if the child is killed.
    """
    # Under ``ortplugins run``, the variable would switch passes on in the child, too.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # Python ignores other kinds of entries as well.
    searched = [entry for entry in sys.path if entry and isinstance(entry, str)]
    environment["PYTHONPATH"] = os.pathsep.join(searched)
    if scratch is not None:
        environment["TMPDIR"] = os.fspath(scratch)
    environment[_MARKER] = ",".join([*_purposes(), purpose])
    return environment


def end_with_parent() -> None:
    """End this child process when its parent ends, for whatever reason."""
    import threading
    import time

    parent = os.getppid()

    def wait() -> None:
        # On Windows, the parent's id does not change when it ends.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _purposes() -> list[str]:
    return list(filter(None, os.environ.get(_MARKER, "").split(",")))
