# SPDX-License-Identifier: MIT
"""Mutations that change what a model means, or only look as if; one row of a table each.

A mutation changes a model in place; ValueError says that there is nothing to change.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
import onnx_ir as ir
from builders.token_batches import held, kind_of

T = onnx.TensorProto
FLOAT = T.FLOAT
Rng = np.random.Generator
info = onnx.helper.make_tensor_value_info


class Mutant:
    """A model that mutations change, and what is known of its values."""

    def __init__(self, model: onnx.ModelProto, rng: Rng, numbers: Iterator[int]) -> None:
        """``numbers`` tell new names apart."""
        self.model, self.graph, self.rng = model, model.graph, rng
        self._numbers = numbers
        inferred = onnx.shape_inference.infer_shapes(model).graph
        self.types = {
            value.name: value.type.tensor_type
            for value in (*inferred.value_info, *inferred.input, *inferred.output)
        }
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}

    def rank(self, name: str) -> int | None:
        kind = self.types.get(name)
        return len(kind.shape.dim) if kind is not None and kind.HasField("shape") else None

    def is_float(self, name: str) -> bool:
        return name in self.types and self.types[name].elem_type == FLOAT

    def need(self, condition: object) -> None:
        if not condition:
            raise ValueError("nothing to change")

    def pick(self, items: Iterable):
        """One of some items."""
        items = list(items)
        self.need(items)
        return items[self.rng.integers(len(items))]

    def chance(self) -> bool:
        return bool(self.rng.integers(2))

    def nodes(self, *op_types: str) -> list[onnx.NodeProto]:
        return [n for n in self.graph.node if not op_types or n.op_type in op_types]

    def floats(self, rank: int | None = None) -> list[str]:
        """Values that nodes make, float32."""
        names = (name for node in self.graph.node for name in node.output)
        return [n for n in names if self.is_float(n) and rank in (None, self.rank(n))]

    def name(self) -> str:
        return f"mutant_{next(self._numbers)}"

    def constant(self, array: object) -> str:
        name = self.name()
        self.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op_type: str, *inputs: str, **attributes: object) -> str:
        """Put a node at the end; :meth:`sort` puts it where it belongs."""
        name = self.name()
        self.graph.node.append(
            onnx.helper.make_node(op_type, inputs, [name], name, **attributes)
        )
        return name

    def input(self, kind: str, element: int, dims: list[int | str]) -> str:
        """Add an input; what it holds is written down for those who feed it."""
        name = self.name()
        self.graph.input.append(info(name, element, dims))
        self.model.metadata_props.add(key=f"holds.{name}", value=kind)
        return name

    def between(self, value: str, made: Callable[[str], str], one: bool = False) -> None:
        """Have all readers of a value, or one, read what is made of it instead."""
        places = [
            (node, index)
            for node in self.graph.node
            for index, name in enumerate(node.input)
            if name == value
        ]
        self.need(places)
        if one:
            places = [self.pick(places)]
        name = made(value)
        for node, index in places:
            node.input[index] = name

    def sort(self) -> None:
        """Sort the nodes, by what they read; a ValueError if they read each other."""
        model = ir.from_proto(self.model)
        model.graph.sort()
        self.model.CopyFrom(ir.to_proto(model))


# Constants and attributes


def a_constant(m: Mutant) -> None:
    holders = [t for t in m.constants.values() if 0 < np.prod(t.dims, dtype=int) <= 64]
    holders += [a.t for n in m.nodes("Constant") for a in n.attribute if a.HasField("t")]
    tensor = m.pick(
        t for t in holders if t.data_type in (T.FLOAT, T.INT64, T.INT32, T.INT8, T.UINT8)
    )
    array = onnx.numpy_helper.to_array(tensor).copy()
    flat = array.reshape(-1)
    at = m.rng.integers(flat.size)
    old = flat[at]
    with np.errstate(over="ignore"):
        if array.dtype.kind == "f":
            new = m.pick([old * 1.01, old * 2, -old, 0, old + 1, 1, old / 2])
        else:
            new = m.pick([old + old.dtype.type(1), old - old.dtype.type(1), 0, -1, 1, 2])
        flat[at] = np.asarray(new).astype(array.dtype)
    m.need(flat[at] != old)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def an_axis(m: Mutant) -> None:
    names = {"axis", "axes", "perm", "keepdims", "start", "end"}
    attribute = m.pick(a for n in m.graph.node for a in n.attribute if a.name in names)
    if attribute.name == "perm" or attribute.ints:
        values = list(attribute.ints)
        if len(values) > 1:
            i, j = m.rng.choice(len(values), 2, replace=False)
            values[i], values[j] = values[j], values[i]
        else:
            values[0] = int(m.pick([v for v in (-1, 0, 1, 2) if v != values[0]]))
        attribute.ints[:] = values
    else:
        limit = (0, 1) if attribute.name == "keepdims" else (-2, -1, 0, 1, 2, 3)
        attribute.i = int(m.pick([v for v in limit if v != attribute.i]))


def a_number(m: Mutant) -> None:
    """epsilon, alpha, scale, and sizes of blocks."""
    kinds = {onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT}
    attribute = m.pick(a for n in m.graph.node for a in n.attribute if a.type in kinds)
    if attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = m.pick([attribute.f * 2, attribute.f * 1000, attribute.f + 0.01])
    else:
        attribute.i += int(m.pick([-1, 1]))


# Operators

_OTHERS = {
    "Add": ("Sub", "Mul", "Max"), "Sub": ("Add",), "Mul": ("Add", "Div", "Max"),
    "Div": ("Mul",), "Less": ("LessOrEqual", "Greater"),
    "LessOrEqual": ("Less", "GreaterOrEqual"),
    "Greater": ("GreaterOrEqual", "Less"), "GreaterOrEqual": ("Greater", "LessOrEqual"),
    "And": ("Or", "Xor"), "Or": ("And",), "Equal": ("Less", "Greater"), "Cos": ("Sin",),
    "Sin": ("Cos",), "Tanh": ("Sigmoid", "Erf"), "Sqrt": ("Exp", "Abs"),
    "Softmax": ("LogSoftmax",),
    "ReduceMean": ("ReduceSum", "ReduceMax"), "ReduceSum": ("ReduceMean", "ReduceMax"),
    "Reciprocal": ("Neg",), "Neg": ("Identity",), "Identity": ("Neg",), "Max": ("Min", "Sum"),
    "Not": ("Identity",), "Relu": ("Abs",), "Erf": ("Tanh",), "Expand": ("Tile",),
    "Ceil": ("Floor",),
}  # fmt: skip


def an_operator(m: Mutant) -> None:
    node = m.pick(n for n in m.graph.node if n.op_type in _OTHERS and not n.domain)
    node.op_type = m.pick(_OTHERS[node.op_type])


def operands_swapped(m: Mutant) -> None:
    node = m.pick(n for n in m.graph.node if len(n.input) > 1 and n.input[1] and n.input[0])
    i, j = (1, 2) if node.op_type == "Where" else (0, 1)
    node.input[i], node.input[j] = node.input[j], node.input[i]


def outputs_swapped(m: Mutant) -> None:
    node = m.pick(m.nodes("Split"))
    m.need(len(node.output) > 1)
    node.output[0], node.output[1] = node.output[1], node.output[0]


def an_operand_from_elsewhere(m: Mutant) -> None:
    """Another value of the type and rank, made earlier."""
    node = m.pick(n for n in m.graph.node if any(map(m.is_float, n.input)))
    index = m.pick(i for i, name in enumerate(node.input) if m.is_float(name))
    earlier, rank = [], m.rank(node.input[index])
    for other in m.graph.node:
        if other is node or other.output[0] == node.output[0]:
            break
        earlier += [x for x in other.output if m.is_float(x) and m.rank(x) == rank]
    node.input[index] = m.pick(x for x in earlier if x != node.input[index])


def a_node_doubled(m: Mutant) -> None:
    """Only looks as if: one reader gets an equal node of its own."""
    node = m.pick(n for n in m.graph.node if len(n.output) == 1 and n.op_type != "Constant")

    def copy(_: str) -> str:
        attributes = [
            onnx.AttributeProto.FromString(a.SerializeToString()) for a in node.attribute
        ]
        name = m.node(node.op_type, *node.input, domain=node.domain)
        m.graph.node[-1].attribute.extend(attributes)
        return name

    m.between(node.output[0], copy, one=True)


# What stands between


def _batch_row(m: Mutant, x: str) -> str:
    return m.node("Slice", x, m.constant([0]), m.constant([1]), m.constant([0]))


def _length_factor(m: Mutant, x: str) -> str:
    """1 up to a length, then growing with it."""
    axis = m.pick([1, 2])
    size = m.node("Cast", m.node("Shape", x, start=axis, end=axis + 1), to=FLOAT)
    share = m.node("Div", size, m.constant(np.float32(m.pick([4, 9, 30, 200]))))
    return m.node("Mul", x, m.node("Max", share, m.constant(np.float32(1))))


def _heads_permuted(m: Mutant, x: str) -> str:
    heads = m.types[x].shape.dim[1].dim_value
    return m.node("Gather", x, m.constant(m.rng.permutation(heads)), axis=1)


def _halved(m: Mutant, x: str) -> str:
    return m.node("Cast", m.node("Cast", x, to=T.FLOAT16), to=FLOAT)


def _chosen(m: Mutant, x: str) -> str:
    """A branch that runs where the values say so."""
    total = m.node("ReduceMax", x, keepdims=0)
    branches = {}
    for name, op_type in (("then_branch", "Identity"), ("else_branch", "Neg")):
        inner = onnx.helper.make_node(op_type, [x], [f"{m.name()}_{name}"])
        out = onnx.helper.make_empty_tensor_value_info(inner.output[0])
        branches[name] = onnx.helper.make_graph([inner], name, [], [out])
    return m.node("If", m.node("Greater", total, m.constant(np.float32(0.5))), **branches)


_BETWEEN: dict[str, Callable[[Mutant, str], str]] = {
    "Identity": lambda m, x: m.node("Identity", x),
    "factor": lambda m, x: m.node("Mul", x, m.constant(np.float32(1.02))),
    "one": lambda m, x: m.node("Mul", x, m.constant(np.float32(1))),
    "shift": lambda m, x: m.node("Add", x, m.constant(np.float32(0.1))),
    "Relu": lambda m, x: m.node("Relu", x),
    "cap": lambda m, x: m.node("Tanh", x),
    "turned": lambda m, x: m.node("Neg", m.node("Neg", x)),
    "half": _halved,
    "first row": _batch_row,
    "length factor": _length_factor,
    "branch": _chosen,
}


def a_node_between(m: Mutant) -> None:
    value, make = m.pick(m.floats()), m.pick(_BETWEEN.values())
    m.between(value, lambda x: make(m, x), one=m.chance())


def a_node_before(m: Mutant) -> None:
    node = m.pick(m.nodes("Softmax", "MatMul", "ReduceMean", "ReduceSum"))
    index = m.rng.integers(2) if node.op_type == "MatMul" else 0
    make, name = m.pick(_BETWEEN.values()), node.input[index]
    m.need(m.is_float(name))
    node.input[index] = make(m, name)


def heads_permuted(m: Mutant) -> None:
    value = m.pick(v for v in m.floats(rank=4) if m.types[v].shape.dim[1].dim_value > 1)
    m.between(value, lambda x: _heads_permuted(m, x), one=True)


def one_row_for_the_batch(m: Mutant) -> None:
    wide = [v for v in m.floats() if (m.rank(v) or 0) >= 2]
    value = m.pick(wide + [i.name for i in m.graph.input])
    m.between(value, lambda x: _batch_row(m, x), one=True)


# Masks


def _hit(m: Mutant, element: int) -> str:
    """Where an input of ids or positions has a number, [batch, sequence]."""
    ids = m.pick(v.name for v in m.graph.input if v.name.endswith("ids"))
    m.need(m.types[ids].elem_type in (T.INT64, T.INT32))
    kind = np.int64 if m.types[ids].elem_type == T.INT64 else np.int32
    hits = m.node("Equal", ids, m.constant(np.array(m.rng.integers(0, 12), kind)))
    return m.node("Cast", hits, to=element)


def _by_query(m: Mutant) -> str:
    bias = m.node("Mul", _hit(m, FLOAT), m.constant(np.float32(m.pick([-2, 3]))))
    return m.node("Unsqueeze", bias, m.constant([1, 3]))


def _by_key(m: Mutant) -> str:
    """ALiBi's like, of the mask's columns; of the ids themselves where there is no cache."""
    if m.chance():
        hit = _hit(m, FLOAT)
        bias = m.node("Mul", hit, m.constant(np.float32(m.pick([-2, -1e4, -3e38]))))
        return m.node("Unsqueeze", bias, m.constant([1, 2]))
    mask = m.pick(v.name for v in m.graph.input if "mask" in v.name and m.rank(v.name) == 2)
    counts = m.node("CumSum", m.node("Cast", mask, to=FLOAT), m.constant(np.int64(1)))
    bias = m.node("Mul", counts, m.constant(np.float32(m.pick([0.25, -0.25]))))
    return m.node("Unsqueeze", bias, m.constant([1, 2]))


def _callers(m: Mutant) -> str:
    """One more mask of the caller, of any axes."""
    axes = m.pick(["B1ST", "11ST", "B11T", "ST", "BST", "T"])
    made = m.input(
        f"numbers {axes}", FLOAT, [f"d{i}" if a != "1" else 1 for i, a in enumerate(axes)]
    )
    return m.node("Unsqueeze", made, m.constant([1])) if axes == "BST" else made


def a_term_of_the_mask(m: Mutant) -> None:
    node = m.pick(m.nodes("Softmax"))
    term = m.pick([_by_query, _by_key, _callers])(m)
    makers = (n for n in m.graph.node if node.input[0] in n.output)
    before = m.pick([node.input[0], *(x for n in makers for x in n.input)])
    m.need(m.is_float(before))
    m.between(before, lambda x: m.node("Add", x, term))


def a_condition_of_the_mask(m: Mutant) -> None:
    """And or Or with another condition; where an And, Or or Where is."""
    node = m.pick(m.nodes("And", "Or", "Where", "Not"))
    shaped = m.node("Unsqueeze", _hit(m, T.BOOL), m.constant(m.pick([[1, 3], [1, 2]])))
    node.input[0] = m.node(m.pick(["And", "Or", "Xor"]), node.input[0], shaped)


def another_mask(m: Mutant) -> None:
    """The mask is another input's: all ones, or what ids say."""
    mask = m.pick(v.name for v in m.graph.input if "mask" in v.name)
    element = m.types[mask].elem_type
    if by_ids := m.chance():
        other = _hit(m, element)
    else:
        other = m.constant(np.ones(1, onnx.helper.tensor_dtype_to_np_dtype(element)))
    m.between(mask, lambda x: m.node("Max", x, other), one=by_ids or m.chance())


