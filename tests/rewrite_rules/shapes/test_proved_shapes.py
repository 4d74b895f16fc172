# SPDX-License-Identifier: MIT
"""What is proved of shapes and numbers, case by case; random graphs are in test_shape_fuzz."""

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.same_numbers import session
from builders.text_cases import text_cases
from builders.text_models import model_of, text_model
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite_rules.shapes.dimensions import Dim
from rewrite_rules.shapes.evaluator import CannotEvaluate, array_of
from rewrite_rules.shapes.proved_shapes import ProvedShapes


@pytest.mark.parametrize("held", [0, 15, 17])
def test_a_damaged_constant_proves_nothing(held):
    data = onnx.TensorProto(
        name="back", data_type=onnx.TensorProto.INT64, dims=[2], raw_data=bytes(held)
    )
    model = ir.from_proto(text_model("y = Reshape (x, back)", [data], {"x": (1, ["a", 4])}))
    facts = ProvedShapes(model)
    assert facts.integers(model.graph.initializers["back"]) is None
    assert all(dim[1] for dim in facts.shape(model.graph.outputs[0]))  # of unknown sizes


def test_a_value_that_is_read_often_is_computed_once():
    steps = " ".join(f"v{i + 1} = Max(v{i}, v{i}, v{i})" for i in range(10))
    loaded = ir.from_proto(
        text_model(f"v0 = Neg(one) {steps} y = Neg(v10)", {"one": np.float32(1)}, {})
    )
    start = time.process_time()
    assert array_of(loaded.graph.outputs[0], ProvedShapes(loaded)) == 1
    assert time.process_time() - start < 2


_ENDS = (1 << 63) - 1, -(1 << 63)
_NUMBERS = (*_ENDS, *(n + k for n in _ENDS for k in (-1, 1) if abs(n + k) < 1 << 63),
            1 << 62, 1 << 32, (1 << 31) - 1, 1 << 40, 0, 1, -1, 2, 3, 7)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_what_is_known_of_integers_is_what_a_run_computes(data):
    """Sums, products, quotients and slices of sizes and of the greatest numbers there are."""
    pick = lambda values: data.draw(st.sampled_from(values))  # noqa: E731
    constants = {f"c{i}": np.array([n]) for i, n in enumerate(_NUMBERS)}
    made, lines = ["size", *constants], ["size = Shape<start = 0, end = 1>(x)"]
    for number in range(8):
        operator = pick(["Add", "Sub", "Mul", "Div", "Slice"])
        name, a, b = f"n{number}", pick(made), pick(made)
        if operator == "Div":  # a process dies of 0, and of the least by -1
            b = pick([key for key, array in constants.items() if array[0] > 0])
        if operator == "Slice":
            step = pick([key for key, array in constants.items() if array[0]])
            lines += [
                f"{name}s = Slice(x, {a}, {b}, zero, {step})",
                f"{name} = Shape({name}s)",
            ]
        else:
            lines.append(f"{name} = {operator}({a}, {b})")
        made.append(name)
    outputs = [name for name in made if name not in constants]
    model = text_model(
        " ".join(lines),
        constants | {"zero": np.array([0])},
        {"x": (onnx.TensorProto.FLOAT, ["a"])},
        outputs,
        output_type=onnx.TensorProto.INT64,
    )
    loaded = ir.from_proto(model)
    facts = ProvedShapes(loaded)
    found = {v.name: facts.integers(v) for v in loaded.graph.outputs}
    ((_, size),) = found["size"].numbers
    actual = session(model).run(None, {"x": np.zeros(5, np.float32)})
    for name, (number,) in zip(outputs, actual, strict=True):
        for dim in found[name].numbers if found[name] else ():
            if dim is not None and {*dim[1]} <= {*size}:
                assert dim[0] * 5 ** len(dim[1]) == number, (name, lines)


CASES = text_cases(Path(__file__).with_name("cases.txt"))


