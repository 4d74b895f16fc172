# SPDX-License-Identifier: MIT
"""Statistics and codes of a run of the quantiser in files, which may be kept for the next one.

What belongs to an activation, or to a group of weights, is an entry, called by a digest of all
that it is made of: model, samples, options, versions. So an interrupted run goes on, another
method finds the statistics, and what belongs to another model or version is not found. The
.json of an entry comes last, and only an entry with its .json counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import onnxruntime

from ortplugins._version import __version__
from ortplugins.errors import UsageError
from ortplugins.model_io.loading import digest_of_files
from ortplugins.quantization.statistics.accumulator import ActivationStatistics
from ortplugins.quantization.statistics.collect import Calibration
from ortplugins.quantization.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.weight import STORED, Errors, Group
from ortplugins.samples.sources import KeptSamples

_MARK = "ortplugins-run"


class RunFolder:
    """A folder in use; nothing is looked for in one that is not ``kept``, a scratch folder."""

    def __init__(self, path: Path, *, kept: bool = False) -> None:
        """Take the folder as it is; see :meth:`opened`."""
        self.path, self.kept, self._recipe = path, kept, Recipe()
        self._identity: Mapping[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: str | os.PathLike[str]) -> Iterator[RunFolder]:
        """Open a folder to keep, made where there is none; no other run can meanwhile.

        Raises:
            UsageError: If the folder is not a run folder and not empty, or in use.
        """
        folder = Path(os.path.abspath(path))
        folder.mkdir(exist_ok=True)
        if not (folder / _MARK).exists() and any(folder.iterdir()):
            raise UsageError(f"{folder}: holds other files than a run's: give an empty folder")
        (folder / _MARK).touch()
        lock = filelock.FileLock(folder / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UsageError(f"{folder}: another run uses it") from None
        try:
            yield cls(folder, kept=True)
        finally:
            lock.release()

    def identify(
        self, files: Iterable[Path], recipe: Recipe, calibration: Calibration | None
    ) -> None:
        """Say what it keeps: what a recipe makes of these files of a model and samples."""
        identity: dict[str, Any] = {
            "ortplugins": __version__,
            "onnxruntime": onnxruntime.__version__,
            "model": digest_of_files(files),
        }
        if calibration is not None:
            identity["samples"] = _digest_of_samples(calibration.samples)
            identity["providers"] = list(map(str, calibration.providers))
        self._identity, self._recipe = identity, recipe

    def key(self, **parts: Any) -> str:
        """Return the digest of an entry's parts, and of the run's."""
        text = json.dumps([self._identity, parts], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()

    def writer(self, name: str) -> ScratchWriter:
        """Return what writes a new file."""
        path = self.path / f"{name}.bin"
        path.unlink(missing_ok=True)
        return ScratchWriter(path)

    def statistics(self, key: str) -> dict[str, TensorReference] | None:
        """Return the statistics of an activation by name; None where there are none."""
        found = self._read(f"statistics-{key}")
        return None if found is None else found[0]

    def keep_statistics(
        self, key: str, statistics: ActivationStatistics | None
    ) -> dict[str, TensorReference]:
        """Write the statistics of an activation, a file for each; return where they are."""
        entry, arrays = f"statistics-{key}", statistics.arrays() if statistics else {}
        found = {n: self.writer(f"{entry}-{n}").append(array) for n, array in arrays.items()}
        self._seal(entry, found, {})
        return found

    def codes_key(self, group: Group) -> str:
        """Return the key of the codes of a group, whatever its statistics are by now."""
        recipe = self._recipe
        return self.key(
            method=group.method,
            statistics=group.statistics_key,
            undecided=group.undecided,
            weights=[
                (
                    (weight.name, weight.place),
                    weight.stored_k_last,
                    (dataclasses.asdict(weight.form), weight.k_last),
                )
                for weight in group.weights
            ],
            options=(recipe.alphas, recipe.clip_ratios, dataclasses.asdict(recipe.gptq)),
        )

    def reserve_codes(self, group: Group) -> None:
        """Give the weights of a group space for their codes, in one file."""
        writer = self.writer(f"codes-{self.codes_key(group)}")
        for weight in group.weights:
            weight.make_room(writer)

    def codes(self, group: Group) -> Group | None:
        """Return a worker's copy of a group that has its codes; None where there are none."""
        read = self._read(f"codes-{self.codes_key(group)}")
        if read is None:
            return None
        references, found = read
        copy = group.for_worker()
        for name, reference in references.items():
            number, _, kind = name.partition(".")
            setattr(copy.weights[int(number)], kind, reference)
        for weight, errors in zip(copy.weights, found["errors"], strict=True):
            weight.errors = Errors(*errors)
        scales = found["channel_scales"]
        copy.channel_scales = None if scales is None else np.array(scales, np.float32)
        copy.reached, copy.alpha = found["reached"], found["alpha"]
        return copy

    def keep_codes(self, group: Group) -> None:
        """Have the codes of a group count, which are in their files."""
        references = {
            f"{number}.{kind}": reference
            for number, weight in enumerate(group.weights)
            for kind in STORED
            if (reference := getattr(weight, kind)) is not None
        }
        scales = group.channel_scales
        found = {
            "errors": [weight.errors for weight in group.weights],
            "reached": group.reached,
            "alpha": group.alpha,
            "channel_scales": None if scales is None else scales.tolist(),
        }
        self._seal(f"codes-{self.codes_key(group)}", references, found)

    def _read(self, name: str) -> tuple[dict[str, TensorReference], dict[str, Any]] | None:
        if not self.kept:
            return None
        try:
            content = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
            references = {
                key: TensorReference(str(self.path / file), offset, tuple(shape), dtype)
                for key, (file, offset, shape, dtype) in content["arrays"].items()
            }
            if _digest(references) != content["digest"]:
                return None  # the machine went down before it was on the disk
        except (FileNotFoundError, ValueError):  # none, or not all of its JSON
            return None
        return references, content

    def _seal(
        self, name: str, references: Mapping[str, TensorReference], more: Mapping[str, Any]
    ) -> None:
        if not self.kept:
            return
        content = {
            "digest": _digest(references),
            "arrays": {
                key: (Path(r.path).name, r.offset, r.shape, r.dtype)
                for key, r in references.items()
            },
            **more,
        }
        (self.path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def _digest(references: Mapping[str, TensorReference]) -> str:
    return digest_of_files(dict.fromkeys(Path(r.path) for r in references.values()))


def _digest_of_samples(samples: KeptSamples) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for feed in samples:
        for name, array in sorted(feed.items()):
            digest.update(json.dumps([name, array.dtype.name, array.shape]).encode())
            content = array if array.dtype.kind != "O" else np.array(array.tolist())
            digest.update(np.ascontiguousarray(content).tobytes())
    return digest.hexdigest()
