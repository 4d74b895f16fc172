# SPDX-License-Identifier: MIT
"""Finds mixtures of experts, and proves what they compute.

    com.microsoft MoE                        as onnxruntime's CPU kernel computes it
    Gather(stack, TopK's choice), MatMul     batches of chosen matrices, as torch exports them:

        rows = Reshape(Expand(x[:, None], [T, k, K]), [-1, K])
        h = MatMul(Gather(first, Reshape(chosen, [-1])), rows[..., None])
        y = ReduceSum(Reshape(MatMul(Gather(last, ...), act(h)) * shares, [-1, k, N]), 1)

Row ``t * k + j`` of all that lies between is token t at its j-th choice: every Reshape on the
way keeps the order of elements, and the sizes that this rests on are proved. How the chosen
and their shares are computed is left to the graph, but for two things: no expert comes twice
for a token (TopK chose), and no share is negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from ortplugins.quantization.experts.mixture import (
    Activation,
    Choice,
    Columns,
    Layer,
    Mixture,
    Operator,
)
from rewrite_rules.graph.nodes import input_of, made_by
from rewrite_rules.graph.parameters import (
    axis_of,
    constant,
    float_attribute,
    int_attribute,
    require_constant,
    source_of,
)
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dims, known, number
from rewrite_rules.shapes.node_facts import Site, sliced
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_RESHAPES = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_FIRST_OPSET = 13  # of what is written
_KINDS = ("relu", "gelu", "silu", "identity", "swiglu")
# Results that are not negative, whatever the input; and that are not where no input is.
_POSITIVE = frozenset({"Abs", "Exp", "Relu", "Sigmoid", "Softmax", "Softplus"})
_FIRST = frozenset({
    "Cast", "Expand", "Gather", "GatherElements", "GatherND", "ReduceMax", "ReduceSum",
    "Slice", "Split", "TopK", "Transpose", *_RESHAPES,
})  # fmt: skip
_ALL = frozenset({"Add", "Div", "Mul"})

_TRACED = (
    "experts: a loop that TorchScript traced has as many turns as its sample reached experts, "
    "and is wrong for other tokens; export them with experts_implementation='batched_mm'"
)
_HALVES = "experts: the halves of a gated layer are not proved"
_ACTIVATION = "experts: QMoE does not compute their activation"


def find_mixtures(model: ir.Model) -> Iterator[tuple[ir.Node, Mixture | str]]:
    """Yield what looks like a mixture of experts: what it computes, or why that is not known.

    The node of one that is refused reads the weights.
    """
    facts = ProvedShapes(model, on_demand=True)
    for node in list(model.graph.all_nodes()):
        gather = None if node.domain or node.op_type != "ReduceSum" else _last_gather(node)
        if gather is None and (node.domain, node.op_type) != ("com.microsoft", "MoE"):
            if _is_picked_alone(node, facts):
                yield node, _TRACED
            continue
        try:
            if node.graph is not model.graph:
                raise Refusal("experts: they lie in a subgraph of If, Loop or Scan")
            if (opset := facts.opset(node)) < _FIRST_OPSET:
                raise Refusal(f"experts: the model has opset {opset}, not {_FIRST_OPSET}")
            found = _read_operator(node) if gather is None else _read_sum(node, gather, facts)
            yield node, found
        except Refusal as refusal:
            yield gather or node, str(refusal)


# The operator.


def _read_operator(node: ir.Node) -> Mixture:
    """Read MoE as the CPU computes it."""
    x, logits, first, bias, last, last_bias, *third = (input_of(node, i) for i in range(8))
    kind = node.attributes.get_string("activation_type", "relu")
    if any(value is not None for value in third):
        raise Refusal("MoE: onnxruntime's CPU kernel has no fc3")
    if kind not in _KINDS:
        raise Refusal(f"MoE: onnxruntime's CPU kernel has no activation {kind!r}")
    if kind == "swiglu" and int_attribute(node, "swiglu_fusion", 0) != 1:
        raise Refusal("MoE: onnxruntime's CPU kernel takes swiglu_fusion=1 alone")
    for name in ("use_sparse_mixer", "swiglu_limit_after_activation"):
        if int_attribute(node, name, 0):
            raise Refusal(f"MoE: onnxruntime's CPU kernel does not compute {name}")
    if x is None or logits is None:
        raise Refusal("MoE: it has no input or no router")
    down, up = _layer(last, True, last_bias), _layer(first, True, bias)
    gate, other = Columns(up, range(up.N)), None
    if kind == "swiglu":
        gate, other = (Columns(up, range(half, up.N, 2)) for half in range(2))
    given = "swiglu_limit" in node.attributes
    limit = float_attribute(node, "swiglu_limit", 0.0) if given else math.inf
    activation = Activation(
        kind,
        gate,
        other,
        alpha=float_attribute(node, "activation_alpha", 1.0),
        beta=float_attribute(node, "activation_beta", 0.0),
        limit=limit,
    )
    router = Operator(logits, bool(int_attribute(node, "normalize_routing_weights", 0)))
    return _checked(Mixture(node, x, router, int_attribute(node, "k", 1), activation, down))


def _checked(mixture: Mixture) -> Mixture:
    """Refuse layers that do not fit each other."""
    hidden, last = len(mixture.activation.gate.places), mixture.last
    counts = {layer.experts for layer in mixture.layers}
    if len(counts) > 1 or hidden != last.K or mixture.k > last.experts:
        shapes = (
            f"{layer.matrices.name!r} {list(layer.tensor.shape.numpy())}"
            for layer in mixture.layers
        )
        raise Refusal(
            f"experts: {mixture.k} of the layers {' and '.join(shapes)} do not fit each other"
        )
    if any(layer.K != last.N for layer in mixture.activation.layers):
        raise Refusal("experts: their output is not as wide as their input")
    return mixture


def _layer(matrices: ir.Value | None, k_last: bool, bias: ir.Value | None) -> Layer:
    value, tensor = require_constant(matrices, "the experts' weight")
    if tensor.dtype not in _FLOATS or len(tensor.shape) != 3 or not tensor.size:
        raise Refusal(
            f"experts: weight {value.name!r} is {tensor.dtype.name.lower()} "
            f"{list(tensor.shape.numpy())}, not a float32 or float16 matrix for each"
        )
    layer = Layer(value, tensor, k_last, None if bias is None else source_of(bias))
    if bias is not None:
        added, numbers = require_constant(bias, "the experts' bias")
        if tuple(numbers.shape.numpy()) != (layer.experts, layer.N):
            raise Refusal(f"experts: bias {added.name!r} is not one vector for each")
    return layer


# Nodes.


def _read_sum(node: ir.Node, gather: ir.Node, facts: ProvedShapes) -> Mixture:
    """Read batches of chosen matrices, from the sum over the choices of each token on."""
    reader = _Batches(gather, facts)
    site = Site(node, facts, facts.opset(node))
    dims = site.dims(0)
    axes = site.axes(1) or ()
    if len(dims) != 3 or [axis_of(a, 3) for a in axes] != [1] or site.integer("keepdims", 1):
        raise Refusal("experts: their outputs are not added up over the choices of a token")
    weighted = made_by(_flat(site.input(0), reader.dtype), "Mul")
    for product, other in _either(weighted):
        if (found := reader.layer_behind(product)) is not None:
            shares = _flat(other, reader.dtype)
            break
    else:
        raise Refusal("experts: their outputs are not multiplied by one share each")
    last, hidden = found
    k, N = number(dims[1]), known(last.N)
    operands = [facts.dims(value) for value in weighted.inputs] if weighted else []
    one_each = [(reader.rows, N), (reader.rows, known(1))]
    if k is None or dims[2] != N or operands not in (one_each, one_each[::-1]):
        raise Refusal("experts: their outputs are not proved to have one share each")
    activation = reader.activation(hidden)
    router = reader.choice(shares, k)
    x = reader.tokens(k, facts.dims(router.chosen))
    return _checked(Mixture(node, x, router, k, activation, last))


class _Batches:
    """Products of rows and the matrices that an expert's number picks for each."""

    def __init__(self, gather: ir.Node, facts: ProvedShapes) -> None:
        self.facts = facts
        self._numbers = _picked_by(gather)
        tensor = constant(gather.inputs[0])
        assert tensor is not None
        self.dtype = tensor.dtype
        dims = None if self._numbers is None else facts.dims(self._numbers, 1)
        if self._numbers is None or dims is None:
            raise Refusal("experts: they are not picked by a list of their numbers")
        self._ids, self.rows = _flat(self._numbers), dims[0]
        self._x: list[ir.Value] = []  # what the first layers read

    def layer_behind(self, value: ir.Value) -> tuple[Layer, ir.Value] | None:
        """Return the layer that computes rows, and what it reads; None if none does."""
        value, bias = _flat(value), None
        for rows, picked in _either(made_by(value, "Add")):
            if (gather := made_by(picked, "Gather", "GatherND")) is not None:
                value, bias = rows, gather
                if self.facts.dims(rows) != self.facts.dims(picked, 2):
                    raise Refusal("experts: a bias is not proved to be added to its own row")
        for on_right, (stack, x) in enumerate(_either(made_by(_flat(value), "MatMul"))):
            turned, source = made_by(stack, "Transpose"), None
            if turned is not None and turned.attributes.get_ints("perm") == (0, 2, 1):
                source = turned.inputs[0]
            gather = made_by(source or stack, "Gather", "GatherND")
            if gather is None or constant(gather.inputs[0]) is None:
                continue
            on_left = not on_right
            self._check_picked(gather)
            added_to = None if bias is None else bias.inputs[0]
            if bias is not None:
                self._check_picked(bias)
            layer = _layer(gather.inputs[0], on_left != (turned is not None), added_to)
            one, K = known(1), known(layer.K)
            wanted = (self.rows, K, one) if on_left else (self.rows, one, K)
            if self.facts.dims(x) != wanted:
                raise Refusal("experts: they are not proved to read one row for each choice")
            return layer, x
        return None

    def _check_picked(self, gather: ir.Node) -> None:
        numbers = _picked_by(gather)
        same = numbers is not None and _flat(numbers) is self._ids
        if not same or self.facts.dims(numbers) != (self.rows,):
            raise Refusal("experts: their layers are not picked by the same numbers")

    def _columns(self, value: ir.Value) -> Columns:
        """Read what is taken of a first layer's output."""
        node = made_by(_flat(value), "Slice", "Split")
        if node is None:
            return self._columns_of(value, None)
        whole, site = node.inputs[0], Site(node, self.facts, self.facts.opset(node))
        dims = self.facts.dims(whole)
        size = None if not dims else number(dims[-1])
        if whole is None or not dims or size is None:
            raise Refusal(_HALVES)
        start: int | None
        end: int | None
        if node.op_type == "Split":
            parts = [(self.facts.dims(output) or (known(0),))[-1] for output in node.outputs]
            width, place = size // len(parts), node.outputs.index(_flat(value))
            if parts != [known(width)] * len(parts):
                raise Refusal(_HALVES)
            axis, step = site.integer("axis", 0), 1
            start, end = place * width, (place + 1) * width
        else:
            starts, ends, axes, steps = site.slices()
            if len(axes) != 1:
                raise Refusal(_HALVES)
            axis, start, end, step = axes[0], number(starts[0]), number(ends[0]), steps[0]
        if axis_of(axis, len(dims)) != len(dims) - 1 or start is None or end is None:
            raise Refusal(_HALVES)
        return self._columns_of(whole, sliced(size, start, end, step))

    def _columns_of(self, value: ir.Value, places: range | None) -> Columns:
        found = self.layer_behind(value)
        if found is None:
            raise Refusal(_ACTIVATION)
        layer, x = found
        self._x.append(x)
        dims = self.facts.dims(value)
        if places is not None and (dims is None or dims[-1] != known(layer.N)):
            raise Refusal(_HALVES)
        for other in self._layers:
            if (other.matrices, other.bias) == (layer.matrices, layer.bias):
                return Columns(other, places or range(layer.N))
        self._layers.append(layer)
        return Columns(layer, places or range(layer.N))

    def activation(self, value: ir.Value) -> Activation:
        """Read what lies between the layers."""
        self._layers: list[Layer] = []
        value = _flat(value)
        bent = made_by(value, "Relu", "Gelu")
        if bent is not None and bent.inputs[0] is not None:
            kind, form = (
                bent.op_type.lower(),
                bent.attributes.get_string("approximate", "none"),
            )
            if kind == "relu" or form == "tanh":
                return Activation(kind, self._columns(bent.inputs[0]))
        factors = self._factors(value)
        squashed = next((f for f in factors if made_by(f, "Sigmoid")), None)
        if squashed is None:
            return Activation("identity", self._columns(value))
        factors.remove(squashed)
        producer = squashed.producer()
        assert producer is not None and producer.inputs[0] is not None
        scaled = self._factors(producer.inputs[0])
        numbers = [n for n in map(_scalar, scaled) if n is not None]
        gates = [factor for factor in scaled if _scalar(factor) is None]
        if len(gates) != 1 or gates[0] not in factors or len(factors) > 2:
            raise Refusal(_ACTIVATION)
        factors.remove(gates[0])
        alpha = math.prod(numbers, start=1.0)
        gate, least, most = self._clipped(gates[0])
        if least > -math.inf:
            raise Refusal("experts: their gate is clipped from below")
        if not factors and alpha == 1 and most == math.inf:
            return Activation("silu", self._columns(gate))
        if not factors:
            raise Refusal(_ACTIVATION)
        other, beta = _without_constant(factors[0])
        other, least, limit = self._clipped(other)
        if not -least == limit == most:
            raise Refusal("experts: both halves are not clipped by one limit")
        if (dims := self.facts.dims(gate)) is None or self.facts.dims(other) != dims:
            raise Refusal(_HALVES)
        return Activation(
            "swiglu", self._columns(gate), self._columns(other), alpha, beta, limit
        )

    def _factors(self, value: ir.Value) -> list[ir.Value]:
        """Return what is multiplied, in any order."""
        node = made_by(value, "Mul")
        if node is None:
            return [source_of(value)]
        factors = (factor for factor in node.inputs if factor is not None)
        return [part for factor in factors for part in self._factors(factor)]

    def _clipped(self, value: ir.Value) -> tuple[ir.Value, float, float]:
        """Return what is clipped, and to what."""
        node = made_by(value, "Clip")
        if node is None or node.inputs[0] is None:
            return value, -math.inf, math.inf
        if node.attributes:  # as before opset 11
            raise Refusal(_ACTIVATION)
        bounds = []
        for index, default in ((1, -math.inf), (2, math.inf)):
            bound = input_of(node, index)
            given = default if bound is None else _scalar(bound)
            if given is None:
                raise Refusal("experts: a limit is computed at run time")
            bounds.append(given)
        return node.inputs[0], bounds[0], bounds[1]

    def choice(self, shares: ir.Value, k: int) -> Choice:
        """Return what TopK chose, and the shares."""
        chosen = _flat(self._ids, ir.DataType.INT64, ir.DataType.INT32)
        top = made_by(chosen, "TopK")
        dims = self.facts.dims(chosen, 2)
        if top is None or chosen is not top.outputs[1] or dims is None or dims[1] != known(k):
            raise Refusal("experts: no TopK of a token's scores chooses them")
        if axis_of(int_attribute(top, "axis", -1), 2) != 1 or self.facts.dims(shares) != dims:
            raise Refusal("experts: shares are not proved to be those of the chosen")
        if not _is_not_negative(shares):
            raise Refusal("experts: shares are not proved to be positive")
        return Choice(chosen, shares)

    def tokens(self, k: int, chosen: Dims | None) -> ir.Value:
        """Return the tokens [T, K], each of which the first layers read k times."""
        roots = {_flat(x) for x in self._x}
        spread = made_by(roots.pop(), "Expand", "Tile") if len(roots) == 1 else None
        x, facts = None if spread is None else spread.inputs[0], self.facts
        before, after = facts.dims(x, 3), facts.dims(spread.outputs[0] if spread else None, 3)
        if chosen is not None and before is not None and after is not None:
            count, width = chosen[0], before[2]
            spreads = before[:2] == (count, known(1)) and after == (count, known(k), width)
            while spreads and x is not None and facts.dims(x) != (count, width):
                node = made_by(x, *_RESHAPES)
                x = None if node is None else node.inputs[0]
            if spreads and x is not None:
                return x
        raise Refusal("experts: they are not proved to read each token once a choice")


