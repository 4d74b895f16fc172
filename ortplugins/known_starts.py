# SPDX-License-Identifier: MIT
"""Starts that an earlier one knew: the same options, and files that have not changed.

What such a start depends on is one text, made before any pass is imported: what was set on the
``SessionOptions``, the packages that are installed, the processor. One memo under it, in the
cache, says what to open:

    <root>/known/<checksum>.memo            what was found out about files, until they change
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on; the key
                                            ends with the beginning of the model's digest
    <root>/entries/<key>/manifest.json      its files' sizes and digests, how to open it, the
                                            report; its modification time is the last use
    <root>/building/<model>.<random>/       an entry that is being built; <model> as in the key
    <root>/locks/<model>.lock               held by the process that builds

This is one module, and imports none that onnxruntime has not imported but for ``zlib``: each
takes a tenth of a millisecond of a start.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import time
import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins import __version__

if TYPE_CHECKING:
    import tempfile

# What was set on SessionOptions, by the methods that set it. They have no getter that lists
# their entries, and to ask for one that is not there takes an exception of onnxruntime's, 50
# microseconds of a start for each of some 40. Nor do they say which initializers, dimensions
# or providers were added. So the methods note what they are called with, for objects that are
# made after this module is imported: what they do stays the same. Other objects are asked; so
# are all where somebody holds a method of onnxruntime's already, who could call it unnoticed.


class Record:
    """What was set on one object."""

    __slots__ = ("entries", "others")

    def __init__(self) -> None:
        """Nothing was set yet."""
        self.entries: dict[str, str] = {}
        self.others: list[str] = []  # methods that were called, other than for an entry


_records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()


def record_of(options: Any) -> Record | None:
    """Return what was set on an object; None for one that has to be asked."""
    return _records.get(options)


def _install(cls: type[Any]) -> None:
    names = [x for x in dir(cls) if x.startswith(("add_", "register_", "set_", "clear_"))]
    if not any(_is_held(cls, name) for name in names):
        for name in ("__init__", *names):
            setattr(cls, name, _noting(name, getattr(cls, name)))


def _is_held(cls: type[Any], name: str) -> bool:
    """Whether anything but its class refers to a method, or it is not onnxruntime's own."""
    if not hasattr(vars(cls).get(name), "__func__"):
        return True
    alone = [object()]
    most = sys.getrefcount(alone[0])
    return (
        sys.getrefcount(vars(cls)[name]) > most
        or sys.getrefcount(vars(cls)[name].__func__) > most
    )


def _noting(name: str, method: Any) -> Any:
    """Return a method that does the same, and notes that it was called."""

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if name == "__init__":
            _records[self] = Record()
        elif (record := _records.get(self)) is None:
            pass
        elif name == "add_session_config_entry":
            key, value = map(_as_kept, args)
            record.entries[key] = value
        else:
            record.others.append(name)
        return result

    # functools.wraps takes three times as long, and would hold the method out to others.
    noting.__name__, noting.__doc__ = name, method.__doc__
    return noting


