# SPDX-License-Identifier: MIT
"""Models written as ONNX text, their constants as arrays, and their outputs in float64."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
from onnx import helper, numpy_helper
from onnx.reference.op_run import OpRun

T = onnx.TensorProto
FUNCTIONS = "test.functions"  # domain of the model-local functions
DOMAINS = {"com.microsoft": 1, "com.microsoft.nchwc": 1, FUNCTIONS: 1}
# Read by the nodes of a graph, a subgraph or a function.
Nodes = onnx.GraphProto | onnx.FunctionProto


def text_model(
    nodes: str,
    constants: Mapping[str, npt.NDArray] | Iterable[onnx.TensorProto] = (),
    inputs: Mapping[str, tuple[int, Sequence[int | str | None]]] | None = None,
    outputs: Sequence[str] = ("y",),
    *,
    functions: str = "",
    opset: int = 21,
    place: str = "graph",
    output_type: int = T.FLOAT,
) -> onnx.ModelProto:
    """Return the model of some nodes in ONNX's textual syntax.

    Args:
        nodes: ``[name] output = Operator <attribute = value> (inputs)``; a node without a name
            is called by its operator, in small letters.
        constants: Arrays by name, or tensors that have one.
        inputs: Element type and shape by name; by default x, float32 [rows, 64].
        outputs: Names of the outputs of the graph.
        functions: Functions of the domain FUNCTIONS, in the same syntax.
        opset: 25 makes an ir_version of 13.
        place: Where the constants stand: ``"graph"``; ``"body"``, in each graph that reads
            them; or ``"nodes"``, as Constant nodes there.
        output_type: Element type of the outputs.
    """
    domains = ", ".join(f'"{name}" : {version}' for name, version in DOMAINS.items())
    header = (
        f'<ir_version: {13 if opset == 25 else 10}, opset_import: ["" : {opset}, {domains}]>'
    )
    text = f"{header} graph () => ({quoted(outputs)}) {{ {nodes} }} {functions}"
    model = onnx.parser.parse_model(text)
    inputs = {"x": (T.FLOAT, ("rows", 64))} if inputs is None else inputs
    model.graph.input.extend(
        helper.make_tensor_value_info(name, *given) for name, given in inputs.items()
    )
    for value in model.graph.output:
        value.type.tensor_type.elem_type = output_type
    if isinstance(constants, Mapping):
        constants = [numpy_helper.from_array(a, name) for name, a in constants.items()]
    _place(model, list(constants), place)
    _name_nodes(model)
    used = {node.domain for graph in graphs(model) for node in graph.node}
    for entry in [e for e in model.opset_import if e.domain and e.domain not in used]:
        model.opset_import.remove(entry)
    return model


def model_of_nodes(
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[onnx.TensorProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str | onnx.ValueInfoProto],
    opset: int = 21,
) -> onnx.ModelProto:
    """Return the model of nodes that no text could hold; outputs may have a name alone."""
    ends = [onnx.ValueInfoProto(name=end) if isinstance(end, str) else end for end in outputs]
    graph = helper.make_graph(nodes, "graph", inputs, ends, tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    version = 13 if opset == 25 else 10
    return helper.make_model(graph, opset_imports=imports, ir_version=version)


def quoted(names: Iterable[str]) -> str:
    """Names as they stand in the text, whatever signs they hold."""
    return ", ".join(f'"{name}"' for name in names)


def graphs(model: onnx.ModelProto) -> Iterator[Nodes]:
    """Yield the graph, every subgraph and every function."""
    waiting: list[Nodes] = [model.graph, *model.functions]
    for graph in waiting:
        yield graph
        waiting += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]


def _place(model: onnx.ModelProto, tensors: list[onnx.TensorProto], place: str) -> None:
    if place == "graph":
        model.graph.initializer.extend(tensors)
        return
    for graph in graphs(model):
        read = {name for node in graph.node for name in node.input}
        own = [tensor for tensor in tensors if tensor.name in read]
        if place == "body":
            graph.initializer.extend(own)
            continue
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in own]
        nodes += graph.node
        del graph.node[:]
        graph.node.extend(nodes)


def _name_nodes(model: onnx.ModelProto) -> None:
    taken: dict[str, int] = {}
    for graph in graphs(model):
        for node in graph.node:
            number = taken[node.op_type] = taken.get(node.op_type, 0) + 1
            name = node.op_type.lower() + (str(number) if number > 1 else "")
            node.name = node.name or name


# What a model must give.


class _DequantizeLinear(OpRun):
    op_domain = ""

    def _run(self, codes, scale, zero_point=None, axis=1, block_size=0, output_dtype=None):
        def spread(array: npt.NDArray) -> npt.NDArray:
            if block_size:
                whole = np.repeat(array, block_size, axis)
                return whole.take(range(codes.shape[axis]), axis)
            if array.size == 1:
                return array.reshape(())
            return array.reshape(
                [-1 if i == axis % codes.ndim else 1 for i in range(codes.ndim)]
            )

        offset = 0 if zero_point is None else spread(zero_point.astype(np.int64))
        return ((codes.astype(np.int64) - offset) * spread(scale.astype(np.float64)),)


_DequantizeLinear.__name__ = "DequantizeLinear"


class FusedMatMul(OpRun):
    """onnxruntime's own: MatMul with transposed operands and a factor."""

    op_domain = "com.microsoft"

    def _run(self, a, b, transA=0, transB=0, alpha=1.0):
        left = np.swapaxes(a, -1, -2) if transA else a
        return (alpha * np.matmul(left, np.swapaxes(b, -1, -2) if transB else b),)


