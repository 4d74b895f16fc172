# SPDX-License-Identifier: MIT
"""Assertions about models, and the bounds of ``ortplugins compare``."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.command_line import ortplugins_command, printed
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import CPU, EXACT, options
from builders.text_models import proto_of

import ortplugins
from ortplugins.testing import assert_fused, assert_no_unfused_weights, assert_same_outputs

FUSED = DequantizedMatMul(64, 32, 32)
# MatMulNBits has no kernel for blocks of 24.
REFUSED = DequantizedMatMul(64, 32, 24)
# By default FUSED has int8 activations, as in onnxruntime, which fuses it itself.
EXACTLY = ("--set", "dq_matmulnbits_fusion.accuracy_level=0")


def session_of(model: ir.Model, *passes: ortplugins.Pass) -> ort.InferenceSession:
    """A session of ours; a stock one without passes."""
    so = options(*passes) if passes else None
    content = ir.to_proto(model).SerializeToString()
    return ortplugins.InferenceSession(content, so, providers=CPU)


def caught_session(model: ir.Model) -> ort.InferenceSession:
    """A session that somebody else opens where passes are switched on."""
    with ortplugins.enabled(ortplugins.DqMatMulNBitsFusion()):
        return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=CPU)


@pytest.mark.parametrize(
    "kind", ["path", "bytes", "proto", "ir", "result", "file", "session", "caught"]
)
def test_operators_are_counted_in_every_kind_of_model(kind, tmp_path):
    plain, path = FUSED.model(), tmp_path / "fused.onnx"
    assert_fused(plain, {"ai.onnx:MatMul": 1, "com.acme:MatMul": 0, "MatMul": 1})
    ortplugins.optimize(plain, path)
    model = {
        "path": lambda: path,
        "bytes": path.read_bytes,
        "proto": lambda: onnx.load(path),
        "ir": lambda: ir.load(path),
        "result": lambda: ortplugins.optimize(plain),
        "file": lambda: ortplugins.optimize(plain, tmp_path / "again.onnx"),
        "session": lambda: session_of(plain, EXACT),
        "caught": lambda: caught_session(plain),
    }[kind]()
    assert_fused(model, {"com.microsoft:MatMulNBits": 1, "DequantizeLinear": 0})
    with pytest.raises(AssertionError, match="MatMulNBits: 1, expected 2"):
        assert_fused(model, {"MatMulNBits": 2})


def test_nodes_of_bodies_and_functions_count():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "f": 1]>
        g (bool c, float[2] x) => (float[2] z) {
            y = If(c) <then_branch = t () => (float[2] a) { a = Relu(x) },
                       else_branch = e () => (float[2] b) { b = Relu(x) }>
            z = f.twice(y)
        }
        <domain: "f", opset_import: ["": 21]> twice (x) => (z) { y = Relu(x)  z = Neg(y) }""")
    assert_fused(model, {"Relu": 3, "Neg": 1, "If": 1, "f:twice": 1})


@pytest.mark.parametrize(
    "made",
    [lambda x: x, ortplugins.optimize, lambda model: session_of(model, EXACT)],
    ids=["model", "result", "session"],
)
def test_the_message_says_what_was_not_fused_and_why(made):
    with pytest.raises(AssertionError) as error:
        assert_fused(made(REFUSED.model()), {"MatMulNBits": 1, "DequantizeLinear": 0})
    text = str(error.value)
    assert "  MatMulNBits: 0, expected 1\n  DequantizeLinear: 1, expected 0\n" in text
    assert "operators found: DequantizeLinear 1, MatMul 1\n" in text
    assert "not fused:\n  matmul: " in text and "block_size 24" in text


def test_weights_that_the_fusion_refuses_are_named():
    assert_no_unfused_weights(FUSED.model())  # the fusion could take it
    for model in (REFUSED.model(), ortplugins.optimize(REFUSED.model())):
        with pytest.raises(AssertionError, match=r"1 nodes .*\n  matmul: .*block_size 24"):
            assert_no_unfused_weights(model)
    # A session has to be fused already.
    assert_no_unfused_weights(session_of(FUSED.model(), EXACT))
    with pytest.raises(AssertionError, match="matmul: would fuse"):
        assert_no_unfused_weights(session_of(FUSED.model()))


@pytest.mark.filterwarnings("error")
def test_records_of_packed_weights_are_no_obstacle(tmp_path):
    path = tmp_path / "fused.onnx"
    ortplugins.optimize(FUSED.model(), path, external_data=True)
    model = onnx.load(path, load_external_data=False)
    tensor = next(item for item in model.graph.initializer if item.external_data)
    tensor.external_data.add(key="prepacked_0", value="kernel|0;64;64")
    onnx.save(model, path)
    assert_fused(path, {"MatMulNBits": 1})
    assert_no_unfused_weights(path)


