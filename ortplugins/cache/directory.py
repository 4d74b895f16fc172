# SPDX-License-Identifier: MIT
"""The cache directory, and what was found out about files that have not changed since.

    <root>/known/<checksum>.memo            what was found out about files, until they change
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on; the key
                                            ends with the beginning of the model's digest
    <root>/entries/<key>/manifest.json      its files' sizes and digests, how to open it, the
                                            report; its modification time is the last use
    <root>/building/<model>.<random>/       an entry that is being built; <model> as in the key
    <root>/locks/<model>.lock               held by the process that builds

A start on files that an earlier one knew imports this module of the package and no other, and
no module of Python's that onnxruntime has not imported.
"""

from __future__ import annotations

import os
import stat
import sys
import time
import zlib
from collections.abc import Mapping, Sequence

MANIFEST = "manifest.json"
MODEL = "model.onnx"
MEMOS = "known"
# A use is written down if the last one is longer ago than this.
USE_SECONDS = 60.0
# A file changed a moment ago may change again within the resolution of its time stamps, as in
# git's index.
SETTLED_SECONDS = 2.0
_SAMPLED_PAGES, _PAGE_BYTES = 16, 4096
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

    return os.path.join(tempfile.gettempdir(), f"ortplugins-{os.geteuid()}")


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
