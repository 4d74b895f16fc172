# SPDX-License-Identifier: MIT
"""Measurements behind the figures of README and docs."""

import sys
from pathlib import Path

# Models are built by the tests' builders.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
