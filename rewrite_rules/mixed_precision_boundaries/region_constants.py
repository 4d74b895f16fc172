# SPDX-License-Identifier: MIT
"""Constants that follow the activations of their node into another precision.

- Of elementwise operators: ``code16 = (code8 - min8) * 256 + min16`` on the refined grid; the
  values stay bit for bit. Weights of Conv, MatMul and Gemm stay as they are.
- Biases in int32, whose scale is the input's times the weight's: kernels of NPUs want the
  same of the new input scale: ``code * 256`` with the scale / 256, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import dequantizer, input_of, label
from rewrite_rules.graph.parameters import constant, require_constant
from rewrite_rules.mixed_precision_boundaries.quantized_graph import (
    ELEMENTWISE_OPERATORS,
    QuantizedGraph,
    QuantizedTensor,
    read_grid,
)
from rewrite_rules.mixed_precision_boundaries.regions import ConstantChange, Region
from rewrite_rules.remarks import Refusal

_BIASED_OPERATORS = frozenset({"Conv", "ConvTranspose", "Gemm"})
# Float32 products of two scales, and Gemm's beta of 1, are this close.
_SCALE_TOLERANCE = 1e-3
_FINER = 256  # steps of 16 bits in one of 8
_MOST = np.iinfo(np.int32).max


def change_constants(region: Region, graph: QuantizedGraph) -> None:
    """Note what becomes of a region's constants, and which biases stay."""
    region.constants += _elementwise_changes(region, graph)
    for dequantize, nodes in _wider_biases(region).items():
        try:
            region.constants.append(_rescaled(dequantize, nodes))
        except Refusal as refusal:
            stays = refusal.behind(f"bias {label(dequantize)!r} stays: ")
            region.biases_that_stay[nodes[0]] = stays


def _new_type(node: ir.Node, region: Region, graph: QuantizedGraph) -> ir.DataType | None:
    """The type of all activations of a node, if it is one, and new to one of them."""
    try:
        read, written = graph.read_by(node), graph.written_by(node)
    except Refusal:
        return None
    ends = [(t, t.grid.dtype) for t in (*read, *written) if t not in region.plans]
    ends += [(t, region.plans[t].reads[node]) for t in read if t in region.plans]
    ends += [(t, region.plans[t].produced) for t in written if t in region.plans]
    types = {dtype for _, dtype in ends}
    changed = any(dtype != tensor.grid.dtype for tensor, dtype in ends)
    return types.pop() if changed and len(types) == 1 else None


def _elementwise_changes(region: Region, graph: QuantizedGraph) -> Iterator[ConstantChange]:
    """What becomes of the constants of a region's elementwise operators."""
    found: dict[tuple[ir.Node, ir.DataType], list[ir.Node]] = {}
    touched = dict.fromkeys(
        node
        for tensor, plan in region.plans.items()
        for node in (*plan.reads, tensor.producer)
        if node is not None and node.op_type in ELEMENTWISE_OPERATORS
    )
    for node in touched:
        dtype = _new_type(node, region, graph)
        if dtype is not None and dtype != ir.DataType.FLOAT:
            for dequantize in dict.fromkeys(_dequantized_constants(node)):
                found.setdefault((dequantize, dtype), []).append(node)
    for (dequantize, dtype), nodes in found.items():
        try:
            grid = read_grid(dequantize)
        except Refusal:
            continue  # per channel, or of another type: legal beside any activation
        if grid.bits >= dtype.bitwidth:
            continue
        name = label(dequantize)
        try:
            fine = grid.refine(dtype)
            _, tensor = require_constant(dequantize.inputs[0], "codes")
        except Refusal as refusal:
            raise Refusal(refusal.code, f"constant {name!r}: {refusal}") from None
        codes = fine.quantize(grid.dequantize(tensor.numpy()))
        zero_point = np.asarray(fine.zero_point, dtype.numpy())
        scale = np.asarray(fine.scale)
        yield ConstantChange(dequantize, tuple(nodes), codes, scale, zero_point)


