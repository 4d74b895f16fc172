# SPDX-License-Identifier: MIT
"""The declaration of every option that more than one command has, and what they all check.

Options that go together are the parameters of a function, a group. A command that has a
parameter ``Annotated[..., group]`` gets them all, and what the function returns for them.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from session_options import DqMatMulNBitsFusion, keys

# Behind the name of a parameter: its metavar, where it has one, and its help.
_DESCRIPTION = r"(?: \(([^)]+)\))?: (.+(?:\n {8}.+)*)"
# The same for parameters that several commands have.
_SHARED = """
    model (MODEL): An .onnx file.
    output: File to write.
    force: Overwrite files that exist.
    verbose: Print everything, not only refusals.
    passes (NAME): A pass to run; repeatable.
    settings (KEY=VALUE): An option of a pass, <pass>.<option>; repeatable.
    onnxruntime (VERSION): Oldest onnxruntime to run on, for example 1.24; default: the
        installed one.
    cache_dir (DIR): Cache directory; default: ORTPLUGINS_CACHE_DIR, else the user's own.
    dims (NAME=SIZE,...): Sizes of input dimensions; x[1]=8 for an unnamed axis of x.
    count: How many samples to take from --text, or to make up.
    nodes_to_include (PATTERN): Nodes to quantise: name, glob, or re:REGEX; repeatable.
    nodes_to_exclude (PATTERN): Nodes to leave in float: name, glob, or re:REGEX; repeatable.
    providers (NAME): Execution provider to run on; repeatable.
    work_dir (DIR): Folder for intermediate files; default: the system's temporary folder.
    tokenizer (FILE): tokenizer.json; default: the one beside the model.
"""


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command, or a group, that has the options of its groups in their place.

    The help of a parameter is what its docstring, or that of all commands, says of it:
    ``name (METAVAR): help``.
    """
    groups: dict[str, Callable[..., Any]] = {}
    options: dict[str, inspect.Parameter] = {}
    own = inspect.signature(command, eval_str=True).parameters
    text, _, described = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    for name, parameter in own.items():
        metadata = getattr(parameter.annotation, "__metadata__", ())
        line = re.search(rf"^    {name}{_DESCRIPTION}", described + _SHARED, re.MULTILINE)
        if group := next(filter(inspect.isfunction, metadata), None):
            groups[name] = with_groups(group)
            options |= inspect.signature(groups[name]).parameters
        elif line:
            options[name] = _with_help(parameter, line[1], " ".join(line[2].split()))
        else:
            options[name] = parameter

    def run(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(
                **{key: given[key] for key in inspect.signature(group).parameters}
            )
        return command(**{key: given[key] for key in own})

    keyword = inspect.Parameter.KEYWORD_ONLY
    ordered = [parameter.replace(kind=keyword) for parameter in options.values()]
    run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, text
    return run


def _with_help(parameter: inspect.Parameter, metavar: str, help: str) -> inspect.Parameter:
    """Return a parameter as an option with a help; what is False is a flag without a --no."""
    kind = parameter.annotation
    if metadata := getattr(kind, "__metadata__", ()):
        kind, info = kind.__origin__, copy.copy(metadata[0])
    else:
        flag = [f"--{parameter.name.replace('_', '-')}"] if parameter.default is False else []
        info = typer.Option(*flag)
    info.help, info.metavar = info.help or help, metavar
    return parameter.replace(annotation=Annotated[kind, info])


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter of the command's function comes from this call, not by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_without_effect(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options of this call that would be ignored."""
    for parameter in context.command.params:
        given = is_given(context, parameter.name or "")
        if given and parameter.name in names:
            raise typer.BadParameter(f"has no effect {why}", param_hint=parameter.opts[0])


def parse_settings(settings: list[str] | None, param_hint: str = "--set") -> dict[str, str]:
    """Read KEY=VALUE pairs."""
    pairs = {}
    for item in settings or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint=param_hint)
        pairs[key] = value
    return pairs