def _as_kept(text: Any) -> str:
    """Return a text as onnxruntime keeps it: it takes bytes, too, and cuts at a NUL."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return str(text).partition("\0")[0]


_install(onnxruntime.SessionOptions)

# What a start depends on.

# Of a memo's text; another number is another text.
_FORMAT = 4
CACHE_DIR_KEY = "ortplugins.cache_dir"
_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
# Of SessionOptions, what decides how fast a session is or what it holds.
SPEED_ATTRIBUTES = (
    "graph_optimization_level",
    "execution_mode",
    "execution_order",
    "intra_op_num_threads",
    "inter_op_num_threads",
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
)
_METADATA = (".dist-info", ".egg-info")
_PACKAGES = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


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
    files = [text.removeprefix("@") for text in every.values() if text.startswith("@")]
    try:
        states = [state_of(os.path.expanduser(name)) for name in files]
    except OSError:
        return None
    folder = every.get(_FOLDER_KEY)
    path = os.path.abspath(os.fsdecode(model))
    if "\0" in path:
        return None
    return repr(
        (
            (_FORMAT, __version__, onnxruntime.__version__),
            installed_packages(tuple(entry for entry in sys.path if isinstance(entry, str))),
            os.environ.get("ORTPLUGINS_NO_ENTRY_POINTS"),
            processor(),
            path,
            os.path.realpath(path),  # beside which its data may be
            sorted(entries.items()),
            None if switched is None else sorted(switched.items()),
            [int(getattr(options, name)) for name in SPEED_ATTRIBUTES],
            providers or onnxruntime.get_available_providers(),
            provider_options,
            disabled_optimizers,
            states,
            folder and os.path.abspath(folder),
        )
    )


@functools.cache
def installed_packages(path: tuple[str, ...]) -> str:
    """Return what changes when a package is installed, removed or replaced.

    Of folders that packages are installed into, the time of change; of others, in which
    programs have files of their own, the metadata of packages: of those in development, which
    have no version in their name, what it says.
    """
    return repr([_packages_in(entry or os.curdir) for entry in path])


def _packages_in(folder: str) -> Any:
    try:
        if folder.endswith(_PACKAGES) or folder.startswith(_STANDARD_LIBRARY):
            return folder, os.stat(folder).st_mtime_ns
        found = sorted(x for x in os.listdir(folder) if x.endswith(_METADATA))
        return folder, [
            (x, "-" in x.rpartition(".")[0] or _contents(folder, x)) for x in found
        ]
    except NotADirectoryError:  # an archive
        return folder, os.stat(folder).st_mtime_ns
    except OSError:
        return folder


def _contents(*parts: str) -> list[bytes]:
    found = []
    for name in ("PKG-INFO", "entry_points.txt"):
        try:
            with open(os.path.join(*parts, name), "rb") as file:
                found.append(file.read())
        except OSError:
            found.append(b"")
    return found


@functools.cache
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


# What it opens.

MANIFEST = "manifest.json"
MODEL = "model.onnx"
# Stands in a memo for the folder of the entry.
_ENTRY = "{entry}"


class Artifact:
    """What a session opens; ``model`` is None for the one that the user gave."""

    __slots__ = ("flags", "model", "report", "settings", "source", "temporary")

    def __init__(
        self,
        report: Mapping[str, Any],
        model: str | None = None,
        settings: Mapping[str, str] | None = None,
        flags: str = "",
    ) -> None:
        """Describe an artifact."""
        self.report = report  # as Report.to_dict has it; "stored" is the JSON of the rest
        self.model = model
        self.settings = settings or {}  # as Pass.session_settings has them
        # baked: onnxruntime's optimisers ran; in_place: its data stays where the user has it;
        self.flags = flags.split()
        # What describe_model says of the user's model; of a known start, nothing.
        self.source: Mapping[str, Any] = {}
        # If the cache cannot be written.
        self.temporary: tempfile.TemporaryDirectory[str] | None = None


def root_of(entries: Mapping[str, str], switched: Mapping[str, str] | None) -> str:
    """Return the cache directory that memos of a start are in."""
    return cache_folder(entries.get(CACHE_DIR_KEY) or (switched or {}).get(CACHE_DIR_KEY, ""))


def find(root: str, text: str) -> Artifact | None:
    """Return what an earlier start of a text found; None where none did, or files changed."""
    if (found := recall(root, text)) is None:
        return None
    key, state, flags, report, *pairs = found
    settings = dict(zip(pairs[::2], pairs[1::2], strict=True))
    model = None
    if key:
        folder = os.path.join(root, "entries", key)
        try:
            is_whole = _state_of_entry(folder) == state
        except OSError:
            return None
        is_ours = is_private(os.path.dirname(folder), folder)
        if not (is_whole and is_ours and note_use(folder)):
            return None
        settings = {name: folder if x == _ENTRY else x for name, x in settings.items()}
        model = os.path.join(folder, MODEL)
    source = "cache" if model or settings else "untouched"
    content = {"source": source, "notes": (), "artifact": model or "", "stored": report}
    return Artifact(content, model, settings, flags)


def keep(
    root: str, text: str, artifact: Artifact, states: Mapping[str, str], started: float
) -> None:
    """Keep what a start opened, for :func:`find`.

    Args:
        root: Of the cache.
        text: What the start depends on.
        artifact: What it opened.
        states: Those of the model's files, as they were read.
        started: When the start began, in seconds since the epoch.
    """
    import json

    report = json.dumps({**artifact.report, "notes": list(artifact.report["notes"])})
    folder = os.path.dirname(artifact.model or "")
    try:
        state = _state_of_entry(folder) if folder else ""
    except OSError:  # it was removed meanwhile
        return
    found = [os.path.basename(folder), state, " ".join(artifact.flags), report]
    for name, value in artifact.settings.items():
        found += name, _ENTRY if value == folder else str(value)
    remember(root, text, states, found, started)


def _state_of_entry(folder: str) -> str:
    """Return the sizes and times of an entry's files; uses change that of its manifest."""
    states = []
    for name in sorted(os.listdir(folder)):
        status = os.stat(os.path.join(folder, name))
        time_ns = 0 if name == MANIFEST else status.st_mtime_ns
        states.append(f"{name} {status.st_size} {time_ns}")
    return "/".join(states)