# Inputs, outputs, types


def an_output_inside(m: Mutant) -> None:
    value = m.pick(m.floats())
    m.need(value not in {v.name for v in m.graph.output})
    m.graph.output.append(info(value, FLOAT, None))


def an_output_earlier(m: Mutant) -> None:
    at = m.pick(range(len(m.graph.output)))
    value = m.pick(m.floats(m.rank(m.graph.output[at].name)))
    m.need(value not in {v.name for v in m.graph.output})
    m.graph.output[at].CopyFrom(info(value, FLOAT, None))


def an_output_computed(m: Mutant) -> None:
    """What reads the result: scores behind a mask, pools, norms over another axis."""
    names = [v.name for v in m.graph.output if m.is_float(v.name)]
    value = m.pick(name for name in names if (m.rank(name) or 0) > 1)
    axis = int(m.rng.integers(0, m.rank(value)))
    made = m.pick([
        lambda: m.node("Softmax", value, axis=axis),
        lambda: m.node("LogSoftmax", value, axis=axis),
        lambda: m.node("ReduceMean", value, **_axes(m, axis)),
        lambda: m.node("ReduceMax", value, **_axes(m, axis)),
        lambda: m.node("CumSum", value, m.constant(np.int64(axis))),
        lambda: m.node("Concat", value, value, axis=axis),
        lambda: m.node("Slice", value, *map(m.constant, ([-1], [1 << 62], [axis]))),
        lambda: m.node("Slice", value, *map(m.constant, ([0], [9], [axis]))),
        lambda: m.node("Slice", value, *map(m.constant, ([-1], [-(1 << 62)], [axis], [-1]))),
    ])()  # fmt: skip
    m.graph.output.append(info(made, FLOAT, None))


