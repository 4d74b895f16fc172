# SPDX-License-Identifier: MIT
"""The command line: ``ortplugins``, and ``python -m ortplugins``."""

from ortplugins.cli.app import main

__all__ = ["main"]
