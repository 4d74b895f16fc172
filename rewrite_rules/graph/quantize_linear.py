# SPDX-License-Identifier: MIT
"""QuantizeLinear and DequantizeLinear, of ONNX or of onnxruntime."""

from __future__ import annotations

import onnx_ir as ir

_DOMAINS = ("", "com.microsoft")


def is_dequantize_linear(node: ir.Node) -> bool:
    """Whether a node is ONNX's DequantizeLinear, or onnxruntime's of the same meaning."""
    return node.op_type == "DequantizeLinear" and node.domain in _DOMAINS


def is_quantize_linear(node: ir.Node) -> bool:
    """Whether a node is ONNX's QuantizeLinear, or onnxruntime's of the same meaning."""
    return node.op_type == "QuantizeLinear" and node.domain in _DOMAINS
