# SPDX-License-Identifier: MIT
"""Round-to-nearest, against its own definition; and the QDQ graphs, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ortplugins.quantization import quantize_blocks, quantize_matmuls
from rewrite_rules.remarks import Outcome

LAYOUTS = pytest.mark.parametrize("layout", ["axis0", "transposed"])
FORMATS = pytest.mark.parametrize("bits", [4, 8])
SYMMETRIES = pytest.mark.parametrize("symmetric", [True, False])

weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=70),
    elements=st.floats(-(2.0**99), 2.0**99, width=32),
)
grids = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([2, 4, 8]),
        "block_size": st.sampled_from([1, 7, 16, 32, 128]),
        "symmetric": st.booleans(),
    }
)


def dequantize(codes, scales, zero_points, block_size):
    """What DequantizeLinear computes, in float64."""
    block = np.arange(len(codes)) // block_size
    zeros = 0 if zero_points is None else zero_points[block].astype(np.float64)
    return (codes - zeros) * scales[block].astype(np.float64)


@given(weight=weights, grid=grids)
def test_the_error_is_at_most_half_a_step(weight, grid):
    codes, scales, zero_points = quantize_blocks(weight, **grid)
    block_size, bits = grid["block_size"], grid["bits"]
    error = abs(dequantize(codes, scales, zero_points, block_size) - weight)
    steps = error / abs(scales[np.arange(len(codes)) // block_size])
    allowed = np.full(codes.shape, 0.5)
    if grid["symmetric"]:  # the opposite of the extreme has no code
        allowed[codes == 2 ** (bits - 1) - 1] = 1
    assert (steps <= allowed + 1e-4).all()


@given(weight=weights, grid=grids)
def test_codes_scales_and_zero_points_have_their_shapes_and_types(weight, grid):
    codes, scales, zero_points = quantize_blocks(weight, **grid)
    k, n = weight.shape
    expected = (-(-k // grid["block_size"]), n)
    assert codes.shape == (k, n)
    assert (scales.shape, scales.dtype) == (expected, np.float32)
    low = -(2 ** (grid["bits"] - 1)) if grid["symmetric"] else 0
    assert low <= codes.min() <= codes.max() < low + 2 ** grid["bits"]
    if grid["symmetric"]:
        assert (codes.dtype, zero_points) == (np.int8, None)
    else:
        assert (codes.dtype, zero_points.dtype) == (np.uint8, np.uint8)
        assert zero_points.shape == expected
        assert zero_points.max() < 2 ** grid["bits"]


@given(weight=weights, grid=grids, zeros=st.randoms(use_true_random=False))
def test_zeros_are_exact(weight, grid, zeros):
    weight[zeros.randrange(len(weight))] = 0
    result = dequantize(*quantize_blocks(weight, **grid), grid["block_size"])
    assert (result[weight == 0] == 0).all()


@SYMMETRIES
def test_blocks_of_zeros_and_subnormals_divide_by_no_zero(symmetric):
    weight = np.zeros((64, 2), np.float32)
    weight[:32, 1] = 1e-45
    with np.errstate(all="raise", under="ignore"):
        codes, scales, zero_points = quantize_blocks(weight, symmetric=symmetric)
    assert (scales > 0).all()
    assert not dequantize(codes, scales, zero_points, 32).any()


def test_the_signed_extreme_gets_the_longer_end():
    weight = np.array([[3.5, -4.0], [-7.0, 4.0], [8.0, -8.0]], np.float32)
    codes, scales, zero_points = quantize_blocks(weight, block_size=4)
    assert scales.tolist() == [[-1.0, 1.0]]
    assert codes.tolist() == [[-4, -4], [7, 4], [-8, -8]]
    assert zero_points is None


def test_an_asymmetric_range_holds_zero():
    weight = np.linspace(5, 6, 32, dtype=np.float32)[:, None]
    codes, scales, zero_points = quantize_blocks(weight, symmetric=False)
    assert zero_points.tolist() == [[0]]
    np.testing.assert_allclose(dequantize(codes, scales, zero_points, 32), weight, atol=0.2)


def test_an_asymmetric_range_may_be_wider_than_float32():
    weight = np.array([[3e38], [-3e38]], np.float32)
    _, scales, _ = quantize_blocks(weight, symmetric=False)
    assert np.isfinite(scales).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@SYMMETRIES
def test_weights_that_are_not_finite_raise(bad, symmetric):
    weight = np.ones((40, 3), np.float32)
    weight[37, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_blocks(weight, symmetric=symmetric)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"block_size": 0}, "block_size is 0"),
        ({"weight": np.ones(4, np.float32)}, r"\[4\]: \[K, N\] is expected"),
    ],
)
def test_arguments_out_of_range_raise(change, message):
    arguments = {"weight": np.ones((4, 4), np.float32), **change}
    with pytest.raises(ValueError, match=message):
        quantize_blocks(**arguments)


def matmul_model(weight: np.ndarray, *, opset: int = 21) -> ir.Model:
    """y = x @ W; z = (x + x) @ W: one weight, two MatMuls."""
    k, n = weight.shape
    return ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": {opset}]>
        shared (float[b, {k}] x) => (float[b, {n}] y, float[b, {n}] z) {{
            [first] y = MatMul(x, W)
            twice = Add(x, x)
            [second] z = MatMul(twice, W)
        }}""",
        initializers=[ir.tensor(weight, name="W")],
    )


