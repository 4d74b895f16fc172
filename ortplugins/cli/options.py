# SPDX-License-Identifier: MIT
"""The declaration of every option that more than one command has, and what they all check."""

from __future__ import annotations

__all__ = [
    "DEFAULT_PASSES",
    "CacheDir",
    "Chat",
    "Count",
    "Dims",
    "Exclude",
    "Force",
    "Format",
    "Include",
    "Mode",
    "Model",
    "OnnxruntimeVersion",
    "Output",
    "Passes",
    "Providers",
    "ReportFormat",
    "Samples",
    "Seed",
    "Settings",
    "SvgFile",
    "Target",
    "Text",
    "Tokenizer",
    "Verbose",
    "WorkDir",
    "check_absent",
    "parse_dims",
    "parse_settings",
    "refuse_without_effect",
    "sample_source",
]

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from session_options import DqMatMulNBitsFusion

if TYPE_CHECKING:
    from ortplugins.samples.text import TextSamples


class Format(enum.StrEnum):
    """Of what a command prints."""

    TEXT = "text"
    JSON = "json"


class ReportFormat(enum.StrEnum):
    """Of what a command prints that has annotations for GitHub Actions, too."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


class Mode(enum.StrEnum):
    """What promoted tensors become."""

    INT16 = "int16"
    FLOAT = "float"


class Target(enum.StrEnum):
    """What runs the model."""

    CPU = "cpu"
    QNN = "qnn"


def _pass_names() -> list[str]:
    from session_options import registered_passes

    return list(registered_passes())


_PATTERN = "name, glob, or re:REGEX; repeatable."
DEFAULT_PASSES = [DqMatMulNBitsFusion.name]

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
Passes = Annotated[
    list[str],
    typer.Option(
        "--pass", metavar="NAME", help="A pass to run; repeatable.", autocompletion=_pass_names
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="An option of a pass, <pass>.<option>; repeatable."
    ),
]
OnnxruntimeVersion = Annotated[
    str | None,
    typer.Option(
        "--onnxruntime",
        metavar="VERSION",
        help="Oldest onnxruntime to run on, for example 1.24; default: the installed one.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print everything, not only refusals.")
]
CacheDir = Annotated[
    str,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Cache directory; default: ORTPLUGINS_CACHE_DIR, else the user's own.",
    ),
]
Samples = Annotated[
    list[Path] | None,
    typer.Option(
        "--samples",
        metavar="FILE.npz",
        help="Inputs, an array for each; repeatable. Default: inputs are made up.",
    ),
]
Dims = Annotated[
    str,
    typer.Option(
        "--dims",
        metavar="NAME=SIZE,...",
        help="Sizes of the inputs' dimensions; x[1]=8 for an axis of x without a name.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="Samples: windows of a text, by --tokenizer."),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="With --text: its tokenizer.json."),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="With --text: each paragraph as a message of a conversation."),
]
Count = Annotated[
    int,
    typer.Option("--count", help="How many samples to make up, or to take of --text.", min=1),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of samples that are made up.", min=0)]
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
    typer.Option(
        "--provider",
        metavar="NAME",
        help="Execution provider to run on; repeatable. Default: CPUExecutionProvider.",
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="For intermediate files; default: the system's temporary folder."
    ),
]
SvgFile = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Draw the curves as SVG, too.")
]


def parse_settings(settings: list[str] | None, param_hint: str = "--set") -> dict[str, str]:
    """Read KEY=VALUE pairs.

    Args:
        settings: The pairs; None for none.
        param_hint: Name of the option that they come from, for errors.
    """
    pairs = {}
    for item in settings or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint=param_hint)
        pairs[key] = value
    return pairs


def sample_source(
    context: typer.Context,
) -> list[Path] | TextSamples | None:
    """Return what ``--samples`` or ``--text`` name; None where samples are to be made up.

    Raises:
        typer.BadParameter: If one of the options that go with them has no effect, or is
            missing.
    """
    given = context.params
    if given["text"] is None:
        refuse_without_effect(context, "without --text", "tokenizer", "chat")
        if "dims" not in given:  # the command makes up as many as it needs
            refuse_without_effect(context, "without --text", "count")
        if given["samples"]:
            made_up = ("dims", "count", "seed")
            refuse_without_effect(context, "with --samples", *made_up)
        return given["samples"] or None
    refuse_without_effect(context, "with --text", "samples", "dims", "seed")
    if given["tokenizer"] is None:
        raise typer.BadParameter("give the tokenizer.json", param_hint="--tokenizer")
    from ortplugins.samples.text import TextSamples

    count = given["count"]
    return TextSamples(given["text"], given["tokenizer"], count=count, chat=given["chat"])


def parse_dims(text: str) -> dict[str, int]:
    """Read ``batch=1,seq=16``."""
    sizes = {}
    for item in filter(None, text.split(",")):
        name, equals, size = item.rpartition("=")
        if not equals or not size.strip().isdecimal():
            raise typer.BadParameter(f"{item!r} is not NAME=SIZE", param_hint="--dims")
        sizes[name.strip()] = int(size)
    return sizes


def refuse_without_effect(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options of this call that would be ignored.

    Args:
        context: Of the command.
        why: What makes them useless, such as ``"with --dry-run"``.
        names: Parameters of the command's function.

    Raises:
        typer.BadParameter: If one of them was given.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and parameter.name in names:
            raise typer.BadParameter(f"has no effect {why}", param_hint=parameter.opts[0])


def check_absent(*paths: Path | None, force: bool) -> None:
    """Find out what would fail at the end, before the work.

    Raises:
        FileExistsError: If a file exists and ``force`` is false.
    """
    for path in paths:
        if path is not None and path.exists() and not force:
            raise FileExistsError(f"{path}: exists; --force overwrites it")
