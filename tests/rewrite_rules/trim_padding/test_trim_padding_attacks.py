# SPDX-License-Identifier: MIT
"""Graphs that look trimmable and are not, or only in part, beside those that are.

Each is a head behind an encoder, with inputs of its own; numbers in its text are constants.
It is refused for the reason that is given, or computes the same with inputs that the proof
has not seen.
"""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.encoders import ADDITIVE, BOOLEAN, VOCABULARY, batch, encoder
from builders.same_numbers import session
from builders.text_cases import text_cases

import ortplugins
from rewrite_rules.remarks import PassContext, Remark, Remarks
from rewrite_rules.trim_padding.trim import trim_padding

ATTACKS = text_cases(Path(__file__).with_name("attacks.txt"))
MASKS = {"additive": ADDITIVE, "boolean": BOOLEAN}
CONSTANTS = {
    "span": -np.ones((8, 1), np.float32),
    "kernel": np.ones((8, 8, 3), np.float32),
    "kernel_1": np.ones((8, 8, 1), np.float32),
    "table_of_400": np.random.default_rng(4).standard_normal((400, 8), np.float32),
    "qkv": np.random.default_rng(6).standard_normal((8, 24), np.float32),
    "qkv_bias": np.ones(24, np.float32),
    "lstm_w": np.ones((1, 8, 8), np.float32),
    "lstm_r": np.ones((1, 8, 2), np.float32),
    "ones8": np.ones(8, np.float32),
    "middle_code": np.uint8(128),
    "code_rows": np.arange(-32, 32, dtype=np.int8).reshape(8, 8),
    "code_zeros": np.zeros(8, np.int8),
    "nbits_steps": np.ones((8, 1), np.float32),
    "nbits": np.arange(64, dtype=np.uint8).reshape(8, 1, 8) * 3,
    "row_steps": np.linspace(0.1, 1, 32, dtype=np.float32)[:, None],
    "row_codes": np.arange(256, dtype=np.uint8).reshape(32, 8),
    "lowest_rows": np.full(32, -3.4e38, np.float32),
    "infinity": np.float32(np.inf),
}
# An argument that is a number, or a list of them.
LITERAL = re.compile(r"(?<=[(,])\s*(-?[\d.][\d.e]*|\[[^\]]*\])(?=[,)])(?![^(\n]*>)")
INPUTS = {
    "labels": (["texts", "kinds"], "int64"),
    "gate": (["rows", "places", 8], "float"),
    "short": (["rows", "places"], "int64"),
    "positions": (["places"], "int64"),
    "other_mask": (["texts", "places"], "int64"),
    "biases": ([1, 1, "queries", "keys"], "float"),
}
# Of operators, the first that has them as they are written; a number of keys is of 24.
OPSETS = {"= Attention<": 24, "ScatterElements": 18}
ROWS = [("111", "11111"), ("1", "1"), ("00111", "1"), ("000", "11"), ("1" * 300, "1" * 4)]


def with_literals(text: str) -> tuple[str, dict[str, np.ndarray]]:
    """Return nodes whose arguments are names, and the constants that these stand for."""
    found = dict[str, np.ndarray]()

    def name_of(match: re.Match[str]) -> str:
        kind = np.float32 if {".", "e"} & {*match[1]} else np.int64
        name = "number" + re.sub(r"\W", "_", match[1])
        found[name] = np.array(json.loads(match[1]), kind)
        return f" {name}"

    return LITERAL.sub(name_of, text), found


def attack(name: str, *change: str) -> onnx.ModelProto:
    """Return an encoder with the head of a case; ``change`` is a text of it, and another."""
    case = ATTACKS[name]
    mask = MASKS[case.settings.get("mask", "additive")]
    head, extra = with_literals(case.nodes.replace(*change) if change else case.nodes)
    text = f"{mask} {head}"
    extra |= {name: array for name, array in CONSTANTS.items() if name in text}
    model = encoder(
        mask,
        head,
        extra=extra,
        opset=max([17, *(opset for name, opset in OPSETS.items() if name in text)]),
    )
    for name, (shape, kind) in INPUTS.items():
        if f" {name})" in text or f"({name}" in text:
            dtype = getattr(onnx.TensorProto, kind.upper())
            model.graph.input.append(onnx.helper.make_tensor_value_info(name, dtype, shape))
    if "y = Mul(labels" in head:
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    del model.graph.value_info[:]
    # So that the encoder runs, whatever the head reads.
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("hidden"))
    return onnx.shape_inference.infer_shapes(model)


def fed(model: onnx.ModelProto, rows: tuple[str, ...], labels: int) -> dict[str, np.ndarray]:
    """Draw inputs; labels are as many as tokens, or fewer."""
    feed = batch(*rows, length=max(9, max(map(len, rows)) + 5))
    count, length = feed["input_ids"].shape
    rng = np.random.default_rng(count * length)
    made = {
        "labels": rng.integers(0, VOCABULARY, (count, labels or length)),
        "gate": rng.standard_normal((count, 1, 8), np.float32),
        "short": np.zeros((count, 1), np.int64),
        "positions": np.arange(length) % VOCABULARY,
        "other_mask": np.ones((count, length), np.int64),
        "biases": rng.standard_normal((1, 1, length, 1 if labels else length), np.float32),
    }
    return feed | {v.name: made[v.name] for v in model.graph.input if v.name in made}


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return session(model).run(None, feed)


