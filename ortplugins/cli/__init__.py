# SPDX-License-Identifier: MIT
"""The command line: ``ortplugins``, and ``python -m ortplugins``.

A table of commands; a command's module is imported when it is used.

Exit codes: 0 done, 1 a check failed, 2 wrong usage or input that cannot be used.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

from ortplugins import __version__
from ortplugins.errors import ModelFileError, PassError, QuantizationError, UsageError
from session_options import OptionError

try:
    import rich  # noqa: F401
    import typer
    import typer.core
    import typer.main
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in ("rich", "typer"):
        raise
    print("The command line needs: pip install 'ortplugins[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

COMMANDS = {
    "inspect": "Print what passes would do to a model, and why not; write nothing.",
    "optimize": "Apply passes to a model and write the result.",
    "compare": "Run two models on the same inputs: errors, speed and memory.",
    "evaluate": "Measure a model's quality on a text: perplexity or retrieval; and its size.",
    "quantize": "Quantise a model's weights to 4, 8 or 2 bits.",
    "quantize-static": "Quantise weights and activations to 8 bits, chosen activations to 16.",
    "tune": "Measure passes and session settings beside plain onnxruntime; write nothing.",
    "run": "Run a Python program with passes enabled for every session that it opens.",
    "cache": "Fill, show, check or empty the cache of sessions.",
    "explain": "Explain a refusal by its code or its text; without either, list all.",
    "doctor": "Check what ortplugins depends on: versions, CPU, cache, limits.",
}
"""Each command and its line in the help."""
# Commands stand in modules of their names, but for these.
_MODULES = {
    "inspect": "optimize",
}


class _Commands(typer.core.TyperGroup):
    """The table as a group: help and completion import none of the commands' modules."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in COMMANDS.items():
            self.add_command(typer.core.TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and _load(args[0]), rest


def _load(name: str) -> Any:
    from ortplugins.cli.options import with_groups

    identifier = name.replace("-", "_")
    module = importlib.import_module(f"ortplugins.cli.{_MODULES.get(name, identifier)}")
    command = getattr(module, identifier)
    if not isinstance(command, typer.Typer):
        # What follows the program of `run` is the program's.
        settings = {"allow_interspersed_args": name != "run"}
        function, command = command, typer.Typer(add_completion=False)
        command.command(context_settings=settings)(with_groups(function))
    return typer.main.get_command(command)


app = typer.Typer(
    cls=_Commands,
    help="Optimise and quantise ONNX models for ONNX Runtime.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    programs: list[Callable[[], None]] = []  # of `ortplugins run`
    try:
        app(obj=programs)
    except SystemExit:
        if not programs:
            raise
    except (
        UsageError,
        ModelFileError,
        OptionError,
        PassError,
        QuantizationError,
        OSError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    warnings.formatwarning = formatwarning
    programs[0]()  # here, where none of our handlers catches what it raises
    sys.exit()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ortplugins {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass
