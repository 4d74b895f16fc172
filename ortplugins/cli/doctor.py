# SPDX-License-Identifier: MIT
"""``ortplugins doctor``: what sessions and commands depend on, and what is wrong with it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.filesize import decimal

from ortplugins.cli.options import CacheDir, Format
from ortplugins.cli.terminal import print_table
from rewrite_rules.onnxruntime_version import OLDEST, parse_version

_THREADS, _THREADS_SINCE = "ORT_INTRA_OP_NUM_THREADS", (1, 29)
_UNLIMITED = 1 << 60  # in version 1 of cgroups, no limit is a number near 2**63


def doctor(*, cache_dir: CacheDir = "", format: Format = "text") -> None:
    """Check what ortplugins depends on: versions, CPU, cache, limits.

    Exits with 1 if something is wrong; the last column says what, and what to do.
    """
    rows = [*_runtime(), *_machine(), *_cache(cache_dir), *_settings()]
    if format == "json":
        fields = ("name", "value", "problem")
        listed = [dict(zip(fields, row, strict=True)) for row in rows]
        print(json.dumps(listed, indent=1))
    else:
        print_table(("What", "Found", "Problem"), rows)
    if any(problem for _, _, problem in rows):
        sys.exit(1)


_Rows = Iterator[tuple[str, str, str]]


def _runtime() -> _Rows:
    import onnxruntime

    from ortplugins.runtime.machine import versions

    for name, found in versions().items():
        old = name == "onnxruntime" and parse_version(found) < OLDEST
        oldest = ".".join(map(str, OLDEST))
        advice = f"ortplugins needs {oldest} or later: pip install -U onnxruntime"
        yield name, found, advice if old else ""
    yield "execution providers", ", ".join(onnxruntime.get_available_providers()), ""


def _machine() -> _Rows:
    from ortplugins.runtime.machine import machine

    found = machine()
    yield "processor", found["processor"], ""
    yield (
        "instruction sets",
        ", ".join(found["instruction_sets"]) or "none that matter here",
        "",
    )
    yield "cores", str(found["cores"]), ""
    default, usable, advice = _threads()
    yield "threads of a session", f"{default}, on {usable} physical cores", advice
    memory = found["memory_bytes"]
    yield "memory", "unknown" if memory is None else decimal(memory), ""
    if limit := _memory_limit():
        yield "memory limit (cgroup)", decimal(limit), ""


def _threads() -> tuple[int, int, str]:
    """Return the threads of a session by default, the cores it may use, and what to do."""
    import onnxruntime

    from ortplugins.runtime.machine import host_cores, usable_cores

    default, usable = host_cores(), usable_cores()
    known = parse_version(onnxruntime.__version__) >= _THREADS_SINCE
    if known and (given := os.environ.get(_THREADS, "")).isdecimal():
        default = int(given) or default
    if default <= usable:
        return default, usable, ""
    environment = f", or {_THREADS}={usable} in the environment" if known else ""
    return default, usable, f"set intra_op_num_threads={usable}{environment}"


def _memory_limit() -> int | None:
    """Bytes that the container may use; None without a limit."""
    from ortplugins.runtime.machine import text_of

    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = text_of("/sys/fs/cgroup", name)
        if text.isdecimal() and int(text) < _UNLIMITED:
            return int(text)
    return None


def _cache(cache_dir: str) -> _Rows:
    from ortplugins.cache.folder import cache_folder
    from ortplugins.cache.store import ArtifactCache

    root = Path(cache_folder(cache_dir))
    exists = os.path.exists(root)  # Path.exists raises where a folder cannot be entered
    yield "cache directory", str(root), ""
    try:
        cache = ArtifactCache(root)
        cache.check_trusted()
        entries = cache.entries() if exists else []
    except OSError as error:
        yield "cache entries", "not used", str(error)
    else:
        size = decimal(sum(entry.size for entry in entries))
        yield "cache entries", f"{len(entries)}, {size}", ""
    place = next(path for path in (root, *root.parents) if os.path.exists(path))
    if place.is_dir() and os.access(place, os.W_OK):
        yield "cache writable", "yes" if exists else "yes, once it is created", ""
    else:
        advice = "set ORTPLUGINS_CACHE_DIR to a folder of your own"
        yield "cache writable", "no", f"{place} cannot be written: {advice}"
    yield "free disk for the cache", decimal(shutil.disk_usage(place).free), ""


def _settings() -> _Rows:
    """Yield what the environment sets; what sessions cannot read is a problem."""
    from ortplugins.cache.store import cache_of
    from session_options.environment import VARIABLE, environment_entries
    from session_options.keys import OptionError

    limit = "ORTPLUGINS_CACHE_LIMIT"
    read: dict[str, Callable[[], object]] = {
        VARIABLE: environment_entries,
        limit: lambda: cache_of({}),
    }
    for name in (VARIABLE, "ORTPLUGINS_CACHE_DIR", limit):
        if text := os.environ.get(name):
            problem = ""
            try:
                read.get(name, str)()
            except OptionError as error:
                problem = str(error)
            yield f"environment: {name}", text, problem
