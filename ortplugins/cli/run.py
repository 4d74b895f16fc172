# SPDX-License-Identifier: MIT
"""``ortplugins run``: a program as it is, with passes enabled for its sessions."""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import Parameter

from ortplugins.cli.options import Passes, Settings, parse_settings
from session_options.entries import PASSES_KEY, PREFIX
from session_options.environment import environment_entries
from session_options.plan import entries_of


def start(name: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run a program as ``python`` does, and log each of its sessions to stderr.

    In ``__main__``, with its ``sys.argv``; what it raises is raised here.
    """
    logger, handler = logging.getLogger("ortplugins"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:  # modules next to the program, instead of next to our command
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(name))
    # What runpy's other functions put there is gone when they return, and threads, workers and
    # atexit need it until the process ends.
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if is_module:
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # as python -m does
    elif pkgutil.get_importer(name) or name.endswith(".pyc"):  # a folder or an archive
        runpy.run_path(name, run_name="__main__")
    else:
        main.__file__ = name
        with open(name, "rb") as file:
            program = compile(file.read(), name, "exec", dont_inherit=True)
        exec(program, main.__dict__)


def run(
    program: str,
    /,
    *arguments: str,
    module: Annotated[bool, Parameter(name="-m")] = False,
    passes: Passes = (),
    settings: Settings = (),
) -> Callable[[], None]:
    """Run a Python program with passes enabled for every session that it opens.

    Without --pass, the environment variable ORTPLUGINS names the passes; by default
    dq_matmulnbits_fusion. Options of ortplugins come before the program; the program gets
    everything after its name. Workers that it forks have the passes enabled, too.

    Args:
        program: A script; with -m, a module.
        arguments: Those of the program.
        module: Run a module, as python -m does.
    """
    from ortplugins.session.patching import enable_entries

    if not module and not os.path.exists(program):
        raise FileNotFoundError(f"{program}: no such program")
    enable_entries(_entries(passes, parse_settings(settings)))
    return functools.partial(start, program, arguments, module)


def marked(arguments: Sequence[str]) -> list[str]:
    """Put "--" before the program of a command line: what follows is the program's own."""
    place = 1
    while place < len(arguments) and arguments[place].startswith("-"):
        if arguments[place] in ("--", "--help", "-h"):
            return [*arguments]
        place += 2 if arguments[place] in ("--pass", "--set") else 1
    return [*arguments[:place], "--", *arguments[place:]]


def _entries(passes: Sequence[str], settings: dict[str, str]) -> dict[str, str]:
    """Entries of the passes named here, else of the environment's, else of the default."""
    found = entries_of(passes) or environment_entries()
    enabling = f"{PREFIX}.enable_"
    names = [key.removeprefix(enabling) for key in found if key.startswith(enabling)]
    names += filter(None, found.get(PASSES_KEY, "").split(","))
    return {**found, **entries_of(names, settings)}
