# SPDX-License-Identifier: MIT
"""Which nodes of a float model deserve weights of 8 bits where the others get 4.

The float model is quantised twice by rounding to nearest, to 4 and to 8 bits, and both forms
of each weight are put behind a switch:

    MatMul(x, W)    ->    MatMul(x, If(switch) { DQ(codes of 4 bits) } else { DQ(of 8) })

What the search finds is quantised by the method asked for and compared with the float model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Unpack

import onnx_ir as ir

from ortplugins.model_io.loading import ModelLike
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.weights.plan import QuantizeReport
from ortplugins.quantization.weights.quantize import quantize
from ortplugins.quantization.weights.recipe import Settings
from ortplugins.samples.sources import CalibrationSource
from ortplugins.static_qdq.search import Plan, Search, Unit
from ortplugins.static_qdq.switched_model import add_weight_switch
from rewrite_rules.graph.initializers import FreshNames
from rewrite_rules.graph.nodes import dequantizer, label, made_by
from rewrite_rules.graph.parameters import constant

_FEW, _MANY = 4, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsPlan(Plan):
    """Which nodes get 8 bits; see :class:`.Plan` for what that brings.

    Attributes:
        node_config: For :func:`.quantize`.
        nodes: Number of nodes whose weights are quantised.
        report: Of the model with this plan.
    """

    node_config: dict[str, dict[str, int]]
    nodes: int
    report: QuantizeReport


def plan_bits(
    model: ModelLike,
    data: CalibrationSource,
    *,
    budget: float | None = None,
    max_8bit: float | None = None,
    max_calibration_memory: int = 1 << 30,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    work_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **settings: Unpack[Settings],
) -> BitsPlan:
    """Choose the nodes of a float model whose weights get 8 bits instead of 4.

    Args:
        model: Path of an .onnx file, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        data: Samples, as for :func:`.quantize`.
        budget: Cosine of the outputs to the float model's that is to be reached.
        max_8bit: What may get 8 bits: a number of nodes (int), or a share of the quantised
            weights, and so of their bytes (float, 0 to 1). With a budget: whichever is met
            first.
        max_calibration_memory: Bytes for weights that are kept in float;
            as for ``quantize`` besides.
        providers: Execution providers that run the samples.
        work_dir: Folder for intermediate files; by default the system's.
        progress: Called with what is done, of how much, and what it is.
        settings: Of ``quantize``: method, block_size, nodes_to_exclude and so on; ``bits`` and
            ``node_config`` are what is planned.

    Raises:
        CalibrationError: If samples can't be used or onnxruntime fails.
        MissingFileError, ModelFileError: If a model can't be used or has nothing to quantise.
        QuantizationError: If an option is out of range, or the budget can't be reached.
    """
    limits = budget, max_8bit, "max_8bit"
    how = providers, max_calibration_memory, progress
    with Search.start(model, data, work_dir, *limits, *how) as search:
        samples = search.calibration.samples
        samples.read_all()
        report = QuantizeReport("")

        def quantized(names: Sequence[str], **planned: Any) -> ir.Model:
            nonlocal report
            chosen: Any = {"method": "rtn", "bits": _FEW} | settings | planned
            result = quantize(
                search.model,
                node_config={name: {"bits": _MANY} for name in names},
                calibration_data_reader=None if chosen["method"] == "rtn" else samples,
                calibration_providers=providers,
                max_calibration_memory=max_calibration_memory,
                work_dir=search.calibration.scratch,
                **chosen,
            )
            report = result.report
            model: ir.Model = result.model
            return model

        # Switches choose between DequantizeLinear nodes of constants.
        plain = {"half_scales": False, "fuse_tables": False, "accuracy_level": None}
        many, few = (quantized((), method="rtn", bits=bits, **plain) for bits in (_MANY, _FEW))
        nodes = len(report.quantized)
        units = _with_switches(few, many, report, isinstance(max_8bit, int))
        switched = search.switched(few, [switch for unit in units for switch in unit.switches])
        figures = search.run(
            switched,
            units,
            quantized,
            cost=sum(unit.cost for unit in units),
            of=f"{nodes} nodes at {_MANY} bits",
            reference=search.switched(search.model.clone()).values(),
        )
        final = report
        before = switched.compare(search.switched(quantized(())).values())
    return BitsPlan(
        **figures | {"before": before},
        node_config={name: {"bits": _MANY} for name in search.promoted_names()},
        nodes=nodes,
        report=final,
    )


def _with_switches(
    few: ir.Model, many: ir.Model, report: QuantizeReport, nodes_count: bool
) -> list[Unit]:
    """Put the weights of one model beside those of the other; nodes of a weight are one.

    They cost their elements, or a node each where nodes count.
    """
    finer = {label(node): node for node in many.graph}
    quantized = {node.node: node for node in report.quantized}
    names = FreshNames(few)
    nodes: dict[ir.Node, tuple[ir.Node, list[str]]] = {}
    for node in list(few.graph):
        name = label(node)
        if name not in quantized or name not in finer:
            continue  # within a subgraph of If or Loop
        for value, twin in zip(node.inputs, finer[name].inputs, strict=False):
            coarse, fine = _dequantize(value), _dequantize(twin)
            if coarse is None or fine is None:
                continue
            nodes.setdefault(coarse, (fine, []))[1].append(name)
    units = []
    for coarse, (fine, readers) in nodes.items():
        first, readers = quantized[readers[0]], list(dict.fromkeys(readers))
        cost = len(readers) if nodes_count else first.K * first.N
        switch = add_weight_switch(few, coarse, fine, names)
        units.append(Unit(tuple(readers), (switch,), first.op_type, cost))
    return units


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    """The node that dequantises a weight, a Transpose behind it looked through."""
    transpose = made_by(value, "Transpose")
    node = dequantizer(value if transpose is None else transpose.inputs[0])
    return None if node is None or constant(node.inputs[0]) is None else node