def unary(line: str, size: str = "float[n]", weights: str = "") -> onnx.ModelProto:
    return proto_of(f"g ({size} x) => ({size} y) {weights} {{ {line} }}")


SAME = unary("y = Identity(x)")
LOG = unary("y = Log(x)")


def test_the_message_names_output_place_values_and_errors():
    b = unary("y = Add(x, k)", "float[2, 2]", "<float[2, 2] k = {0, 0, 0.5, 0}>")
    x = np.array([[1, 2], [3, 4]], np.float32)
    a = unary("y = Identity(x)", "float[2, 2]")
    with pytest.raises(AssertionError) as error:
        assert_same_outputs(a, b, rtol=1e-3, atol=0.1, inputs={"x": x})
    text = str(error.value)
    assert "output 'y' of sample 0: 1 of 4 elements" in text
    assert "worst at [1, 0]: a = 3.0, b = 3.5, bound 0.103" in text
    assert "max abs error 0.5, relative RMS 0.0913" in text and "cosine 0.99" in text
    assert_same_outputs(a, b, rtol=1e-3, atol=0.5, inputs={"x": x})


def test_what_is_the_same():
    near = unary("y = Add(x, k)", weights="<float k = {0.0005}>")
    given = {"x": np.array([0, 1], np.float32)}
    # Without atol the greatest element is the measure.
    assert_same_outputs(SAME, near, 1e-3, inputs=given)
    with pytest.raises(AssertionError, match=r"worst at \[0\]"):
        assert_same_outputs(SAME, near, 1e-3, inputs=given, atol=0.0)
    # NaN equals NaN and nothing else.
    given = {"x": np.array([-1, 0, 1], np.float32)}
    assert_same_outputs(LOG, LOG, 1e-3, inputs=given)
    with pytest.raises(AssertionError, match=r"\[0\]: a = nan, b = 0.0"):
        assert_same_outputs(LOG, unary("a = Abs(x) y = Log(a)"), 1e-3, inputs=given)


def test_texts_are_compared_and_cannot_be_made_up():
    a = unary("y = Identity(x)", "string[n]")
    b = unary("y = Gather(x, first)", "string[n]", "<int64[2] first = {0, 0}>")
    with pytest.raises(ortplugins.ModelFileError, match="input 'x' takes strings"):
        assert_same_outputs(a, b)
    assert_same_outputs(a, b, inputs={"x": np.array(["one", "one"])})
    with pytest.raises(AssertionError, match=r"worst at \[1\]: a = two, b = one"):
        assert_same_outputs(a, b, inputs={"x": np.array(["one", "two"])})


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fused.onnx fuses, refused.onnx does not; in the current folder."""
    monkeypatch.chdir(tmp_path)
    ir.save(FUSED.model(), "fused.onnx")
    ir.save(REFUSED.model(), "refused.onnx", external_data="refused.data")


COMPARE = "compare", "--runs", 0, "--pass", "dq_matmulnbits_fusion"


@pytest.mark.usefixtures("models")
def test_compare_holds_a_model_to_its_bounds():
    before = {path.name for path in Path().iterdir()}
    for arguments in (
        ("fused.onnx", *EXACTLY, "--max-unfused", 0, "--rtol", 1e-4),
        ("refused.onnx",),
        ("refused.onnx", "--max-unfused", 1),
    ):
        printed(*COMPARE, *arguments)
    done = ortplugins_command(*COMPARE, "refused.onnx", "--max-unfused", 0)
    assert done.returncode == 1
    failed = "nodes with a dequantised weight: 1, allowed 0\n  matmul: "
    assert f"failed: {failed}" in done.stdout
    done = ortplugins_command(*COMPARE, "refused.onnx", "--max-unfused", 0, "--format", "json")
    content = json.loads(done.stdout)
    assert done.returncode == 1 and content["failures"][0].startswith(failed)
    assert content["report"]["refused"] == 1
    assert {path.name for path in Path().iterdir()} == before


@pytest.mark.usefixtures("models")
def test_compare_holds_outputs_to_their_bounds():
    level = ("--set", "dq_matmulnbits_fusion.accuracy_level=4")  # int8 activations
    compare = *COMPARE, "fused.onnx", *level
    printed(*compare, "--rtol", 0.1)
    done = ortplugins_command(*compare, "--rtol", 1e-5)
    assert done.returncode == 1
    assert "failed: output 'y' of sample 0: " in done.stdout
    printed(*compare, "--atol", 1e3)
    assert ortplugins_command(*compare, "--atol", 1e-6).returncode == 1