def _wider_biases(region: Region) -> dict[ir.Node, list[ir.Node]]:
    """Return int32 biases of nodes whose input has 16 bits in place of 8, and the nodes."""
    found: dict[ir.Node, list[ir.Node]] = {}
    for tensor, plan in region.plans.items():
        for node, dtype in plan.reads.items():
            is_wider = dtype != ir.DataType.FLOAT and dtype.bitwidth > tensor.grid.bits
            if not is_wider or node.op_type not in _BIASED_OPERATORS:
                continue
            _check_float_bias(node, tensor)
            if (dequantize := _bias_of(node, tensor)) is not None:
                found.setdefault(dequantize, []).append(node)
    return found


def _check_float_bias(node: ir.Node, tensor: QuantizedTensor) -> None:
    """Refuse a float bias that overflows by the finer scale only.

    Between Q and DQ, onnxruntime quantises it to int32 by the scales of input and weight
    (weight_bias_quantization.cc, 1.32), without a check of the ends.
    """
    bias, weight = constant(input_of(node, 2)), dequantizer(input_of(node, 1))
    scale = None if weight is None else constant(input_of(weight, 1))
    reads = node.inputs[0] in tensor.values()
    if not reads or bias is None or scale is None or scale.size not in (1, bias.size):
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.ravel(bias.numpy()).astype(np.float64) / np.ravel(scale.numpy())
    steps = float(np.abs(values).max(initial=0)) / float(tensor.grid.scale)
    if steps <= _MOST < _FINER * steps:
        raise Refusal(
            "ORP308",
            f"float bias {bias.name!r} is {_FINER * steps:.3g} steps of the new scale, beyond "
            "int32, which onnxruntime makes it; quantise it, or promote in mode 'float'",
        )


def _bias_of(node: ir.Node, tensor: QuantizedTensor) -> ir.Node | None:
    """The DequantizeLinear of a bias whose scale is that of the tensor times the weight's."""
    bias, weight = dequantizer(input_of(node, 2)), dequantizer(input_of(node, 1))
    reads = node.inputs[0] in {dq.outputs[0] for dq in tensor.dequantizes}
    if not reads or bias is None or weight is None:
        return None
    codes = constant(bias.inputs[0])
    scales = [constant(dq.inputs[1]) for dq in (bias, weight)]
    if codes is None or codes.dtype != ir.DataType.INT32 or None in scales:
        return None
    own, of_weight = (np.ravel(scale.numpy()).astype(np.float64) for scale in scales if scale)
    product = float(tensor.grid.scale) * of_weight
    if own.size != product.size and 1 not in (own.size, product.size):
        return None
    return bias if np.allclose(own, product, rtol=_SCALE_TOLERANCE, atol=0) else None


def _rescaled(dequantize: ir.Node, nodes: list[ir.Node]) -> ConstantChange:
    _, codes = require_constant(dequantize.inputs[0], "codes")
    _, scale = require_constant(dequantize.inputs[1], "scale")
    wide, old = codes.numpy().astype(np.int64) * _FINER, scale.numpy()
    greatest, fine = int(np.abs(wide).max(initial=0)), old / old.dtype.type(_FINER)
    if greatest > _MOST:
        raise Refusal(
            "ORP308",
            f"times {_FINER}, its greatest code is {greatest}, beyond int32; a greater weight "
            "scale makes room",
        )
    if (fine * old.dtype.type(_FINER) != old).any():
        raise Refusal("ORP308", f"its scale / {_FINER} is too small for {old.dtype}")
    return ConstantChange(dequantize, tuple(nodes), wide.astype(np.int32), fine, None)


def _dequantized_constants(node: ir.Node) -> Iterator[ir.Node]:
    for dequantize in map(dequantizer, node.inputs):
        if dequantize is not None and constant(dequantize.inputs[0]) is not None:
            yield dequantize
