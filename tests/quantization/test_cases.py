# SPDX-License-Identifier: MIT
"""What is quantised, into what, why the rest is not, and what it then computes: cases.txt."""

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import yaml
from builders.dequantized_models import relative_error
from builders.quantized_files import FORMATS, arrays_of, read
from builders.same_numbers import session
from builders.text_cases import TextCase, text_cases
from builders.text_models import Array, T, normal, proto_of, text_model

from ortplugins.quantization import QuantizeReport, quantize
from ortplugins.quantization.weights.report import NodeReport
from ortplugins.quantization.weights.uses import OP_TYPES, WeightUse, find_uses

CASES = text_cases(Path(__file__).with_name("cases.txt"))
ANGLES = np.outer(np.arange(40), 1 / 100 ** np.linspace(0, 1, 16))
SHAPES = {
    "W": (12, 5), "V": (12, 5), "L": (5, 12), "U": (5, 5), "R": (12, 4), "E": (4, 12),
    "T": (12, 4), "B": (2, 12), "S": (4, 12, 12), "P": (12, 12), "Q": (12, 12), "G": (12,),
    "scales": (3, 5), "four": (4,), "five": (5,), **{f"Q{i}": (12, 12) for i in range(5)},
}  # fmt: skip
CONSTANTS = {
    **{name: normal(*shape, seed=ord(name[-1])) for name, shape in SHAPES.items()},
    "codes": np.ones((12, 5), np.int8), "scale": np.float32(1), "two": np.array([2]),
    "axis": np.array([1]), "one": np.array([1]), "three": np.array([1, -1, 12]),
    "COS": np.cos(ANGLES), "SIN": np.sin(ANGLES), "NEAR": np.cos(ANGLES + np.arange(16) / 1e3),
}  # fmt: skip
INPUTS = {
    "x": (T.FLOAT, ["P", 12]), "W": (T.FLOAT, [12, 5]),
    "i": (T.INT64, ["P"]), "f": (T.FLOAT, []),
}  # fmt: skip
SIZES = {"B": 2, "P": 3, "T": 3}


def constant(text: str, name: str) -> Array:
    """``[2, 3]``, or a type and a shape."""
    if text.startswith("["):
        return np.array(yaml.safe_load(text))
    kind, *shape = text.split()
    dtype = {"float": np.float32, "bfloat16": ml_dtypes.bfloat16}.get(kind) or np.dtype(kind)
    array = normal(*map(int, shape), seed=ord(name[0]))
    return (4 * array if kind.startswith("int") else array).astype(dtype)


def model_of(case: TextCase) -> onnx.ModelProto:
    words = set(case.nodes.replace("(", " ").replace(")", " ").replace(",", " ").split())
    given = {
        n: constant(case.settings[n], n) for n in case.settings.keys() & words - {*"xzuv"}
    }
    known = {n: np.asarray(a) for n, a in CONSTANTS.items() if n in words and n not in given}
    for name, array in known.items():
        known[name] = array.astype(np.float32) if array.dtype == np.float64 else array
    inputs = case.settings.get("inputs", "i" if "x" not in words else "x").split(", ")
    shaped = dict(INPUTS)
    for name in case.settings.keys() & {*"xzuv"}:
        sizes = case.settings[name].split()[1:]
        shaped[name] = (T.FLOAT, [int(s) if s.isdigit() else s for s in sizes])
    outputs = case.settings.get("outputs", "y").split()
    model = text_model(
        case.nodes, given | known, {name: shaped[name] for name in inputs}, outputs
    )
    for node in model.graph.node if "unnamed" in case.settings else ():
        node.name = ""
    return model


def feed_of(model: onnx.ModelProto) -> dict[str, Array]:
    weights = {tensor.name for tensor in model.graph.initializer}
    feed = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [SIZES.get(d.dim_param, d.dim_value) for d in kind.shape.dim]
        if value.name not in weights:
            rows = np.arange(1, 4) if kind.elem_type == T.INT64 else normal(*shape, seed=5)
            feed[value.name] = rows
    return feed