# Files, and what was found out about them.

# Below the cache directory.
MEMOS = "known"
# A use is written down if the last one is longer ago than this.
USE_SECONDS = 60.0
# A file changed a moment ago may change again within the resolution of its time stamps, as in
# git's index.
SETTLED_SECONDS = 2.0
_SAMPLED_PAGES, _PAGE_BYTES = 16, 4096
# From this size on, hashing a file takes a noticeable part of a start.
MEMO_SIZE = 1 << 20
# The state of a file that is not there, and would count if it were.
ABSENT = "absent 0"
_PLATFORM: str = sys.platform


def cache_folder(chosen: str = "") -> str:
    """Return the cache directory: the one chosen, ORTPLUGINS_CACHE_DIR, or the user's own."""
    if chosen or (chosen := os.environ.get("ORTPLUGINS_CACHE_DIR", "")):
        folder = os.path.expanduser(chosen)
    elif _PLATFORM == "linux":  # importing platformdirs takes longer than the rest of a hit
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        # One that is relative is to be ignored.
        base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
        folder = os.path.join(base, "ortplugins")
    else:
        import platformdirs

        folder = platformdirs.user_cache_dir("ortplugins", appauthor=False)
    if not folder.startswith("~"):
        return os.path.abspath(folder)
    # A user without a home, as in containers that run under any number.
    import tempfile

    # Windows has no such number; its folder for temporary files is the user's own.
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    return os.path.join(tempfile.gettempdir(), f"ortplugins-{user}")


def is_private(*folders: str | os.PathLike[str]) -> bool:
    """Whether nobody but this user, or the administrator, can write to directories."""
    try:
        states = [os.stat(folder) for folder in folders]
    except OSError:
        return False
    if not hasattr(os, "geteuid"):  # Windows: by its ACL, only what is in the user's profile
        profile = os.path.join(_real("~"), "")
        return all(_real(folder).startswith(profile) for folder in folders)
    return all(
        status.st_uid in (os.geteuid(), 0)
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for status in states
    )


def _real(path: str | os.PathLike[str]) -> str:
    return os.path.normcase(os.path.realpath(os.path.expanduser(path)))


def note_use(folder: str | os.PathLike[str]) -> bool:
    """Write down that an entry is used now; return False if it was removed meanwhile.

    The manifest's modification time does for that: it is the smallest file, which matters
    where an overlay copies a whole file first. Nothing is written twice in a minute, nor
    while the clock is behind an earlier use.
    """
    manifest = os.path.join(folder, MANIFEST)
    try:
        if time.time() - os.stat(manifest).st_mtime >= USE_SECONDS:
            os.utime(manifest)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a read-only cache
    return True


def state_of(path: str | os.PathLike[str]) -> str:
    """Return what shows that a file is another one, or was written to."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        return state_of_open(file)
    finally:
        os.close(file)


def state_of_open(file: int) -> str:
    """Return the state of an open file; its last part is when it was changed.

    The third part is a checksum of pages spread over it: file systems without a change time of
    their own (squashfs, say, with every time set to one date) could show two files alike.
    """
    status, checksum = os.fstat(file), 0
    for number in range(_SAMPLED_PAGES if status.st_size > _PAGE_BYTES else 1):
        os.lseek(file, number * (status.st_size // _SAMPLED_PAGES), os.SEEK_SET)
        checksum = zlib.crc32(os.read(file, _PAGE_BYTES), checksum)
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    copied = f"{status.st_size} {status.st_mtime_ns} {checksum}"
    return f"{copied} {status.st_dev} {status.st_ino} {changed}"


def is_settled(state: str, started: float) -> bool:
    """Whether a file of a state was left alone for a while before a moment."""
    return int(state.rpartition(" ")[2]) / 1e9 < started - SETTLED_SECONDS


def seconds_to_settle(state: str) -> float:
    """Return how long a file of a state has to be left alone until it is settled."""
    return int(state.rpartition(" ")[2]) / 1e9 + SETTLED_SECONDS + 0.01 - time.time()


def recall(root: str | os.PathLike[str], text: str) -> list[str] | None:
    """Return what was kept under a text; None where nothing was, or files have changed."""
    folder = os.path.join(root, MEMOS)
    memo = read_memo(os.path.join(folder, memo_name(text)))
    if memo is None or memo[0] != text or not is_private(root, folder):
        return None
    _, shared, states, found = split_memo(memo)
    copied = bool(shared) and not os.access(folder, os.W_OK)
    return found if are_unchanged(states, copied=copied) else None


def file_digest(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the SHA-256 of a file, and the state in which the file has it.

    A large one of which a memo below ``root`` has it is not read.

    Raises:
        OSError: If it can't be read, or changes while it is.
    """
    import hashlib

    name, started = os.path.realpath(path), time.time()
    with open(name, "rb") as file:
        state = state_of_open(file.fileno())
        is_large = os.fstat(file.fileno()).st_size >= MEMO_SIZE
        memo = recall(root, digest_text(name)) if is_large else None
        if memo is not None and state_of(name) == state:  # of the open file
            return memo[0], state
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if state_of_open(file.fileno()) != state:
            raise OSError(f"{name}: changed while it was read")
    if is_large:
        remember(root, digest_text(name), {name: state}, [digest], started)
    return digest, state