def _flat(value: ir.Value, *casts: ir.DataType) -> ir.Value:
    """Look through what keeps elements and their order, and casts to some types."""
    while (node := value.producer()) is not None and not node.domain and node.inputs[0:1]:
        source = node.inputs[0]
        is_cast = node.op_type == "Cast" and node.attributes.get_int("to", 0) in casts
        if source is None or not (is_cast or node.op_type in _RESHAPES):
            break
        value = source
    return value


def _last_gather(node: ir.Node) -> ir.Node | None:
    """Return what picks the matrices of the product that a sum goes back to."""
    waiting, seen = [value for value in node.inputs[:1] if value is not None], 0
    while waiting and seen < 16:
        maker, seen = waiting.pop().producer(), seen + 1
        if maker is None or maker.domain:
            continue
        if maker.op_type == "MatMul":
            for operand in maker.inputs:
                turned = made_by(operand, "Transpose")
                gather = made_by(turned.inputs[0] if turned else operand, "Gather", "GatherND")
                tensor = None if gather is None else constant(gather.inputs[0])
                if tensor is not None and len(tensor.shape) == 3 and tensor.dtype in _FLOATS:
                    return gather
        elif maker.op_type in ("Add", "Cast", "Mul", *_RESHAPES):
            inputs = maker.inputs[:1] if maker.op_type in _RESHAPES else maker.inputs
            waiting += [value for value in inputs if value is not None]
    return None


