# SPDX-License-Identifier: MIT
"""Where a model multiplies by a float constant, and which of these can be quantised.

    MatMul, Gemm   a constant matrix on the right; transB; any subgraph
    Gather         rows of a constant table

Identity nodes, and Transpose nodes that swap the two axes, are looked through. Refused by
name: a weight that a caller may feed, that is not a float32 or float16
matrix, or that holds nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.quantization.weights.routers import is_router
from rewrite_rules.dq_matmulnbits_fusion.matmul_operands import read_product
from rewrite_rules.graph.nodes import input_of, label
from rewrite_rules.graph.parameters import constant, int_attribute, source_of
from rewrite_rules.remarks import Refusal, Remarks
from rewrite_rules.shape_size_reorder.size_readings import Law, SizeReadings
from rewrite_rules.shape_size_reorder.size_rules import read_better
from rewrite_rules.shapes.proved_shapes import ProvedShapes

OP_TYPES = ("MatMul", "Gemm", "Gather")
ROLES = (":head", ":table", ":router")
"""What patterns may call nodes by what they do."""

SCOPES = "pkg.torch.onnx.name_scopes"  # of a node, in its metadata
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# Between float weights and what they were before somebody quantised them.
_QUANTISED = frozenset({"DequantizeLinear", "DequantizeBFP", "QuantizeLinear"})
_PRODUCTS = frozenset({"Gemm", "MatMul"})
# What may stand between the product of a head and the output of the model.
_BEHIND_HEAD = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Tanh"})
_RESHAPING = frozenset({"Cast", "Reshape", "Squeeze", "Unsqueeze", "Transpose"})


@dataclasses.dataclass(frozen=True, eq=False)
class WeightUse:
    """A node and the constant matrix that it reads."""

    node: ir.Node
    weight: ir.Value  # the initializer, or the output of the Constant node, that holds it
    tensor: ir.TensorProtocol
    stored_k_last: bool  # the initializer is [N, K], and not [K, N]
    wanted_k_last: bool  # the node's input is, after whatever Transpose is between
    activation: ir.Value | None  # the other operand [..., K]; None for Gather
    no_statistics: str | None  # why the activation can't be calibrated

    @property
    def index(self) -> int:
        """Which input the matrix is."""
        return 0 if self.activation is None else 1

    @property
    def K(self) -> int:
        """Size that is reduced; for Gather, the length of a row."""
        return int(self.tensor.shape.numpy()[int(self.stored_k_last) - 2])

    @property
    def N(self) -> int:
        """Number of output columns; for Gather, of rows."""
        return int(self.tensor.shape.numpy()[-1 - int(self.stored_k_last)])

    @property
    def matrix(self) -> npt.NDArray[Any]:
        """The weight as ``[K, N]``; mapped where it lies in a file."""
        array = self.tensor.numpy()
        array = array.reshape(array.shape[-2:])
        return array.T if self.stored_k_last else array

    @functools.cached_property
    def names(self) -> list[str]:
        """What patterns may call it: the node, the weight, and modules that it is part of."""
        return [label(self.node), self.weight.name or "", *modules_of(self.node)]

    @functools.cached_property
    def roles(self) -> set[str]:
        """Which of :data:`ROLES` it has; a Gather of the head's table is one, too."""
        readers = [self.node]
        if self.activation is None:
            readers = [node for node, _ in readers_of(self.weight) if node is not None]
        products = (node for node in readers if node.op_type in _PRODUCTS)
        has = any(_is_head(node.outputs[0]) for node in products), self.activation is None
        return {
            role for role, it_is in zip(ROLES, (*has, self.is_router), strict=True) if it_is
        }

    @functools.cached_property
    def is_rotation(self) -> bool:
        """Whether a table has cosines or sines of positions, which multiply activations."""
        # At position 0 all cosines are 1 and all sines 0.
        return (
            self.activation is None
            and self.stored_k_last
            and len({*self.tensor.numpy()[0].tolist()}) == 1
            and _are_factors(self.node.outputs[0])
        )

    @functools.cached_property
    def is_router(self) -> bool:
        """Whether the product chooses experts."""
        return self.activation is not None and is_router(self.node.outputs[0])


