# SPDX-License-Identifier: MIT
"""Time of the fusion over graphs of growing size."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir

from benchmarks.figures.bounds import Figure
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import Outcome, PassContext, Remarks

_OPTIONS = FusionOptions(accuracy_level=0, slow_kernels="float")
_OTHERS = ("Add", "Mul", "Relu", "Sigmoid", "Sub", "Tanh", "Neg", "Softmax", "Abs")
_WIDTH = 32


def measure_rewrite_speed(folder: Path, rounds: int) -> list[Figure]:
    """Fuse a twentieth of the nodes of 2,000 and of 20,000; interleaved, medians.

    For the growth the garbage collector is kept off the model: its full
    collections walk all that is alive, whatever runs, and the larger run meets one or two.
    """
    del folder
    cases = [(20_000, False), (2_000, True), (20_000, True)]
    seconds: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, times in seconds.items():
            times.append(_fuse(*case))
    whole, small, large = (statistics.median(times) for times in seconds.values())
    return [
        Figure("20,000 nodes, 1,000 matches", whole, unit="s", bound=1.5),
        Figure("20,000 nodes beside 2,000, no collections", large, small, unit="s", bound=12),
    ]


def _fuse(nodes: int, frozen: bool) -> float:
    model = _model(nodes)
    remarks = Remarks("dq_matmulnbits_fusion")
    gc.collect()
    if frozen:
        gc.freeze()
        gc.disable()
    start = time.perf_counter()
    fuse(model, _OPTIONS, PassContext(remarks))
    elapsed = time.perf_counter() - start
    gc.enable()
    gc.unfreeze()
    assert sum(remark.outcome is Outcome.FIRED for remark in remarks) == nodes // 20
    return elapsed


def _model(nodes: int) -> ir.Model:
    """A chain of twenty nodes, one of them a DequantizeLinear, one its MatMul, repeated."""
    rng = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", _WIDTH])
    value, chain, initializers = x, [], []
    for i in range(nodes // 20):
        codes = _initializer(f"w{i}", rng.integers(0, 256, (_WIDTH, _WIDTH // 2), np.uint8))
        codes = _packed(codes)
        scales = _initializer(f"s{i}", rng.uniform(0.1, 1, (1, _WIDTH)).astype(np.float32))
        initializers += [codes, scales]
        attributes = {"axis": 0, "block_size": _WIDTH}
        chain.append(ir.node("DequantizeLinear", [codes, scales], attributes))
        chain.append(ir.node("MatMul", [value, chain[-1].outputs[0]]))
        value = chain[-1].outputs[0]
        for op_type in (*_OTHERS, *_OTHERS):
            binary = op_type in ("Add", "Mul", "Sub")
            chain.append(ir.node(op_type, [value, x] if binary else [value]))
            value = chain[-1].outputs[0]
    value.name, value.dtype = "y", ir.DataType.FLOAT
    graph = ir.Graph(
        [x], [value], nodes=chain, initializers=initializers, opset_imports={"": 21}
    )
    return ir.Model(graph, ir_version=10)


def _packed(codes: ir.Value) -> ir.Value:
    assert codes.const_value is not None and codes.name is not None
    tensor = ir.PackedTensor(
        codes.const_value.numpy().reshape(-1),
        ir.DataType.INT4,
        shape=ir.Shape([_WIDTH, _WIDTH]),
        name=codes.name,
    )
    return ir.Value(
        name=codes.name,
        shape=tensor.shape,
        type=ir.TensorType(ir.DataType.INT4),
        const_value=tensor,
    )


def _initializer(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(
        name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
