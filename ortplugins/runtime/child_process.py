# SPDX-License-Identifier: MIT
"""What a Python process of ours is started with."""

from __future__ import annotations

__all__ = ["child_environment"]

import os
import sys

from session_options.environment import VARIABLE


def child_environment() -> dict[str, str]:
    """Return this process's environment, for a child that imports from the same places.

    Its sessions are plain ones, whatever is switched on here.
    """
    # Under ``ortplugins run`` it would switch passes on in the child, too.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return environment
