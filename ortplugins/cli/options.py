# SPDX-License-Identifier: MIT
"""The options that more than one command has, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter
from cyclopts.validators import Number

from ortplugins.errors import UsageError
from session_options import DqMatMulNBitsFusion, keys

if TYPE_CHECKING:
    from ortplugins.samples.text import TextSamples

DEFAULT_PASSES = (DqMatMulNBitsFusion.name,)

Model: TypeAlias = Annotated[Path, Parameter(help="An .onnx file.")]
ModelOrFolder: TypeAlias = Annotated[
    Path, Parameter(help="An .onnx file, or a folder with one.")
]
Output: TypeAlias = Annotated[Path, Parameter(alias="-o", help="File to write.")]
Force: TypeAlias = Annotated[bool, Parameter(help="Overwrite files that exist.")]
Format: TypeAlias = Annotated[Literal["text", "json"], Parameter(help="How to print it.")]
Passes: TypeAlias = Annotated[
    tuple[str, ...],
    Parameter("--pass", help="Pass to run: a name, or module:class; repeatable."),
]
Settings: TypeAlias = Annotated[
    tuple[str, ...],
    Parameter("--set", help="Option of a pass, PASS.OPTION=VALUE; repeatable."),
]
Version: TypeAlias = Annotated[
    str | None,
    Parameter(
        help="Oldest onnxruntime to run on, such as 1.24; by default the installed one."
    ),
]
Providers: TypeAlias = Annotated[
    tuple[str, ...],
    Parameter("--provider", help="Execution provider to run on; repeatable."),
]
CacheDir: TypeAlias = Annotated[
    str,
    Parameter(help="Cache directory; by default ORTPLUGINS_CACHE_DIR, else the user's own."),
]
Dims: TypeAlias = Annotated[
    str,
    Parameter(
        help="Sizes of input dimensions, NAME=SIZE,...; x[1]=8 for an unnamed axis of x."
    ),
]
Exclude: TypeAlias = Annotated[
    tuple[str, ...],
    Parameter(
        "--exclude", help="Nodes to leave in float: name, glob, or re:REGEX; repeatable."
    ),
]
Positive: TypeAlias = Annotated[int, Parameter(validator=Number(gte=1))]
CPU = ("CPUExecutionProvider",)


def refuse(why: str, **given: object) -> None:
    """Raise UsageError for options of this call that would be ignored.

    What is None, False or empty was not given.
    """
    for name, value in given.items():
        if value is not None and value is not False and value not in ("", [], ()):
            option = name.strip("_").replace("_", "-")
            raise UsageError(f"--{option} has no effect {why}")


def parse_settings(
    settings: Sequence[str], option: str = "--set", sign: str = "="
) -> dict[str, str]:
    """Read KEY=VALUE pairs, or those with another sign between them."""
    try:
        return keys.parse_pairs(settings, sign)
    except keys.OptionError as error:
        raise UsageError(f"{option}: {error}") from None


def parse_dims(text: str) -> dict[str, int]:
    """Read ``batch=1,seq=16``."""
    return keys.parse_dims("--dims", text)


def size(_: type, tokens: Sequence[Any]) -> int:
    """Convert a size to bytes: 500MB, 10GB, 1GiB."""
    return keys.parse_size("size", tokens[0].value)


@Parameter(name="*")
@dataclass(frozen=True)
class GivenSamples:
    """Samples for a model, if any."""

    samples: Annotated[
        tuple[Path, ...],
        Parameter(help=".npz file with an array for each input; repeatable."),
    ] = ()
    text: Annotated[
        Path | None, Parameter(help="A text to take samples from, read with --tokenizer.")
    ] = None
    tokenizer: Annotated[
        Path | None, Parameter(help="tokenizer.json; by default the one next to the model.")
    ] = None

    count: Annotated[
        Positive | None, Parameter(help="Windows to take from --text (128 by default).")
    ] = None

    def read(self, model: Path) -> Sequence[Path] | TextSamples | None:
        """Return the paths or windows of the text; None where neither is given."""
        if self.text is None:
            refuse("without --text", tokenizer=self.tokenizer, count=self.count)
            return self.samples or None
        refuse("with --text", samples=self.samples)
        from ortplugins.model_io.model_folder import tokenizer_beside
        from ortplugins.samples.text import TextSamples

        tokenizer = self.tokenizer or tokenizer_beside(model)
        if tokenizer is None:
            raise UsageError("--tokenizer: none next to the model; give its path")
        more = {} if self.count is None else {"count": self.count}
        return TextSamples(self.text, tokenizer, **more)


@Parameter(name="*")
@dataclass(frozen=True)
class Printing:
    """How a report is printed."""

    verbose: Annotated[
        bool, Parameter(alias="-v", help="Print everything, not only refusals.")
    ] = False
    format: Format = "text"

    def check(self) -> None:
        """Refuse what has no effect."""
        if self.format != "text":
            refuse(f"with --format {self.format}", verbose=self.verbose)