def reported(report: QuantizeReport) -> Iterator[str]:
    for row in report.nodes:
        form = f"{row.bits} bits in {row.block_size}" if row.quantized else "float"
        how = f" by {row.method}" if row.method not in ("", "rtn") else ""
        yield f"{row.node}: {form}{how}{row.reason and f', {row.reason}'}"
    for item in report.floats:
        yield f"{item.op_type}: {item.elements} floats{item.reason and f', {item.reason}'}"
    yield from report.notes
    yield str(report)


def floats_of(model: onnx.ModelProto) -> set[str]:
    arrays = arrays_of(model)
    return {name for name, a in arrays.items() if a.dtype.kind == "f" and a.ndim > 1}


def stored(model: onnx.ModelProto) -> int:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def sizes(row: NodeReport) -> tuple[object, ...]:
    return row.node, row.bits, row.block_size, row.K, row.N, row.bytes_before, row.bytes_after


@pytest.mark.parametrize("name", CASES)
def test_what_is_quantised(name):
    case = CASES[name]
    model, options = model_of(case), yaml.safe_load(case.settings.get("options", "{}"))
    feed = feed_of(model)
    given = {"calibration_data_reader": [feed] * 2, **options}
    try:
        result = quantize(model, **given)
    except (TypeError, ValueError) as error:
        case.expect(f"{type(error).__name__}: {error}")
        return
    report, proto = result.report, read(result.model)
    planned = quantize(model, dry_run=True, **given).report
    assert (planned.floats, planned.share) == (report.floats, report.share)
    assert [*map(sizes, planned.nodes)] == [*map(sizes, report.nodes)]
    # A weight of several nodes counts once, and one that stays for some stays counted.
    # MatMulNBits fills blocks up.
    if options.get("quant_format") != "MatMulNBits" and "unread" not in case.settings:
        more = stored(proto) - stored(model)
        assert more == report.bytes_after - report.bytes_before
    stay = sorted(floats_of(model) & floats_of(proto))
    case.expect("\n".join([*reported(report), *(f"in the file: {name}" for name in stay)]))
    if "numbers" in case.settings:
        return
    expected = session(model).run(None, feed)
    for layout in [options["quant_format"]] if "quant_format" in options else FORMATS:
        wide = {"bits": 8, "block_size": -1, "quant_format": layout}
        made = read(quantize(model, **wide | given).model)
        for found, wanted in zip(session(made).run(None, feed), expected, strict=True):
            assert relative_error(found, wanted) < (
                0.05 if options.keys() <= wide.keys() else 1
            )


def test_long_chains_of_sums_are_followed_in_a_moment():
    lines = " ".join(
        f"a{i + 1} = Add(a{i}, one) m{i + 1} = Mul(a{i + 1}, one)" for i in range(9)
    )
    sums = " ".join(f"s{i + 1} = Add(s{i}, one)" for i in range(1500))
    text = f"""g (float[T, 32] x) => (float[T, 32] y) {{
        [product] a0 = MatMul(x, W) {lines} s0 = Add(a9, one) {sums} y = Softmax(s1500)
    }}"""
    model = ir.from_proto(proto_of(text, {"W": normal(32, 32), "one": normal(1)}))
    (use,) = (use for _, use in find_uses(model, ("MatMul",)))
    assert isinstance(use, WeightUse) and use.roles == set()


def test_long_chains_from_a_weight_are_followed():
    casts = " ".join(
        f"w{i + 1} = Cast<to=1>(w{i}) t{i + 1} = Cast<to=1>(t{i})" for i in range(1500)
    )
    text = f"""g (float[T, 32] x, int64[T] i) => (float[T, 32] y) {{
        w0 = Identity(W) t0 = Gather(T, i) {casts} h = MatMul(x, W) a = Mul(h, t1500)
        s = ReduceSum<keepdims = 0>(w1500) y = Mul(a, s)
    }}"""
    model = ir.from_proto(proto_of(text, {"W": normal(32, 32), "T": np.ones((8, 32), "f")}))
    report = quantize(model, op_types=OP_TYPES).report
    assert [row.quantized for row in report.nodes] == [False, True, False]
