# SPDX-License-Identifier: MIT
"""llama.cpp's importance matrix: the mean square of each input channel of a weight.

    GGUF     NAME.in_sum2 float32 [1, K], NAME.counts float32 [1]
    legacy   int32 entries; of each: int32 length, name, int32 calls, int32 K, float32 [K]

The latter are sums over calls, so both are known but for a factor, which decides nothing.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ortplugins.errors import MissingFileError, ModelFileError, QuantizationError
from ortplugins.quantization.checkpoints.checkpoint import module_names
from ortplugins.quantization.checkpoints.gguf_file import MAGIC, llama_names, read_gguf
from ortplugins.quantization.methods.nearest import Floats
from ortplugins.quantization.weights.recipe import METHODS, Recipe
from ortplugins.quantization.weights.uses import WeightUse
from ortplugins.quantization.weights.weight import Group

_SUMS, _COUNTS = ".in_sum2", ".counts"


class Imatrix:
    """The entries of a file."""

    def __init__(self, path: Path) -> None:
        """Read a file.

        Raises:
            MissingFileError, ModelFileError: If there is no such file, or it is damaged.
        """
        self.path = path
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file")
        with open(path, "rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC
        self._entries = _of_gguf(path) if is_gguf else _of_legacy(path)
        if not self._entries:
            raise ModelFileError(f"{path} is no importance matrix: it has no entry")

    def check(self, recipe: Recipe) -> None:
        """Refuse what needs more than energies of channels."""
        methods = {recipe.method, *(rule.method or recipe.method for rule in recipe.rules)}
        others = sorted(methods - {"rtn", "awq_lite"})
        if others or recipe.share_of_8_bits:
            raise QuantizationError(
                f"{self.path} has mean squares of channels alone, which is too little for "
                f"{others[0] if others else 'share_of_8_bits'}: take rtn or awq_lite"
            )

    def give(self, groups: Sequence[Group]) -> list[str]:
        """Note on groups what is known of their channels; return what is to be said of it."""
        left = []
        for group in groups:
            uses = [use for weight in group.weights for use in weight.uses]
            found = (self.energy_of(use) for use in uses)
            group.energy = next((energy for energy in found if energy is not None), None)
            if group.energy is not None:
                continue
            left += [weight.name for weight in group.weights]
            if METHODS[group.method]:
                group.method, group.reason = "rtn", "it has no entry in the importance matrix"
                group.weights = [
                    dataclasses.replace(weight, method="rtn") for weight in group.weights
                ]
        if not any(group.energy is not None for group in groups):
            raise ModelFileError(
                f"{self.path}: no entry is for a weight of this model; the first is "
                f"{next(iter(self._entries))!r}"
            )
        return [f"{len(left)} weights have no entry in {self.path}: {left[0]}"] if left else []

    def energy_of(self, use: WeightUse) -> Floats | None:
        """Return the mean squares of a node's input channels, ``[K]``, but for a factor."""
        for name in (llama for module in module_names(use) for llama in llama_names(module)):
            energy = self._entries.get(f"{name}.weight")
            if energy is None:
                continue
            if len(energy) != use.K:
                raise ModelFileError(
                    f"{self.path}: entry '{name}.weight' has {len(energy)} channels, node "
                    f"{use.label!r} {use.K}: give the importance matrix of this model"
                )
            if not (np.isfinite(energy).all() and (energy >= 0).all()):
                raise ModelFileError(
                    f"{self.path}: entry '{name}.weight' has numbers that are no mean squares"
                )
            return energy if energy.any() else None
        return None


def _of_gguf(path: Path) -> Mapping[str, Floats]:
    floats = {
        name: np.asarray(tensor.map(), np.float32).reshape(-1)
        for name, tensor in read_gguf(path)[1].items()
        if tensor.is_float
    }
    sums = {name.removesuffix(_SUMS): floats[name] for name in floats if name.endswith(_SUMS)}
    counts = {name: floats.get(f"{name}{_COUNTS}", np.zeros(0, np.float32)) for name in sums}
    # Stacked experts have a count each.
    return {
        name: found / counts[name]
        for name, found in sums.items()
        if len(counts[name]) == 1 and counts[name][0] > 0
    }


def _of_legacy(path: Path) -> Mapping[str, Floats]:
    found = {}
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size

        def part(size: int) -> bytes:
            if not 0 <= size <= end - file.tell():
                raise struct.error(f"{size} bytes are expected")
            return file.read(size)

        try:
            (entries,) = struct.unpack("<i", part(4))
            for _ in range(entries):
                name = part(*struct.unpack("<i", part(4))).decode()
                _, channels = struct.unpack("<ii", part(8))
                found[name] = np.frombuffer(part(4 * channels), "<f4")
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelFileError(
                f"{path} is no importance matrix, or cut short: byte {file.tell()} of {end} "
                f"({error})"
            ) from error
    return found
