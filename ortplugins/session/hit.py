# SPDX-License-Identifier: MIT
"""Starts that an earlier one knew: the same options, and files that have not changed.

What such a start depends on is one text, made from what was set, before any pass is imported.
One memo under it says what to open. This imports no module that onnxruntime has not imported,
but for ``zlib``.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins._version import __version__
from ortplugins.cache import directory

if TYPE_CHECKING:
    import tempfile

# Of a memo's text; another number is another text.
_FORMAT = 1
CACHE_DIR_KEY = "ortplugins.cache_dir"
_FILE_KEYS = ("ortplugins.hint_samples",)
_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
_ATTRIBUTES = (
    "graph_optimization_level",
    "execution_mode",
    "execution_order",
    "intra_op_num_threads",
    "inter_op_num_threads",
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
)
# Stands in a memo for the folder of the entry.
_ENTRY = "{entry}"
_METADATA = (".dist-info", ".egg-info")
_PACKAGES = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
# By the path that modules are imported from: once in a process.
_installed: dict[tuple[str, ...], str] = {}


class Artifact:
    """What a session opens; ``model`` is None for the one that the user gave."""

    __slots__ = (
        "as_bytes",
        "baked",
        "model",
        "opened",
        "report",
        "settings",
        "source",
        "temporary",
    )

    def __init__(
        self,
        report: Mapping[str, Any],
        model: str | None = None,
        *,
        baked: bool = False,
        settings: Mapping[str, str] | None = None,
        source: Mapping[str, Any] | None = None,
        as_bytes: bool = False,
        opened: bool = False,
    ) -> None:
        """Describe an artifact."""
        self.report = report  # as Report.to_dict has it; "stored" is the JSON of the rest
        self.model, self.baked = model, baked
        self.settings = settings or {}  # as Pass.session_settings has them
        self.source = source or {}  # what describe_model says of the user's model
        self.as_bytes = as_bytes  # its data stays where the user has it
        self.opened = opened  # whether a pass has something to do once a session is open
        # If the cache cannot be written.
        self.temporary: tempfile.TemporaryDirectory[str] | None = None


def text_of_start(
    model: Any,
    entries: Mapping[str, str],
    switched: Mapping[str, str] | None,
    options: Any,
    providers: Sequence[Any] | None,
    provider_options: Sequence[Any] | None,
    disabled_optimizers: Any,
) -> str | None:
    """Return what a start depends on, but for its files; None where nothing is kept of it.

    ``entries`` are those of its options, ``switched`` those that :func:`.enable` has switched
    on.
    """
    if not isinstance(model, str | os.PathLike):
        return None
    if disabled_optimizers is not None:
        if not isinstance(disabled_optimizers, Collection):
            return None
        disabled_optimizers = sorted({*disabled_optimizers})
    every = {**(switched or {}), **entries}
    files = [
        text.removeprefix("@")
        for key, text in every.items()
        if text.startswith("@") or (text and key in _FILE_KEYS)
    ]
    try:
        states = [directory.state_of(os.path.expanduser(name)) for name in files]
    except OSError:
        return None
    folder = every.get(_FOLDER_KEY)
    path = os.path.abspath(os.fsdecode(model))
    parts = (
        (_FORMAT, __version__, onnxruntime.__version__),
        installed_packages(),
        processor(),
        path,
        os.path.realpath(path),  # beside which its data may be
        sorted(entries.items()),
        None if switched is None else sorted(switched.items()),
        [int(getattr(options, name)) for name in _ATTRIBUTES],
        providers or onnxruntime.get_available_providers(),
        provider_options,
        disabled_optimizers,
        states,
        folder and os.path.abspath(folder),
        _cores() if every.get("ortplugins.hint") else None,
    )
    text = repr(parts)
    return None if "\0" in text else text


def root_of(entries: Mapping[str, str], switched: Mapping[str, str] | None) -> str:
    """Return the cache directory that memos of a start are in."""
    own = entries.get(CACHE_DIR_KEY)
    return directory.cache_folder(own or (switched or {}).get(CACHE_DIR_KEY, ""))


def find(root: str, text: str) -> Artifact | None:
    """Return what an earlier start of a text found; None where none did, or files changed."""
    if (found := directory.recall(root, text)) is None:
        return None
    key, source, flags, number, *fields = found
    end = 2 * int(number)
    files = dict(zip(fields[:end:2], fields[1:end:2], strict=True))
    report, *pairs = fields[end:]
    settings = dict(zip(pairs[::2], pairs[1::2], strict=True))
    if not key:
        return Artifact({"source": source, "notes": (), "artifact": "", "stored": report})
    folder = os.path.join(root, "entries", key)
    try:
        is_whole = all(size_and_time(folder, name) == was for name, was in files.items())
    except OSError:
        return None
    is_private = directory.is_private(os.path.dirname(folder), folder)
    if not (is_whole and is_private and directory.note_use(folder)):
        return None
    model = os.path.join(folder, directory.MODEL) if "m" in flags else None
    return Artifact(
        {"source": source, "notes": (), "artifact": model or "", "stored": report},
        model,
        baked="b" in flags,
        settings={name: folder if x == _ENTRY else x for name, x in settings.items()},
        as_bytes="d" in flags,
        opened="o" in flags,
    )


def fields_of(
    artifact: Artifact, folder: str | None, names: Collection[str], report: str
) -> list[str]:
    """Return what :func:`find` reads, of an artifact of an entry or of none.

    Args:
        artifact: What a session opened.
        folder: Of the entry; None where the model needs none.
        names: Files of the entry.
        report: JSON of the artifact's report.
    """
    source = str(artifact.report["source"])
    if folder is None:
        return ["", source, "", "0", report]
    flags = zip(
        "mbdo",
        (artifact.model, artifact.baked, artifact.as_bytes, artifact.opened),
        strict=True,
    )
    pairs = [
        part
        for name, value in artifact.settings.items()
        for part in (name, _ENTRY if value == folder else str(value))
    ]
    files = [part for name in names for part in (name, size_and_time(folder, name))]
    return [
        os.path.basename(folder),
        "untouched" if source == "untouched" else "cache",
        "".join(flag for flag, is_set in flags if is_set),
        str(len(names)),
        *files,
        report,
        *pairs,
    ]


def size_and_time(folder: str, name: str) -> str:
    """Return size and time of change of an entry's file; uses change that of its manifest."""
    status = os.stat(os.path.join(folder, name))
    return f"{status.st_size} {'' if name == directory.MANIFEST else status.st_mtime_ns}"


