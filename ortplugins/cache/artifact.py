# SPDX-License-Identifier: MIT
"""What a session wants, the key of its entry, and what it opens of the entry."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnxruntime

from ortplugins._version import __version__
from ortplugins.cache.folder import (
    absolute,
    cache_folder,
    data_locations,
    digest_of,
    file_digest,
    is_private,
    processor,
    read_digest,
    read_fields,
    write_fields,
)
from session_options.entries import (
    CACHE_DIR_KEY,
    DATA_FOLDER_KEY,
    IN_MEMORY_KEY,
    PASSES_KEY,
    STRICT_KEY,
    VERIFY_KEY,
    is_default,
    is_without_effect,
)

# Layout of the cache; another number is another cache.
_FORMAT = 9
MODEL = "model.onnx"
ARTIFACT = "artifact"
REPORT = "report.json"
# Passes that failed are tried again after a day.
_RETRY_SECONDS = 86400.0
# A key ends with so much of the model's digest, which also names the model's lock.
MODEL_CHARACTERS = 16
# A use is recorded if the last recorded one is older than this.
USE_SECONDS = 60.0


class Wanted:
    """A model, and everything else that its entry depends on."""

    __slots__ = ("cpu_arena", "disabled", "entries", "level", "model", "providers", "root")

    def __init__(
        self,
        model: str | bytes,
        entries: Mapping[str, str],
        providers: Sequence[str] = ("CPUExecutionProvider",),
        level: str = "ORT_ENABLE_ALL",
        disabled: Iterable[str] = (),
        cpu_arena: bool = True,
    ) -> None:
        """Describe what a session wants.

        Args:
            model: Its absolute path, or its content.
            entries: Session entries: ours, and those that onnxruntime's optimisers read.
            providers: In order of precedence.
            level: Of onnxruntime's optimisers.
            disabled: Names of disabled optimisers.
            cpu_arena: Whether the session allocates CPU memory from an arena.

        Raises:
            OSError: If the cache is in a working directory that is gone.
        """
        self.model, self.entries, self.level = model, dict(entries), level
        # onnxruntime ignores a name that is repeated.
        self.providers = tuple(dict.fromkeys(providers))
        self.disabled, self.cpu_arena = tuple(sorted({*disabled})), cpu_arena
        self.root = cache_folder(self.entries.get(CACHE_DIR_KEY, ""))  # of its cache

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments that it was made of, except for the model."""
        left = ("model", "root")
        return {name: getattr(self, name) for name in self.__slots__ if name not in left}

    @property
    def name(self) -> str:
        """The model's path; "bytes" for its content."""
        return "bytes" if isinstance(self.model, bytes) else self.model

    @property
    def data_folder(self) -> str | None:
        """Where external data is; None for the model's own folder."""
        chosen = self.entries.get(DATA_FOLDER_KEY)
        return absolute(chosen) if chosen else None

    @property
    def is_strict(self) -> bool:
        """Whether an error in a pass is raised."""
        return self.entries.get(STRICT_KEY) == "1"

    @property
    def is_in_memory(self) -> bool:
        """Whether nothing may be written to the disk."""
        return self.entries.get(IN_MEMORY_KEY) == "1"

    @property
    def reads_files(self) -> bool:
        """Whether a start reads the entry's files completely, to compare their digests."""
        return self.entries.get(VERIFY_KEY) == "digest"

    @property
    def text(self) -> str:
        """What the key is made from, except for the model's files: each of the fields."""
        others = self.fields
        del others["entries"]
        entries = sorted(
            (key, text)
            for key, text in self.entries.items()
            if not (
                is_without_effect(key, text) or key == DATA_FOLDER_KEY or is_default(key, text)
            )
        )
        return repr((
            (_FORMAT, __version__, onnxruntime.__version__, processor()),
            entries,
            _versions(self.entries.get(PASSES_KEY)),
            others,
        ))  # fmt: skip

    def model_digest(self) -> str:
        """Return the digest of the .onnx file.

        Raises:
            OSError: If it can't be read.
        """
        if isinstance(self.model, bytes):
            return digest_of(self.model)
        return file_digest(self.model, self.root)

    def key(self, model_digest: str, locations: Sequence[str]) -> str:
        """Return the key of its entry: a digest, and at its end the beginning of the model's.

        Args:
            model_digest: As :meth:`model_digest` returns it.
            locations: Where the model has external data.

        Raises:
            OSError: If data can't be read.
        """
        data: list[tuple[str, str]] = []
        places: list[str] = []
        if locations:
            from ortplugins.model_io.data_in_place import data_file, data_folders

            folders = data_folders(self.name, self.data_folder)
            files = sorted((location, data_file(location, folders)) for location in locations)
            data = [(location, file_digest(path, self.root)) for location, path in files]
            # An entry may read the data in place, so the names count.
            places = [os.path.relpath(path, os.path.dirname(files[0][1])) for _, path in files]
        text = repr((self.text, model_digest, data, places))
        end = model_digest[:MODEL_CHARACTERS]
        return digest_of(text.encode("utf-8", "surrogateescape"))[: -len(end)] + end

    def known_key(self) -> str | None:
        """Return the key; None if no start has seen the model yet, or its data is missing.

        Raises:
            OSError: If the model can't be read.
        """
        digest = self.model_digest()
        if (locations := data_locations(digest, self.root)) is None:
            return None
        try:
            return self.key(digest, locations)
        except OSError:
            return None


