# SPDX-License-Identifier: MIT
"""ortplugins.quantization.int4 against ModelOpt's: values, signatures, what breaks there.

The stored values are ModelOpt's own, see make_int4_golden.py.
"""

import inspect
import re
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from builders.dequantized_models import run as run_model
from builders.text_models import proto_of
from data import make_int4_golden as golden
from data.make_int4_golden import numbers, packed
from onnx import TensorProto, numpy_helper

import ortplugins
from ortplugins.errors import CalibrationError, ModelFileError, QuantizationError
from ortplugins.quantization import int4

METHODS = ("rtn", "rtn_dq", "awq_lite", "awq_clip", "awq_full")


def samples():
    # Of different lengths: ModelOpt puts them together before it divides them into tokens.
    return [{"ids": np.arange(n).reshape(1, n) % 20} for n in (5, 9, 7)]


def run(proto, *, exact=True):
    # onnxruntime's own fusion rounds activations to int8.
    return run_model(proto, samples()[1], optimised=not exact)[0]


def relative_error(result, expected):
    return np.linalg.norm(result - expected) / np.linalg.norm(expected)


def products(proto):
    """Bits of each product's weight by the node's name; 32 for float."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    bits = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT8: 8}
    found = {}
    for node in proto.graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            maker = makers.get(node.input[1])
            if maker is not None and maker.op_type == "Transpose":
                maker = makers[maker.input[0]]
            kind = None if maker is None else types.get(maker.input[0])
            if maker is not None and kind is None:  # QuantizeLinear of the float weight
                inner = makers[maker.input[0]]
                given = [a.i for a in inner.attribute if a.name == "output_dtype"]
                kind = given[0] if given else types[inner.input[2]]
            found[node.name] = 32 if kind is None else bits[kind]
    return found


# Values


@pytest.mark.parametrize("make", golden.DIGESTED, ids=lambda make: make.__name__)
def test_values_are_modelopts_bit_for_bit(make):
    stored = golden.load()[0]
    found = golden.everything(int4, [make])
    names = {name for name in stored if name.startswith(f"{make.__name__}:")}
    refused = {name for name in names if ": mixed " in name}  # enable_mixed_quant
    expected = {name: stored[name] for name in names - refused}
    assert {name: golden.digest(array) for name, array in found.items()} == expected


@pytest.mark.parametrize("make", golden.KEPT, ids=lambda make: make.__name__)
def test_statistics_and_searches_are_modelopts(make):
    # Their last digit depends on the processor, hence the tolerance.
    stored = golden.load()[1]
    found = golden.everything(int4, [make])
    assert found.keys() == {n for n in stored if n.startswith(f"{make.__name__}:")}
    for name, array in found.items():
        tolerance = 2e-3 if stored[name].dtype == np.float16 else 1e-5
        np.testing.assert_allclose(array, stored[name], tolerance, 1e-7, err_msg=name)
        assert array.dtype == stored[name].dtype


# Of ModelOpt's documentation of int4; and what nvidia-modelopt 0.47.0 has besides.
PAGE = {
    name: rest.removesuffix(")")
    for line in golden.SIGNATURES.read_text(encoding="utf-8").splitlines()
    for name, _, rest in [line.partition("(")]
}
LATER = {
    "dq_tensor": {"quantize_axis=0"},
    "find_scales": {"quantize_axis=0", "num_bits=4"},
    "get_parent_child_nodes_map": {"nodes_to_exclude=()"},
    "quant_tensor": {"quantize_axis=0", "num_bits=4"},
    "quantize_rtn": {"nodes_to_exclude=()", "**kwargs"},
    "rtn": {"quantize_axis=0", "num_bits=4"},
    "run_awq_scale_search_per_node": {"layer_info=None"},
}


def words(name: str) -> list[str]:
    """Parameters as the page writes them."""
    found = []
    for parameter in inspect.signature(getattr(int4, name)).parameters.values():
        default = parameter.default
        if name == "quantize_rtn" and parameter.name in ("gemm_io_type", "block_size"):
            default = parameter.empty  # 0.47.0 has no gemm_io_type; an error says what misses
        elif isinstance(default, tuple) and default:
            default = list(default)
        word = "**" * (parameter.kind is parameter.VAR_KEYWORD) + parameter.name
        found.append(word if default is parameter.empty else f"{word}={default!r}")
    return found


@pytest.mark.parametrize("name", PAGE)
def test_positional_arguments_are_the_pages_and_later_ones_keywords(name):
    later = LATER.get(name, set())
    assert ", ".join(w for w in words(name) if w not in later) == PAGE[name]
    assert later <= set(words(name))
    for parameter in inspect.signature(getattr(int4, name)).parameters.values():
        keyword = any(word.startswith(f"{parameter.name}=") for word in later)
        optional = name == "get_parent_child_nodes_map"  # 0.47.0 has it there, too
        assert optional or keyword == (parameter.kind is parameter.KEYWORD_ONLY)
    assert name in int4.__all__


W, X = numbers(1, 64, 8), numbers(2, 16, 64)
PACK = [entry[:4] for entry in [packed("W", W)]]
GEMM = proto_of("g (float[T, 64] x) => (float[T, 8] y) { [mm] y = MatMul(x, W) }", {"W": W})


def test_a_wa_pack_of_the_page_has_no_names():
    helpers, _ = search_per_node(PACK, [{"x": X}])
    named, _ = search_per_node([packed("W", W)], [{"x": X}])
    np.testing.assert_array_equal(helpers[0].best_scale, named[0].best_scale)
    assert int4.get_act_to_weight_map_and_act_to_wa_pack_map(PACK)[0] == {"x": [0]}
    assert [
        n.name for n in int4.get_parent_child_nodes_map(GEMM.graph, PACK)[0]["root_0"]
    ] == ["mm"]


def test_rtn_writes_q_and_dq_unless_dq_alone_is_asked_for():
    both = int4.quantize_rtn(GEMM, TensorProto.FLOAT, 32)
    alone = int4.quantize_rtn(GEMM, TensorProto.FLOAT, 32, True)
    kinds = ([node.op_type for node in proto.graph.node] for proto in (both, alone))
    assert [*kinds] == [
        ["QuantizeLinear", "DequantizeLinear", "MatMul"],
        ["DequantizeLinear", "MatMul"],
    ]
    feed = {"x": X}
    np.testing.assert_array_equal(run_model(both, feed)[0], run_model(alone, feed)[0])
    later = int4.quantize_rtn(onnx_model=GEMM, block_size=32, dq_only=True)
    assert later == alone
    with pytest.raises(
        QuantizationError, match="gemm_io_type is FLOAT16, but weight 'W' is FLOAT"
    ):
        int4.quantize_rtn(GEMM, TensorProto.FLOAT16, 32)
    with pytest.raises(TypeError, match="block_size, the third argument"):
        int4.quantize_rtn(GEMM, 32)
    with pytest.raises(QuantizationError, match="reduce_across_tp"):
        int4.get_scale(abs(X).mean(0), abs(W).mean(1), 0.5, True)


# Where ModelOpt's primitives are wrong


def test_ranges_of_zero_points_include_0_and_do_not_wrap():
    w = np.linspace(5, 6, 64, dtype=np.float32).reshape(32, 2)
    for weights in (w, -w):
        codes, scales, zeros = int4.quant_tensor(weights, 16, use_zero_point=True)
        error = int4.dq_tensor(codes, scales, 16, zp=zeros) - weights
        assert abs(error).max() <= scales.max() / 2 + 1e-6
    w = numbers(1, 40, 3)
    codes, scales, zeros = int4.quant_tensor(w, 8, use_zero_point=True, num_bits=8)
    assert codes.dtype == np.uint8
    error = int4.dq_tensor(codes, scales, 8, zp=zeros) - w
    assert abs(error).max() <= scales.max() * 0.51


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: int4.find_scales(w, 8, num_bits=3), "bits is 3"),
        (lambda w: int4.find_scales(w, 0), "block_size is 0"),
        (lambda w: int4.rtn(w, w[:5], 8), "expected 3 blocks of 8 along axis 0"),
    ],
)
def test_bad_arguments_of_primitives_are_named(call, message):
    with pytest.raises(QuantizationError, match=re.escape(message)):
        call(numbers(1, 24, 6))


# The searches


def search_per_node(pack, inputs, **kwargs):
    arguments = {
        "session": golden.Session(),
        "awq_lite": [None] * len(pack),
        "inputs": inputs,
        "tqdm_msg_append_str": "",
        "enable_weight_clipping": False,
        "enable_fast_path_using_high_sysram": False,
        "output_data": [],
        "clip_alphas": {},
    }
    return int4.run_awq_scale_search_per_node(
        pack, "model.onnx", 16, False, **(arguments | kwargs)
    )


def test_samples_of_different_lengths_are_searched_per_node_and_per_subgraph():
    pack = [packed("a", numbers(2, 48, 6)), packed("b", numbers(3, 48, 9), transposed=True)]
    x = numbers(1, 1, 30, 48)
    parts, whole = [{"x": x[:, :13]}, {"x": x[:, 13:]}], [{"x": x}]
    for inputs in (parts, whole):
        maps = int4.get_act_to_weight_map_and_act_to_wa_pack_map(pack)
        assert maps[0] == {"x": [0, 1]}
        assert [list(shape) for shape in maps[1]["x"]] == [[48, 6], [9, 48]]
        found = int4.run_awq_scale_search_per_subgraph(
            pack, *maps, "m.onnx", 16, False, golden.Session(), [None, None], inputs, ""
        )
        assert found[0].best_scale is found[1].best_scale
        if inputs is parts:
            first = found[0].best_scale
    np.testing.assert_array_equal(first, found[0].best_scale)
    per_node = [search_per_node(pack, inputs)[0][1].best_alpha for inputs in (parts, whole)]
    assert per_node[0] == per_node[1]


def test_clips_are_those_of_the_scaled_weight():
    w, x = numbers(1, 48, 6), numbers(2, 1, 30, 48)
    pack, clipping = [packed("a", w)], {"enable_weight_clipping": True}
    (helper,), clips = search_per_node(pack, [{"x": x}], **clipping)
    scaled = w * helper.best_scale[:, None]
    expected = int4.AWQClipHelper(scaled, 16)
    int4.clip_search(x / helper.best_scale, scaled, expected)
    np.testing.assert_array_equal(clips["a"], expected.best_alpha)
    assert (clips["a"] < 1).any()


def test_parents_and_their_products():
    text = """g (float[4, 8] x, float[4, 4] other) => (float[4, 4] y) {
        [s] a, b = Split <axis = 1, num_outputs = 2> (x)
        [m1] p = MatMul (a, w1)
        [m2] q = MatMul (b, w2)
        [m3] r = MatMul (other, a)
        [m4] t = MatMul (other, w2)
        [m5] u = MatMul (a, w2)
        y = Sum (p, q, r, t, u)
    }"""
    graph = proto_of(text, dict.fromkeys(("w1", "w2"), numbers(1, 4, 4))).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    pack = [
        (SimpleNamespace(name=activation), weights[weight], False, 1)
        for activation, weight in (("a", "w1"), ("b", "w2"), ("other", "w2"))
    ]
    children, consumers = int4.get_parent_child_nodes_map(graph, pack, ["m5"])
    names = {parent: [node.name for node in nodes] for parent, nodes in children.items()}
    assert names == {"s": ["m1", "m2"], "root_0": ["m4"]}
    assert [node.name for node in consumers["a"]] == ["m1", "m3", "m5"]


# quantize


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 16},
        {"block_size": -1},
        {"use_zero_point": True, "block_size": 8},
        {"use_column_major": True, "block_size": 16},
        {"gather_quantize_axis": -1, "gather_block_size": 16},
        {"layers_8bit": "v_proj, /model/layers.0/mlp"},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_every_method_makes_a_model_that_runs(method, options):
    proto = golden.model()
    before = proto.SerializeToString()
    result = int4.quantize(proto, method, samples(), **options)
    assert isinstance(result, onnx.ModelProto)
    assert proto.SerializeToString() == before
    onnx.checker.check_model(result)
    bits = products(result)
    assert bits.pop("/lm_head/MatMul") == 32
    assert set(bits.values()) <= {4, 8} and len(bits) == 3
    names = {tensor.name for tensor in result.graph.initializer}
    zeros = any(name.endswith("_zero_points") for name in names)
    assert zeros == options.get("use_zero_point", False)
    tables = any(name.startswith("table.") for name in names)
    assert tables == ("gather_quantize_axis" in options)
    assert relative_error(run(result), run(proto)) < 0.25
    assert relative_error(run(result, exact=False), run(proto)) < 0.25


def test_a_path_gives_a_model_that_holds_its_tensors(tmp_path):
    path = tmp_path / "model.onnx"
    outside = {"save_as_external_data": True, "size_threshold": 0, "location": "data"}
    onnx.save(golden.model(), path, **outside)
    result = int4.quantize(path, "rtn_dq", block_size=8, use_external_data_format=True)
    assert all(tensor.data_location == 0 for tensor in result.graph.initializer)
    for file in tmp_path.iterdir():
        file.unlink()
    expected = int4.quantize_rtn(golden.model(), None, 8, nodes_to_exclude=[r"/lm_head"])
    np.testing.assert_array_equal(run(result), run(expected))


def test_float16_codes_are_the_nearest():
    w = numbers(3, 256, 64, dtype="float16")
    text = "g (float16[s, 256] x) => (float16[s, 64] y) { y = MatMul (x, w) }"
    result = int4.quantize(proto_of(text, {"w": w}), "rtn_dq", block_size=32)
    found = golden.quantized(result)
    (scales,) = (
        numpy_helper.to_array(t) for t in result.graph.initializer if "scales" in t.name
    )
    theirs = int4.find_scales(w, 32)[0]
    np.testing.assert_array_equal(scales, theirs)
    nearest = np.rint(w / np.repeat(theirs, 32, axis=0).astype(np.float64)).clip(-8, 7)
    np.testing.assert_array_equal(found["w_i4"], nearest)
    assert 0 < (int4.rtn(w, theirs, 32) != nearest).mean() < 0.01  # ModelOpt's


# Keywords


def test_nodes_are_excluded_by_the_start_of_their_names(monkeypatch):
    proto = golden.model()
    for pattern, kept in {
        "/lm_head": {"/lm_head/MatMul"},
        "lm_head": set(),
        ".*q_proj": {"/model/layers.0/attn/q_proj/MatMul"},
        r"(?i)/MODEL/layers\.0/(mlp|attn/v)": {
            "/model/layers.0/mlp/Gemm",
            "/model/layers.0/attn/v_proj/MatMul",
        },
    }.items():
        bits = products(int4.quantize(proto, "rtn", nodes_to_exclude=[pattern]))
        assert {name for name, width in bits.items() if width == 32} == kept
    assert 32 not in products(int4.quantize(proto, "rtn", nodes_to_exclude=None)).values()
    names = ("/a[0]/MatMul", "/a0/MatMul")  # one would be a glob that means the other
    for node, name in zip(proto.graph.node[2:4], names, strict=True):
        node.name = name
    bits = products(int4.quantize(proto, "rtn", nodes_to_exclude=[r"/a\[0\]"]))
    assert (bits[names[0]], bits[names[1]]) == (32, 4)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"awqlite_alpha_steps": 0.1}, TypeError, "did you mean 'awqlite_alpha_step'"),
        ({"bits": 8}, TypeError, "there are gather_quantize_axis, "),
        ({"calibration_method": "gptq"}, QuantizationError, "quantize has GPTQ as well"),
        ({"calibration_method": "rtn_trt"}, QuantizationError, "one of rtn, rtn_dq"),
        ({"gather_quantize_axis": 0}, QuantizationError, "gather_quantize_axis is 0"),
        ({"force_fp16": True}, QuantizationError, "convert the model to float16 before"),
        ({"enable_mixed_quant": True}, QuantizationError, "name the layers in layers_8bit"),
        ({"layers_8bit": "lm_heads"}, QuantizationError, "matches no node"),
        ({"block_size": 0}, QuantizationError, "block_size is 0"),
        ({"nodes_to_exclude": "/lm_head"}, QuantizationError, "nodes_to_exclude is a string"),
        ({"nodes_to_exclude": ["("]}, QuantizationError, "not a regular expression"),
        ({"nodes_to_exclude": [".*"]}, ModelFileError, "nothing to quantise"),
        ({"calibration_eps": ["gpu"]}, QuantizationError, "calibration_eps has 'gpu'"),
        ({"calibration_data_reader": [{"id": 1}]}, CalibrationError, "did you mean 'ids'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_is_refused(kwargs, error, message):
    arguments = {"calibration_method": "awq_lite", "calibration_data_reader": samples()}
    with pytest.raises(error, match=re.escape(message)):
        int4.quantize(golden.model(), **(arguments | kwargs))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"awqclip_bsz_col": 512},
        {"enable_fast_path_using_high_sysram": True},
        {"input_shapes_profile": [{}]},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_what_has_no_effect_says_so(kwargs):
    (name,) = kwargs
    with pytest.warns(ortplugins.OrtpluginsWarning, match=f"{name} has no effect") as seen:
        int4.quantize(golden.model(), "rtn", **kwargs)
    assert seen[0].filename == __file__


def test_providers_that_are_missing_are_left_out(monkeypatch):
    available = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    assert int4._providers_of(["cuda:1", "dml:0", "cpu"]) == [
        ("CUDAExecutionProvider", {"device_id": "1"}),
        ("CPUExecutionProvider", {}),
    ]