def installed_packages() -> str:
    """Return what changes when a package is installed, removed or replaced.

    Of folders that packages are installed into, the time of change; of others, in which
    programs have files of their own, the metadata of packages.
    """
    path = tuple(entry for entry in sys.path if isinstance(entry, str))
    if (text := _installed.get(path)) is None:
        text = _installed[path] = repr([_packages_in(entry or os.curdir) for entry in path])
    return text + os.environ.get("ORTPLUGINS_NO_ENTRY_POINTS", "")


def _packages_in(folder: str) -> Any:
    try:
        if folder.endswith(_PACKAGES) or folder.startswith(_STANDARD_LIBRARY):
            return folder, os.stat(folder).st_mtime_ns
        return [
            (folder, name) for name in sorted(os.listdir(folder)) if name.endswith(_METADATA)
        ]
    except NotADirectoryError:  # an archive
        return folder, os.stat(folder).st_mtime_ns
    except OSError:
        return folder


def processor() -> str:
    """Return a checksum of the processor's architecture and instruction sets."""
    try:
        file = os.open("/proc/cpuinfo", os.O_RDONLY)
        try:
            # The first processor speaks for all, and its flags are in the first page.
            content = os.read(file, 8192)
        finally:
            os.close(file)
        lines = [line for line in content.split(b"\n\n")[0].split(b"\n") if b":" in line]
        flags = b"".join(x for x in lines if x.startswith((b"flags", b"Features", b"model\t")))
    except OSError:  # not Linux
        flags = b""
    if not flags:
        from numpy._core._multiarray_umath import __cpu_features__

        flags = repr(sorted(__cpu_features__.items())).encode()
    architecture = os.uname().machine if hasattr(os, "uname") else ""
    return f"{architecture} {zlib.crc32(flags):08x}"


def _cores() -> int:
    from ortplugins.runtime.machine import usable_cores

    return usable_cores()