@contextlib.contextmanager
def naming(*names: str) -> Iterator[None]:
    """Have errors say which weights cannot be quantised."""
    try:
        yield
    except QuantizationError as error:
        named = ", ".join(map(repr, names))
        raise QuantizationError(f"weight {named} cannot be quantised: {error}") from error


def state_sizes(model: ir.Model) -> None:
    """Turn sizes of constant matrices into constants: a Shape would keep a table in float.

    Olive writes them around a head that is tied to the table (its issue 2240).
    """
    nodes = (node for node in model.graph.all_nodes() if node.op_type in ("Shape", "Size"))
    sources = (input_of(node, 0) for node in nodes if not node.domain)
    if any(source and constant(_root(source)[0]) is not None for source in sources):
        better = SizeReadings(model, ProvedShapes(model)).better
        known = {node: found for node, found in better.items() if found.law is Law.CONSTANT}
        read_better(model, known, Remarks("shape_size_reorder"))


def find_uses(
    model: ir.Model, op_types: Collection[str]
) -> Iterator[tuple[ir.Node, WeightUse | str]]:
    """Yield every node of some operators that reads a constant: a use, or its refusal."""
    facts = functools.cache(lambda: ProvedShapes(model, on_demand=True))
    for node in model.graph.all_nodes():
        if node.op_type not in op_types or node.domain:
            continue
        operand = input_of(node, 0 if node.op_type == "Gather" else 1)
        try:
            use = None if operand is None else _use(node, operand, model.graph, facts)
        except Refusal as refusal:
            yield node, str(refusal)
        else:
            if use is not None:
                yield node, use


def modules_of(node: ir.Node) -> Iterator[str]:
    """Yield names of the modules that a node was exported from, where torch noted them."""
    # "['', 'model.layers.0', 'lm_head', 'linear_7']"
    yield from filter(None, re.findall("'([^']*)'", node.metadata_props.get(SCOPES, "")))
    # ": ...ExportedProgram/lm_head: torch.nn.modules.linear.Linear/linear: aten.linear..."
    for part in node.metadata_props.get("namespace", "").split("/"):
        if name := part.partition(":")[0].strip():
            yield name


def readers_of(value: ir.Value) -> Iterator[tuple[ir.Node | None, str]]:
    """Yield what reads a weight, or its numbers in another shape or type, with its name.

    None, and the output's name, where it is an output of the graph.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            yield None, value.name or ""
        for node, index in value.uses():
            if index == 0 and (node.op_type in _RESHAPING or node.op_type == "Identity"):
                waiting.append(node.outputs[0])
            else:
                yield node, label(node)


def _use(
    node: ir.Node,
    operand: ir.Value,
    main: ir.Graph,
    facts: Callable[[], ProvedShapes],
) -> WeightUse | None:
    """Read an operand; None where it is not a constant matrix."""
    root, swapped = _root(operand)
    _check_not_quantised(root)
    if root.is_graph_input() and root.is_initializer():
        raise Refusal(
            "ORP101",
            f"weight {root.name!r} is a graph input: a caller may feed another; make it an "
            "initializer only",
        )
    tensor, gathers = constant(root), node.op_type == "Gather"
    # What Gather reads of other types are shapes and indices, mostly.
    if tensor is None or (gathers and tensor.dtype not in _FLOATS):
        return None
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype not in _FLOATS:
        kind_of = tensor.dtype.name.lower()
        raise Refusal(
            "ORP801", f"weight {root.name!r} is {kind_of}: float32 and float16 are quantised"
        )
    if len(shape) < 2:
        return None
    if len(shape) > 2 and not _is_matrix(node, shape, swapped, facts):
        raise Refusal(
            "ORP802",
            f"weight {root.name!r} has shape {list(shape)}: a stack of matrices has no "
            "MatMulNBits; split the MatMul or leave it in float",
        )
    if 0 in shape:
        raise Refusal("ORP802", f"weight {root.name!r} has shape {list(shape)}: it is empty")
    _check_not_beside_codes(node)
    if gathers:
        if int_attribute(node, "axis", 0) not in (0, -2):
            raise Refusal(
                "ORP802", f"table {root.name!r} is not gathered by rows: axis 0 is quantised"
            )
        no_statistics = "rows of a table are picked, not multiplied"
        return WeightUse(node, root, tensor, not swapped, True, None, no_statistics)
    product = read_product(node)
    if product.x is None:
        return None
    if product.transpose_x or product.is_scaled:
        what = "a transposed operand" if product.transpose_x else "with a factor"
        raise Refusal(
            "ORP802", f"weight {root.name!r} multiplies {what}: MatMulNBits takes none"
        )
    k_last = product.k_axis == 1
    why = _no_statistics(product.x, main)
    return WeightUse(node, root, tensor, k_last != swapped, k_last, product.x, why)


def _is_matrix(
    node: ir.Node, shape: Sequence[int], swapped: bool, facts: Callable[[], ProvedShapes]
) -> bool:
    """Whether a weight ``[1, K, N]`` may be ``[K, N]``: the product keeps its rank."""
    if {*shape[:-2]} != {1} or node.op_type != "MatMul" or swapped:
        return False
    rank = read_product(node).x_rank(facts())
    return rank is not None and rank >= len(shape)


def _is_head(value: ir.Value) -> bool:
    """Whether a product is an output of the model, or becomes one element by element.

    Behind a bias, a scale and the like. A sum with another activation is a residual: where
    such a stream is an output, the products that are added to it are not heads.
    """
    values, seen = [value], {value}
    while values:
        value = values.pop()
        if value.is_graph_output():
            return True
        for node, index in value.uses():
            others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
            goes_on = node.op_type in _BEHIND_HEAD and node.outputs[0] not in seen
            if goes_on and all(constant(other) is not None for other in others):
                seen.add(node.outputs[0])
                values.append(node.outputs[0])
    return False


def _are_factors(value: ir.Value) -> bool:
    """Whether nothing is done with a value but to multiply others by it, by elements."""
    waiting = [value]
    for value in waiting:
        if value.is_graph_output():
            return False
        for node, index in value.uses():
            if node.op_type in _RESHAPING:
                waiting.append(node.outputs[0])
            elif node.op_type != "Mul" or constant(node.inputs[1 - index]) is not None:
                return False
    return True


def _no_statistics(activation: ir.Value, main: ir.Graph) -> str | None:
    """Say why statistics of an activation can't be had; None if they can."""
    if activation.graph is not main:
        return "its activation lies in a subgraph of If, Loop or Scan"
    if constant(activation) is not None:
        return "both of its operands are constants"
    return None


