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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortplugins.errors import ModelFileError
from ortplugins.quantization.checkpoints.layers import Layer
from ortplugins.quantization.checkpoints.safetensors_folder import (
    BITS,
    FLOATS,
    WORD,
    Numbers,
    SafetensorsCheckpoint,
    stored_layer,
)
from ortplugins.quantization.schema import is_int

# Of the columns in a word of codes and zero points.
_ORDERS: dict[str, tuple[int, ...]] = {"gptq": (), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}
_WORDS, _INDEX = ("I32", "U32"), ("I32", "I64")


class GptqCheckpoint(SafetensorsCheckpoint):
    """A folder with such layers."""

    marks = ("qweight",)

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._packing, self._zero_offset = _packing(config, folder)
        self._bits = bits = config.get("bits", config.get("w_bit", 4))
        if not is_int(bits) or bits not in BITS or (self._packing == "awq" and bits != 4):
            raise ModelFileError(
                f"{folder}: {self._packing} checkpoints of {bits} bits are not read: of GPTQ "
                "2, 4 and 8 bits are, of AWQ 4"
            )
        super().__init__(folder)
        if self._packing == "awq":
            self.required = self.vectors

    def read_layer(self, name: str) -> Layer:
        """Return the layer of a module."""
        qweight = self.part(f"{name}.qweight", _WORDS, 2)
        qzeros = self.part(f"{name}.qzeros", _WORDS, 2)
        (k, n), order = qweight.shape, _ORDERS[self._packing]
        if self._packing == "awq":
            bits = self._bits
            n *= WORD // bits
        else:
            bits = self._bits_of(name, n, qzeros.shape[1])
            k *= WORD // bits
        index = f"{name}.g_idx"
        return stored_layer(
            name,
            self._packing,
            Numbers(qweight, bits, n, 1 if order else 0, order),
            k,
            self.part(f"{name}.scales", FLOATS, 2),
            Numbers(qzeros, bits, n, 1, order, self._zero_offset),
            self.part(index, _INDEX, 1) if index in self.tensors else None,
        )

    def _bits_of(self, name: str, columns: int, words: int) -> int:
        """Return the bits of a layer of GPTQ: rules give some other ones than the rest has.

        N zero points fill a row of words of qzeros, which may hold a few more.
        """
        for bits in (self._bits, *BITS):
            if words == -(-columns * bits // WORD):
                return bits
        raise ModelFileError(
            f"layer {name!r} of the checkpoint has {words} words of zero points for {columns} "
            "columns: 2, 4 and 8 bits are read"
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
