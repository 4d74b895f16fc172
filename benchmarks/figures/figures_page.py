# SPDX-License-Identifier: MIT
"""Puts sections into pages of figures, each by the script that measured it."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ortplugins.runtime.machine import instruction_sets, processor_name

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantization-figures.md"
_HEAD = """# Quantising: figures

Made by `make bench-quantizers`; every section tells how, when and on what. Formulas and
methods: [Quantising weights](quantization.md).
"""
_PACKAGES = ("onnxruntime", "onnx", "onnx_ir", "numpy", "ortplugins")


def write_section(name: str, text: str, page: Path = PAGE, head: str = _HEAD) -> None:
    """Replace a section, or put it at the end; the others stay as they are.

    Args:
        name: Between comments in the page, the reader does not see it.
        text: Markdown.
        page: The file; made if missing.
        head: What a new one begins with.
    """
    old = page.read_text(encoding="utf-8") if page.exists() else head
    section = f"<!-- {name} -->\n{text.strip()}\n<!-- end of {name} -->\n"
    pattern = rf"<!-- {re.escape(name)} -->\n.*?<!-- end of {re.escape(name)} -->\n"
    new, count = re.subn(pattern, lambda _: section, old, flags=re.DOTALL)
    page.write_text(new if count else f"{old.rstrip()}\n\n{section}", encoding="utf-8")


def origin(command: str, versions: Sequence[str] = ()) -> str:
    """Say by which command, when, on which machine and with what a section was measured."""
    own = [f"{package} {version(package)}" for package in _PACKAGES]
    return (
        f"`{command}`, {datetime.date.today().isoformat()}; "
        f"{processor_name()} ({', '.join(instruction_sets())}), "
        f"{os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{', '.join([*own, *versions])}."
    )
