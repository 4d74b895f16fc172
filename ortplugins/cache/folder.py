# SPDX-License-Identifier: MIT
"""The cache directory: where it is, who may write there, and the digests of models' files.

    <root>/index/<checksum>                 the digest of a file, until its state changes
    <root>/index/<digest>.data              where a model, by its digest, has external data
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on
    <root>/entries/<key>/artifact           how a session opens it, see ``artifact.py``; its
                                            modification time is the last use
    <root>/entries/<key>/report.json        what the passes did
    <root>/building/<model>.<random>/       an entry that is being built
    <root>/locks/<model>.lock               held by the process that builds

Each import costs a fraction of a millisecond at every start, so this module uses only what
onnxruntime has imported anyway.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence

try:
    from _blake2 import blake2b  # hashlib takes milliseconds to import
except ImportError:
    from hashlib import blake2b

INDEX = "index"
# A file that has just changed may change again within the resolution of its time stamps; git's
# index has the same problem.
SETTLED_SECONDS = 2.0
_SAMPLED_PAGES, _PAGE_BYTES = 16, 4096
_CHUNK_BYTES = 1 << 20
# From this size on, hashing a file slows a start noticeably.
INDEXED_BYTES = 1 << 16
DIGEST_CHARACTERS = 40
_PLATFORM: str = sys.platform


def cache_folder(chosen: str = "") -> str:
    """Return the cache directory: the one chosen, ORTPLUGINS_CACHE_DIR, or the user's own."""
    chosen = chosen or os.environ.get("ORTPLUGINS_CACHE_DIR", "")
    return _folder_at(chosen) if chosen else user_folder()


def user_folder() -> str:
    """Return the user's own cache directory, whatever was chosen.

    Without a writable home, for example in a container with an arbitrary user id, this is a
    directory below the folder for temporary files.
    """
    if _PLATFORM != "linux":  # importing platformdirs takes longer than the rest of a hit
        import platformdirs

        return _folder_at(platformdirs.user_cache_dir("ortplugins", appauthor=False))
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    # The specification says to ignore a relative path.
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    folder = _folder_at(os.path.join(base, "ortplugins"))
    return folder if _can_be_made(folder) else temporary_folder()


def _folder_at(path: str) -> str:
    folder = os.path.expanduser(path)
    return temporary_folder() if folder.startswith("~") else absolute(folder)


def absolute(path: str) -> str:
    """Return a path from the root that keeps "..": behind a link, that is another folder."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def temporary_folder() -> str:
    """Return the user's own cache directory below the folder for temporary files."""
    import tempfile

    # Windows has no user ids; there, the folder for temporary files is private to the user.
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    return os.path.join(tempfile.gettempdir(), f"ortplugins-{user}")


def _can_be_made(folder: str) -> bool:
    """Whether a folder exists, or its nearest existing parent is writable."""
    while not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        if parent == folder or os.path.lexists(folder):
            return False
        if os.path.isdir(parent):
            return os.access(parent, os.W_OK)
        folder = parent
    return True


def is_private(*folders: str | os.PathLike[str]) -> bool:
    """Whether only this user and the administrator can write to these directories."""
    try:
        states = [os.stat(folder) for folder in folders]
    except OSError:
        return False
    if not hasattr(os, "geteuid"):  # on Windows, ACLs protect the user's profile
        profile = os.path.join(_real("~"), "")
        return all(_real(folder).startswith(profile) for folder in folders)
    return all(
        status.st_uid in (os.geteuid(), 0)
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for status in states
    )


def _real(path: str | os.PathLike[str]) -> str:
    return os.path.normcase(os.path.realpath(os.path.expanduser(path)))


# What an entry depends on.


