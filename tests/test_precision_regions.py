# SPDX-License-Identifier: MIT
"""Which types follow from what a user asks for.

test_static_mixed.py compares the graphs with onnxruntime's own.
"""

from __future__ import annotations

import onnx_ir as ir
import pytest
from builders.qdq_models import chains, grid, place, quantized, serialized

from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    TensorOverride,
)

U8, I8, U16, I16 = (
    ir.DataType.UINT8,
    ir.DataType.INT8,
    ir.DataType.UINT16,
    ir.DataType.INT16,
)

CHAIN = """g (float[2,3] x) => (float[2,3] y) {
    [A] a = Sigmoid(x)
    [B] b = Sigmoid(a)
    [C] y = Sigmoid(b)
}"""


def of(quant_type: ir.DataType | None = None, **fields: object) -> tuple[TensorOverride, ...]:
    return (TensorOverride(quant_type=quant_type, **fields),)


def to(quant_type: ir.DataType, *nodes: str, **fields: object) -> TensorOverride:
    names = frozenset(nodes) or None
    return TensorOverride(quant_type=quant_type, recv_nodes=names, **fields)


SUM = """g (float[3] x, float[3] v) => (float[3] y) {
    [A] a = Sigmoid(x)
    [B] b = Sigmoid(v)
    [C] y = Add(a, b)
}"""
TWO_READERS = """g (float[3] x) => (float[3] y, float[3] z) {
    [A] a = Sigmoid(x)
    [B] y = Sigmoid(a)
    [C] z = Sigmoid(a)
}"""
MOVED = """g (float[2,6] x) => (float[3,2] y, float[2,3] z) {
    [A] a = Sigmoid(x)
    [S] b, c = Split <axis = 1, num_outputs = 2> (a)
    [T] d = Transpose <perm = [1, 0]> (b)
    [C] y = Sigmoid(d)
    [D] z = Sigmoid(c)
}"""

PROMOTED = {"x>u8>A", "A>u8>u16>B", "B>u16>C", "C>u16>y"}
REGIONS = {
    "a tensor": (CHAIN, {"promote": {"b"}}, PROMOTED),
    "its codes": (CHAIN, {"promote": {"b_QuantizeLinear_Output"}}, PROMOTED),
    "what is dequantised": (CHAIN, {"promote": {"b_DequantizeLinear_Output"}}, PROMOTED),
    "a node reads and writes 16 bits": (
        CHAIN,
        {"promote": {"B"}},
        {"x>u8>A", "A>u8>u16>B", "B>u16>u8>C", "C>u8>y"},
    ),
    # B is of the type that it writes.
    "two 16-bit types are neighbours": (
        CHAIN,
        {"overrides": {"a": of(U16), "b": of(I16)}},
        {"x>u8>u16>A", "A>u16>i16>B", "B>i16>C", "C>i16>y"},
    ),
    "a tensor kept at 8 bits ends the region": (
        CHAIN,
        {"overrides": {"a": of(U16), "b": of(U8)}},
        {"x>u8>u16>A", "A>u16>u8>B", "B>u8>C", "C>u8>y"},
    ),
    "an entry into two types": (
        TWO_READERS,
        {"overrides": {"y": of(U16), "z": of(I16)}},
        {"x>u8>A", "A>u8>u16>B", "A>u8>i16>C", "B>u16>y", "C>i16>z"},
    ),
}


@pytest.mark.parametrize(("text", "options", "expected"), REGIONS.values(), ids=REGIONS)
def test_regions(text: str, options: dict, expected: set[str]) -> None:
    model = quantized(text)
    place(model, **options)
    assert chains(model) == expected


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_what_data_movement_shares_is_promoted_together(name: str) -> None:
    model = quantized(MOVED)
    place(model, promote=frozenset({name}))
    assert chains(model) == {
        *("x>u8>u16>A", "A>u16>S", "S>u16>T", "S>u16>D", "T>u16>C"),
        *("C>u16>y", "D>u16>z"),
    }
    wide = {
        (float(node.inputs[1].const_value.numpy()), int(node.inputs[2].const_value.numpy()))
        for node in model.graph
        if node.op_type == "DequantizeLinear"
        and node.inputs[0].producer().inputs[0].name in "abcd"
    }
    assert len(wide) == 1


def test_a_calibrated_range_of_one_is_the_grid_of_its_group() -> None:
    model = quantized(MOVED)
    place(
        model,
        promote=frozenset("xyz") | {"a"},
        ranges=dict.fromkeys("xa", (-2.0, 2.0)),
    )
    scales = {
        node.inputs[0].name: float(node.inputs[1].const_value.numpy())
        for node in model.graph
        if node.op_type == "QuantizeLinear"
    }
    assert [scales[name] for name in "abcd"] == pytest.approx([4 / 65535] * 4)


def test_unequal_parameters_make_no_group() -> None:
    model = quantized(MOVED, {"d": grid(0.03, 100)})
    place(model, promote=frozenset({"d"}))
    assert {"A>u8>S", "S>u8>u16>T", "T>u16>C"} <= chains(model)


FINE, FINER = ({"scale": scale, "zero_point": 5} for scale in (0.002, 0.001))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (MOVED, {"overrides": {"a": of(U16), "d": of(I16)}},
         r"'d'.*int16.*override of 'd'.*uint16.*'a'"),
        (MOVED, {"overrides": {"a": of(U16, **FINE), "d": of(U16, **FINER)}},
         "'a' and 'd' share parameters"),
        (SUM, {"overrides": {"a": of(U16), "b": of(I16)}},
         r"'C'.*uint16 by the override of 'a'.*int16.*'b'"),
        (CHAIN, {"overrides": {"a": of(U8, convert=to(I16, "B")), "b": of(U16)}},
         r"'B' is asked to read tensor 'a' as int16.*uint16"),
        (CHAIN, {"overrides": {"b": of(I16)}, "promote": {"B"}},
         r"tensor 'b'.*int16.*'b'.*uint16.*'B'"),
        (CHAIN, {"promote": {"Sigmoidd"}}, "no quantised tensor and no node 'Sigmoidd'"),
        (CHAIN, {"promote": {"b_QuantizeLinear_Outptu"}}, r"b_QuantizeLinear_Output'\?"),
        (CHAIN, {"overrides": {"bb": of(U16)}}, "'bb'"),
        (CHAIN, {"overrides": {"b": of(U8, convert=to(U16, "D"))}}, "no node 'D'"),
        (CHAIN, {"overrides": {"b": of(U8, convert=to(U8, "C"))}}, "tensor's own"),
        (CHAIN, {"mode": "int8"}, "mode is 'int8'"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_contradicts_itself_changes_nothing(
    text: str, options: dict, words: str
) -> None:
    model = quantized(text)
    before = serialized(model)
    with pytest.raises(OverrideError, match=words):
        place(model, **options)
    assert serialized(model) == before