def digest_text(name: str) -> str:
    """Return the text under which the digest of a file is kept."""
    return f"digest of {name}"


def are_unchanged(states: Mapping[str, str], *, copied: bool = False) -> bool:
    """Whether files are as they were, or as copies of them would be, if those will do."""
    for path, state in states.items():
        try:
            now = state_of(path)
        except FileNotFoundError:
            now = ABSENT
        except OSError:
            return False
        if now == state:
            continue
        if not (copied and _is_copy(now.split(), state.split())):
            return False
    return True


def _is_copy(now: list[str], before: list[str]) -> bool:
    """Whether size, time of change and sampled pages are those of a file that was copied."""
    same = now[0] == before[0] and now[2:3] == before[2:3]
    return same and is_same_time(int(now[1]), int(before[1]))


def is_same_time(now: int, before: int) -> bool:
    """Whether times of change, in ns, agree; layers of images have whole seconds."""
    return now in (before, before - before % 10**9)


def read_memo(path: str | os.PathLike[str]) -> list[str] | None:
    """Return the fields of a memo; None where there is none, or a byte of it has changed."""
    try:
        with open(path, "rb") as file:
            checksum, _, content = file.read().partition(b"\n")
    except OSError:
        return None
    if checksum != _checksum(content):
        return None
    return content.decode("utf-8", "surrogateescape").split("\0")


def split_memo(fields: Sequence[str]) -> tuple[str, str, dict[str, str], list[str]]:
    """Return a memo's text; if copies of files will do; states by path; and what was found."""
    text, shared, number = fields[:3]
    end = 3 + 2 * int(number)
    states = dict(zip(fields[3:end:2], fields[4:end:2], strict=True))
    return text, shared, states, list(fields[end:])


def remember(
    root: str | os.PathLike[str],
    text: str,
    states: Mapping[str, str],
    found: Sequence[str],
    started: float,
    *,
    shared: bool = False,
) -> None:
    """Keep what was found under a text, until one of the files changes; :func:`recall` reads.

    Not of files that were changed just before ``started``, seconds since the epoch; nor in a
    cache that is read-only. ``states`` are those in which the files were read. Where a memo is
    ``shared`` and cannot be written, copies of the files will do: those of an image.
    """
    folder = os.path.join(root, MEMOS)
    pairs = [part for pair in states.items() for part in pair]
    fields = [text, "shared" if shared else "", str(len(states)), *pairs, *found]
    if any("\0" in field for field in fields):
        return
    if not all(is_settled(state, started) for state in states.values()):
        return
    content = "\0".join(fields).encode("utf-8", "surrogateescape")
    path = os.path.join(folder, memo_name(text))
    new = f"{path}.{os.getpid()}.{time.time_ns()}"
    try:
        for made in (root, folder):
            if not os.path.isdir(made):
                os.makedirs(made, mode=0o700, exist_ok=True)
        if not is_private(root, folder):
            return
        # Readers see the file whole or not at all.
        with open(new, "xb") as file:
            file.write(_checksum(content) + b"\n" + content)
        os.replace(new, path)
    except OSError:
        if os.path.exists(new):
            os.unlink(new)


def memo_name(text: str) -> str:
    """Return the name of a memo; of two texts of one name the later is kept."""
    return f"{zlib.crc32(text.encode('utf-8', 'surrogateescape')):08x}.memo"


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)