def digest_of(content: bytes) -> str:
    """Return the digest of bytes, 20 bytes of BLAKE2b as hexadecimal digits."""
    return blake2b(content, digest_size=DIGEST_CHARACTERS // 2).hexdigest()


@functools.cache
def processor() -> str:
    """Return a text that identifies the processor's architecture and instruction sets."""
    try:
        file = os.open("/proc/cpuinfo", os.O_RDONLY)
        try:
            # All processors have the flags of the first, which are in the first pages.
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
    return f"{architecture} {digest_of(flags)}"


def state_of(path: str | os.PathLike[str]) -> str:
    """Return a text that changes when a file is replaced or written to."""
    with _opened(path) as file:
        return _state_of_open(file)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a file for reading, and close it."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        yield file
    finally:
        os.close(file)


def _state_of_open(file: int) -> str:
    """Return the state of an open file; its last field is the time of the last change.

    It includes a checksum of pages spread over the file, because on a file system without
    change times (squashfs with all times set to one date) two files could look the same.
    """
    status, sampled = os.fstat(file), blake2b(digest_size=8)
    for number in range(_SAMPLED_PAGES if status.st_size > _PAGE_BYTES else 1):
        os.lseek(file, number * (status.st_size // _SAMPLED_PAGES), os.SEEK_SET)
        sampled.update(os.read(file, _PAGE_BYTES))
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    place = f"{status.st_dev} {status.st_ino}"
    return f"{status.st_size} {sampled.hexdigest()} {place} {status.st_mtime_ns} {changed}"


def file_digest(path: str | os.PathLike[str], root: str) -> str:
    """Return the digest of a file; if the index has it, only the file's state is read.

    The index lies below ``root`` or, if that is read-only, in the user's own cache directory,
    so that with a cache in an image each file is read once per machine.

    Raises:
        OSError: If the file can't be read, or changes meanwhile.
    """
    name, started = os.path.realpath(path), time.time()
    with _opened(name) as file:
        state = _state_of_open(file)
        is_large = os.fstat(file).st_size >= INDEXED_BYTES
        if is_large:
            for place in _places(root):
                found = _recall(place, name)
                if found is not None and found[:2] == [name, state] and len(found) == 3:
                    return found[2]
        digest = _digest_of_open(file)
        if _state_of_open(file) != state:
            raise OSError(f"{name}: changed while it was read")
    is_settled = int(state.rpartition(" ")[2]) / 1e9 < started - SETTLED_SECONDS
    if is_large and is_settled:
        for place in _places(root):
            if _remember(place, name, [name, state, digest]):
                break
    return digest


def read_digest(path: str | os.PathLike[str]) -> str:
    """Read a whole file and return its digest.

    Raises:
        OSError: If it can't be read.
    """
    with _opened(path) as file:
        return _digest_of_open(file)


def _digest_of_open(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    hashed = blake2b(digest_size=DIGEST_CHARACTERS // 2)
    while chunk := os.read(file, _CHUNK_BYTES):
        hashed.update(chunk)
    return hashed.hexdigest()


def data_locations(digest: str, root: str) -> list[str] | None:
    """Return the locations of a model's external data, by its digest; None if not known."""
    for place in _places(root):
        if (found := _recall(place, digest, ".data")) is not None and found[0] == digest:
            return found[1:]
    return None


def keep_data_locations(digest: str, locations: Sequence[str], root: str) -> None:
    """Record the locations of a model's external data."""
    for place in _places(root):
        if _remember(place, digest, [digest, *locations], ".data"):
            break


def _places(root: str) -> Sequence[str]:
    """Return the directories whose indexes are used, in order."""
    if os.access(root, os.W_OK) or not os.path.isdir(root):
        return (root,)
    return (root, user_folder())


def _path_in_index(root: str, name: str, suffix: str) -> str:
    digest = digest_of(name.encode("utf-8", "surrogateescape"))
    return os.path.join(root, INDEX, digest + suffix)


def _recall(root: str, name: str, suffix: str = "") -> list[str] | None:
    path = _path_in_index(root, name, suffix)
    fields = read_fields(path)
    return fields if fields and is_private(root, os.path.dirname(path)) else None


def _remember(root: str, name: str, fields: Sequence[str], suffix: str = "") -> bool:
    """Write a record of the index; return whether that worked."""
    path = _path_in_index(root, name, suffix)
    folder, new = os.path.dirname(path), f"{path}.{os.getpid()}.{time.time_ns()}"
    if any("\0" in field for field in fields):
        return False
    try:
        for made in (root, folder):
            if not os.path.isdir(made):
                os.makedirs(made, mode=0o700, exist_ok=True)
            if not is_private(made):
                return False
        # Readers see either the complete file or none.
        write_fields(new, fields)
        os.replace(new, path)
    except OSError:
        if os.path.exists(new):
            os.unlink(new)
        return False
    return True


# Small text files; importing json would take milliseconds.


def read_fields(path: str | os.PathLike[str]) -> list[str] | None:
    """Return the fields of a file; None if it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            checksum, _, content = file.read().partition(b"\n")
    except OSError:
        return None
    if checksum != _checksum(content):
        return None
    return content.decode("utf-8", "surrogateescape").split("\0")


def write_fields(path: str | os.PathLike[str], fields: Sequence[str]) -> None:
    """Write fields, none of which may contain a NUL, for :func:`read_fields`.

    Raises:
        OSError: If the file can't be written or exists already.
    """
    content = "\0".join(fields).encode("utf-8", "surrogateescape")
    with open(path, "xb") as file:
        file.write(_checksum(content) + b"\n" + content)


def _checksum(content: bytes) -> bytes:
    return digest_of(content).encode()
