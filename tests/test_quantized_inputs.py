# SPDX-License-Identifier: MIT
"""Weights that are quantised for the inputs that they get in the quantised model."""

import numpy as np
import onnx_ir as ir
import pytest
from builders.same_numbers import session
from builders.text_models import model_of, normal

from ortplugins.quantization import quantize

D, TOKENS = 32, 96
OUTPUTS = ("q", "k", "v", "o", "up", "down")


def network() -> ir.Model:
    """Products of every layout; a table and a subgraph without statistics; two late reads."""
    return model_of(
        f"""g (int64[T] ids, float[T, {D}] x)
            => (float[T, {D}] q, float[T, {D}] k, float[T, {D}] v, float[T, {D}] o,
                float[T, {2 * D}] up, float[T, {D}] down) {{
            e = Gather(E, ids) s = Add(e, x)
            [q] q = MatMul(s, Q) [k] k = Gemm <transB = 1> (s, K)
            VT = Transpose(V) [v] v = com.microsoft.FusedMatMul <transB = 1> (s, V)
            [w] w = MatMul(s, VT) qk = Mul(q, k) n = Tanh(qk)
            [o] o = MatMul(n, O) some = ReduceMax <keepdims = 0> (o)
            condition = Greater(some, zero)
            r = If (condition) <
                then_branch = t () => (float[T, {D}] a) {{ [in] a = MatMul(o, S) }},
                else_branch = f () => (float[T, {D}] b) {{ b = Identity(s) }}>
            vw = Add(v, w) sr = Add(r, vw) z = Add(sr, s)
            [up] up = MatMul(z, U) y = Relu(up) [down] down = MatMul(y, W)
        }}""",
        {
            **{name: 0.3 * normal(D, D, seed=seed) for seed, name in enumerate("QKVOS")},
            "E": normal(50, D, seed=6),
            "U": 0.3 * normal(D, 2 * D, seed=7),
            "W": 0.3 * normal(2 * D, D, seed=8),
            "zero": np.zeros((), np.float32),
        },
    )


SAMPLES = [
    {"ids": np.arange(TOKENS // 2) % 50, "x": normal(TOKENS // 2, D, seed=seed)}
    for seed in range(2)
]


def outputs(model: ir.Model) -> dict[str, np.ndarray]:
    """Return each output for all samples together."""
    opened = session(model, optimised=True, accuracy_level=0)
    found = [opened.run(list(OUTPUTS), sample) for sample in SAMPLES]
    return {name: np.concatenate(each) for name, *each in zip(OUTPUTS, *found, strict=True)}


@pytest.mark.parametrize("settings", [
    {"method": "gptq"},
    {"method": "gptq", "bits": 2, "is_symmetric": False, "quant_format": "QDQ_transposed"},
    {"method": "awq_gptq", "block_size": 16, "share_of_8_bits": 0.3},
])  # fmt: skip
def test_reported_errors_are_those_between_the_two_models(settings):
    model = network()
    op_types = ("MatMul", "Gemm", "Gather")
    result = quantize(
        model,
        calibration_data_reader=SAMPLES,
        op_types=op_types,
        quantized_inputs=True,
        **settings,
    )
    floats, quantised = outputs(model), outputs(result.model)
    rows = {row.node: row for row in result.report.nodes}
    assert len(rows) == len(OUTPUTS) + 3
    for name in OUTPUTS:
        difference = np.linalg.norm(quantised[name] - floats[name])
        error = difference / np.linalg.norm(floats[name])
        assert rows[name].output_error == pytest.approx(error, rel=1e-3), name
