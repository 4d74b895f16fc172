# SPDX-License-Identifier: MIT
"""The simulated orders are those that onnxruntime's profile shows."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
import order_graphs
import pytest

from rewrite_rules.constants import Refusal
from rewrite_rules.execution_order import (
    Dependencies,
    bodies,
    captures,
    default_order,
    is_constant,
    priority_order,
)

GRAPHS = int(os.environ.get("ORTPLUGINS_ORDERS", "60"))


def graphs_of(graph: ir.Graph):
    yield graph
    for node in graph:
        for body in bodies(node):
            yield from graphs_of(body)


def check_against_profile(model: onnx.ModelProto, folder: Path, *, priority: bool) -> int:
    """Compare each graph that ran; returns how many did."""
    simulate = priority_order if priority else default_order
    compared = 0
    for cond in (True, False):
        names = order_graphs.ran(
            order_graphs.profile(model, folder, priority=priority, cond=cond)
        )
        place = {name: index for index, name in enumerate(names)}
        for graph in graphs_of(ir.from_proto(model).graph):
            nodes = list(graph)
            expected = [
                nodes[index].name
                for index in simulate(graph)
                if not is_constant(nodes[index])
            ]
            if not all(name in place for name in expected):
                # A branch that was not taken; nothing of it ran.
                assert not any(name in place for name in expected)
                continue
            assert sorted(expected, key=place.__getitem__) == expected
            compared += 1
    return compared


def model_of(text: str) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> {text}')


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_orders_of_random_graphs(seed: int, tmp_path: Path):
    model = order_graphs.random_model(seed, nodes=12 + seed % 40, subgraphs=seed % 3)
    assert check_against_profile(model, tmp_path, priority=False)
    assert check_against_profile(model, tmp_path, priority=True)
