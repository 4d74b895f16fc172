# SPDX-License-Identifier: MIT
"""``python -m ortplugins``, the same as the command ``ortplugins``."""

from ortplugins.cli import main

main()
