# SPDX-License-Identifier: MIT
"""Writes a dequantised constant as the float constant that DequantizeLinear would make."""

from __future__ import annotations

import math
from functools import partial

import onnx_ir as ir

from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import ChunkedTensor
from rewrite_rules.remarks import Refusal
from rewrite_rules.weights.dequantized_operand import DequantizedOperand


class FloatConstants:
    """The float constants of one run over one model; what exists costs nothing."""

    def __init__(self, initializers: DerivedInitializers, limit_mb: int) -> None:
        self._initializers = initializers
        self._limit_mb = limit_mb
        self._made: set[ir.Value] = set()
        self._bytes = 0

    def check(self, operand: DequantizedOperand) -> None:
        """Refuse an operand that exceeds the limit, with sizes in megabytes."""
        if not self.fits(operand):
            used, size = self._bytes / 1e6, float_bytes(operand) / 1e6
            raise Refusal(
                "ORP316",
                f"as a float constant it would take {size:.0f} MB, above what "
                f"float_limit_mb={self._limit_mb} leaves ({used:.0f} MB used): raise it",
            )

    def fits(self, operand: DequantizedOperand) -> bool:
        """Whether an operand is within what the limit leaves."""
        return (self._bytes + float_bytes(operand)) / 1e6 <= self._limit_mb

    def write(self, operand: DequantizedOperand) -> ir.Value:
        """Register what DequantizeLinear makes as a float constant."""
        dtype, shape = operand.casts[0], tuple(operand.code_tensor.shape.numpy())
        make = partial(ChunkedTensor, operand.chunks, dtype, shape)
        # Values and not their names: sibling subgraphs may give theirs the same.
        key = (operand.runs, dtype, operand.scales, operand.zero_points)
        value = self._initializers.get(operand.codes, ".float", make, key)
        if value not in self._made:
            self._made.add(value)
            self._bytes += float_bytes(operand)
        return value


def float_bytes(operand: DequantizedOperand) -> int:
    """Return what an operand takes as a float constant."""
    return math.prod(operand.shape) * operand.casts[0].bitwidth // 8
