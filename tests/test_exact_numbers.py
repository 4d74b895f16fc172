# SPDX-License-Identifier: MIT
"""Each pass leaves the outputs as they were, where one constant is read in two ways."""

import numpy as np
import onnx
import pytest
from builders.dequantized_models import assert_same_outputs

import ortplugins

RNG = np.random.default_rng(0)
MODELS = {
    # The default domain under its other name.
    "shape_of_a_slice": (
        "shape_size_reorder",
        """<ir_version: 8, opset_import: ["ai.onnx": 17]>
        g (float[a, b] x) => (int64[2] y) <int64[1] start = {0}, int64[1] end = {3}> {
            t = Slice(x, start, end)
            y = Shape(t)
        }""",
        {"x": np.zeros((7, 4), np.float32)},
    ),
    "table_read_by_row_and_by_column": (
        "dq_matmulnbits_fusion",
        """<ir_version: 10, opset_import: ["": 21]>
        g (int64[3] i, uint8[64, 64] w) => (float[3, 64] y, float[3, 64] z)
        <float s = {0.1}, uint8 zero = {3}> {
            d = DequantizeLinear(w, s, zero)
            t = Transpose<perm = [1, 0]>(d)
            y = Gather(d, i)
            z = Gather(t, i)
        }""",
        {"i": np.array([1, 5, 9])},
    ),
    "bias_codes_on_two_axes": (
        "mixed_precision_boundaries",
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[3, 3] x) => (float[3, 3] y, float[3, 3] z)
        <int32[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3] s = {1, 10, 100}> {
            rows = DequantizeLinear<axis = 0>(w, s)
            columns = DequantizeLinear<axis = 1>(w, s)
            y = Mul(x, rows)
            z = Mul(x, columns)
        }""",
        {"x": np.ones((3, 3), np.float32)},
    ),
    "bias_codes_with_two_zero_points": (
        "dq_matmulnbits_fusion",
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 64] x, uint8[64, 64] w) => (float[2, 64] y, float[2, 64] z)
        <float s = {0.1}, uint8 a = {3}, uint8 b = {9}, uint8[1] codes = {50}> {
            d = DequantizeLinear(w, s, a)
            first = DequantizeLinear(codes, s, a)
            second = DequantizeLinear(codes, s, b)
            product = MatMul(x, d)
            y = Add(product, first)
            other = MatMul(x, d)
            z = Add(other, second)
        }""",
        {"x": np.ones((2, 64), np.float32)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_stay(name: str):
    pass_name, text, feeds = MODELS[name]
    model = onnx.parser.parse_model(text)
    # Weights are constants, and too long to be written out.
    for value in [value for value in model.graph.input if value.name == "w"]:
        array = RNG.integers(0, 256, (64, 64), np.uint8)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
        model.graph.input.remove(value)
    options = {"dq_matmulnbits_fusion": {"slow_kernels": "fuse"}, "shape_size_reorder": {}}
    settings = options.get(pass_name, {"mode": "float"})
    result = ortplugins.optimize(
        model,
        passes=[pass_name],
        options={f"{pass_name}.{key}": value for key, value in settings.items()},
    )
    assert_same_outputs(result.model, model, feeds, rtol=1e-5)
