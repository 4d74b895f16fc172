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
LEVELS = ort.GraphOptimizationLevel
# What models read, by name: weights are initializers, the others are fed.
GIVEN = {
    "x": RNG.standard_normal((1, 64), np.float32),
    "half": RNG.standard_normal((1, 64)).astype(np.float16),
    "vector": RNG.standard_normal(64, np.float32),
    "matrix": RNG.standard_normal((64, 8), np.float32),
    "c": np.array(True),
    "w": onnx.helper.make_tensor(
        "w", onnx.TensorProto.UINT4, (64, 32), RNG.integers(0, 16, 2048)
    ),
    "s": RNG.random((2, 32), np.float32),
    "w2": onnx.helper.make_tensor(
        "w2", onnx.TensorProto.UINT2, (64, 6), RNG.integers(0, 4, 384)
    ),
    "s2": RNG.random((2, 6), np.float32),
    "row": np.array([70]),
    "ones": np.ones((64, 1), np.float32),
}
# What onnxruntime refuses with its optimisers, or gives other numbers for than without. Where
# it is wrong without them, too, y is what it should be.
TEXTS = {
    # 2-bit weights whose N is not a multiple of 4.
    "two_bits": """(float[1, 64] x) => (float[1, 6] y) {
        d = DequantizeLinear <axis = 0, block_size = 32> (w2, s2)  y = MatMul (x, d) }""",
    # 4-bit weights of the main graph that the body of an If dequantises.
    "outer_weights": """(float[1, 64] x, bool c) => (float[1, 32] y) {
        y = If (c) <
            then_branch = one () => (float[1, 32] a) {
                d = DequantizeLinear <axis = 0, block_size = 32> (w, s)  a = MatMul (x, d)
            },
            else_branch = two () => (float[1, 32] b) {
                e = DequantizeLinear <axis = 0, block_size = 32> (w, s)  b = MatMul (x, e)
            }> }""",
    # 4-bit weights with float32 scales, dequantised to float16.
    "other_output_type": """(float16[1, 64] half) => (float16[1, 32] y) {
        d = DequantizeLinear <axis = 0, block_size = 32, output_dtype = 10> (w, s)
        y = MatMul (half, d) }""",
    # int8 codes whose floats a Transpose moves.
    "int8_moves": """(float[1, 64] x) => (float[64, 1] y) <float f = {0.1}, int8 z = {0}> {
        q = QuantizeLinear (x, f, z)  d = DequantizeLinear (q, f, z)
        t = Transpose (d)  y = Sin (t) }""",
    # A matrix with transA, times a vector.
    "transposed_matrix": """(float[64] vector, float[64, 8] matrix)
        => (float[8] y, float[8] z) {
        t = Transpose <perm = [1, 0]> (matrix)  y = MatMul (t, vector)
        z = com.microsoft.FusedMatMul <transA = 1> (matrix, vector) }""",
}
OPSETS = {"two_bits": (25, 13), "other_output_type": (23, 11)}


def session_of(text: str, level: Any, opset: int = 21, ir_version: int = 10, file: str = ""):
    """Open the model of a graph's text, with what it reads of GIVEN as initializers."""
    header = f'<ir_version: {ir_version}, opset_import: ["": {opset}, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{header} g {text}")
    fed = {value.name for value in model.graph.input}
    for name in GIVEN.keys() - fed:
        if f"({name}, " in text or f", {name})" in text or f", {name}, " in text:
            given = GIVEN[name]
            is_array = isinstance(given, np.ndarray)
            tensor = onnx.numpy_helper.from_array(given, name) if is_array else given
            model.graph.initializer.append(tensor)
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.optimized_model_filepath = file
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    content = model.SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(text: str, level: Any = LEVELS.ORT_ENABLE_ALL, *versions: int) -> list[Any]:
    session = session_of(text, level, *versions)
    return session.run(None, {value.name: GIVEN[value.name] for value in session.get_inputs()})


def differs(name: str) -> str:
    text, versions = TEXTS[name], OPSETS.get(name, ())
    expected, *_ = run(text, LEVELS.ORT_DISABLE_ALL, *versions)
    try:
        *_, found = run(text, LEVELS.ORT_ENABLE_ALL, *versions)
    except Exception as error:  # onnxruntime's own classes
        return " ".join(str(error).split())[-120:]
    error = np.abs(expected - found).max() / np.abs(expected).max()
    return f"relative error {error:.2g}" if error > 1e-3 else "fixed"


def out_of_range() -> str:
    """An index behind the last row, in GatherBlockQuantized."""
    try:
        (found,) = run("""(int64[1] row) => (float[1, 32] y) {
            y = com.microsoft.GatherBlockQuantized <block_size = 32> (w, row, ones) }""")
    except Exception:  # as Gather does
        return "fixed"
    return f"no error, {sorted(set(found.ravel().tolist()))[:3]}"


def relu_behind() -> str:
    """4-bit weights whose MatMul a Relu follows: unpacked at every run."""
    text = """(float[1, 64] x) => (float[1, 32] y) {
        d = DequantizeLinear <axis = 0, block_size = 32> (w, s)  m = MatMul (x, d)
        r = Relu (m)  y = Neg (r) }"""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "m.onnx"))
        session_of(text, LEVELS.ORT_ENABLE_ALL, file=file)
        kinds = [node.op_type for node in onnx.load(file).graph.node]
    return "fixed" if "MatMulNBits" in kinds else ", ".join(kinds)


def named_variable() -> str:
    """onnxscript: the check of a named variable of a pattern."""
    import onnx_ir as ir
    from onnxscript.rewriter import pattern

    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[2] x) => (float[2] y) { y = Neg (x) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    variable = pattern.Var("x", check=lambda *_, **__: False)
    rule = pattern.RewriteRule(lambda op, x: op.Neg(variable), lambda op, x: op.Abs(x))
    rule.apply_to_model(model)
    return "not called" if model.graph.node(0).op_type == "Abs" else "fixed"


FINDINGS = {name: lambda name=name: differs(name) for name in TEXTS}
FINDINGS |= {found.__name__: found for found in (out_of_range, relu_behind, named_variable)}

if __name__ == "__main__":
    print(FINDINGS[sys.argv[1]]())
