# SPDX-License-Identifier: MIT
"""Child processes: which interpreter runs them, and in what environment."""

from __future__ import annotations

import os
import sys

from session_options.environment import VARIABLE

_PYTHON = f"{VARIABLE}_PYTHON"
# Names what the processes above this one were started for.
_MARKER = f"{VARIABLE}_CHILD_OF"


def child_python(purpose: str) -> str | None:
    """Return the interpreter that a child process is started with.

    ``ORTPLUGINS_PYTHON``; else what ``multiprocessing.set_executable`` was given; else this
    process's own, unless that is a program: one frozen by PyInstaller, or one that embeds
    Python, such as uWSGI. None where there is none, and in a child of the same purpose: that
    is a program which was taken for an interpreter.
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
    """Return this process's environment, for a child that imports from the same places.

    Its sessions are plain ones, whatever is switched on here. Its temporary files go to
    ``scratch``, where somebody sweeps up after one that is killed.
    """
    # Under ``ortplugins run`` it would switch passes on in the child, too.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # Python ignores other kinds of entries, too.
    searched = [entry for entry in sys.path if entry and isinstance(entry, str)]
    environment["PYTHONPATH"] = os.pathsep.join(searched)
    if scratch is not None:
        environment["TMPDIR"] = os.fspath(scratch)
    environment[_MARKER] = ",".join([*_purposes(), purpose])
    return environment


def end_with_parent() -> None:
    """Have this child process end when its parent does, however that ends."""
    import threading
    import time

    parent = os.getppid()

    def wait() -> None:
        # Windows keeps the number of a parent that has ended.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _purposes() -> list[str]:
    return list(filter(None, os.environ.get(_MARKER, "").split(",")))
