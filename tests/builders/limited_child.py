# SPDX-License-Identifier: MIT
"""Calls functions in a process with limits on time and memory, in another after a crash."""

import faulthandler
import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

# Of processor time for one call; a child that takes four times as long dies.
SECONDS = 5
ADDRESS_SPACE = 6 << 30

CRASHED = "the process crashed or hung"


class Child:
    """Calls functions in a process with limits, in another one after a crash."""

    def __init__(self) -> None:
        self.pool = self._started()

    def __call__(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return self.pool.submit(limited, function, *arguments).result()
        except BrokenProcessPool:
            self.pool = self._started()
            return CRASHED

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def limited(function: Callable[..., Any], *arguments: object) -> Any:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()
