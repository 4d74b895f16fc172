# SPDX-License-Identifier: MIT
"""examples/acme_passes as pip would install it."""

from __future__ import annotations

import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme_passes"


def installed(folder: Path) -> list[str]:
    """Write what pip would leave of the package besides its code.

    Returns:
        The folders for ``sys.path``.
    """
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / f"acme_passes-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return [str(EXAMPLE), str(folder)]
