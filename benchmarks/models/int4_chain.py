# SPDX-License-Identifier: MIT
"""Writes a chain of int4 MatMuls of any size, without holding it in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.lazy_tensors import ChunkedTensor

_MEAN_SQUARE = {"INT4": 21.5, "UINT4": 77.5}


def write_chain(
    path: Path, layers: int, width: int, hidden: int, layout: str, storage: str = "INT4"
) -> int:
    """Write x -> (MatMul [width, hidden] -> MatMul [hidden, width]) x layers, block 32.

    Args:
        path: The .onnx file; the data goes next to it.
        layers: Number of pairs.
        width: Size of the input and output.
        hidden: Size between the two of a pair.
        layout: ``"axis0"`` or ``"transposed"`` ([N, K] + Transpose).
        storage: ``"INT4"`` or ``"UINT4"``.

    Returns:
        Bytes of the codes.
    """
    x = ir.val("x", ir.DataType.FLOAT, ["rows", width])
    value, nodes, initializers, size = x, [], [], 0
    for i in range(2 * layers):
        k, n = (width, hidden) if i % 2 == 0 else (hidden, width)
        shape, blocks = ((k, n), (k // 32, n)) if layout == "axis0" else ((n, k), (n, k // 32))
        codes = initializer(_codes(f"w{i}", shape, ir.DataType[storage], i))
        scales = initializer(_scales(f"s{i}", blocks, k, storage))
        axis = 0 if layout == "axis0" else 1
        attributes = {"axis": axis, "block_size": 32}
        nodes.append(ir.node("DequantizeLinear", [codes, scales], attributes, name=f"dq{i}"))
        if layout == "transposed":
            nodes.append(ir.node("Transpose", nodes[-1].outputs, {"perm": [1, 0]}))
        nodes.append(ir.node("MatMul", [value, nodes[-1].outputs[0]], name=f"matmul{i}"))
        value = nodes[-1].outputs[0]
        initializers += [codes, scales]
        size += k * n // 2
    value.name, value.dtype = "y", ir.DataType.FLOAT
    save_graph(path, x, value, nodes, initializers)
    return size


def save_graph(
    path: Path,
    x: ir.Value,
    y: ir.Value,
    nodes: Sequence[ir.Node],
    initializers: Sequence[ir.Value],
    external: bool = True,
) -> None:
    """Write a model of one input and one output, at opset 21."""
    opset = {"": 21}
    graph = ir.Graph(
        [x], [y], nodes=nodes, initializers=initializers, opset_imports=opset, name="chain"
    )
    data = f"{path.name}.data" if external else None
    ir.save(ir.Model(graph, ir_version=10), path, external_data=data)


def initializer(tensor: ir.TensorProtocol) -> ir.Value:
    """Return the value of a constant tensor."""
    return ir.Value(
        name=tensor.name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )


def _codes(name: str, shape: tuple[int, int], dtype: ir.DataType, seed: int) -> ChunkedTensor:
    def chunks() -> Iterator[npt.NDArray[np.uint8]]:
        rng = np.random.default_rng(seed)
        left = shape[0] * shape[1] // 2
        while left:
            count = min(left, 4 << 20)
            yield np.frombuffer(rng.bytes(count), np.uint8)
            left -= count

    return ChunkedTensor(chunks, dtype, shape, name)


def _scales(name: str, shape: tuple[int, int], k: int, storage: str) -> ChunkedTensor:
    def chunks() -> Iterator[npt.NDArray[np.float32]]:
        # Outputs stay about 1 from layer to layer: the mean square of a code is known, and
        # alternating signs cancel their mean.
        row, column = np.indices(shape, np.int32, sparse=True)
        signs = 1 - 2 * ((row ^ column) & 1)
        yield (signs / np.sqrt(_MEAN_SQUARE[storage] * k)).astype(np.float32)

    return ChunkedTensor(chunks, ir.DataType.FLOAT, shape, name)