def described(facts: ProvedShapes, values: Iterable[ir.Value]) -> Iterator[str]:
    """Yield what is proved of values, in the names of the inputs' sizes."""
    named = {u: str(value.shape[axis]) for u, (value, axis) in facts.places.items()}

    def text(dim: Dim | None) -> str:
        if dim is None:
            return "_"
        factors = [name(unknown) for unknown in dim[1]]
        return "*".join(factors if factors and dim[0] == 1 else [str(dim[0]), *factors])

    def name(unknown: int) -> str:
        match facts.unknowns.key(unknown):
            case ("sum", *terms):
                return f"({'+'.join(map(text, terms))})"
            case ("fit", *parts):
                return f"max({', '.join(map(text, parts))})"
        return named.setdefault(unknown, f"?{len(named) - len(facts.places)}")

    for value in values:
        shape, integers = facts.shape(value), facts.integers(value)
        dims = " ".join(map(text, shape)) if isinstance(shape, tuple) else name(shape)
        sizes = " ".join(map(str, facts.sizes(value) or ()))
        assert sizes == (dims if re.fullmatch(r"[\d ]*", dims) else "")
        numbers = f" = {' '.join(map(text, integers.numbers))}" if integers else ""
        yield f"{value.name}: {dims}{numbers}"
    met = [" ".join(map(text, sizes)) for found in facts.met.values() for sizes, _ in found]
    yield from [f"~ {', '.join(met)}"] if met else []


def computed(facts: ProvedShapes, values: Iterable[ir.Value]) -> Iterator[str]:
    """Yield the numbers that values hold, or the shape of many."""
    for value in values:
        try:
            array = array_of(value, facts)
        except CannotEvaluate:
            yield f"{value.name}: not known"
        else:
            held = array.tolist() if array.size < 20 else f"{array.shape}"
            yield f"{value.name}: {array.dtype} {held}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_proved(name: str):
    case = CASES[name]
    model = model_of(case.nodes + "}", opset=int(case.settings.get("opset", 21)))
    dims = {case.settings["estimate"]: 3} if "estimate" in case.settings else None
    facts = ProvedShapes(model, dims, nonempty="nonempty" in case.settings)
    values = [
        value for node in model.graph.all_nodes() for value in node.outputs if value.name
    ]
    describe = computed if "numbers" in case.settings else described
    case.expect("\n".join(describe(facts, values)))


FORMS = {
    "A B 4": True, "_ _ 4": True, "A B C": True, "A A 4": False, "A B 5": False, "A B": False,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_sizes_are_matched_by_name(form: str):
    model = text_model("y = Relu(x)", {}, {"x": (1, ["a", "b", 4])})
    loaded = ir.from_proto(model)
    facts, result = ProvedShapes(loaded), loaded.graph.outputs[0]
    found = facts.match(loaded.graph.inputs[0], form)
    assert (found is not None) == FORMS[form]
    if found is not None:  # bound names are those of other values, too
        assert facts.match(result, form, **found) == found


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ("x 0", "x 0", True),
        ("x 0", "m 0", True),  # texts of two inputs
        ("x 0", "m 1", False),  # texts and tokens
        ("twice 0", "x 0", False),
        ("both 0", "m 0", False),
        ("some 0", "some 0", True),
        ("some 0", "x 0", False),
        ("some 0", "others 0", False),  # sizes that a run finds
        ("sum 0", "m 0", True),  # what broadcasts
    ],
)
def test_sizes_agree_where_the_inputs_have_one_batch_and_length(one, other, agree):
    nodes = """twice = Concat<axis = 0>(x, x) both = Concat<axis = 0>(x, m) sum = Add(x, m)
        zero = Constant<value_ints = [0]>() s = ReduceSum<keepdims = 0>(x)
        t = Unsqueeze(s, zero) k = Cast<to = 7>(t)
        some = Slice(x, zero, k) others = Slice(m, zero, k)"""
    sizes = {"x": (1, ["a", "b"]), "m": (1, ["c", "d"])}
    model = ir.from_proto(text_model(f"{nodes} y = Neg(x)", {}, sizes))
    facts = ProvedShapes(model)
    made = (value for node in model.graph for value in node.outputs)
    values = {value.name: value for value in (*model.graph.inputs, *made)}
    dims = [facts.dims(values[name])[int(axis)] for name, axis in map(str.split, (one, other))]
    assert facts.agree(*dims) == agree
