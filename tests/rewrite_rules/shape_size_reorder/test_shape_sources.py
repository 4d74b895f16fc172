# SPDX-License-Identifier: MIT
"""Shape and Size read the first value of the same sizes; every number stays."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import run
from builders.same_numbers import session
from builders.text_cases import assert_laws_on_page, text_cases
from builders.text_models import model_of

from ortplugins.optimization.shape_inference import infer_shapes
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.shape_size_reorder import size_rules
from rewrite_rules.shape_size_reorder.memory_order import GraphOrder
from rewrite_rules.shape_size_reorder.reorder import put_in_order
from rewrite_rules.shape_size_reorder.simplify import simplify_shapes
from rewrite_rules.shapes.evaluator import array_of
from rewrite_rules.shapes.proved_shapes import ProvedShapes

F = np.float32


def parse(text: str, opset: int = 21) -> ir.Model:
    return model_of(text, opset=opset, ir_version=10 if opset < 23 else 11)


def simplify(model: ir.Model, infer: bool = True) -> list[str]:
    """Simplify as the pipeline does; what fired."""
    if infer:
        infer_shapes(model)
    remarks = Remarks("shape_size_reorder")
    simplify_shapes(model, PassContext(remarks))
    return [str(remark) for remark in remarks if remark.outcome == "fired"]


def same(
    before: ir.Model,
    after: ir.Model,
    feeds: Sequence[Mapping[str, np.ndarray]],
    optimised: bool = False,
) -> None:
    assert [v.name for v in before.graph.outputs] == [v.name for v in after.graph.outputs]
    types = {v.name: v.dtype.numpy() for v in before.graph.inputs}
    for feed in feeds:
        fed = {name: array.astype(types[name]) for name, array in feed.items()}
        each = (run(model, fed, optimised=optimised) for model in (before, after))
        for expected, found in zip(*each, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def written(model: ir.Model) -> list[str]:
    """The nodes that compute shapes, as text: ``o = Gather(Shape(x), [0, 2])``.

    Of bodies: ``body: s = Shape(h)``.
    """

    def text(value: ir.Value) -> str:
        node = value.producer()
        if value.const_value is not None:
            return str(value.const_value.numpy().tolist())
        if node is None or node.op_type not in _SMALL or value.dtype is not ir.DataType.INT64:
            return str(value.name)
        if node.op_type == "Constant":
            return str(ir.convenience.get_const_tensor(value).numpy().tolist())
        inputs = [text(value) for value in node.inputs if value is not None]
        named = [f"{k}={v.value}" for k, v in node.attributes.items() if v.value]
        return f"{node.op_type}({', '.join(inputs + named)})"

    return [
        f"{f'{graph.name}: ' if graph is not model.graph else ''}{value.name} = {text(value)}"
        for graph in model.graphs()
        for value in graph.outputs
    ]


_SMALL = {
    *("Shape", "Size", "Gather", "Slice", "Squeeze", "Unsqueeze", "Concat", "Constant", "Mul"),
    *("Identity", "Add"),
}


def sized(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(F)


def feeds(*shapes: Sequence[Sequence[int]]) -> list[dict[str, np.ndarray]]:
    """Inputs x, y, z of these shapes, a dict for each run."""
    rng = np.random.default_rng(0)
    return [
        {name: sized(rng, *shape) for name, shape in zip("xyz", run, strict=False)}
        for run in shapes
    ]


def kept(text: str, runs: Sequence[Mapping[str, np.ndarray]]) -> ir.Model:
    before, after = parse(text), parse(text)
    simplify(after)
    same(before, after, runs)
    return after


RUNS_3D = feeds([(2, 3, 4)], [(1, 5, 4)], [(0, 3, 4)], [(2, 0, 4)])
BRANCHES = [{"x": np.ones((2, 3), F), "c": np.array(flag)} for flag in (True, False)]

# What nodes alone may read.
PICKED = f"""g (float[{{x}}] x) => ({{type}} o)
    <int64 one = {{{{1}}}}, int64 last = {{{{-1}}}}, int64[2] three = {{{{1, -1}}}},
     int64[1] axis = {{{{1}}}}, int64[1] zero = {{{{0}}}}, int64[1] two = {{{{2}}}},
     int64[1] end = {{{{3}}}}, int64[2] back = {{{{0, -1}}}}, float unit = {{{{1}}}},
     float[4] w4 = {{{{1, 2, 3, 4}}}}, float[3] w3 = {{{{1, 2, 3}}}}, bool yes = {{{{1}}}},
     int64[3] copy = {{{{0, 0, -1}}}}, int64[6] pads = {{{{0, 0, 0, 0, 0, 0}}}},
     int64[1] most = {{{{9223372036854775807}}}}, int64[0] empty = {{{{}}}},
     float[3, 3, 3] w333 = {{{{{", ".join("1" * 27)}}}}}, int64[0, 1] none = {{{{}}}},
     float[4, 4] w44 = {{{{{", ".join("1" * 16)}}}}}> {{{{ {{nodes}} }}}}"""


def runs_of(text: str) -> list[dict[str, np.ndarray]]:
    """Read runs: shapes of x, y, z (``-`` is a scalar), and values by name."""
    found = []
    for fed in text.split("; "):
        shapes = [token for token in fed.split() if "=" not in token]
        (made,) = feeds([[int(d) for d in each.split(",") if d != "-"] for each in shapes])
        for name, value in (token.split("=") for token in fed.split() if "=" in token):
            is_flag = value in ("true", "false")
            made[name] = np.array(
                value == "true" if is_flag else [*map(int, value.split(","))]
            )
        found.append(made)
    return found


CASES = text_cases(Path(__file__).with_name("cases.txt"))
PAGE = Path(__file__).parents[3] / "docs" / "shape-size-reorder.md"


def test_the_page_has_a_case_of_each_rule():
    def left(expected: str) -> str:
        output, operators = expected.split("\n")
        return operators if output == "o = o" else output

    assert_laws_on_page(PAGE, [size_rules], CASES, left)


@pytest.mark.parametrize("name", CASES)
def test_shapes_become(name):
    """A case has what is left of the outputs' shapes, and the operators."""
    case, text = CASES[name], CASES[name].nodes
    if not text.startswith("g ("):
        kind = "int64" if re.search(r"o = (Size|Gather \(s, one\))", text) else "int64[k]"
        nodes = text if re.search(r"\bh(, \w+)* = ", text) else f"h = Relu (x)  {text}"
        text = PICKED.format(x=case.settings.get("x", "a, b, c"), type=kind, nodes=nodes)
    runs = runs_of(case.settings["runs"]) if "runs" in case.settings else RUNS_3D
    opset, infer = int(case.settings.get("opset", 21)), "infer" not in case.settings
    before, after = parse(text, opset), parse(text, opset)
    simplify(after, infer)
    if name.startswith("damaged: "):  # onnxruntime refuses such models
        runs = []
    same(before, after, runs, "optimised" in case.settings)
    assert simplify(after, infer) == []
    if case.settings.get("law") == "BehindMaker":
        put_in_order(after, GraphOrder(after.graph, ProvedShapes(after, {})))
    left = " ".join(node.op_type for node in after.graph)
    case.expect("\n".join([*written(after), left]))


