# SPDX-License-Identifier: MIT
"""Builds a cache entry in a process of its own, so that a server never sees the peak.

The parent writes a job to the child's standard input: a line of JSON, then the model's bytes
where it was given as bytes. The child builds the entry and prints, as one line of JSON, where
it is, or what went wrong.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from ortplugins.artifacts.build import build_entry
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.child_process import child_environment, child_python
from session_options import OptionError
from session_options.caller_warnings import warn_caller

_ERRORS = {cls.__name__: cls for cls in (MissingFileError, ModelFileError, PassError)}
_ERROR_CHARACTERS = 500
_SECONDS = 3600  # where no pass sets a limit
_IN_PROCESS = "ORTPLUGINS_BUILD_IN_PROCESS"


def build_in_child(request: BuildRequest, spare: Path) -> tuple[Path, str] | None:
    """Have a child do what :func:`.build_entry` does; None where this process has to."""
    python = child_python("build")
    if python is None or os.environ.get(_IN_PROCESS) == "1":
        return None
    limits = (item.child_seconds() for item in request.plan.passes)
    seconds = max((limit for limit in limits if limit is not None), default=_SECONDS)
    job = {"request": request.as_json(), "spare": os.fspath(spare)}
    content = request.source if isinstance(request.source, bytes) else b""
    code = "from ortplugins.artifacts.build_process import main; main()"
    try:
        done = subprocess.run(
            # -P: not what lies in the working directory under the name of a module.
            [python, "-P", "-c", code],
            input=json.dumps(job).encode() + b"\n" + content,
            capture_output=True,
            env=child_environment("build"),
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PassError(
            f"the process that optimises the model took more than {seconds} s and was stopped"
        ) from None
    except OSError:
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = done.stderr.decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
        raise PassError(
            f"the process that optimises the model ended with {done.returncode}: {tail}"
        ) from None
    for text in answer["warnings"]:
        warn_caller(text, OrtpluginsWarning)
    if answer["error"] is not None:
        raise _ERRORS[answer["error"]](answer["text"])
    if answer["built"] is None:
        return None
    folder, origin = answer["built"]
    return Path(folder), origin


def main() -> None:
    """Do the job on standard input, and end the process."""
    # A graph is many objects and no garbage: looking for some takes a tenth of a build.
    gc.set_threshold(100_000)
    header, _, content = sys.stdin.buffer.read().partition(b"\n")
    # Whatever else prints goes to the error output: the answer is the last line.
    answer: dict[str, Any] = {"built": None, "error": None, "text": "", "warnings": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OrtpluginsWarning)
        try:
            built = _build(json.loads(header), content)
            answer["built"] = built and (os.fspath(built[0]), built[1])
        except tuple(_ERRORS.values()) as error:
            kind = next(name for name, cls in _ERRORS.items() if isinstance(error, cls))
            answer.update(error=kind, text=str(error))
    answer["warnings"] = [
        str(item.message) for item in caught if issubclass(item.category, OrtpluginsWarning)
    ]
    print(json.dumps(answer), flush=True)
    sys.stderr.flush()
    os._exit(0)  # somebody waits, and taking hundreds of modules down takes its time


def _build(job: dict[str, Any], content: bytes) -> tuple[Path, str] | None:
    try:
        request = BuildRequest.from_json(job["request"], content)
    except OptionError:
        return None  # a pass that only the parent knows
    if json.loads(json.dumps(request.as_json())) != job["request"]:
        return None  # another version of it
    return build_entry(request, Path(job["spare"]))