FLOATS = (T.FLOAT, T.FLOAT16, T.BFLOAT16)


def float64_outputs(
    model: onnx.ModelProto, feeds: Mapping[str, npt.NDArray]
) -> list[npt.NDArray]:
    """Return the outputs by ONNX's reference evaluator, every float in float64."""
    model = onnx.ModelProto.FromString(model.SerializeToString())

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type in FLOATS:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    for graph in graphs(model):
        for tensor in getattr(graph, "initializer", ()):
            widen(tensor)
        for node in graph.node:
            if node.op_type == "Loop" and not node.input[1]:
                node.input[1] = "always"  # the evaluator takes "" for False
            for attribute in node.attribute:
                widen(attribute.t)
                if attribute.name == "to" and attribute.i in FLOATS:
                    attribute.i = T.DOUBLE
    wide = {
        name: array.astype(np.float64) if array.dtype.kind not in "iub" else array
        for name, array in feeds.items()
    }
    operators = [_DequantizeLinear, FusedMatMul]
    return onnx.reference.ReferenceEvaluator(model, new_ops=operators).run(None, wide)


# From the text of a whole graph.

Array = npt.NDArray[Any]


def proto_of(
    text: str,
    weights: Mapping[str, npt.ArrayLike] | None = None,
    *,
    opset: int = 21,
    ir_version: int = 10,
) -> onnx.ModelProto:
    """Return the model of a graph's text, with initializers of these names."""
    header = f'<ir_version: {ir_version}, opset_import: ["": {opset}, "com.microsoft": 1]>'
    proto = onnx.parser.parse_model(f"{header}\n{text}")
    add_weights(proto.graph, weights or {})
    return proto


def add_weights(graph: onnx.GraphProto, weights: Mapping[str, npt.ArrayLike]) -> None:
    for name, array in weights.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))


def model_of(
    text: str, weights: Mapping[str, npt.ArrayLike] | None = None, **options: int
) -> ir.Model:
    """Return the same as an ``onnx_ir.Model``."""
    return ir.from_proto(proto_of(text, weights, **options))


def normal(*shape: int, dtype: npt.DTypeLike = np.float32, seed: int = 0) -> Array:
    """Return numbers of a standard normal distribution; of another shape, others."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def matmul_chain(
    names: Sequence[str], sizes: Sequence[int], between: str = "", seed: int = 0
) -> ir.Model:
    """Return MatMuls x @ W0 @ W1 ... of these names and widths, an operator between them."""
    lines, weights, value = [], {}, "x"
    for number, (k, n) in enumerate(itertools.pairwise(sizes)):
        made = "y" if number == len(names) - 1 else f"h{number}"
        lines.append(f"{made} = MatMul({value}, W{number})")
        weights[f"W{number}"] = normal(k, n, seed=seed + number)
        value = made
        if between and made != "y":
            value = f"t{number}"
            lines.append(f"{value} = {between}({made})")
    ends = f"(float[T, {sizes[0]}] x) => (float[T, {sizes[-1]}] y)"
    model = model_of(f"chain {ends} {{ {' '.join(lines)} }}", weights)
    matmuls = (node for node in model.graph if node.op_type == "MatMul")
    for node, name in zip(matmuls, names, strict=True):
        node.name = name
    return model


def matmul_of(weight: Array) -> ir.Model:
    """Return ``y = x @ W`` in the weight's type; the node is called ``m``."""
    kind = {np.dtype(np.float32): "float", np.dtype(np.float16): "float16"}[weight.dtype]
    k, n = weight.shape
    text = f"g ({kind}[T, {k}] x) => ({kind}[T, {n}] y) {{ [m] y = MatMul(x, W) }}"
    return model_of(text, {"W": weight})