def run(model: ir.Model, folder: Path, x: np.ndarray) -> list[np.ndarray]:
    path = folder / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data", size_threshold_bytes=0)
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@LAYOUTS
@FORMATS
@SYMMETRIES
@settings(max_examples=8, deadline=None)
@given(
    k=st.integers(1, 70),
    n=st.integers(1, 40),
    block_size=st.sampled_from([16, 32, 33]),
    seed=st.integers(0, 99),
)
def test_the_graph_computes_what_numpy_does(
    tmp_path_factory, layout, bits, symmetric, k, n, block_size, seed
):
    random = np.random.default_rng(seed)
    weight = random.normal(size=(k, n)).astype(np.float32)
    x = random.normal(size=(3, k)).astype(np.float32)
    grid = {"bits": bits, "block_size": block_size, "symmetric": symmetric}
    model = matmul_model(weight)
    quantize_matmuls(model, layout=layout, **grid)
    y, z = run(model, tmp_path_factory.mktemp("model"), x)
    expected = x @ dequantize(*quantize_blocks(weight, **grid), block_size)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(z, 2 * expected, rtol=1e-4, atol=1e-4)


@LAYOUTS
def test_large_weights_are_quantised_strip_by_strip(tmp_path, monkeypatch, layout):
    monkeypatch.setattr("ortplugins.quantization.quantized_tensors._STRIP_BYTES", 4096)
    random = np.random.default_rng(0)
    weight = random.normal(size=(99, 77)).astype(np.float32)
    ir.save(matmul_model(weight), tmp_path / "float.onnx", external_data="float.data")
    model = ir.load(tmp_path / "float.onnx")
    quantize_matmuls(model, symmetric=False, layout=layout)
    x = np.eye(99, dtype=np.float32)
    expected = dequantize(*quantize_blocks(weight, symmetric=False), 32)
    np.testing.assert_allclose(run(model, tmp_path, x)[0], expected, rtol=1e-6)


@LAYOUTS
def test_a_shared_weight_is_quantised_once_and_its_floats_go(layout):
    model = matmul_model(np.ones((64, 8), np.float32))
    remarks = quantize_matmuls(model, layout=layout)
    kinds = [node.op_type for node in model.graph]
    dequantized = ["DequantizeLinear"] + ["Transpose"] * (layout == "transposed")
    assert kinds == [*dequantized, "MatMul", "Add", "MatMul"]
    suffix = "_transposed" if layout == "transposed" else ""
    name = f"W.int4_block32{suffix}"
    assert set(model.graph.initializers) == {name, f"{name}_scales"}
    assert [(r.node, r.outcome) for r in remarks] == [
        ("first", Outcome.FIRED),
        ("second", Outcome.FIRED),
    ]


def test_excluded_nodes_keep_their_weight():
    model = matmul_model(np.ones((64, 8), np.float32))
    remarks = quantize_matmuls(model, nodes_to_exclude=["second"])
    assert [r.outcome for r in remarks] == [Outcome.FIRED, Outcome.REFUSED]
    assert "W" in model.graph.initializers
    assert [node.op_type for node in model.graph].count("DequantizeLinear") == 1
    quantize_matmuls(model)
    assert [node.op_type for node in model.graph].count("DequantizeLinear") == 1
    assert "W" not in model.graph.initializers


def test_unknown_names_and_old_opsets_raise():
    weight = np.ones((64, 8), np.float32)
    with pytest.raises(ValueError, match="'frist'; the closest are 'first'"):
        quantize_matmuls(matmul_model(weight), nodes_to_exclude=["frist"])
    with pytest.raises(ValueError, match=r"opset 17.*convert_version\(model, 21\)"):
        quantize_matmuls(matmul_model(weight, opset=17))
    with pytest.raises(ValueError, match="layout is 'axis1'"):
        quantize_matmuls(matmul_model(weight), layout="axis1")


def test_a_bad_weight_raises_with_its_name_when_saved(tmp_path):
    weight = np.ones((64, 64), np.float32)
    weight[3, 3] = np.nan
    model = matmul_model(weight)
    quantize_matmuls(model)
    with pytest.raises(ValueError, match=r"weight 'W' cannot be quantised.*NaN"):
        ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")


def test_weights_that_may_change_or_are_no_matrices_are_refused():
    ones = np.ones((4, 4), np.float32)
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]>
        refusals (float[2, 4] x, float[4, 4] fed) => (float[2, 4] y) {
            [a] u = MatMul(x, fed)
            [b] v = MatMul(u, half)
            [c] w = MatMul(v, deep)
            t = Transpose(w)
            [d] y = MatMul(w, t)
        }""",
        initializers=[
            ir.tensor(ones, name="fed"),
            ir.tensor(ones.astype(np.float16), name="half"),
            ir.tensor(ones[None], name="deep"),
        ],
    )
    remarks = {r.node: r.reason for r in quantize_matmuls(model)}
    assert list(remarks) == ["a", "b", "c"]
    assert "graph input" in remarks["a"]
    assert "float16" in remarks["b"]
    assert "[1, 4, 4]" in remarks["c"]
    assert all(node.op_type != "DequantizeLinear" for node in model.graph)
