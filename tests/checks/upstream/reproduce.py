# SPDX-License-Identifier: MIT
"""Minimal reproductions of defects of other packages; needs onnxruntime, onnx and numpy only.

python reproduce.py NAME prints what is wrong, or "fixed"; docs/onnxruntime-findings.md has
the names.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

RNG = np.random.default_rng(0)
K, N = 64, 6
LEVELS = ort.GraphOptimizationLevel


def parsed(text: str, **tensors: Any) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    for name, value in tensors.items():
        if not isinstance(value, onnx.TensorProto):
            value = onnx.numpy_helper.from_array(value)
        value.name = name
        model.graph.initializer.append(value)
    return model


def codes(dtype: int, *shape: int, bits: int) -> onnx.TensorProto:
    return onnx.helper.make_tensor("", dtype, shape, RNG.integers(0, 1 << bits, shape).ravel())


def run(
    model: onnx.ModelProto, feeds: dict[str, Any], level: Any = LEVELS.ORT_ENABLE_ALL
) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    content = model.SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def two_bits() -> str:
    """2-bit weights whose N is not a multiple of 4, fused by onnxruntime."""
    text = f"""<ir_version: 13, opset_import: ["": 25]>
    g (float[1, {K}] x) => (float[1, {N}] y) {{
        d = DequantizeLinear <axis = 0, block_size = 32> (w, s)  y = MatMul (x, d)
    }}"""
    model = parsed(
        text,
        w=codes(onnx.TensorProto.UINT2, K, N, bits=2),
        s=RNG.random((K // 32, N), np.float32),
    )
    x = {"x": RNG.standard_normal((1, K), np.float32)}
    expected, found = run(model, x, LEVELS.ORT_DISABLE_ALL), run(model, x)
    error = np.abs(expected - found).max() / np.abs(expected).max()
    return f"relative error {error:.2g}" if error > 1e-3 else "fixed"


def outer_weights() -> str:
    """4-bit weights of the main graph that the body of an If dequantises."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[1, {K}] x, bool c) => (float[1, 8] y) {{
        y = If (c) <
            then_branch = one () => (float[1, 8] a) {{
                d = DequantizeLinear <axis = 0, block_size = 32> (w, s)  a = MatMul (x, d)
            }},
            else_branch = two () => (float[1, 8] b) {{
                e = DequantizeLinear <axis = 0, block_size = 32> (w, s)  b = MatMul (x, e)
            }}>
    }}"""
    weight = codes(onnx.TensorProto.UINT4, K, 8, bits=4)
    model = parsed(text, w=weight, s=RNG.random((K // 32, 8), np.float32))
    feeds = {"x": RNG.standard_normal((1, K), np.float32), "c": np.array(True)}
    run(model, feeds, LEVELS.ORT_DISABLE_ALL)
    try:
        run(model, feeds)
    except Exception as error:  # onnxruntime's own classes
        return " ".join(str(error).split())[-120:]
    return "fixed"


def other_output_type() -> str:
    """4-bit weights with float32 scales, dequantised to float16."""
    text = f"""<ir_version: 11, opset_import: ["": 23]>
    g (float16[1, {K}] x) => (float16[1, 8] y) {{
        d = DequantizeLinear <axis = 0, block_size = 32, output_dtype = 10> (w, s)
        y = MatMul (x, d)
    }}"""
    weight = codes(onnx.TensorProto.UINT4, K, 8, bits=4)
    model = parsed(text, w=weight, s=RNG.random((K // 32, 8), np.float32))
    feeds = {"x": RNG.standard_normal((1, K)).astype(np.float16)}
    run(model, feeds, LEVELS.ORT_DISABLE_ALL)
    try:
        run(model, feeds)
    except Exception as error:  # onnxruntime's own classes
        return " ".join(str(error).split())[:120]
    return "fixed"


def out_of_range() -> str:
    """An index behind the last row, in GatherBlockQuantized."""
    text = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    g (int64[1] i) => (float[1, 32] y) {
        y = com.microsoft.GatherBlockQuantized <block_size = 32> (w, i, s)
    }"""
    weight = codes(onnx.TensorProto.UINT4, 4, 32, bits=4)
    model = parsed(text, w=weight, s=np.ones((4, 1), np.float32))
    try:
        found = run(model, {"i": np.array([7])})
    except Exception:  # as Gather does
        return "fixed"
    return f"no error, {sorted(set(found.ravel().tolist()))[:3]}"


def transposed_matrix() -> str:
    """FusedMatMul with transA of a matrix, times a vector."""
    text = f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    g (float[{K}] x, float[{K}, 8] w) => (float[8] y) {{
        y = com.microsoft.FusedMatMul <transA = 1> (w, x)
    }}"""
    feeds = {
        "x": RNG.standard_normal(K, np.float32),
        "w": RNG.standard_normal((K, 8), np.float32),
    }
    found, expected = run(parsed(text), feeds), feeds["w"].T @ feeds["x"]
    error = np.abs(expected - found).max() / np.abs(expected).max()
    return f"relative error {error:.2g}" if error > 1e-3 else "fixed"


def relu_behind() -> str:
    """4-bit weights whose MatMul a Relu follows: unpacked at every run."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[1, {K}] x) => (float[1, 8] y) {{
        d = DequantizeLinear <axis = 0, block_size = 32> (w, s)  m = MatMul (x, d)
        r = Relu (m)  y = Neg (r)
    }}"""
    weight = codes(onnx.TensorProto.UINT4, K, 8, bits=4)
    model = parsed(text, w=weight, s=RNG.random((K // 32, 8), np.float32))
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(folder, "m.onnx"))
        ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        nodes = onnx.load(options.optimized_model_filepath).graph.node
    kinds = [node.op_type for node in nodes]
    return "fixed" if "MatMulNBits" in kinds else ", ".join(kinds)


def named_variable() -> str:
    """onnxscript: the check of a named variable of a pattern."""
    import onnx_ir as ir
    from onnxscript.rewriter import pattern

    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[2] x) => (float[2] y) { y = Neg (x) }"""
    model = ir.from_proto(parsed(text))
    variable = pattern.Var("x", check=lambda *_, **__: False)
    rule = pattern.RewriteRule(lambda op, x: op.Neg(variable), lambda op, x: op.Abs(x))
    rule.apply_to_model(model)
    return "not called" if model.graph.node(0).op_type == "Abs" else "fixed"


FINDINGS = (
    two_bits,
    outer_weights,
    other_output_type,
    out_of_range,
    transposed_matrix,
    relu_behind,
    named_variable,
)

if __name__ == "__main__":
    print({found.__name__: found for found in FINDINGS}[sys.argv[1]]())
