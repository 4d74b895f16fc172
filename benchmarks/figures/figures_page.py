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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantization-figures.md"
_HEAD = """# Quantising: figures

Made by `make bench-quantizers`; every section tells how, when and on what. Formulas and
methods: [Quantising weights](quantization.md).
"""
_PACKAGES = ("onnxruntime", "onnx", "onnx_ir", "numpy", "ortplugins")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "amx_int8")


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
        f"`{command}`, {datetime.date.today().isoformat()}; {_processor()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{', '.join([*own, *versions])}."
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            pairs = (line.split(":", 1) for line in lines if ":" in line)
            facts = {key.strip(): value.strip() for key, value in pairs}
    except OSError:
        return platform.processor()
    sets = [name for name in _INSTRUCTIONS if name in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.processor())} ({', '.join(sets)})"
