# SPDX-License-Identifier: MIT
"""The simulated orders are those that onnxruntime's profile shows."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from builders import order_graphs

from rewrite_rules.graph.nodes import captures, is_constant
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.shape_size_reorder.order.onnxruntime_orders import Dependencies

GRAPHS = int(os.environ.get("ORTPLUGINS_ORDERS", "60"))


def default_order(graph: ir.Graph) -> list[int]:
    return Dependencies.of(graph).default()


def priority_order(graph: ir.Graph) -> list[int]:
    return Dependencies.of(graph).priority()


def check_against_profile(model: onnx.ModelProto, folder: Path, *, priority: bool) -> int:
    """Compare each graph that ran; returns how many did."""
    simulate = priority_order if priority else default_order
    compared = 0
    for cond in (True, False):
        names = order_graphs.ran(
            order_graphs.profile(model, folder, priority=priority, cond=cond)
        )
        place = {name: index for index, name in enumerate(names)}
        for graph in ir.from_proto(model).graphs():
            nodes = list(graph)
            expected = [
                nodes[index].name for index in simulate(graph) if not is_constant(nodes[index])
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


def test_shape_in_the_file_is_not_shape_in_the_run():
    # Hoisted in the file, the Shape runs last by default: the table in the reference.
    graph = model_of("""
        g (float[4, 4] x, float[4, 4] w) => (float[a, b] r) {
            a1 = Relu (x)  sh = Shape (a1)  a2 = Neg (a1)  a3 = Exp (a2)
            b1 = Relu (w)  b2 = Neg (b1)  b3 = Exp (b2)
            j = Add (a3, b3)  r = Reshape (j, sh)
        }""").graph
    names = [node.outputs[0].name for node in graph]
    run = " ".join(names[i] for i in default_order(graph))
    assert run == "b1 b2 b3 a1 a2 a3 j sh r"
    run = " ".join(names[i] for i in priority_order(graph))
    assert run == "a1 sh a2 a3 b1 b2 b3 j r"


def test_a_body_waits_for_what_it_reads_two_levels_up():
    graph = model_of("""
        g (float[4] x, bool c) => (float[4] y) {
            late = Exp (x)
            early = Neg (x)
            y = If (c) <
                then_branch = t () => (float[4] p) {
                    p = If (c) <
                        then_branch = tt () => (float[4] q) { q = Neg (late) },
                        else_branch = te () => (float[4] r) { r = Neg (x) }>
                },
                else_branch = e () => (float[4] s) { s = Neg (early) }>
        }""").graph
    node = graph[-1]
    assert {value.name for value in captures(node)} == {"late", "early", "x", "c"}
    assert Dependencies.of(graph).producers[2] == [0, 1]


def test_constants_are_no_nodes_of_the_run():
    graph = model_of("""
        g (float[4] x) => (float[4] y) {
            a = Relu (x)
            c = Constant <value = float {2}> ()
            y = Mul (a, c)
        }""").graph
    assert default_order(graph) == priority_order(graph) == [1, 0, 2]
    assert Dependencies.of(graph).constants == [1]


def test_a_file_that_is_not_sorted(tmp_path: Path):
    model = model_of("""
        g (float[4, 4] x) => (float[a, b] y) {
            a = Relu (x)  b = Neg (a)  s = Shape (b)  c = Exp (b)  d = Neg (c)
            y = Reshape (d, s)
        }""")
    for node, name in zip(model.graph, "abscdy", strict=True):
        node.name = name
    proto = ir.to_proto(model)
    nodes = [proto.graph.node[index] for index in (5, 2, 0, 4, 1, 3)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    inputs = {"x": order_graphs.feeds(True)["x"][:4, :4]}
    for priority, simulate in ((False, default_order), (True, priority_order)):
        events = order_graphs.profile(proto, tmp_path, priority=priority, inputs=inputs)
        assert order_graphs.ran(events) == [nodes[i].name for i in simulate(read(proto))]


def read(proto: onnx.ModelProto) -> ir.Graph:
    return ir.from_proto(proto).graph


def test_empty_graph():
    graph = model_of("g (float[4] x) => (float[4] x) {}").graph
    assert default_order(graph) == priority_order(graph) == []


def test_a_circle_is_refused_by_name():
    graph = model_of("""
        g (float[4] x) => (float[4] y) {
            a = Add (x, c)
            b = Neg (a)
            c = Exp (b)
            y = Neg (x)
        }""").graph
    with pytest.raises(Refusal, match=r"'a'.*'c'|'c'.*'a'|'b'.*'a'"):
        default_order(graph)
    with pytest.raises(Refusal, match="wait for each other"):
        priority_order(graph)


def test_two_values_of_one_name_are_refused():
    model = model_of("g (float[4] x) => (float[4] y) { a = Neg (x) b = Neg (a) y = Exp (b) }")
    first, second, _ = model.graph
    second.outputs[0].name = "a"
    with pytest.raises(Refusal, match="'a' is an output of nodes"):
        default_order(model.graph)
    assert first.outputs[0].name == "a"


def test_nodes_of_one_name_are_kept_apart():
    model = model_of("g (float[4] x) => (float[4] y) { a = Neg (x) b = Neg (a) y = Exp (b) }")
    for node in model.graph:
        node.name = "same"
    assert default_order(model.graph) == [0, 1, 2]