def _check_not_beside_codes(node: ir.Node) -> None:
    """Refuse channels that :func:`.quantize_encoder8` multiplies in float, next to codes."""
    for reader, index in node.outputs[0].uses():
        other = reader.inputs[1 - index] if reader.op_type == "Add" else None
        beside = None if other is None else other.producer()
        if beside is not None and beside.op_type == "MatMulIntegerToFloat":
            raise Refusal("ORP803", f"already quantised: {label(beside)!r} holds the rest")


def _root(operand: ir.Value) -> tuple[ir.Value, bool]:
    """Look through Identity and Transpose; whether the two axes are swapped on the way."""
    swapped = False
    value = source_of(operand)
    while (node := value.producer()) is not None and node.op_type == "Transpose":
        perm = node.attributes.get("perm")
        source = node.inputs[0] if node.inputs else None
        if source is None or node.domain:
            break
        if perm is None or list(perm.as_ints()) == [1, 0]:
            swapped = not swapped
        value = source_of(source)
    return value, swapped


def _check_not_quantised(value: ir.Value) -> None:
    """Refuse a weight that is already dequantised, or rounded, on its way."""
    through: list[str] = []
    node = value.producer()
    while node is not None and len(through) < 8:
        source = node.inputs[0] if node.inputs else None
        if node.op_type in _QUANTISED:
            # Codes are constants, or made from some: weights trained for quantisation are.
            maker = None if source is None else source_of(source).producer()
            if maker is not None and maker.op_type == "QuantizeLinear" and maker.inputs:
                source = maker.inputs[0]
            if constant(source) is not None:
                raise Refusal("ORP803", f"already quantised, by {label(node)!r}")
            return
        if source is None or node.op_type not in _RESHAPING:
            return
        through.append(node.op_type)
        value = source_of(source)
        if constant(value) is not None:
            raise Refusal(
                "ORP802",
                f"weight {value.name!r} goes through {', '.join(through)} first: fold the "
                "constants, with onnxruntime's or onnx_ir's own optimiser",
            )
        node = value.producer()
