# SPDX-License-Identifier: MIT
"""Options that the commands around quantisation share."""

from __future__ import annotations

__all__ = ["Exclude", "Force", "Format", "Include", "Mode", "Providers", "Target"]

import enum
from typing import Annotated

import typer

_PATTERN = "name, glob, or re:REGEX; repeatable."


class Format(enum.StrEnum):
    """Of a report."""

    TEXT = "text"
    JSON = "json"


class Mode(enum.StrEnum):
    """What becomes of promoted tensors."""

    INT16 = "int16"
    FLOAT = "float"


class Target(enum.StrEnum):
    """What runs the model."""

    CPU = "cpu"
    QNN = "qnn"


Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help=f"Nodes to quantise: {_PATTERN}"),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help=f"Nodes to leave in float: {_PATTERN}"),
]
Providers = Annotated[
    list[str] | None,
    typer.Option("--provider", help="Execution providers that run the samples."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output.")]
