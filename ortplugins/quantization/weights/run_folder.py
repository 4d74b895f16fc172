# SPDX-License-Identifier: MIT
"""A folder that keeps what a run of the quantiser has found, for the next one.

Statistics and codes of a group of weights are files, called by a digest of all that they are
made of: model, samples, options, versions. So an interrupted run goes on, another method finds
the statistics, and what belongs to another model or version is not found. An entry is two
files; the .json comes last, and only an entry with its .json counts.
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
import numpy.typing as npt
import onnxruntime

from ortplugins import __version__
from ortplugins.errors import UsageError
from ortplugins.model_io.loading import digest_of_files
from ortplugins.quantization.statistics.collect import Calibration
from ortplugins.quantization.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.weight import Errors, Group
from ortplugins.samples.sources import KeptSamples

_MARK = "ortplugins-run"
_UNFINISHED = ".unfinished"


class RunFolder:
    """A run folder in use; with ``path`` None, what keeps nothing in its place."""

    def __init__(self, path: Path | None) -> None:
        """Take the folder as it is; see :meth:`opened`."""
        self.path, self._recipe = path, Recipe()
        self._identity: Mapping[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: str | os.PathLike[str]) -> Iterator[RunFolder]:
        """Open a folder, made where there is none; no other run can meanwhile.

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
            for left in folder.glob(f"*{_UNFINISHED}"):
                left.unlink()
            yield cls(folder)
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

    def statistics(self, key: str) -> dict[str, TensorReference] | None:
        """Return the statistics of an activation by name; None where there are none."""
        found = self._read(f"statistics-{key}")
        return None if found is None else found[0]

    def keep_statistics(
        self, key: str, arrays: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, TensorReference]:
        """Write the statistics of an activation and return where they are."""
        return self._write(f"statistics-{key}", arrays, {})

    def codes_key(self, group: Group) -> str:
        """Return the key of the codes of a group, whatever its statistics are by now."""
        recipe = self._recipe
        return self.key(
            method=group.method,
            statistics=group.statistics_key,
            undecided=group.undecided,
            weights=[
                (
                    weight.name,
                    weight.stored_k_last,
                    weight.layer and weight.layer.name,
                    (dataclasses.asdict(weight.form), weight.k_last),
                )
                for weight in group.weights
            ],
            options=(recipe.alphas, recipe.clip_ratios, dataclasses.asdict(recipe.gptq)),
        )

    def codes(self, group: Group) -> Group | None:
        """Fill a worker's copy of a group with its codes; None where there are none."""
        read = self._read(f"codes-{self.codes_key(group)}")
        if read is None:
            return None
        references, found = read
        for name, target in _files(group):
            target.map("r+")[...] = references[name].map()
        for weight, errors in zip(group.weights, found["errors"], strict=True):
            weight.errors = Errors(*errors)
        scales = references.get("channel_scales")
        group.channel_scales = None if scales is None else np.array(scales.map())
        group.reached, group.alpha = found["reached"], found["alpha"]
        return group

    def keep_codes(self, group: Group) -> None:
        """Write what became of a group."""
        if self.path is None:
            return
        arrays = {name: target.map() for name, target in _files(group)}
        if group.channel_scales is not None:
            arrays["channel_scales"] = group.channel_scales
        errors = [weight.errors for weight in group.weights]
        more = {"errors": errors, "reached": group.reached, "alpha": group.alpha}
        self._write(f"codes-{self.codes_key(group)}", arrays, more)

    def _read(self, name: str) -> tuple[dict[str, TensorReference], dict[str, Any]] | None:
        if self.path is None:
            return None
        data = self.path / f"{name}.bin"
        try:
            content = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
            if digest_of_files([data]) != content.get("digest"):
                return None  # the machine went down before it was on the disk
        except (FileNotFoundError, ValueError):  # none, or not all of its JSON
            return None
        references = {
            key: TensorReference(str(data), offset, tuple(shape), dtype)
            for key, (offset, shape, dtype) in content["arrays"].items()
        }
        return references, content

    def _write(
        self, name: str, arrays: Mapping[str, npt.NDArray[Any]], more: Mapping[str, Any]
    ) -> dict[str, TensorReference]:
        assert self.path is not None
        data, about = (self.path / f"{name}{suffix}" for suffix in (".bin", ".json"))
        unfinished = Path(f"{data}{_UNFINISHED}"), Path(f"{about}{_UNFINISHED}")
        unfinished[0].touch()  # there may be no array
        writer = ScratchWriter(unfinished[0])
        written = {key: writer.append(array) for key, array in arrays.items()}
        content = {
            "digest": digest_of_files([unfinished[0]]),
            "arrays": {key: (r.offset, r.shape, r.dtype) for key, r in written.items()},
            **more,
        }
        unfinished[1].write_text(json.dumps(content), encoding="utf-8")
        for path, final in zip(unfinished, (data, about), strict=True):
            os.replace(path, final)
        return {
            key: dataclasses.replace(reference, path=str(data))
            for key, reference in written.items()
        }


NOTHING_KEPT = RunFolder(None)


def _files(group: Group) -> Iterator[tuple[str, TensorReference]]:
    """Name every tensor that a worker writes."""
    for number, weight in enumerate(group.weights):
        for kind, target in weight.files():
            yield f"{number}.{kind}", target


def _digest_of_samples(samples: KeptSamples) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for feed in samples:
        for name, array in sorted(feed.items()):
            digest.update(json.dumps([name, array.dtype.name, array.shape]).encode())
            content = array if array.dtype.kind != "O" else np.array(array.tolist())
            digest.update(np.ascontiguousarray(content).tobytes())
    return digest.hexdigest()