def _content(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return file.read()
    except (OSError, ValueError):  # a module in an archive, or in no file
        return b""


def _versions(places: str | None) -> list[tuple[str, str]]:
    """Return the versions of passes of other packages, and the digests of their modules."""
    if not places:
        return []
    from session_options.registry import loaded

    found = []
    for cls in loaded(places):
        # None for a program without a file: python -c, a notebook.
        file = getattr(sys.modules[cls.__module__], "__file__", None)
        found.append((cls.version, digest_of(_content(file or ""))))
    return found


class Artifact:
    """What a session opens, and how; ``model`` is None if the original runs."""

    __slots__ = (
        "baked", "data", "digests", "failed", "files", "folder", "free",
        "has_custom_operators", "initializers",
        "made", "of_model", "settings",
    )  # fmt: skip

    def __init__(self, folder: str | os.PathLike[str], **fields: Any) -> None:
        """Describe one; ``fields`` are the others of this class."""
        self.folder = os.fspath(folder)
        # Sizes and times in ns of its files, and their digests, by name.
        self.files: dict[str, tuple[int, int]] = fields["files"]
        self.digests: dict[str, str] = fields["digests"]
        # As from Pass.session_settings.
        self.settings: dict[str, str] = fields["settings"]
        # The user's data files that it reads in place: names by location.
        self.data: dict[str, str] = fields["data"]
        self.baked: bool = fields["baked"]  # whether onnxruntime's optimisers ran
        # For each input of the user's model, a "1" per free dimension and a "0" per fixed one.
        self.free: dict[str, str] = fields["free"]
        # Whether it has custom operators, whose library copies of SessionOptions lack.
        self.has_custom_operators: bool = fields["has_custom_operators"]
        self.initializers: list[str] = fields["initializers"]  # of the user's model
        self.failed: list[str] = fields["failed"]  # passes that were left out, and why
        self.made: float = fields["made"]  # seconds since the epoch
        self.of_model: str = fields["of_model"]  # what it was made from: a path, or "bytes"

    @property
    def key(self) -> str:
        """The key that it is found by."""
        return os.path.basename(self.folder)

    @property
    def model(self) -> str | None:
        """The path of its model."""
        return os.path.join(self.folder, MODEL) if MODEL in self.files else None

    @property
    def may_be_retried(self) -> bool:
        """Whether a pass failed so long ago that it may work now, with more disk or memory."""
        from ortplugins.runtime.machine import missing_packages

        is_old = abs(time.time() - self.made) > _RETRY_SECONDS
        return bool(self.failed) and is_old and not missing_packages()

    # Groups of texts behind their sizes: json would have to be imported at a start, and Python
    # 3.11 cannot parse literals in two threads (SystemError, python/cpython#106905).

    def write(self) -> None:
        """Write it into its folder, which must not have one yet."""
        flags = ["baked"] * self.baked + ["custom"] * self.has_custom_operators
        files = [(x, *map(str, pair), self.digests[x]) for x, pair in self.files.items()]
        maps = (self.settings.items(), self.data.items(), self.free.items())
        groups = [
            [str(self.made), self.of_model],
            *([*itertools.chain(*items)] for items in (files, *maps)),
            *(flags, self.initializers, self.failed),
        ]
        counts = " ".join(str(len(group)) for group in groups)
        path = os.path.join(self.folder, ARTIFACT)
        write_fields(path, [counts, *itertools.chain(*groups)])

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Artifact | None:
        """Return the artifact of an entry's folder; None without one, or if it is damaged."""
        if (fields := read_fields(os.path.join(folder, ARTIFACT))) is None:
            return None
        counts, rest = fields[0].split(), iter(fields[1:])
        try:
            groups = [[*itertools.islice(rest, int(count))] for count in counts]
            (made, of_model), files, *maps, flags, initializers, failed = groups
            settings, data, free = (dict(zip(x[::2], x[1::2], strict=True)) for x in maps)
            names, sizes, times, digests = (files[number::4] for number in range(4))
            moments = zip(map(int, sizes), map(int, times), strict=True)
            return cls(
                folder,
                files=dict(zip(names, moments, strict=True)),
                digests=dict(zip(names, digests, strict=True)),
                settings=settings, data=data, free=free,
                baked="baked" in flags, has_custom_operators="custom" in flags,
                initializers=initializers, failed=failed, made=float(made), of_model=of_model,
            )  # fmt: skip
        except ValueError:
            return None


def find_entry(wanted: Wanted) -> Artifact | None:
    """Return the entry that a session opens, and mark it as used.

    None without one that can be trusted, and where a pass failed that is to be tried again.
    """
    try:
        if (key := wanted.known_key()) is None:
            return None
        folder = os.path.join(wanted.root, "entries", key)
        artifact = Artifact.read(folder)
        if artifact is None or not is_private(wanted.root, os.path.dirname(folder), folder):
            return None
        if artifact.failed and (wanted.is_strict or artifact.may_be_retried):
            return None
        if changed_files(artifact, reads_files=wanted.reads_files) or not note_use(folder):
            return None
    except OSError:  # the model cannot be read, or the entry was removed meanwhile
        return None
    return artifact


def changed_files(artifact: Artifact, *, reads_files: bool) -> list[str]:
    """Return which of an entry's files are not as they were published.

    If only the time differs, as for a copy, the content decides; with ``reads_files``, the
    content of every file is compared.

    Raises:
        OSError: If one is not there.
    """
    changed = []
    for name, (size, published) in artifact.files.items():
        path = os.path.join(artifact.folder, name)
        status, digest = os.stat(path), artifact.digests[name]
        if status.st_size != size:
            changed.append(name)
        elif reads_files:
            changed += [name] * (read_digest(path) != digest)
        elif not _is_same_time(status.st_mtime_ns, published):
            root = os.path.dirname(os.path.dirname(artifact.folder))
            changed += [name] * (file_digest(path, root) != digest)
    return changed


def _is_same_time(now: int, before: int) -> bool:
    """Whether modification times, in ns, agree; image layers store whole seconds."""
    return now in (before, before - before % 10**9)


def note_use(folder: str | os.PathLike[str]) -> bool:
    """Record that an entry is used now; return False if it was removed in the meantime.

    The modification time of a small file serves for this, because an overlay file system would
    copy a whole file first. It is set at most once a minute, and not while the clock is behind
    an earlier use.
    """
    path = os.path.join(folder, ARTIFACT)
    try:
        if time.time() - os.stat(path).st_mtime >= USE_SECONDS:
            os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a read-only cache
    return True