def proved(model: onnx.ModelProto, **options: object) -> tuple[onnx.ModelProto, Remark]:
    """Return what the pass makes of a model, and what it says of it."""
    result, remarks = ir.from_proto(model), Remarks("trim_padding")
    trim_padding(result, PassContext(remarks), **options)
    (remark,) = (each for each in remarks if each.outcome.value != "note")
    return ir.to_proto(result), remark


def only_proved(model: onnx.ModelProto, **options: object) -> onnx.ModelProto:
    result, remark = proved(model, **options)
    assert remark.outcome.value == "fired"
    return result


def assert_same_where_real(found: np.ndarray, expected: np.ndarray, real: np.ndarray) -> None:
    """Compare; padding counts where the model sets it, which is where it is one value."""
    assert found.shape == expected.shape
    if expected.shape[:2] == real.shape:
        behind = int(np.flatnonzero(real.any(axis=0)).max(initial=-1)) + 1
        tail = expected[:, behind:]
        if not (tail == tail[:, :1]).all():
            found, expected = found[real], expected[real]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_looks_trimmable(name):
    """The proof alone decides."""
    model = attack(name)
    result, remark = proved(model)
    trimmed, expected = remark.outcome.value == "fired", ATTACKS[name].expected
    found = "trimmed" if trimmed else remark.reason
    if not (expected and expected in found):  # a part of the reason is enough
        ATTACKS[name].expect(found)
    if not trimmed:
        return
    sessions = [session(one) for one in (model, result, proved(model, pack=True)[0])]
    for rows, labels in itertools.product(ROWS, (0, 3)):
        feed = fed(model, rows, labels)
        expected, *others = (one.run(None, feed) for one in sessions)
        for found, one in zip(itertools.chain(*others), expected * 2, strict=True):
            assert_same_where_real(found, one, feed["attention_mask"].astype(bool))


def test_an_output_has_another_rank_than_declared():
    model = attack("biases of the caller", "y = Squeeze(m, first)", "y = Identity(m)")
    stale = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["a", "n", 8])
    model.graph.output[0].CopyFrom(stale)
    result = ortplugins.optimize(model, passes=[ortplugins.TrimPadding()])
    assert result.report.fired
    feed = fed(model, ("111", "11111"), 0)
    (found, _), (expected, _) = (run(m, feed) for m in (result.model, model))
    assert_same_where_real(found[0], expected[0], feed["attention_mask"].astype(bool))


def test_a_declared_shape_that_is_wrong_decides_nothing():
    mask, head = ADDITIVE, "t = Hardmax(nine_rows)\ny = Add(hidden, t)"
    rows = np.random.default_rng(8).standard_normal((9, 8), np.float32)
    model = encoder(mask, head, extra={"nine_rows": rows})
    (stale,) = (value for value in model.graph.value_info if value.name == "t")
    stale.type.tensor_type.shape.dim[0].dim_value = 1
    _, remark = proved(model)
    assert "has sizes that do not follow from the length" in remark.reason


def test_one_row_of_the_mask_may_stand_for_all_texts():
    """What is packed is as long as the mask says for each text, so batches are compared."""
    model = attack("labels")
    feed = fed(model, ("111",) * 3, 0)
    feed["attention_mask"] = feed["attention_mask"][:1]
    (found, _), (expected, _) = (run(m, feed) for m in (only_proved(model, pack=True), model))
    np.testing.assert_allclose(found[:, :3], expected[:, :3], rtol=1e-4, atol=1e-5)


NAMES = (("s10", "s70"), ("s43", "s53"), ("s77", "s88"))
MASK_OF_ONE_NAME = (("batch", "sequence"), ("n", "n"), ("s77", "s88"))
ONE_NAME = (("batch", "sequence"),) * 3


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        *((names, count) for names in (NAMES, ONE_NAME) for count in (3, 16, 20)),
        (MASK_OF_ONE_NAME, 3),
        ((("batch", 16),) * 3, 16),
        (((2, 16),) * 3, 16),
    ],
)
def test_neither_names_nor_sizes_make_a_sequence(shapes, count):
    model = attack("labels")
    for value, shape in zip(model.graph.input, shapes, strict=True):
        declared = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT64, shape)
        value.type.CopyFrom(declared.type)
    model = onnx.shape_inference.infer_shapes(model)
    result = ortplugins.optimize(model, passes=[ortplugins.TrimPadding()])
    (fired,) = result.report.fired
    assert "'labels'" not in fired.reason
    feed = batch("111", "11111", length=16)
    feed["labels"] = np.random.default_rng(0).integers(0, VOCABULARY, (2, count))
    found, expected = (
        session(m, optimised=False).run(None, feed) for m in (result.model, model)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pack", [False, True])
def test_a_node_that_nothing_reads_says_nothing(pack: bool):
    """onnxruntime may drop it, whatever sizes it reads."""
    read = "y = ReduceMean<axes = [1], keepdims = 0>(wanted)"
    model = attack("labels pooled", read, "unread = Add(wanted, hidden)\ny = Neg(wanted)")
    result = only_proved(model, pack=pack)
    feed = fed(model, ("111", "11111"), 0)
    np.testing.assert_array_equal(run(result, feed)[0], run(model, feed)[0])