def _is_picked_alone(node: ir.Node, facts: ProvedShapes) -> bool:
    """Whether a node picks one matrix of a stack at run time, for a product."""
    stack = constant(input_of(node, 0)) if node.op_type == "Gather" else None
    if stack is None or len(stack.shape) != 3 or stack.dtype not in _FLOATS:
        return False
    turned = (reader.outputs[0] for reader in node.outputs[0].consumers())
    readers = {
        *node.outputs[0].consumers(),
        *(r for value in turned for r in value.consumers()),
    }
    is_one = constant(node.inputs[1]) is None and facts.dims(node.inputs[1]) == ()
    return is_one and any(reader.op_type == "MatMul" for reader in readers)


def _picked_by(gather: ir.Node) -> ir.Value | None:
    """Return the numbers [S] by which matrices or vectors are picked along the first axis."""
    numbers = gather.inputs[1]
    if gather.op_type == "Gather":
        return numbers if int_attribute(gather, "axis", 0) == 0 else None
    column = made_by(numbers, "Unsqueeze")
    if column is None or int_attribute(gather, "batch_dims", 0):
        return None
    axes = constant(input_of(column, 1))
    is_last = axes is not None and axes.numpy().reshape(-1).tolist() in ([-1], [1])
    return column.inputs[0] if is_last else None


def _scalar(value: ir.Value | None) -> float | None:
    tensor = constant(value)
    return None if tensor is None or tensor.size != 1 else float(tensor.numpy().item())


def _without_constant(value: ir.Value) -> tuple[ir.Value, float]:
    """Return what a number is added to, and that."""
    for added, rest in _either(made_by(value, "Add")):
        if (number := _scalar(added)) is not None:
            return rest, number
    return value, 0.0


def _either(node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield both operands of a node, if there is one, each with the other."""
    first, second = (None, None) if node is None else node.inputs
    if first is not None and second is not None:
        yield first, second
        yield second, first


def _is_not_negative(value: ir.Value) -> bool:
    """Whether no number of a tensor is below 0, in any run."""
    tensor = constant(value)
    if tensor is not None:
        return tensor.dtype in _FLOATS and bool((tensor.numpy() >= 0).all())
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type in _POSITIVE:
        return True
    inputs = node.inputs[:1] if node.op_type in _FIRST else node.inputs
    known_kind = node.op_type in (*_FIRST, *_ALL)
    return known_kind and all(v is not None and _is_not_negative(v) for v in inputs)
