# SPDX-License-Identifier: MIT
"""Random graphs with everything that an order depends on; what onnxruntime makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

COLUMNS = 64  # float32 rows of 256 bytes, so that tensors outweigh shapes


class RandomGraph:
    """Grows one graph node by node; bodies are grown by others that share the counter."""

    def __init__(self, rng: random.Random, names: Iterator[int], subgraphs: int) -> None:
        self.rng, self.names, self.subgraphs = rng, names, subgraphs
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        self.rows: dict[str, int] = {}  # float[rows, COLUMNS] values in scope
        self.lengths: list[str] = []  # int64[2] values in scope

    def add(self, op: str, inputs: list[str], outputs: int = 1, **attributes) -> list[str]:
        number = next(self.names)
        made = [f"v{number}" + ("" if i == 0 else f"_{i}") for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op, inputs, made, name=f"n{number}_{op}", **attributes)
        )
        return made

    def value(self, op: str, inputs: list[str], rows: int, **attributes) -> str:
        (name,) = self.add(op, inputs, **attributes)
        self.rows[name] = rows
        self.infos.append(info(name, rows))
        return name

    def ints(self, numbers: list[int]) -> str:
        """An int64 constant, as a node or as an initializer."""
        if self.rng.random() < 0.5:
            return self.add(
                "Constant", [], value=helper.make_tensor("c", 7, [len(numbers)], numbers)
            )[0]
        name = f"i{next(self.names)}"
        self.initializers.append(helper.make_tensor(name, 7, [len(numbers)], numbers))
        return name

    def any(self) -> str:
        # The last ones more often: chains, with skips.
        names = list(self.rows)
        if self.rng.random() < 0.6:
            names = names[-4:]
        return self.rng.choice(names)

    def step(self) -> None:
        kind, x = self.rng.random(), self.any()
        rows = self.rows[x]
        if kind < 0.3:
            op = self.rng.choice(["Relu", "Neg", "Sigmoid", "Tanh", "Abs", "Identity", "Exp"])
            self.value(op, [x], rows)
        elif kind < 0.34:
            self.value("Clip", [x, "", self.limit()], rows)
        elif kind < 0.5:
            same = [name for name, other in self.rows.items() if other == rows]
            op = self.rng.choice(["Add", "Mul", "Sub"])
            self.value(op, [x, self.rng.choice([*same, x])], rows)
        elif kind < 0.58:
            other = self.any()
            if rows + self.rows[other] <= 64:
                self.value("Concat", [x, other], rows + self.rows[other], axis=0)
        elif kind < 0.64 and rows > 1:
            half = rows // 2
            one, two = self.add("Split", [x, self.ints([half, rows - half])], 2, axis=0)
            self.rows |= {one: half, two: rows - half}
            self.infos += [info(one, half), info(two, rows - half)]
        elif kind < 0.72:
            self.lengths.append(self.add("Shape", [x])[0])
        elif kind < 0.75:
            size = self.add("Size", [x])[0]
            last = self.add("Cast", [size], to=TensorProto.FLOAT)[0]
            self.value("Add", [x, last], rows)
        elif kind < 0.8 and self.lengths:
            # The Shape's result is used late: Gather, Mul, Reshape of something else.
            length = self.rng.choice(self.lengths)
            kept = self.add("Gather", [length, self.ints([1])], axis=0)[0]
            shape = self.add("Concat", [self.ints([-1]), kept], axis=0)[0]
            self.value("Reshape", [x, shape], rows)
        elif kind < 0.84:
            self.add("Neg", [x])  # nobody reads it
        elif self.subgraphs > 0 and kind < 0.94:
            self.control_flow(rows)
        else:
            self.value("Add", [x, x], rows)

    def limit(self) -> str:
        name = f"i{next(self.names)}"
        self.initializers.append(helper.make_tensor(name, 1, [], [6.0]))
        return name

    def body(self, name: str, inputs: dict[str, int], rows: int) -> RandomGraph:
        inner = RandomGraph(self.rng, self.names, self.subgraphs - 1)
        inner.rows = {**self.rows, **inputs}
        inner.lengths = list(self.lengths)
        for _ in range(self.rng.randint(1, 6)):
            inner.step()
        same = [value for value, other in inner.rows.items() if other == rows]
        inner.value("Relu", [self.rng.choice(same)], rows)
        return inner

    def control_flow(self, rows: int) -> None:
        kind = self.rng.choice(["If", "If", "Loop", "Scan"])
        if kind == "If":
            branches = {}
            for branch in ("then_branch", "else_branch"):
                inner = self.body(branch, {}, rows)
                outputs = [info(list(inner.rows)[-1], rows)]
                branches[branch] = inner.graph(branch, [], outputs)
            self.value("If", ["cond"], rows, **branches)
        elif kind == "Loop":
            number = next(self.names)
            state = f"s{number}"
            inner = self.body("loop", {state: rows}, rows)
            last = list(inner.rows)[-1]
            go_on = inner.add("Identity", [f"go{number}"])[0]
            graph = inner.graph(
                "loop",
                [
                    helper.make_tensor_value_info(f"it{number}", 7, []),
                    helper.make_tensor_value_info(f"go{number}", 9, []),
                    info(state, rows),
                ],
                [helper.make_tensor_value_info(go_on, 9, []), info(last, rows)],
            )
            start = self.rng.choice([v for v, other in self.rows.items() if other == rows])
            self.value("Loop", ["trips", "", start], rows, body=graph)
        else:
            row = f"s{next(self.names)}"
            inner = self.body("scan", {row: 1}, 1)
            rowwise = info(row, 1)
            rowwise.type.tensor_type.shape.dim.pop(0)
            # Scan hands over rows of one dimension less; give it back first.
            lifted = f"l{next(self.names)}"
            for node in inner.nodes:
                replace(node, row, lifted)
            axes = self.ints([0])
            inner.nodes.insert(
                0, helper.make_node("Unsqueeze", [row, axes], [lifted], name=f"n_{lifted}")
            )
            flat = inner.add("Squeeze", [list(inner.rows)[-1], axes])[0]
            out = helper.make_tensor_value_info(flat, 1, [COLUMNS])
            graph = inner.graph("scan", [rowwise], [out])
            start = self.any()
            self.value("Scan", [start], self.rows[start], body=graph, num_scan_inputs=1)

    def graph(self, name, inputs, outputs) -> onnx.GraphProto:
        names = {value.name for value in outputs}
        infos = [value for value in self.infos if value.name not in names]
        return helper.make_graph(
            self.nodes, name, inputs, outputs, self.initializers, value_info=infos
        )


def replace(node: onnx.NodeProto, old: str, new: str) -> None:
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new
    for attribute in node.attribute:
        for inner in attribute.g.node:
            replace(inner, old, new)


def info(name: str, rows: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, COLUMNS])


def random_model(seed: int, nodes: int = 30, subgraphs: int = 0) -> onnx.ModelProto:
    """A model whose nodes lie in the file in a random order that is a topological one."""
    rng = random.Random(seed)
    grown = RandomGraph(rng, iter(range(10**9)), subgraphs)
    grown.rows = {"x": 16, "y": 8, "w": 8}
    for _ in range(nodes):
        grown.step()
    read = {name for node in grown.nodes for name in reads(node)}
    made = {name for node in grown.nodes for name in node.output}
    ends = [name for name in grown.rows if name in made and name not in read]
    ends = rng.sample(ends, max(1, len(ends) - 1)) if ends else [list(grown.rows)[-1]]
    # One that others read as well.
    more = [name for name in grown.rows if name in made and name in read]
    ends += rng.sample(more, min(len(more), 1))
    if not any(name in made for name in ends):
        ends = [grown.value("Neg", ["x"], 16)]
    shuffle(grown, rng)
    grown.initializers.append(
        helper.make_tensor("w", 1, [8, COLUMNS], np.ones(8 * COLUMNS, np.float32))
    )
    graph = grown.graph(
        "random",
        [
            info("x", 16),
            info("y", 8),
            info("w", 8),  # an initializer that is an input, too
            helper.make_tensor_value_info("cond", 9, []),
            helper.make_tensor_value_info("trips", 7, []),
        ],
        [info(name, grown.rows[name]) for name in dict.fromkeys(ends)],
    )
    opset = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from reads(inner)


def shuffle(grown: RandomGraph, rng: random.Random) -> None:
    """Another topological order: file order and creation order are not the same."""
    if rng.random() < 0.3:
        return
    left, known = list(grown.nodes), set()
    made = {name for node in left for name in node.output}
    grown.nodes = []
    while left:
        ready = [n for n in left if all(r in known or r not in made for r in reads(n))]
        node = rng.choice(ready)
        left.remove(node)
        known.update(node.output)
        grown.nodes.append(node)


def feeds(cond: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((16, COLUMNS)).astype(np.float32),
        "y": rng.standard_normal((8, COLUMNS)).astype(np.float32),
        "cond": np.array(cond),
        "trips": np.array(2, np.int64),
    }


def profile(
    model: onnx.ModelProto,
    folder: Path,
    *,
    priority: bool = False,
    inputs: dict[str, np.ndarray] | None = None,
    cond: bool = True,
    options: ort.SessionOptions | None = None,
) -> list[dict]:
    """Events of the nodes that ran, in the order in which they ended; bodies' among them."""
    options = options or ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if priority:
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    data = model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    inputs = feeds(cond) if inputs is None else inputs
    names = {value.name for value in session.get_inputs()}
    session.run(None, {name: array for name, array in inputs.items() if name in names})
    path = Path(session.end_profiling())
    events = json.loads(path.read_text())
    path.unlink()
    return [
        event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]


def ran(events: list[dict]) -> list[str]:
    """Names of the nodes that ran, each where it ran first."""
    return list(dict.fromkeys(event["name"].removesuffix("_kernel_time") for event in events))
