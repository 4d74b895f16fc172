# SPDX-License-Identifier: MIT
"""The smoke check: a grossly wrong result is left out with a warning, whatever is set."""

import dataclasses
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.sessions import options, start
from builders.text_models import normal, proto_of
from onnxscript import TapeBuilder

import ortplugins
from rewrite_rules.remarks import PassContext
from session_options import option

FAILS = "made a wrong result, please report it"


@dataclasses.dataclass(frozen=True)
class Behind(ortplugins.Pass):
    """Puts nodes behind each output: right, or wrong in one way."""

    name: ClassVar[str] = "behind"
    summary: ClassVar[str] = "for tests"
    how: str = option("right", "What is wrong.")

    def rewrite(self, model: ir.Model, context: PassContext) -> bool:
        op = TapeBuilder()
        for index, value in enumerate(model.graph.outputs):
            made = {
                "right": lambda v: op.Identity(v),
                "off": lambda v: op.Mul(v, op.Constant(value_float=1.5)),
                "NaN": lambda v: op.Sqrt(op.Sub(v, op.Constant(value_float=10.0))),
                "shape": lambda v: op.Unsqueeze(v, op.Constant(value_ints=[0])),
                "type": lambda v: op.Cast(v, to=ir.DataType.DOUBLE),
                "unknown": lambda v: op.NoSuchOperator(v),
                "at 12": lambda v: op.Add(v, in_second_rows(op, v, 12)),
                "at 13": lambda v: op.Add(v, in_second_rows(op, v, 13)),
            }[self.how](value)
            made.name, value.name = value.name, f"{value.name}_{self.name}"
            kind = ir.DataType.DOUBLE if self.how == "type" else ir.DataType.FLOAT
            made.type = ir.TensorType(kind)
            model.graph.outputs[index] = made
        model.graph.extend(op.nodes)
        context.remarks.fired("model", self.how)
        return True


def in_second_rows(op: TapeBuilder, value: ir.Value, place: int) -> ir.Value:
    """1 at a position of 19 where there are two rows, else 0."""
    rows = op.Cast(op.Shape(value, start=0, end=1), to=ir.DataType.FLOAT)
    spot = op.Constant(value=ir.tensor(np.eye(19, dtype=np.float32)[:, place : place + 1]))
    return op.Mul(op.Sub(rows, op.Constant(value_float=1.0)), spot)


@dataclasses.dataclass(frozen=True)
class Again(Behind):
    """The same, under another name."""

    name: ClassVar[str] = "again"


def rounded() -> onnx.ModelProto:
    return proto_of("""g (float[N, 8] x) => (float[N, 8] y)
        <float s = {0.1}, uint8 z = {0}>
        { c = QuantizeLinear(x, s, z)  y = DequantizeLinear(c, s, z) }""")


def plain(nodes: str = "y = Relu(x)") -> onnx.ModelProto:
    return proto_of(f"g (float[N, 8] x) => (float[N, 8] y) {{ {nodes} }}")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("off", "output 'y' differs by"),
        ("NaN", "is not finite where the original is"),
        ("shape", r"is float32 \[1, 19, 8\] instead of float32 \[19, 8\]"),
        ("type", "is float64"),
        ("unknown", "it does not run: .*INVALID_GRAPH"),
    ],
)
def test_what_is_wrong_is_left_out(how: str, reason: str):
    model = plain().SerializeToString()
    with pytest.warns(ortplugins.OrtpluginsWarning, match=f"'behind' {FAILS}: .*{reason}"):
        report = start(model, options(Again(), Behind(how), bake=False)).ortplugins_report
    assert [one.name for one in report.passes] == ["again"]
    assert any(FAILS in note for note in report.notes)
    assert [node.op_type for node in onnx.load(report.artifact).graph.node] == [
        "Relu",
        "Identity",
    ]


def test_padding_does_not_count():
    """The last 6 of 19 tokens, in the batch of two rows."""
    model = proto_of(
        """g (int64[b, s] input_ids, int64[b, s] attention_mask) => (float[b, s, 4] y) {
            e = Gather(table, input_ids) m = Cast <to = 1> (attention_mask)
            u = Unsqueeze(m, last) y = Add(e, u)
        }""",
        {"table": normal(9, 4), "last": np.array([-1])},
    )
    ortplugins.optimize(model, passes=[Behind("at 13")])
    with pytest.raises(ortplugins.PassError, match=FAILS):
        ortplugins.optimize(model, passes=[Behind("at 12")])


def test_no_pass_is_blamed_for_another():
    with pytest.warns(ortplugins.OrtpluginsWarning, match="'again'") as caught:
        session = start(plain().SerializeToString(), options(Again("off"), Behind()))
    assert len(caught) == 1
    assert [one.name for one in session.ortplugins_report.passes] == ["behind"]


def test_no_file_is_left_of_what_is_wrong(tmp_path):
    with pytest.raises(ortplugins.PassError, match=FAILS):
        ortplugins.optimize(plain(), tmp_path / "out.onnx", passes=[Behind("off"), Again()])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "model",
    [
        rounded(),  # a last digit moves whole codes
        plain("r = RandomNormalLike(x)  y = Add(x, r)"),
        plain("y = NoSuchOperator(x)"),  # the original runs nothing
        proto_of("g (string[N] s) => (float[N] y) { i = StringLength(s) y = Cast<to=1>(i) }"),
    ],
)
def test_where_nothing_can_be_concluded_the_result_stays(model: onnx.ModelProto):
    result = ortplugins.optimize(model, passes=[Behind("off")])
    assert result.report.fired
