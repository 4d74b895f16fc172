# SPDX-License-Identifier: MIT
"""Passes of another package, as pip would install it: one made up, and the example."""

import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme_passes"


def install_passes(folder: Path, source: str, **points: str) -> Path:
    """Write a distribution of one module, ``acme``; return what belongs on the path."""
    _write_information(folder, "acme-passes", "1.2", {"ortplugins.passes": points})
    (folder / "acme.py").write_text(textwrap.dedent(source))
    return folder


def installed(folder: Path) -> list[str]:
    """Write what pip leaves of the example besides its code; return what goes on the path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    points = project["entry-points"]
    _write_information(folder, project["name"], project["version"], points)
    return [str(EXAMPLE), str(folder)]


def _write_information(
    folder: Path, name: str, version: str, groups: Mapping[str, Mapping[str, str]]
) -> None:
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
    (information / "METADATA").write_text(metadata)
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{point} = {place}" for point, place in points.items())]
    (information / "entry_points.txt").write_text("\n".join([*lines, ""]))
