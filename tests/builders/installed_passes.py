# SPDX-License-Identifier: MIT
"""Passes of another package, as pip would install it."""

from __future__ import annotations

import textwrap
from pathlib import Path


def install_passes(folder: Path, source: str, **points: str) -> Path:
    """Write a distribution of one module, ``acme``; return what belongs on the path.

    Args:
        folder: Where to.
        source: The module's text.
        points: Its entry points.
    """
    information = folder / "acme_passes-1.2.dist-info"
    information.mkdir(parents=True)
    (folder / "acme.py").write_text(textwrap.dedent(source))
    metadata = "Metadata-Version: 2.1\nName: acme-passes\nVersion: 1.2\n"
    (information / "METADATA").write_text(metadata)
    lines = [f"{name} = {value}" for name, value in points.items()]
    (information / "entry_points.txt").write_text(
        "\n".join(["[ortplugins.passes]", *lines, ""])
    )
    return folder
