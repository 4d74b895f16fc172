# SPDX-License-Identifier: MIT
"""Builds a cache entry in a process of its own, so that a server never sees the peak.

The parent writes a job to the child's standard input: a line of JSON, then the model's bytes
where it was given as bytes. The child does what the parent would do on a miss, publishes the
entry in the cache, and prints what went wrong, if anything did, as one line of JSON.
"""

from __future__ import annotations

__all__ = ["build_in_child", "main"]

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.runtime.child_process import child_environment
from session_options.plan import make_plan, plan_from_settings, settings_of

if TYPE_CHECKING:
    from ortplugins.artifacts.find_or_build import Request

_ERRORS = {cls.__name__: cls for cls in (MissingFileError, ModelFileError, PassError)}
_ERROR_CHARACTERS = 500


def build_in_child(request: Request) -> str:
    """Have a child build the entry of a request.

    Returns:
        ``"built"``, or ``"cache"`` where another one was quicker; empty where no child can do
        it, so that this process has to.

    Raises:
        MissingFileError, ModelFileError, PassError: As the build itself; PassError too when
            the child was killed, or took too long.
    """
    if not sys.executable:
        return ""
    seconds = max(item.child_seconds() for item in request.plan.passes)
    content, path = b"", None
    if isinstance(request.source, bytes):
        content = request.source
    else:
        path = os.path.abspath(os.fspath(request.source))
    job = {
        "source": path,
        "folder": None if request.folder is None else str(request.folder),
        "passes": [item.name for item in request.plan.passes],
        "settings": settings_of(request.plan),
        "cache_dir": request.plan.cache_dir,
        "bake": request.plan.bake,
        "cpu_arena": request.plan.cpu_arena,
        "fingerprint": request.plan.fingerprint(),
        "providers": list(request.providers),
        "optimisers": None if request.settings is None else request.settings.as_json(),
        "final_graph": request.final_graph,
    }
    code = "from ortplugins.artifacts.build_process import main; main()"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            input=json.dumps(job).encode() + b"\n" + content,
            capture_output=True,
            env=child_environment(),
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PassError(
            f"the process that optimises the model took more than {seconds} s and was stopped"
        ) from None
    except OSError:
        return ""
    lines = done.stdout.decode(errors="replace").splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = done.stderr.decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
        raise PassError(
            f"the process that optimises the model ended with {done.returncode}: {tail}"
        ) from None
    for text in answer["warnings"]:
        warnings.warn(text, OrtpluginsWarning, stacklevel=7)
    if answer["error"] is not None:
        raise _ERRORS[answer["error"]](answer["text"])
    return str(answer["origin"])


def main() -> None:
    """Do the job on standard input."""
    header, _, content = sys.stdin.buffer.read().partition(b"\n")
    # Whatever else prints goes to the error output: the answer is the last line.
    answer: dict[str, Any] = {"origin": "", "error": None, "text": "", "warnings": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OrtpluginsWarning)
        try:
            answer["origin"] = _build(json.loads(header), content)
        except tuple(_ERRORS.values()) as error:
            kind = next(name for name, cls in _ERRORS.items() if isinstance(error, cls))
            answer.update(error=kind, text=str(error))
    answer["warnings"] = [
        str(item.message) for item in caught if issubclass(item.category, OrtpluginsWarning)
    ]
    print(json.dumps(answer), flush=True)


def _build(job: dict[str, Any], content: bytes) -> str:
    from ortplugins.artifacts.find_or_build import Request, build_and_publish
    from ortplugins.optimization.offline_optimizers import BakeSettings

    plan = plan_from_settings(job["passes"], job["settings"])
    general = {name: job[name] for name in ("cache_dir", "bake", "cpu_arena")}
    plan = make_plan(plan.passes, **general)
    if json.loads(json.dumps(plan.fingerprint())) != job["fingerprint"]:
        return ""  # a pass that only the parent knows, or another version of it
    request = Request(
        source=content if job["source"] is None else job["source"],
        folder=None if job["folder"] is None else Path(job["folder"]),
        plan=plan,
        providers=tuple(job["providers"]),
        settings=BakeSettings.from_json(job["optimisers"]),
        final_graph=job["final_graph"],
    )
    return build_and_publish(request)