def parse_dims(text: str) -> dict[str, int]:
    """Read ``batch=1,seq=16``."""
    try:
        return keys.parse_dims("dims", text)
    except keys.OptionError as error:
        raise typer.BadParameter(str(error), param_hint="--dims") from None


def parse_size(text: str) -> int:
    """Read a size as bytes: 500MB, 10GB, 1GiB."""
    try:
        return keys.parse_size("size", text)
    except keys.OptionError as error:
        raise typer.BadParameter(str(error)) from None


def _pass_names() -> list[str]:
    from session_options import registered_passes

    return list(registered_passes())


class Printing(NamedTuple):
    """How a report is printed, and whether rewrites and notes are, too."""

    format: str
    verbose: bool


DEFAULT_PASSES = [DqMatMulNBitsFusion.name]
CPU = ["CPUExecutionProvider"]

Model = Annotated[Path, typer.Argument()]
ModelOrFolder = Annotated[Path, typer.Argument(help="An .onnx file, or a folder with one.")]
Output = Annotated[Path, typer.Option("--output", "-o")]
Format = Literal["text", "json"]
Verbose = Annotated[bool, typer.Option("--verbose", "-v")]
Passes = Annotated[list[str], typer.Option("--pass", autocompletion=_pass_names)]
Settings = Annotated[list[str] | None, typer.Option("--set")]
Count = Annotated[int, typer.Option(min=1)]
Include = Annotated[list[str] | None, typer.Option("--include")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude")]
Providers = Annotated[list[str], typer.Option("--provider")]


def _chosen_passes(passes: Passes = DEFAULT_PASSES, settings: Settings = None) -> Any:
    """Return passes and options, as ``optimize`` takes them."""
    return {"passes": passes, "options": parse_settings(settings)}


def _given_samples(
    context: typer.Context,
    samples: list[Path] | None = None,
    text: Path | None = None,
    tokenizer: Path | None = None,
    chat: bool = False,
    count: Count = 32,
) -> Any:
    """Return the paths or the text; None where neither is given.

    Args:
        samples (FILE.npz): Samples: an array for each input; repeatable.
        text (FILE): Samples: windows of a text, read by --tokenizer.
        chat: With --text: send each paragraph through the chat template.
    """
    if text is None:
        refuse_without_effect(context, "without --text", "tokenizer", "chat")
        if "dims" not in context.params:  # the command makes up as many as it needs
            refuse_without_effect(context, "without --text", "count")
        if samples:
            refuse_without_effect(context, "with --samples", "dims", "count", "seed")
        return samples or None
    refuse_without_effect(context, "with --text", "samples", "dims", "seed")
    from ortplugins.model_io.model_folder import tokenizer_beside
    from ortplugins.samples.text import TextSamples

    tokenizer = tokenizer or tokenizer_beside(context.params["model"])
    if tokenizer is None:
        raise typer.BadParameter(
            "none beside the model: give its path", param_hint="--tokenizer"
        )
    return TextSamples(text, tokenizer, count=count, chat=chat)


GivenSamples: TypeAlias = Annotated[Any, _given_samples]


def _inputs(
    given: GivenSamples,
    dims: str = "",
    count: Count = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> Any:
    """Return inputs, given or made up, as ``compare`` takes them.

    Args:
        seed: Seed of made-up samples.
    """
    return {"inputs": given, "dims": parse_dims(dims), "samples": count, "seed": seed}


def _printing(
    context: typer.Context,
    verbose: Verbose = False,
    format: Format = "text",
) -> Any:
    """Return how a report is printed."""
    if format != "text":
        refuse_without_effect(context, f"with --format {format}", "verbose")
    return Printing(format, verbose)


ChosenPasses: TypeAlias = Annotated[dict[str, Any], _chosen_passes]
Inputs: TypeAlias = Annotated[dict[str, Any], _inputs]
ReportPrinting: TypeAlias = Annotated[Printing, _printing]