@pytest.mark.parametrize(
    "call",
    [
        "maker.Log (i)",
        "local.Call (i)",
        """If (c) <then_branch = t () => (a) { a = local.Call (i) },
                   else_branch = e () => (b) { b = Identity (i) }>""",
    ],
)
def test_custom_operators_stay_though_nothing_reads_them(call: str):
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21, "local": 1, "maker": 1]>
        g (float[a] x, bool c) => (int64[k] o, int64[k] p) {{ h = Relu (x)  i = Exp (h)
        log = {call}  s = Shape (x)  t = Shape (i)  o = Neg (s)  p = Abs (t) }}
        <domain: "local", opset_import: ["": 21, "maker": 1]> Call (y) => (z) {{
        z = maker.Log (y) }}"""
    )
    assert "t: is 's', its like" in simplify(model, infer=False)
    called = call.partition(" ")[0].rpartition(".")[2]
    assert [n.op_type for n in model.graph] == ["Relu", "Exp", called, "Shape", "Neg", "Abs"]


def test_a_size_of_minus_1_is_no_proof():
    before = parse("g (float[a, 3] x) => (int64[k] o) { h = Relu (x)\n o = Shape (h) }")
    before.graph.inputs[0].shape = ir.Shape([-1, 3])  # as Paddle's exporter writes it
    after = ir.from_proto(ir.to_proto(before))
    simplify(after)
    assert written(after) == ["o = Shape(x)"]
    same(before, after, feeds([(2, 3)], [(5, 3)]))


def test_an_initializer_that_is_fed_is_an_input():
    before = parse(
        "g (float[a] x, float[b, c] y) => (int64[k] o) { h = Abs (y)\n o = Shape (h) }"
    )
    models = []
    for _ in range(2):
        model = ir.from_proto(ir.to_proto(before))
        value = model.graph.inputs[1]
        value.const_value = ir.tensor(np.ones((2, 3), F), name="y")
        model.graph.register_initializer(value)
        models.append(model)
    simplify(models[1])
    assert models[1].graph.node(0).op_type == "Shape"
    assert models[1].graph.node(0).inputs[0].name == "y"
    same(*models, feeds([(2,), (4, 4)], [(2,), (2, 3)]))


_ENDS = [
    *((1 << 31) - 1, (1 << 63) - 1, (1 << 63) - 2, -(1 << 63), 1 - (1 << 63)),
    *(-5, -4, -1, 0, 3, 5),
]


@pytest.mark.parametrize("step", [1, 3, -1, -2, -(1 << 63)])
def test_slices_end_where_onnxruntime_ends_them(step):
    """Of numbers, of an axis of a known size, and of one of an unknown size.

    onnxruntime must not know the size either: where onnx infers another one than its kernel
    gives, it writes past the end of a buffer.
    """
    lines, outputs = [], []
    for i, (start, end) in enumerate(itertools.product(_ENDS, _ENDS)):
        lines += [f"a{i} = Constant <value_ints = [{start}]> ()"]
        lines += [f"b{i} = Constant <value_ints = [{end}]> ()"]
        for name, sliced in (("s", "numbers"), ("t", "known"), ("u", "x")):
            lines += [f"{name}{i} = Slice ({sliced}, a{i}, b{i}, zero, step)"]
            lines += [f"{name}n{i} = Shape ({name}{i})"]
            outputs += [f"int64[l] {name}n{i}", *([f"int64[l] s{i}"] if name == "s" else [])]
        lines += [f"e{i} = Slice (floats, a{i}, b{i}, zero, step)"]
        outputs += [f"float[l] e{i}"]
    text = f"""g (float[a] x) => ({", ".join(outputs)})
        <int64[1] zero = {{0}}, int64[1] four = {{4}}, int64[1] step = {{{step}}},
         float[1] one = {{1}}, int64[4] some = {{5, 6, 7, 8}}> {{
        equal = Equal (four, four)
        hidden = Where (equal, four, zero)
        known = Expand (one, hidden)
        numbers = Reshape (some, hidden)
        floats = Cast <to = 1> (numbers)
        {" ".join(lines)} }}"""
    before = parse(text)
    found = session(before).run(None, {"x": np.ones(4, F)})
    facts = ProvedShapes(before)
    for value, expected in zip(before.graph.outputs, found, strict=True):
        if value.name.startswith("e"):
            np.testing.assert_array_equal(array_of(value, facts), expected)
    after = kept(text, [{"x": np.ones(rows, F)} for rows in (4, 1, 0)])
    assert not any(v.name.startswith("tn") and v.producer().op_type != "Constant"
                   for v in after.graph.outputs)  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "nodes", "left"),
    [
        ("", "u = Relu (t)", ["Shape"]),
        # The call decides.
        ("wanted", "w = Constant <value_ints: ints = @wanted> ()  u = Reshape (t, w)", None),
    ],
)
def test_functions_are_rewritten_in_place_where_no_call_decides(wanted, nodes, left):
    call, form = ("<wanted = [4, 3]>", "<wanted>") if wanted else ("", "")
    text = f"""<ir_version: 10, opset_import: ["": 21, "local": 1]>
        g (float[a, b] x) => (int64[k] o) {{ o = local.rows {call} (x) }}
        <domain: "local", opset_import: ["": 21]>
        rows {form} (t) => (s) {{ {nodes}  v = Exp (u)  s = Shape (v) }}"""
    before, after = (ir.from_proto(onnx.parser.parse_model(text)) for _ in range(2))
    simplify(after)
    (function,) = after.functions.values()
    assert left in (None, [node.op_type for node in function])
    same(before, after, feeds([(2, 6)], [(3, 4)]))


def test_an_unsorted_graph_is_sorted_and_a_cyclic_one_refused():
    model = parse("g (float[a] x) => (int64[k] o) { h = Relu (x)\n o = Shape (h) }")
    first = model.graph.node(0)
    model.graph.remove(first)
    model.graph.append(first)
    assert simplify(model) == ["o: reads the shape of 'x'"]
    model = parse("g (float[a] x) => (int64[k] o) { h = Relu (x)\n o = Shape (h) }")
    relu = model.graph.node(0)
    relu.replace_input_with(0, relu.outputs[0])
    remarks = Remarks("shape_size_reorder")
    simplify_shapes(model, PassContext(remarks))
    assert [remark.outcome for remark in remarks] == ["refused"]
    assert "sort" in next(iter(remarks)).reason


def test_what_is_left_says_why():
    model = parse("""g (float[a, b] x, float[c, d] y) => (int64[k] o) {
        h = MatMul (x, y)
        i = Add (h, h)
        j = NonZero (i)
        o = Shape (j) }""")
    remarks = Remarks("shape_size_reorder")
    simplify_shapes(model, PassContext(remarks))
    (remark,) = remarks
    assert str(remark) == (
        "o: NonZero 'j' decides the rank and the sizes of 'j': nothing earlier has them in "
        "every run"
    )


def test_a_node_that_was_read_by_a_merged_one_only_is_still_there_for_its_like():
    text = """g (float[b] x) => (float[n] y, float[m] z, int64[1] c2)
        <int64 zero = {0}, int64[1] one = {1}> {
        c = Shape(x)  h = Relu(x)
        a = Gather(c, zero)  r = Reshape(a, one)  y = Expand(h, r)
        d = Gather(c, zero)  e = Mul(d, d)  f = Reshape(e, one)
        w = Expand(one, f)  z = Cast<to = 1>(w)  c2 = Identity(c) }"""
    model = parse(text, opset=13)
    before = ir.from_proto(ir.to_proto(model))
    simplify(model, infer=False)
    same(before, model, [{"x": np.ones(3, F)}])
