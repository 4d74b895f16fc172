# SPDX-License-Identifier: MIT
"""Checkpoints of GPTQ, AWQ and AutoRound.

    GPTQ   qweight int32 [K * bits / 32, N]    codes adjacent along K in a word, low bits first
           qzeros int32 [blocks, N * bits / 32], scales [blocks, N], g_idx [K]: block of each k
           In checkpoint_format "gptq" zero points are stored less 1, in "gptq_v2" as they are.
    AWQ    qweight int32 [K, N / 8]            eight columns in a word: 0 2 4 6 1 3 5 7
           qzeros int32 [blocks, N / 8], scales [blocks, N]; the version "gemm"

AutoRound writes either, and says which in ``packing_format``. AWQ multiplied rows of weights
by scales that the norms before them were divided by: those, and biases, come along by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import ModelFileError
from ortplugins.quantization.checkpoints.layers import Found, LayerCodes
from ortplugins.quantization.checkpoints.safetensors_folder import (
    BITS,
    FLOATS,
    WORD,
    SafetensorsCheckpoint,
    StoredLayer,
    StoredTensor,
    unpacked,
)
from ortplugins.quantization.methods.nearest import BlockFormat, ZeroPoints

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WORDS = ("I32", "U32")


@dataclasses.dataclass(frozen=True)
class GptqLayer(StoredLayer):
    """Codes of one weight."""

    packing: str  # "gptq" or "awq": how codes are packed
    bits: int
    zero_offset: int  # what is added to the stored zero points

    @property
    def method(self) -> str:
        """What made them."""
        return self.packing

    def shape(self) -> tuple[int, int]:
        """Return K and N."""
        rows, columns = self.part("qweight", 2, _WORDS).shape
        packed = WORD // self.bits
        return (rows, columns * packed) if self.packing == "awq" else (rows * packed, columns)

    def with_own_bits(self) -> GptqLayer:
        """Return the layer with the bits that its tensors have: rules give some layers others.

        N zero points fill a row of words of qzeros, which may hold a few more.
        """
        columns = self.part("qweight", 2, _WORDS).shape[1]
        words = self.part("qzeros", 2, _WORDS).shape[1]
        if self.packing == "awq" or words == -(-columns * self.bits // WORD):
            return self
        for bits in BITS:
            if words == -(-columns * bits // WORD):
                return dataclasses.replace(self, bits=bits)
        raise ModelFileError(
            f"layer {self.name!r} of the checkpoint has {words * WORD / columns:.3g} bits: "
            "2, 4 and 8 are read"
        )

    def form(self, scale_type: str) -> BlockFormat:
        """Return the form of the codes: symmetric where all zero points are in the middle."""
        (_, n), zeros = self.shape(), self._zero_points()
        blocks = len(zeros)
        scales = self.part("scales", 2, FLOATS).shape
        if scales != (blocks, n):
            raise ModelFileError(
                f"layer {self.name!r} of the checkpoint has zero points for {blocks} blocks, "
                f"and scales of {list(scales)}"
            )
        middle = bool((zeros == 1 << (self.bits - 1)).all())
        size = -1 if blocks == 1 else self.block_size(blocks)
        return BlockFormat(self.bits, size, middle, scale_type=scale_type)

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the rows block by block, where act-order scattered them."""
        return self.sorted_order(self.part("qzeros", 2, _WORDS).shape[0])

    def load(self, columns: slice, is_symmetric: bool) -> LayerCodes:
        """Read some columns."""
        qweight, order = self.part("qweight", 2, _WORDS), self.order()
        start, stop = columns.start, min(columns.stop, self.shape()[1])
        columns = slice(start, stop)
        if self.packing == "awq":
            words = qweight.read(slice(None), slice(start // 8, -(-stop // 8)))
            codes = unpacked(words, self.bits, _AWQ_ORDER)[:, : stop - start]
        else:
            words = qweight.read(slice(None), columns)
            codes = unpacked(words.T, self.bits).T
        if order is not None:
            codes = codes[order]
        scales = self.part("scales", 2, FLOATS).read(slice(None), columns).astype(np.float32)
        if is_symmetric:
            # Unsigned bytes wrap around to what the signed ones are.
            codes = (codes - np.uint8(1 << (self.bits - 1))).view(np.int8)
            return LayerCodes(codes, scales, order=order)
        return LayerCodes(codes, scales, self._zero_points()[:, columns], order=order)

    def _zero_points(self) -> ZeroPoints:
        order = _AWQ_ORDER if self.packing == "awq" else None
        stored = unpacked(self.part("qzeros", 2, _WORDS).read(), self.bits, order)
        stored = stored[:, : self.shape()[1]]
        return (stored + np.uint8(self.zero_offset)) & np.uint8((1 << self.bits) - 1)


class GptqCheckpoint(SafetensorsCheckpoint):
    """A folder with such layers."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._packing, self._zero_offset = _packing(config, folder)
        self._bits = config.get("bits", config.get("w_bit", 4))
        if self._bits not in BITS or (self._packing == "awq" and self._bits != 4):
            raise ModelFileError(
                f"{folder}: {self._packing} checkpoints of {self._bits} bits are not read"
            )
        super().__init__(folder)
        if not self.layers:
            raise ModelFileError(f"{folder}: no tensor is called *.qweight: is it quantised?")

    def read_layer(self, name: str, parts: Mapping[str, StoredTensor]) -> Found | None:
        """Return the layer that has a qweight."""
        if "qweight" not in parts:
            return None
        return GptqLayer(name, parts, self._packing, self._bits, self._zero_offset)

    def candidates(self, name: str) -> list[Found]:
        """Return the layer or float matrix of a module."""
        return [
            one.with_own_bits() if isinstance(one, GptqLayer) else one
            for one in super().candidates(name)
        ]

    def check_missing(self, name: str) -> None:
        """Refuse to leave out a vector that AWQ may have divided by scales."""
        if self._packing == "awq":
            raise ModelFileError(
                f"tensor {name!r} of the AWQ checkpoint: the model has no initializer of this "
                "name and shape: export the float model with its names"
            )


def _packing(config: Mapping[str, Any], folder: Path) -> tuple[str, int]:
    """Return how codes are packed, and what is added to zero points."""
    method = str(config.get("quant_method", "gptq")).lower()
    packing = str(config.get("packing_format", "")).lower()
    form = str(config.get("checkpoint_format", config.get("format", "gptq"))).lower()
    version = str(config.get("version", "gemm")).lower()
    if method in ("auto-round", "auto_round", "intel/auto-round"):
        # auto_round:auto_gptq, auto_round:auto_awq
        method, form = packing.rpartition("auto_")[2], "gptq"
    if method == "awq" and version == "gemm":
        return "awq", 0
    if method == "gptq" and form in ("gptq", "gptq_v2"):
        return "gptq", int(form == "gptq")
    raise ModelFileError(
        f"{folder}: a checkpoint of {method!r} ({packing or form}, {version}) is not read: "
        "GPTQ, AWQ's gemm, AutoRound's auto_gptq and auto_awq, and compressed-tensors are"
    )
