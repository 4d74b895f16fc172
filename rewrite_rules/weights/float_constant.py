# SPDX-License-Identifier: MIT
"""Writes a dequantised constant as the float constant that DequantizeLinear would make.

For weights that no fast kernel takes: unpacked once, while the model is saved, instead of at
every inference. The numbers are DequantizeLinear's own, bit for bit.
"""

from __future__ import annotations

__all__ = ["float_bytes", "write_float"]

import math

import onnx_ir as ir

from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import ChunkedTensor
from rewrite_rules.weights.dequantized_operand import DequantizedOperand


def float_bytes(operand: DequantizedOperand) -> int:
    """Bytes that the operand takes as a float constant."""
    return math.prod(operand.shape) * operand.dtype.bitwidth // 8


def write_float(initializers: DerivedInitializers, operand: DequantizedOperand) -> ir.Value:
    """Register the operand as a float constant of its own shape and type."""

    def make(name: str) -> ir.TensorProtocol:
        return ChunkedTensor(operand.rows, operand.dtype, operand.shape, name)

    # Values and not their names: sibling subgraphs may give theirs the same.
    key = (operand.axes, operand.casts, operand.scales, operand.zero_points)
    return initializers.get(operand.codes, ".float", make, key)
