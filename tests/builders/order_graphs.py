# SPDX-License-Identifier: MIT
"""Random graphs with everything that an order depends on; what onnxruntime makes of them."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort

from .text_models import proto_of

COLUMNS = 64  # float32 rows of 256 bytes, so that tensors outweigh shapes


class Node(NamedTuple):
    """A node as text, what it makes, and what it or its subgraphs read."""

    text: str
    made: list[str]
    read: set[str]


class RandomGraph:
    """Grows one graph node by node; subgraphs are grown by others that share the counter."""

    def __init__(self, rng: random.Random, names: Iterator[int], subgraphs: int) -> None:
        self.rng, self.names, self.subgraphs = rng, names, subgraphs
        self.nodes: list[Node] = []
        self.declared: dict[str, str] = {}  # initializers, and values with their shapes
        self.rows: dict[str, int] = {}  # float[rows, COLUMNS] values in scope
        self.lengths: list[str] = []  # int64[2] values in scope

    def add(
        self,
        op: str,
        inputs: list[str],
        attributes: str = "",
        outputs: int = 1,
        captured: Iterable[str] = (),
    ) -> list[str]:
        number = next(self.names)
        made = [f"v{number}" + ("" if i == 0 else f"_{i}") for i in range(outputs)]
        call = f"{op} <{attributes}> ({', '.join(inputs)})".replace("<> ", "")
        text = f"[n{number}_{op}] {', '.join(made)} = {call}"
        self.nodes.append(Node(text, made, {*inputs, *captured}))
        return made

    def value(
        self,
        op: str,
        inputs: list[str],
        rows: int,
        attributes: str = "",
        captured: Iterable[str] = (),
    ) -> str:
        (name,) = self.add(op, inputs, attributes, 1, captured)
        self.rows[name], self.declared[name] = rows, info(name, rows)
        return name

    def constant(self, kind: str, *numbers: float) -> str:
        content = f"{{{', '.join(map(str, numbers))}}}"
        if self.rng.random() < 0.5:
            return self.add("Constant", [], f"value = {kind} {content}")[0]
        name = f"i{next(self.names)}"
        self.declared[name] = f"{kind} {name} = {content}"
        return name

    def any(self) -> str:
        # The last ones more often: chains, with skips.
        names = list(self.rows)
        if self.rng.random() < 0.6:
            names = names[-4:]
        return self.rng.choice(names)

    def like(self, rows: int) -> str:
        return self.rng.choice([name for name, other in self.rows.items() if other == rows])

    def step(self) -> None:
        kind, x = self.rng.random(), self.any()
        rows = self.rows[x]
        if kind < 0.3:
            op = self.rng.choice(["Relu", "Neg", "Sigmoid", "Tanh", "Abs", "Identity", "Exp"])
            self.value(op, [x], rows)
        elif kind < 0.34:
            self.value("Clip", [x, "", self.constant("float", 6)], rows)
        elif kind < 0.5:
            self.value(self.rng.choice(["Add", "Mul", "Sub"]), [x, self.like(rows)], rows)
        elif kind < 0.58:
            other = self.any()
            if rows + self.rows[other] <= 64:
                self.value("Concat", [x, other], rows + self.rows[other], "axis = 0")
        elif kind < 0.64 and rows > 1:
            sizes = rows // 2, rows - rows // 2
            parts = self.add("Split", [x, self.constant("int64[2]", *sizes)], "axis = 0", 2)
            self.rows |= zip(parts, sizes, strict=True)
            self.declared |= zip(parts, map(info, parts, sizes), strict=True)
        elif kind < 0.72:
            self.lengths += self.add("Shape", [x])
        elif kind < 0.75:
            last = self.add("Cast", self.add("Size", [x]), "to = 1")
            self.value("Add", [x, *last], rows)
        elif kind < 0.8 and self.lengths:
            # The Shape's result is used late: Gather, Mul, Reshape of something else.
            length = self.rng.choice(self.lengths)
            kept = self.add("Gather", [length, self.constant("int64[1]", 1)], "axis = 0")
            shape = self.add("Concat", [self.constant("int64[1]", -1), *kept], "axis = 0")
            self.value("Reshape", [x, *shape], rows)
        elif kind < 0.84:
            self.add("Neg", [x])  # nobody reads it
        elif self.subgraphs > 0 and kind < 0.94:
            self.control_flow(rows)
        else:
            self.value("Add", [x, x], rows)

    def body(self, inputs: dict[str, int], rows: int) -> "tuple[RandomGraph, str]":
        """A body whose last value, which comes with it, has so many rows."""
        inner = RandomGraph(self.rng, self.names, self.subgraphs - 1)
        inner.rows = {**self.rows, **inputs}
        inner.lengths = list(self.lengths)
        for _ in range(self.rng.randint(1, 6)):
            inner.step()
        return inner, inner.value("Relu", [inner.like(rows)], rows)

    def control_flow(self, rows: int) -> None:
        kind, number = self.rng.choice(["If", "If", "Loop"]), next(self.names)
        state = f"s{number}"
        if kind == "If":
            branches = [self.body({}, rows) for _ in range(2)]
            inners, inputs = [inner for inner, _ in branches], ["cond"]
            branches = [
                f"{name}_branch = {inner.text(f'b{number}', [], {last: info(last, rows)})}"
                for name, (inner, last) in zip(("then", "else"), branches, strict=True)
            ]
            attributes = ", ".join(branches)
        else:
            inner, last = self.body({state: rows}, rows)
            (go_on,) = inner.add("Identity", [f"go{number}"])
            given = [f"int64 it{number}", f"bool go{number}", info(state, rows)]
            made = {go_on: f"bool {go_on}", last: info(last, rows)}
            attributes = f"body = {inner.text('loop', given, made)}"
            inners, inputs = [inner], ["trips", "", self.like(rows)]
        nodes = [node for inner in inners for node in inner.nodes]
        captured = {name for node in nodes for name in node.read}
        self.value(kind, inputs, rows, attributes, captured)

    def text(self, name: str, inputs: Iterable[str], outputs: Mapping[str, str]) -> str:
        declared = [text for value, text in self.declared.items() if value not in outputs]
        values = f"<{', '.join(declared)}>" if declared else ""
        nodes = " ".join(node.text for node in self.nodes)
        made = ", ".join(outputs.values())
        return f"{name} ({', '.join(inputs)}) => ({made}) {values} {{ {nodes} }}"


def info(name: str, rows: int) -> str:
    return f"float[{rows}, {COLUMNS}] {name}"


def random_model(seed: int, nodes: int = 30, subgraphs: int = 0) -> onnx.ModelProto:
    """A model whose nodes lie in the file in a random order that is a topological one."""
    rng = random.Random(seed)
    grown = RandomGraph(rng, iter(range(10**9)), subgraphs)
    inputs = {"x": 16, "y": 8, "w": 8}
    grown.rows = dict(inputs)
    for _ in range(nodes):
        grown.step()
    read = {name for node in grown.nodes for name in node.read}
    made = [name for node in grown.nodes for name in node.made if name in grown.rows]
    ends = [name for name in made if name not in read]
    ends = rng.sample(ends, max(1, len(ends) - 1)) if ends else []
    # One that others read as well.
    more = [name for name in made if name in read]
    ends += rng.sample(more, min(len(more), 1))
    ends = ends or [grown.value("Neg", ["x"], 16)]
    shuffle(grown, rng)
    outputs = {name: info(name, grown.rows[name]) for name in ends}
    given = [info(name, rows) for name, rows in inputs.items()] + ["bool cond", "int64 trips"]
    weight = {"w": np.ones((8, COLUMNS), np.float32)}  # and an input, too
    return proto_of(grown.text("random", given, outputs), weight)


def shuffle(grown: RandomGraph, rng: random.Random) -> None:
    """Another topological order: file order and creation order are not the same."""
    if rng.random() < 0.3:
        return
    left, known = list(grown.nodes), set[str]()
    made = {name for node in left for name in node.made}
    grown.nodes = []
    while left:
        node = rng.choice([n for n in left if not (n.read & made) - known])
        left.remove(node)
        known.update(node.made)
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
    """Events of the nodes that ran, of subgraphs too, in the order in which they ended."""
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
    return events_of(session)


def events_of(session: ort.InferenceSession) -> list[dict]:
    """End the profile of a session; return its events of nodes."""
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
