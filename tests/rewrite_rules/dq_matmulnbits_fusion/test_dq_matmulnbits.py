# SPDX-License-Identifier: MIT
"""DequantizeLinear + MatMul -> MatMulNBits: names, options, refusals.

The layouts and their numbers are those of ``test_layout_matrix.py``.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from builders.dequantized_models import (
    DequantizedMatMul,
    Quantized,
    assert_same_outputs,
    fuse_weights,
    op_types,
    run,
)
from builders.layout_matrix import MATMUL, LayoutCase
from builders.text_cases import assert_laws_on_page, text_cases
from builders.text_models import add_weights, text_model

from ortplugins.report import worded
from rewrite_rules.dq_matmulnbits_fusion import gather_rule, matmul_rules
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions

FLOAT = {"accuracy_level": 0, "slow_kernels": "float"}


def test_the_node_has_the_names_types_and_attributes_of_the_product():
    model = DequantizedMatMul(70, 8, 32, "uint4", zero_points="random").model()
    fuse_weights(model, FusionOptions(accuracy_level=4, slow_kernels="fuse"))
    (node,) = model.graph
    assert (node.domain, node.name) == ("com.microsoft", "matmul")
    output = model.graph.outputs[0]
    assert (output.name, output.dtype) == ("y", ir.DataType.FLOAT)
    attributes = {name: attr.as_int() for name, attr in node.attributes.items()}
    assert attributes == {"K": 70, "N": 8, "bits": 4, "block_size": 32, "accuracy_level": 4}
    # What was packed anew is all that stays.
    codes, scales, zero_points = ("w.T.nbits32", "w_scale.T.nbits", "w_zero_point.T.nbits")
    assert set(model.graph.initializers) == {codes, scales, zero_points}


# A weight as it is stored, and what of it is in MatMulNBits' order.
IN_PLACE = [
    (Quantized((32, 128), "uint4", 1), "w w_scale w_zero_point"),
    (Quantized((32, 128), "uint8", 1, 128), "w w_scale w_zero_point"),
    (Quantized((32, 128), "uint8", 0, scaled="channel"), "w w_scale w_zero_point"),
    (Quantized((32, 128), "uint8", 0, scaled="tensor1"), "w"),
    (Quantized((1, 128), "uint8", 0, scaled="tensor1"), "w w_scale w_zero_point"),
    (Quantized((32, 96), "uint4", 1), "w w_scale"),  # zero points of a row fill no bytes
    (Quantized((32, 70), "uint4", 1), "w_scale"),
    (Quantized((32, 128), "int4", 1), "w_scale"),
    (Quantized((32, 1024), "uint4", 1, 512), "w"),  # each block is two of the kernel's
    (Quantized((128, 32), "uint4", 0), ""),
]


@pytest.mark.parametrize(("weight", "in_place"), IN_PLACE)
def test_bytes_in_the_order_of_the_kernel_stay_where_they_are(weight, in_place, tmp_path):
    turned = "V = $w  W = Transpose <perm = [1, 0]> (V)  y = MatMul (x, W)"
    text = turned if in_place else MATMUL
    stored = LayoutCase("stored", text, weight, (3, weight.shape[bool(in_place)])).build()
    ir.save(stored, tmp_path / "m.onnx", external_data="data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "m.onnx")
    fuse_weights(model)
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    kept = [name for name, each in tensors.items() if isinstance(each, ir.ExternalTensor)]
    assert {name.partition(".")[0] for name in kept} == {*in_place.split()}


@pytest.mark.parametrize(
    ("rows", "storage", "options", "expected"),
    [
        (512, "uint4", {}, ["Gather"]),
        (512, "uint4", {"float_limit_mb": 0}, ["GatherBlockQuantized"]),
        (512, "uint4", {"slow_kernels": "fuse"}, ["GatherBlockQuantized"]),
        (512, "uint4", {"slow_kernels": "keep"}, ["GatherBlockQuantized"]),
        (512, "uint8", {}, ["GatherBlockQuantized"]),
        (17000, "uint4", {}, ["GatherBlockQuantized"]),
    ],
)
def test_small_tables_become_float(rows, storage, options, expected):
    """A batch reads each row several times over; at 64 columns 4 MB are 16,384 rows."""
    weights, ids = Quantized((rows, 64), storage, 1, 32), {"ids": np.int64([0, 39, 7])}
    text = "W = $w  y = Gather (W, ids)"
    model = LayoutCase("table", text, weights, None, inputs=ids).build()
    fuse_weights(model, FusionOptions(**{**FLOAT, **options}))
    assert op_types(model) == expected


KEPT = ["DequantizeLinear", "MatMul"]


@pytest.mark.parametrize(
    ("k", "n", "storage", "options", "outcome", "expected"),
    [
        # The kernel multiplies with what lies in memory behind the last column, denormals say,
        # where N is not a multiple of 16.
        (64, 24, "uint4", {}, "fired", ["MatMul"]),
        (64, 32, "uint4", {}, "fired", ["MatMulNBits"]),
        (64, 24, "uint4", {"accuracy_level": 4}, "fired", ["MatMulNBits"]),
        (64, 24, "uint4", {"slow_kernels": "fuse"}, "fired", ["MatMulNBits"]),
        (65536, 24, "uint4", {}, "fired", ["MatMulNBits"]),
        # 8 bits have a fast kernel at level 4.
        (64, 8, "int8", {"accuracy_level": 4}, "fired", ["MatMulNBits"]),
        (64, 8, "int8", {"slow_kernels": "keep"}, "refused", KEPT),
    ],
)
def test_a_slow_kernel_is_taken_where_nothing_is_faster(
    k, n, storage, options, outcome, expected
):
    model = DequantizedMatMul(k, n, 32, storage).model()
    providers = ("AzureExecutionProvider", "CPUExecutionProvider")  # as wheels list them
    fusion = FusionOptions(**{**FLOAT, **options})
    (remark,) = fuse_weights(model, fusion, providers=providers)
    assert (remark.outcome, op_types(model)) == (outcome, expected)


def refused(model: ir.Model, **kwargs: object) -> str:
    before = ir.to_proto(model).SerializeToString()
    remarks = fuse_weights(model, **kwargs)  # type: ignore[arg-type]
    assert [r.outcome for r in remarks] == ["refused"], remarks
    assert ir.to_proto(model).SerializeToString() == before
    return worded(remarks[0])


CASE = DequantizedMatMul(64, 8, 32, "uint4", zero_points="random")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w", "weight 'w' is a graph input: a caller may feed another"),
        ("w_scale", "scale 'w_scale' is a graph input"),
    ],
)
@pytest.mark.parametrize("default", [True, False])
def test_refuses_what_a_caller_may_override(name, words, default):
    model = CASE.model()
    model.graph.inputs.append(model.graph.initializers[name])
    if not default:
        del model.graph.initializers[name]
    assert words in refused(model)


def test_refuses_providers_that_read_qdq_themselves():
    message = refused(CASE.model(), providers=("QNNExecutionProvider", "CPUExecutionProvider"))
    assert "QNNExecutionProvider has no MatMulNBits kernel" in message


def test_constants_of_operators_in_integers_are_noted():
    """onnxruntime makes a QLinearAdd: nothing is unpacked in a run."""
    text = """d = DequantizeLinear(k, t, u) q = QuantizeLinear(x, t, u)
        h = DequantizeLinear(q, t, u) c = Add(h, d) p = QuantizeLinear(c, t, u)
        y = DequantizeLinear(p, t, u)"""
    constants = {"k": np.full(8, 9, np.uint8), "t": np.float32(0.05), "u": np.uint8(128)}
    remarks = fuse_weights(ir.from_proto(text_model(text, constants, {"x": (1, ["n", 8])})))
    assert [remark.outcome for remark in remarks] == ["note"]


CASES = text_cases(Path(__file__).with_name("cases.txt"))
PAGE = Path(__file__).parents[3] / "docs" / "dq-matmulnbits-fusion.md"
RANDOM = np.random.default_rng(0)


def uint4(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 16, shape).astype(ml_dtypes.uint4)


def scales(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.01, 0.02, shape).astype(np.float32)


LAW_CONSTANTS = {
    "w": uint4(64, 16),
    "s": scales(2, 16),
    "s8": scales(8, 16),
    "table": uint4(17000, 64),
    "tables": scales(17000, 2),
    "rows": np.int64([3, 0, 5]),
    "bias": scales(16),
    "kernel": np.int8(RANDOM.integers(-9, 9, (8, 64, 3))),
    "one": np.float32(0.5),
    "filter": np.int8(RANDOM.integers(-127, 127, (8, 8, 3, 3))),
    "filters": scales(8),
    "zeros": np.zeros(8, np.int8),
    "bias8": scales(8),
    "fine": np.float32(1e-3),
    "rows3": scales(3, 1),
    "deep": scales(1, 1, 16),
    "middle": np.uint8(128),
}
CONSTANTS = {
    "w": np.ones((8, 64), np.uint8),
    "floats": np.ones((8, 64), np.float32),
    "s": np.ones((8, 2), np.float32),
    "z": np.zeros((8, 2), np.uint8),
    "wide": np.ones((8, 64), np.int32),
    "one": np.float32(0.5),
    "offset": np.int32(3),
    "filter": np.ones((8, 64, 3), np.int8),
    "middle": np.uint8(128),
}


def model_of_case(name: str, known: Mapping[str, np.ndarray]) -> ir.Model:
    case = CASES[name]
    dims = case.settings["x"].split(", ") if "x" in case.settings else None
    shape = dims and [int(dim) if dim.isdigit() else dim for dim in dims]
    named = set(re.findall(r"\w+", case.nodes)) - set(re.findall(r"(\w+) =", case.nodes))
    constants = {key: known[key] for key in known.keys() & named}
    inputs = {"x": (1, shape)} if "x" in named else {}
    return ir.from_proto(text_model(case.nodes, constants, inputs))


RULES = [name for name, case in CASES.items() if {"law", "beside"} & case.settings.keys()]


@pytest.mark.parametrize("name", [name for name in CASES if name not in RULES])
def test_names_why_it_refuses(name):
    remark = refused(model_of_case(name, CONSTANTS))
    CASES[name].expect(f"{remark.partition(':')[0]}: {remark[-7:-1]}")


@pytest.mark.parametrize("name", RULES)
def test_each_rule(name):
    before, after = (model_of_case(name, LAW_CONSTANTS) for _ in range(2))
    fuse_weights(after, FusionOptions(**FLOAT))
    CASES[name].expect(" ".join(op_types(after)))
    shape = map(int, CASES[name].settings.get("x", "3, 64").split(", "))
    feeds = {"x": scales(*shape)} if before.graph.inputs else {}
    assert_same_outputs(after, before, feeds, rtol=1e-5, atol=1e-5)


def test_the_page_has_a_case_of_each_rule():
    assert_laws_on_page(PAGE, (matmul_rules, gather_rule), CASES, str)


def test_a_stale_annotation_decides_nothing():
    """Of a value that a node makes, what the file says of its shape is checked by nobody."""
    codes = Quantized((64, 32), "uint4", 0, 32)
    text = f"""h = Reshape (x, s)  d = DequantizeLinear {codes.node("w")[16:]}
        m = MatMul (h, d)  y = Add (m, rows)"""
    rows = onnx.numpy_helper.from_array(np.ones((1, 1, 32), np.float32), "rows")
    constants = [*codes.tensors("w", np.random.default_rng(0)), rows]
    proto = text_model(text, constants, {"x": (1, None), "s": (7, ["r"])})
    stale = onnx.helper.make_tensor_value_info("h", 1, [1, 3, 64])
    proto.graph.value_info.append(stale)
    proto.graph.output[0].ClearField("type")
    after = ir.from_proto(proto)
    fuse_weights(after, FusionOptions(**FLOAT))
    assert "DequantizeLinear" not in op_types(after)
    fused = ir.to_proto(after)
    for model in (proto, fused):  # onnxruntime plans its memory by them
        model.graph.value_info.clear()
    for shape in ([1, 3, 64], [64]):
        feeds = {"x": scales(*shape), "s": np.array(shape)}
        assert_same_outputs(fused, proto, feeds, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("consumer", ["MatMul (x, f)", "Gather (f, i)"])
@pytest.mark.parametrize("slow", ["fuse", "float"])
@pytest.mark.parametrize("n", [32, 33])
@pytest.mark.parametrize("widened", ["Cast <to = 1>", "Identity"])
@pytest.mark.parametrize("scale", [0.15, 900])
def test_products_beyond_float16_overflow_as_in_the_graph(consumer, slow, n, widened, scale):
    rng, wide = np.random.default_rng(0), "Cast" in widened
    kind, dtype = (1, np.float32) if wide else (10, np.float16)
    # Of these codes no product is rounded to float16.
    codes = (1 << rng.integers(0, 8, (64, n))).astype(np.uint8)
    scales = (scale * rng.uniform(0.7, 1.3, (2, n))).astype(np.float16)
    text = f"""d = DequantizeLinear <axis = 0, block_size = 32> (w, s)
        f = {widened} (d)  y = {consumer}"""
    inputs = {"x": (kind, ["m", 64]), "i": (7, ["k"])}
    proto = text_model(text, {"w": codes, "s": scales}, inputs, output_type=kind)
    before, after = ir.from_proto(proto), ir.from_proto(proto)
    fuse_weights(after, FusionOptions(accuracy_level=0, slow_kernels=slow))
    assert slow == "fuse" or op_types(after) != op_types(before)
    x = np.abs(rng.standard_normal((3, 64))).astype(dtype)
    feeds = {"x": x, "i": np.array([3, 63])}
    (expected,), (actual,) = run(before, feeds), run(after, feeds)
    assert np.isinf(expected).any() == (scale == 900)
    exact = consumer.startswith("Gather")
    np.testing.assert_allclose(actual, expected, rtol=0 if exact else 1e-5 if wide else 2e-3)


def test_scales_that_a_cast_rounds_are_refused():
    text = """c = Cast <to = 10> (s)  d = DequantizeLinear <axis = 0, block_size = 32> (w, c)
        y = MatMul (x, d)"""
    weights = {"w": np.ones((64, 32), np.uint8), "s": np.ones((2, 32), np.float32)}
    proto = text_model(text, weights, {"x": (10, ["m", 64])}, output_type=10)
    assert "scale 's' is rounded by a Cast" in refused(ir.from_proto(proto))


DQ_IN_FUNCTION = f"""w = Constant <value = uint8[32, 32] {{{", ".join(["7"] * 1024)}}}> ()
    s = Constant <value_float = 0.5> ()  d = DequantizeLinear (w, s)  b = MatMul (a, d)"""


@pytest.mark.parametrize(
    ("domain", "name", "opset", "nodes", "words"),
    [
        ("local", "F", 21, "b = Neg (a)", None),
        ("local", "F", 13, "b = Softmax (a)", "imports opset 13 of '', and the model 21"),
        ("", "Relu", 21, "b = Neg (a)", "is of a domain whose operators"),
        ("local", "F", 13, DQ_IN_FUNCTION, "imports opset 13 of '', and the model 21"),
    ],
)
def test_a_function_that_is_not_inlined_costs_the_rest_nothing(
    domain, name, opset, nodes, words
):
    call = f"{domain}.{name}" if domain else name
    text = f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "local": 1]>
        g (float[m, 64] x) => (float[m, n] y) {{
        d = DequantizeLinear <axis = 0, block_size = 32> (w, s)
        h = MatMul (x, d)
        y = {call} (h) }}
        <domain: "{domain}", opset_import: ["": {opset}]> {name} (a) => (b) {{ {nodes} }}"""
    proto = onnx.parser.parse_model(text)
    add_weights(proto.graph, {"w": np.ones((64, 32), np.uint8), "s": np.ones((2, 32), "f")})
    before, after = ir.from_proto(proto), ir.from_proto(proto)
    remarks = fuse_weights(after)
    assert [r.outcome for r in remarks] == ["fired"] if words is None else ["fired", "refused"]
    assert words is None or words in next(r.reason for r in remarks if r.outcome == "refused")
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}
    assert_same_outputs(after, before, feeds, atol=1e-3)


def test_a_dequantized_activation_is_no_candidate():
    inputs = {"x": (2, [4])}
    model = text_model("y = DequantizeLinear (x, s)", {"s": np.float32(0.5)}, inputs)
    assert fuse_weights(ir.from_proto(model)) == []


def test_a_model_without_codes_keeps_its_functions():
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21, "local": 1]>
        g (float[m] x) => (float[m] y) { y = local.F (x) }
        <domain: "local", opset_import: ["": 21]> F (a) => (b) { b = Neg (a) }""")
    assert fuse_weights(model) == []
    assert model.functions
