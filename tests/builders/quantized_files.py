# SPDX-License-Identifier: MIT
"""What a quantised model says, read by hand: numpy and ONNX's specification, no ortplugins."""

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from .text_models import graphs

Numbers = npt.NDArray[np.float64]

# What quantize() takes as quant_format.
FORMATS = ("QDQ", "QDQ_transposed", "MatMulNBits")
_LOOKED_THROUGH = ("Transpose", "Identity")


def read(model: onnx.ModelProto | ir.Model | str | os.PathLike[str]) -> onnx.ModelProto:
    """The model with its data in it, whatever it is."""
    if isinstance(model, ir.Model):
        return ir.to_proto(model)
    if isinstance(model, onnx.ModelProto):
        return model
    return onnx.load(os.fspath(model))


def nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in graphs(model):
        yield from graph.node


def kinds(model: onnx.ModelProto) -> list[str]:
    """Operators of all graphs, in their order; constants apart."""
    return [node.op_type for node in nodes_of(model) if node.op_type != "Constant"]


def arrays_of(model: onnx.ModelProto) -> dict[str, npt.NDArray]:
    """Every initializer by its name; codes as the small integers that they are."""
    return {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for graph in graphs(model)
        for tensor in getattr(graph, "initializer", ())
    }


def dequantised(model: onnx.ModelProto) -> dict[str, Numbers]:
    """``W[K, N]`` of every node that reads codes, by the node's name; K is what has blocks."""
    arrays = arrays_of(model)
    found: dict[str, Numbers] = {}
    for node in nodes_of(model):
        if node.op_type == "Cast" and node.input[0] in arrays:
            arrays[node.output[0]] = arrays[node.input[0]]
        if node.op_type == "DequantizeLinear" and node.input[0] in arrays:
            for reader in _readers(model, node.output[0]):
                found[reader.name] = _dequantize_linear(node, arrays)
        elif node.op_type == "MatMulNBits":
            found[node.name] = _matmul_n_bits(node, arrays)
        elif node.op_type == "GatherBlockQuantized":
            found[node.name] = _gather_block_quantized(node, arrays)
    return found


def _readers(model: onnx.ModelProto, name: str) -> Iterator[onnx.NodeProto]:
    for node in nodes_of(model):
        if name in node.input:
            if node.op_type in _LOOKED_THROUGH:
                yield from _readers(model, node.output[0])
            else:
                yield node


def _attributes(node: onnx.NodeProto) -> dict[str, int]:
    return {item.name: item.i for item in node.attribute}


def _k_axis(node: onnx.NodeProto, arrays: dict[str, npt.NDArray]) -> int:
    axis = _attributes(node).get("axis", 1)
    # One scale per column: they lie along N, blocks lie along K.
    return 1 - axis if arrays[node.input[1]].ndim == 1 else axis


def _dequantize_linear(node: onnx.NodeProto, arrays: dict[str, npt.NDArray]) -> Numbers:
    codes = arrays[node.input[0]].astype(np.float64)
    grids = [arrays[name].astype(np.float64) for name in node.input[1:]]
    k_axis = _k_axis(node, arrays)
    if k_axis == 1:
        codes, grids = codes.T, [grid.T for grid in grids]
    block_size = _attributes(node).get("block_size", 0) or len(codes)
    rows = np.arange(len(codes)) // block_size
    scales, zeros = ([grid.reshape(-1, codes.shape[1])[rows] for grid in grids] + [0])[:2]
    return (codes - zeros) * scales


def _unpacked(array: npt.NDArray, bits: int) -> Numbers:
    """Numbers in bytes, the first in the lowest bits, along the last axis."""
    shifts = np.arange(0, 8, bits)
    parts = (array.view(np.uint8)[..., None] >> shifts) & (2**bits - 1)
    return parts.reshape(*array.shape[:-1], -1).astype(np.float64)


def _matmul_n_bits(node: onnx.NodeProto, arrays: dict[str, npt.NDArray]) -> Numbers:
    attributes = _attributes(node)
    k, n = attributes["K"], attributes["N"]
    bits, size = attributes.get("bits", 4), attributes["block_size"]
    blocks = -(-k // size)
    codes = _unpacked(arrays[node.input[1]], bits).reshape(n, -1)[:, :k]
    scales = arrays[node.input[2]].astype(np.float64).reshape(n, blocks)
    zeros: Numbers = np.full((n, blocks), 2.0 ** (bits - 1))
    if len(node.input) > 3 and node.input[3]:
        stored = arrays[node.input[3]].reshape(n, -1)
        zeros = _unpacked(stored, bits)[:, :blocks] if stored.dtype == np.uint8 else stored
    columns = np.arange(k) // size
    return ((codes - zeros[:, columns]) * scales[:, columns]).T


def _gather_block_quantized(node: onnx.NodeProto, arrays: dict[str, npt.NDArray]) -> Numbers:
    attributes = _attributes(node)
    codes = arrays[node.input[0]]
    bits = attributes.get("bits", 4)
    packed = codes.dtype == np.uint8
    numbers = _unpacked(codes, bits) if packed else codes.astype(np.float64)
    size = attributes["block_size"]
    scales = arrays[node.input[2]].astype(np.float64)
    zeros: Numbers = np.full(scales.shape, 2.0 ** (bits - 1) if packed else 0.0)
    if len(node.input) > 3 and node.input[3]:
        stored = arrays[node.input[3]]
        zeros = _unpacked(stored, bits) if packed else stored.astype(np.float64)
    columns = np.arange(numbers.shape[1]) // size
    return ((numbers - zeros[:, columns]) * scales[:, columns]).T
