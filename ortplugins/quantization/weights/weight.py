# SPDX-License-Identifier: MIT
"""A weight from the graph to its codes in files, and the weights that share channel scales.

    WeightUse   a node, and which of its inputs is the matrix         (uses.py)
    Weight      a matrix in one form: its uses, its floats, its codes
    Group       weights that read one activation, and what is known of that

The coordinator's weights and groups know the graph. Workers get copies that do not, and return
these with what they found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    Codes,
    Floats,
    dequantize_blocks,
)
from ortplugins.quantization.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.weights.recipe import METHODS
from ortplugins.quantization.weights.uses import WeightUse
from rewrite_rules.weights.bit_packing import unpack_rows

STORED = ("codes", "scales", "zero_points")
"""What the codes of a weight are made of, in files."""
UNREACHED = "no token of the samples reaches it"
_NOWHERE = TensorReference("", 0, (0,), "uint8")


class Errors(NamedTuple):
    """What the codes of a weight lose; NaN where it was not measured."""

    # Frobenius norm of the difference from the floats over theirs, channel scales taken out
    # again; and the same of products with sampled tokens.
    weight: float = math.nan
    output: float = math.nan
    # Square of the error of the products, for each token, summed over the columns: tr(D^T H D)
    # where there are second moments H and bits are undecided, else that of the sample.
    added: float = math.nan


_UNMEASURED = Errors()


@dataclasses.dataclass(eq=False)
class Weight:
    """A float matrix ``[K, N]`` in one form, and its codes once it is quantised."""

    name: str  # of the initializer
    place: int  # among constants of that name, which those of sibling subgraphs may have
    K: int  # size along which the blocks run
    N: int  # number of columns
    stored_k_last: bool  # the initializer is [N, K]
    form: BlockFormat
    method: str  # by which it gets its codes
    # Nodes that read it; none in the copy of a worker.
    uses: list[WeightUse] = dataclasses.field(default_factory=list)
    floats: TensorReference = _NOWHERE
    k_last: bool = False  # codes are [N, K]; scales and zero points follow
    codes: TensorReference = _NOWHERE  # packed, uint8
    scales: TensorReference = _NOWHERE  # float32 or float16, [blocks, N] or [N, blocks]
    zero_points: TensorReference | None = None  # a byte each, alike; None when symmetric
    errors: Errors = _UNMEASURED

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return self.K * self.N

    @property
    def is_table(self) -> bool:
        """Whether a Gather reads it."""
        return any(use.activation is None for use in self.uses)

    def make_room(self, writer: ScratchWriter) -> None:
        """Reserve space for its codes in a file, to be written by others."""
        blocks, form = self.form.blocks(self.K), self.form
        grid = (self.N, blocks) if self.k_last else (blocks, self.N)
        self.codes = writer.reserve((-(-self.elements * form.bits // 8),), np.uint8)
        self.scales = writer.reserve(grid, np.dtype(form.scale_type))
        if not form.is_symmetric:
            self.zero_points = writer.reserve(grid, np.uint8)

    def dequantized(self) -> Floats:
        """Return the matrix that the codes stand for, float32 ``[K, N]``."""
        shape = (self.N, self.K) if self.k_last else (self.K, self.N)
        codes: Codes = unpack_rows(self.codes.map(), self.form.bits)[: self.elements]
        codes = codes.reshape(shape)
        if self.form.is_symmetric:
            spare = np.int8(8 - self.form.bits)
            codes = codes.view(np.int8) << spare >> spare
        scales = self.scales.map()
        zeros = None if self.zero_points is None else self.zero_points.map()
        if self.k_last:
            codes, scales, zeros = codes.T, scales.T, None if zeros is None else zeros.T
        return dequantize_blocks(codes, scales, zeros, self.form)


@dataclasses.dataclass(eq=False)
class Group:
    """Weights of one K, type and method that share the scales of their input channels."""

    weights: list[Weight]
    method: str  # "rtn" where nothing is known of their activations
    activations: Sequence[ir.Value] = ()  # none in the copy of a worker
    reason: str = ""  # why nothing is
    # Of each activation that tokens of the samples reach: the arrays of ActivationStatistics,
    # or of PairedModels.statistics, by name. None where nothing is calibrated.
    statistics: Sequence[Mapping[str, TensorReference]] = ()
    threads: int = 1  # that may share the columns of a weight; it changes no bit
    undecided: bool = False  # whether some weights may get more bits later
    # What was found; scales that are there already are not searched again.
    reached: bool = False  # whether a token meets the weights
    channel_scales: Floats | None = None  # [K], of rows; activations are divided by them
    alpha: float = math.nan  # their exponent
    folded: str = ""  # as in NodeReport

    @property
    def is_known(self) -> bool:
        """Whether there is anything to calibrate by."""
        return bool(self.statistics)

    @property
    def steps(self) -> tuple[str, ...]:
        """What the method does; nothing but rounding to nearest without a token."""
        return METHODS[self.method] if self.is_known else ()

    @property
    def names(self) -> list[str]:
        """Of the activations."""
        return [activation.name or "" for activation in self.activations]

    @property
    def elements(self) -> int:
        """Of all its weights."""
        return sum(weight.elements for weight in self.weights)

    def for_worker(self) -> Group:
        """Return a copy without the graph."""
        weights = [dataclasses.replace(weight, uses=[]) for weight in self.weights]
        return dataclasses.replace(self, weights=weights, activations=())

    def take_in(self, found: Group) -> None:
        """Note what a worker found."""
        self.reached, self.alpha = found.reached, found.alpha
        self.channel_scales = found.channel_scales
        if METHODS[self.method] and not found.reached:
            self.method, self.reason = "rtn", UNREACHED
        for mine, quantized in zip(self.weights, found.weights, strict=True):
            mine.method, mine.errors = self.method, quantized.errors
            for kind in STORED:
                setattr(mine, kind, getattr(quantized, kind))

    def reads_of(self, activation: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return where an activation meets the weights of the group."""
        uses = (use for weight in self.weights for use in weight.uses)
        return [(use.node, 1 - use.index) for use in uses if use.activation is activation]