def _axes(m: Mutant, axis: int) -> dict[str, object]:
    opset = next(o.version for o in m.model.opset_import if not o.domain)
    return {"axes": [axis]} if opset < 18 else {}


def names_of_inputs(m: Mutant) -> None:
    """Names say nothing: two inputs exchange theirs, or one gets another."""
    said, values = held(m.model), list(m.graph.input)
    names = {v.name: said.get(v.name) or kind_of(v.name) for v in values}
    m.need(len(values) > 1 and all(names.values()))
    one, other = (values[i].name for i in m.rng.choice(len(values), 2, replace=False))
    others = {one: other, other: one}
    if m.chance():
        others = {one: m.pick(["x", "tokens", "mask", "past", "position", "state"])}
    m.need(all(new in others or new not in names for new in others.values()))
    for node in m.graph.node:
        m.need(not any(a.HasField("g") for a in node.attribute))
        node.input[:] = [others.get(name, name) for name in node.input]
    for value in values:
        old = value.name
        value.name = others.get(old, old)
        if old in others:
            m.model.metadata_props.add(key=f"holds.{value.name}", value=names[old])


def names_of_dimensions(m: Mutant) -> None:
    """Symbols say nothing: another one, the same for two, or none."""
    dims = [d for v in m.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param]
    dim = m.pick(dims)
    dim.dim_param = m.pick([m.name(), m.pick(dims).dim_param, "sequence", "batch", "past"])


def a_stale_type(m: Mutant) -> None:
    """A type is written down that is not the value's."""
    value, rank = m.pick(m.floats()), m.pick([1, 2, 3, 4])
    dims = [m.pick(["b", "s", 1, 8, 4]) for _ in range(rank)]
    kept = [v for v in m.graph.value_info if v.name != value]
    del m.graph.value_info[:]
    m.graph.value_info.extend([*kept, info(value, FLOAT, dims)])


def a_constant_to_feed(m: Mutant) -> None:
    """A caller may feed another constant."""
    tensor = m.pick(t for t in m.constants.values() if t.data_type in (T.FLOAT, T.INT64))
    m.need(tensor.name not in {v.name for v in m.graph.input})
    m.graph.input.append(info(tensor.name, tensor.data_type, list(tensor.dims)))


def an_opset(m: Mutant) -> None:
    entry = next(entry for entry in m.model.opset_import if not entry.domain)
    entry.version += int(m.pick([-4, -1, 1, 2]))
    m.need(7 <= entry.version <= 24)


MUTATIONS: dict[str, Callable[[Mutant], None]] = {
    name.replace("_", " "): function
    for name, function in list(globals().items())
    if inspect.isfunction(function) and function.__module__ == __name__ and name[0] != "_"
}
