# SPDX-License-Identifier: MIT
"""Codes that others calibrated: checkpoints of GPTQ, AWQ and AutoRound, in safetensors.

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
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization.methods.nearest import BlockFormat, Codes, Floats, ZeroPoints
from ortplugins.quantization.weights.uses import WeightUse
from rewrite_rules.weights.bit_packing import unpack_rows

_WORD = 32
_BITS = (2, 4, 8)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_CONFIG_FILES = ("config.json", "quantize_config.json", "quant_config.json")
_OPERATORS = (".MatMul", ".FusedMatMul", ".Gemm")


@dataclasses.dataclass(frozen=True)
class Layer:
    """Codes of one weight in a checkpoint, in their file."""

    name: str  # of the layer: model.layers.0.mlp.up_proj
    path: str
    method: str  # "gptq" or "awq": how codes are packed
    bits: int
    zero_offset: int  # what is added to the stored zero points

    def shape(self) -> tuple[int, int]:
        """Return K and N."""
        rows, columns = self._tensor("qweight").shape
        packed = _WORD // self.bits
        return (rows, columns * packed) if self.method == "awq" else (rows * packed, columns)

    def with_own_bits(self) -> Layer:
        """Return the layer with the bits that its tensors have: rules give some layers others.

        N zero points fill a row of words of qzeros, which may hold a few more.
        """
        columns, words = (self._tensor(part).shape[1] for part in ("scales", "qzeros"))
        if self.method == "awq" or words == -(-columns * self.bits // _WORD):
            return self
        for bits in _BITS:
            if words == -(-columns * bits // _WORD):
                return dataclasses.replace(self, bits=bits)
        raise ModelFileError(
            f"layer {self.name!r} of the checkpoint has {words * _WORD / columns:.3g} bits: "
            "2, 4 and 8 are read"
        )

    def form(self, scale_type: str) -> BlockFormat:
        """Return the form of the codes: symmetric where all zero points are in the middle."""
        k, _ = self.shape()
        blocks = len(self._tensor("scales"))
        size = -(-k // blocks)
        index = self._tensor("g_idx")
        if index is not None and not np.array_equal(index, np.arange(k) // size):
            raise ModelFileError(
                f"layer {self.name!r} of the checkpoint has blocks of scattered rows "
                "(desc_act, act-order), which ONNX does not have: quantise with desc_act=False"
            )
        if -(-k // size) != blocks:
            raise ModelFileError(
                f"layer {self.name!r} of the checkpoint has {blocks} blocks for K = {k}"
            )
        middle = bool((self._zero_points() == 1 << (self.bits - 1)).all())
        return BlockFormat(
            self.bits, -1 if blocks == 1 else size, middle, scale_type=scale_type
        )

    def load(self, is_symmetric: bool) -> tuple[Codes, Floats, ZeroPoints | None]:
        """Return codes ``[K, N]``, scales and zero points ``[blocks, N]`` as methods do."""
        words = self._tensor("qweight").view(np.uint32)
        codes = (
            _unpacked(words, self.bits, _AWQ_ORDER)
            if self.method == "awq"
            else _unpacked(words.T, self.bits).T
        )
        scales = np.asarray(self._tensor("scales"), np.float32)
        if is_symmetric:
            # Unsigned bytes wrap around to what the signed ones are.
            return (codes - np.uint8(1 << (self.bits - 1))).view(np.int8), scales, None
        return codes, scales, self._zero_points()

    def _zero_points(self) -> ZeroPoints:
        words = self._tensor("qzeros").view(np.uint32)
        order = _AWQ_ORDER if self.method == "awq" else None
        stored = _unpacked(words, self.bits, order)
        return (stored + np.uint8(self.zero_offset)) & np.uint8((1 << self.bits) - 1)

    def _tensor(self, part: str) -> Any:
        with _opened(Path(self.path)) as file:
            name = f"{self.name}.{part}"
            if part == "g_idx" and name not in file.keys():  # noqa: SIM118
                return None
            return file.get_tensor(name)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors files with quantised layers."""

    method: str  # "gptq" or "awq"
    layers: Mapping[str, Layer]

    @classmethod
    def read(cls, path: str | os.PathLike[str], model: ir.Model) -> Checkpoint:
        """Find out what is in a folder, and give a model its norms and biases."""
        folder = Path(path)
        config = _config(folder)
        method, offset = _packing(config, folder)
        bits = config.get("bits", config.get("w_bit", 4))
        if bits not in _BITS or (method == "awq" and bits != 4):
            raise ModelFileError(f"{folder}: {method} checkpoints of {bits} bits are not read")
        layers, vectors = {}, {}  # float tensors of rank 1: norms, biases
        files = sorted(folder.glob("*.safetensors"))
        for path in files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    layer, _, part = name.rpartition(".")
                    if part == "qweight":
                        layers[layer] = Layer(layer, str(path), method, bits, offset)
                    elif (
                        part in ("weight", "bias")
                        and len(file.get_slice(name).get_shape()) == 1
                    ):
                        vectors[name] = str(path)
        if not files:
            raise MissingFileError(f"{folder}: no .safetensors file")
        if not layers:
            raise ModelFileError(f"{folder}: no tensor is called *.qweight: is it quantised?")
        found = cls(method, layers)
        for name, file in vectors.items():
            found._put_vector(name, file, model)
        return found

    def layer_of(self, use: WeightUse) -> Layer | None:
        """Return the layer of a node: by the name of its weight, or its own."""
        weight = (use.weight.name or "").removesuffix(".weight")
        node = use.label.replace("/", ".").removeprefix(".")
        for name in (weight, node):
            for operator in _OPERATORS:
                name = name.removesuffix(operator)
            layer = self.layers.get(name)
            if layer is not None:
                layer = layer.with_own_bits()
                if layer.shape() != (use.K, use.N):
                    raise ModelFileError(
                        f"layer {name!r} of the checkpoint is {list(layer.shape())}, node "
                        f"{use.label!r} multiplies by [{use.K}, {use.N}]"
                    )
                return layer
        return None

    def _put_vector(self, name: str, path: str, model: ir.Model) -> None:
        """Give the tensor of a model the checkpoint's numbers.

        AWQ's may be divided by scales: one that is not in the model is an error.
        """
        value = model.graph.initializers.get(name)
        old = None if value is None else value.const_value
        with _opened(Path(path)) as file:
            numbers = file.get_tensor(name)
        if value is not None and old is not None and old.shape == numbers.shape:
            value.const_value = ir.Tensor(
                numbers.astype(old.dtype.numpy()), dtype=old.dtype, name=name
            )
        elif self.method == "awq":
            raise ModelFileError(
                f"tensor {name!r} of the AWQ checkpoint: the model has no initializer of this "
                "name and shape: export the float model with its names"
            )


def _unpacked(
    words: npt.NDArray[np.uint32], bits: int, order: tuple[int, ...] | None = None
) -> npt.NDArray[np.uint8]:
    """Return the numbers in words ``[rows, n]``, along the last axis, uint8."""
    numbers = unpack_rows(np.ascontiguousarray(words, "<u4").view(np.uint8), bits)
    if order is not None:
        in_words = numbers.reshape(*words.shape, len(order))
        numbers = in_words[..., np.argsort(order)].reshape(len(words), -1)
    return numbers


def _config(folder: Path) -> dict[str, Any]:
    for name in _CONFIG_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelFileError(f"{path} is not JSON: {error}") from error
        config = found.get("quantization_config") if name == "config.json" else found
        if isinstance(config, dict):
            return config
    raise MissingFileError(
        f"{folder}: neither config.json with quantization_config nor {_CONFIG_FILES[1]}"
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
        "GPTQ, AWQ's gemm, and AutoRound's auto_gptq and auto_awq are"
    )


def _opened(path: Path) -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise ImportError(
            "checkpoints need safetensors: pip install 'ortplugins[checkpoint]'"
        ) from error
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error
