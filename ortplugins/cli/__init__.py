# SPDX-License-Identifier: MIT
"""The command line: ``ortplugins``, and ``python -m ortplugins``.

A table of commands; a command's module is imported when it is used.

Exit codes: 0 done, 1 a check failed, 2 wrong usage or input that cannot be used.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Sequence

from ortplugins import __version__
from ortplugins.errors import ModelFileError, PassError, QuantizationError, UsageError
from session_options import OptionError

try:
    import cyclopts
    import rich  # noqa: F401
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in ("cyclopts", "rich"):
        raise
    print("The command line needs: pip install 'ortplugins[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

COMMANDS = {
    "inspect": ("optimize", "Print what passes would do to a model, and why not."),
    "optimize": ("optimize", "Apply passes to a model and write the result."),
    "compare": ("compare", "Run two models on the same inputs: errors and speed."),
    "evaluate": ("evaluate", "Measure a model's quality on a text, and its size."),
    "quantize": ("quantize", "Quantise a model's weights to 4 or 8 bits."),
    "quantize-static": ("quantize_static", "Quantise weights and activations to 8 bits."),
    "tune": ("tune", "Measure which passes and session settings gain."),
    "run": ("run", "Run a program with passes enabled for its sessions."),
    "cache": ("cache", "Fill, list or empty the cache of sessions."),
    "explain": ("explain", "Explain a refusal by its code or its text."),
    "doctor": ("doctor", "Check versions, CPU, cache and limits."),
}
"""Each command, the module of its function, and its line in the list of all."""


def application(asked: str = "") -> cyclopts.App:
    """Return the command line; the command that is ``asked`` for says more of itself."""
    app = cyclopts.App(
        name="ortplugins",
        help="Optimise and quantise ONNX models for ONNX Runtime.",
        version=f"ortplugins {__version__}",
        default_parameter=cyclopts.Parameter(negative=(), show_default=_default),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        help_format="markdown",
    )
    app.register_install_completion_command()
    for number, (name, (module, summary)) in enumerate(COMMANDS.items()):
        place = f"ortplugins.cli.{module}:{name.replace('-', '_')}"
        text = None if name == asked else summary
        app.command(place, name=name, help=text, sort_key=number)
    return app


def _default(value: object) -> str | None:
    """Return a default as the help shows it; None for what is off, or empty."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or None
    return None if value is None or value is False or value == "" else str(value)


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    arguments: Sequence[str] = sys.argv[1:]
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    # By default, they leave temporary files, which may be as large as the activations.
    ending = [getattr(signal, x) for x in ("SIGTERM", "SIGHUP") if hasattr(signal, x)]
    ending = [x for x in ending if signal.getsignal(x) == signal.SIG_DFL]  # not under nohup
    for number in ending:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if arguments[:1] == ["run"]:
            from ortplugins.cli.run import marked

            arguments = marked(arguments)
        program = application(*arguments[:1])(arguments)
    except (
        cyclopts.CycloptsError,
        UsageError,
        ModelFileError,
        OptionError,
        PassError,
        QuantizationError,
        OSError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
    warnings.formatwarning = formatwarning
    if program is not None:  # of ``ortplugins run``
        program()  # here, where none of our handlers catches what it raises
    sys.exit()
