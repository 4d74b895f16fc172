# SPDX-License-Identifier: MIT
"""One malformed model after another: refused by name, or a documented error, never worse.

Each goes through ``fuse`` and, as a file, through ``ortplugins.optimize``. What onnxruntime
runs all the same must give the same numbers afterwards.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
from builders.layout_matrix import pairwise
from builders.same_numbers import (
    feeds_of,
    holds_halves,
    run_all,
    session,
    time_limit,
    wrong_numbers,
)
from builders.text_models import FUNCTIONS, model_of_nodes, text_model
from onnx import helper, numpy_helper

import ortplugins
from ortplugins import ModelFileError, PassError
from ortplugins.report import Report

T = onnx.TensorProto
K, N, BLOCK = 64, 8, 32
SECONDS = 20
PASS = "dq_matmulnbits_fusion"
node = helper.make_node


def tensor(name: str, array: npt.ArrayLike, dtype: npt.DTypeLike = None) -> onnx.TensorProto:
    return numpy_helper.from_array(
        np.array(array).astype(dtype or np.array(array).dtype), name
    )


def raw(name: str, dtype: int, dims: Sequence[int], data: bytes) -> onnx.TensorProto:
    """A tensor whose bytes are whatever they are."""
    return onnx.TensorProto(name=name, data_type=dtype, dims=dims, raw_data=data)


def codes(
    shape: Sequence[int] = (K, N), dtype: npt.DTypeLike = ml_dtypes.int4, name: str = "w"
) -> onnx.TensorProto:
    numbers = np.random.default_rng(0).integers(-8, 8, shape)
    if dtype in (ml_dtypes.uint4, np.uint8):
        numbers += 8
    return tensor(name, numbers, dtype)


def scales(
    shape: Sequence[int] = (K // BLOCK, N), dtype: npt.DTypeLike = np.float32
) -> onnx.TensorProto:
    return tensor("s", np.random.default_rng(1).uniform(0.5, 2, shape), dtype)


def dequantize(inputs: Sequence[str] = ("w", "s"), **attributes: object) -> onnx.NodeProto:
    attributes = {"axis": 0, "block_size": BLOCK} | attributes
    given = {name: value for name, value in attributes.items() if value is not None}
    return node("DequantizeLinear", inputs, ["d"], "dq", **given)


def matmul(weight: str = "d") -> onnx.NodeProto:
    return node("MatMul", ["x", weight], ["y"], "consumer")


def gather(table: str = "d", **attributes: object) -> onnx.NodeProto:
    return node("Gather", [table, "i"], ["y"], "consumer", **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[onnx.TensorProto],
    *,
    x: Sequence[int | str] = ("rows", K),
    opset: int = 21,
    outputs: Sequence[str] = ("y",),
    inputs: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    """With the inputs that some node reads: x, indices i."""
    indices = helper.make_tensor_value_info("i", T.INT64, ["n"])
    inputs = [*inputs, helper.make_tensor_value_info("x", T.FLOAT, x), indices]
    read = {name for item in nodes for name in item.input}
    given = [value for value in inputs if value.name in read]
    return model_of_nodes(nodes, tensors, given, outputs, opset)


def linear(
    *between: onnx.NodeProto,
    dq: onnx.NodeProto | None = None,
    w: onnx.TensorProto | None = None,
    s: onnx.TensorProto | None = None,
    z: onnx.TensorProto | None = None,
    consumer: onnx.NodeProto | None = None,
    more: Sequence[onnx.TensorProto] = (),
    **options: object,
) -> onnx.ModelProto:
    """A weight [64, 8] in blocks of 32; what stands between reads d and writes e."""
    if dq is None:
        dq = dequantize(("w", "s") if z is None else ("w", "s", "z"))
    tensors = [w or codes(), s or scales(), *([] if z is None else [z]), *more]
    consumer = consumer or matmul("e" if between else "d")
    return model([dq, *between, consumer], tensors, **options)


DQ = "[dq] d = DequantizeLinear <axis = 0, block_size = 32> (w, s)"
LINEAR = f"{DQ}  [consumer] y = MatMul (x, d)"


def written(
    text: str, tensors: Sequence[onnx.TensorProto] | None = None, **more: object
) -> onnx.ModelProto:
    inputs = {"x": (T.FLOAT, ("rows", K))} | ({"c": (T.BOOL, ())} if "If (c)" in text else {})
    return text_model(
        text, [codes(), scales()] if tensors is None else tensors, inputs, **more
    )


# What is asked of each.


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder / "model.onnx"


def optimised(proto: onnx.ModelProto, folder: Path, slow: str = "float") -> Report:
    """Optimise a file, ``model.onnx`` to ``out.onnx``, in time; what the report says."""
    path, options = saved(proto, folder), {"slow_kernels": slow, "accuracy_level": 0}
    options = {f"{PASS}.{name}": option for name, option in options.items()}
    with time_limit(SECONDS):
        return ortplugins.optimize(path, folder / "out.onnx", options=options).report


def refused(proto: onnx.ModelProto, folder: Path, *texts: str, slow: str = "float") -> None:
    """Left as it was, with a remark that holds the texts, the node's name among them."""
    remarks = optimised(proto, folder, slow).remarks
    assert {remark.outcome.value for remark in remarks} == {"refused"}, remarks
    found = [item for item in remarks if all(text in str(item) for text in texts)]
    assert len(found) == 1, (texts, [str(item) for item in remarks])
    assert found[0].node == "dq" or (found[0].node == "consumer" and "'dq'" in str(found[0]))
    same_numbers(folder)


def endured(proto: onnx.ModelProto, folder: Path, slow: str = "float") -> None:
    """Fused, refused or a documented error that names a node; numbers stay."""
    try:
        optimised(proto, folder, slow)
    except ModelFileError as error:
        assert str(folder / "model.onnx") in str(error)
    except PassError as error:
        names = [item.name for item in proto.graph.node if item.name]
        assert any(f"failed at node {name!r}" in str(error) for name in names), error
        assert "MemoryError" not in str(error)
    else:
        same_numbers(folder)


def same_numbers(folder: Path) -> None:
    """Where onnxruntime runs the model as it was."""
    before, after = folder / "model.onnx", folder / "out.onnx"
    try:
        original = session(str(before))
        feeds = feeds_of(original)
        expected = run_all(original, feeds)
    except Exception:
        return
    halves = holds_halves(onnx.load(before, load_external_data=False))
    actual = run_all(session(str(after)), feeds)
    assert not wrong_numbers(expected, actual, halves=halves)


def runs(proto: onnx.ModelProto, folder: Path, slow: str) -> Report:
    """A sound model: onnxruntime runs it, and the optimised one with the same numbers."""
    original = session(proto)
    run_all(original, feeds_of(original))
    report = optimised(proto, folder, slow)
    same_numbers(folder)
    return report


# The table.


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model, and what must become of it."""

    name: str  # parts between hyphens are what `pairwise` combines
    proto: onnx.ModelProto
    texts: Sequence[str] = ()  # of a remark of refusal; without, the model is endured
    slow: str = "float"
    sound: bool = False  # onnxruntime runs it, and so must run the optimised one


Cases = Iterator[Case]
POLICIES = ("fuse", "float", "keep")


def left(name: str, proto: onnx.ModelProto, *texts: str) -> Case:
    return Case(name, proto, texts)


def other_shapes() -> Cases:
    blocks = "weight 'w' of shape [64, 8] in blocks of 32 on axis 0 needs [2, 8]"
    for shape in ((1, N), (3, N), (2, N - 1), (N,), (), (1,), (2, N, 1), (0, N)):
        text = f"scale 's' has shape {list(shape)}: {blocks}"
        yield left(f"scales-{shape}", linear(s=scales(shape)), text)
        text = f"zero point 'z' has shape {list(shape)}: [2, 8] is needed"
        yield left(f"zero_points-{shape}", linear(z=codes(shape, name="z")), text)
    column = dequantize(axis=1, block_size=None)
    for shape in ((N + 1,), (K,), (N, 1), (1, N), (0,)):
        texts = (f"scale 's' has shape {list(shape)}", "[64, 8]", "[8]")
        yield left(f"channels-{shape}", linear(dq=column, s=scales(shape)), *texts)
    for shape in ((0, N), (K, 0), (0,), (0, 0)):
        text = f"weight 'w' of shape {list(shape)} is empty"
        yield left(f"empty-{shape}", linear(w=codes(shape), s=scales(shape)), text)
    text = "zero point 'z' is uint4 but weight 'w' is int4"
    yield left("zero_points-type", linear(z=codes((2, N), ml_dtypes.uint4, "z")), text)


def filled(
    name: str, dtype: int, dims: Sequence[int], count: int, last: int
) -> onnx.TensorProto:
    made = onnx.TensorProto(name=name, data_type=dtype, dims=dims)
    made.int32_data.extend([0] * (count - 1) + [last])
    return made


def odd_numbers() -> Cases:
    numbers = (math.nan, math.inf, -math.inf)
    for number, dtype in itertools.product(numbers, ("float32", "float16")):
        array = np.ones((2, N), dtype)
        array[1, 3] = number
        text = f"scale 's' holds {number} (element 11)"
        yield left(f"scale-{number}-{dtype}", linear(s=tensor("s", array)), text)
    for number in (-1, 256, 1 << 20):
        w = filled("w", T.UINT8, [K, N], K * N, number)
        yield Case(f"codes-{number}", linear(w=w), sound=True)  # onnxruntime drops high bits
    z = filled("z", T.INT8, [2, N], 16, 128)
    yield Case("zero_point-128", linear(w=codes(dtype=np.int8), z=z), sound=True)
    packed = filled("w", T.INT4, [K, N], K * N // 2, 256)
    yield Case("packed-256", linear(w=packed), sound=True)


def odd_lengths() -> Cases:
    stored = {
        "w": ("weight", T.INT4, [K, N], 256),
        "s": ("scale", T.FLOAT, [2, N], 64),
        "z": ("zero point", T.INT4, [2, N], 8),
    }
    for name, (kind, dtype, dims, size) in stored.items():
        for length in (0, size - 1, size + 1):
            texts = (f"{kind} {name!r} holds {length} bytes", f"shape {dims}", f"takes {size}")
            bad = raw(name, dtype, dims, bytes(length))
            yield left(f"{name}-{length}", linear(**{name: bad}), *texts)
    few = onnx.TensorProto(name="s", data_type=T.FLOAT, dims=[2, N], float_data=[1.0] * 15)
    texts = ("scale 's' holds 15 numbers, but shape [2, 8]", "takes 16")
    yield left("numbers-15", linear(s=few), *texts)
    # double_data and uint64_data are as long as the shape says: the type is what is wrong.
    for name in ("float64", "uint64", "uint32"):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(name))
        s = helper.make_tensor("s", kind, (2, N), [1] * 2 * N)
        text = (
            f"scale 's' is {name.replace('float64', 'double')}: float32 or float16 scales fuse"
        )
        yield left(f"field-{name}", linear(s=s), text)
    for dims, name in itertools.product(([1 << 40, N], [1 << 62, 1 << 62]), "wsz"):
        bad = raw(name, T.FLOAT if name == "s" else T.INT4, dims, b"1234")
        given = linear(**{"z": codes((2, N), name="z"), name: bad})
        yield left(f"size-{dims}-{name}", given, f"{name!r} holds 4 bytes, but shape {dims}")
    text = "'w' has shape [-1, 8], with a negative size"
    yield left("size-negative", linear(w=raw("w", T.INT4, [-1, N], bytes(256))), text)


def odd_types() -> Cases:
    for dtype in ("int16", "bool", ml_dtypes.float8_e4m3fn, "float64"):
        w = tensor("w", np.ones((K, N)), dtype)
        name = {"float64": "double", "float8_e4m3fn": "float8e4m3fn"}.get(np.dtype(dtype).name)
        text = f"weight 'w' is {name or dtype}: codes of 4 or 8 bits fuse"
        yield left(f"weight-{np.dtype(dtype).name}", linear(w=w), text)
    for dtype in ("int32", "float32"):  # DequantizeLinear has int32; the pass speaks of it
        yield left(f"weight-{dtype}", linear(w=tensor("w", np.ones((K, N)), dtype)))
    w = onnx.TensorProto(name="w", data_type=T.STRING, dims=[2], string_data=[b"a", b"b"])
    yield left("weight-string", linear(w=w), "weight 'w'", "string")
    for dtype in (np.float64, ml_dtypes.bfloat16, np.int32, np.uint8):
        texts = ("scale 's' is", "float32 or float16")
        yield left(f"scale-{np.dtype(dtype).name}", linear(s=scales(dtype=dtype)), *texts)
    for number, name in itertools.product((0, 99, -1, -(1 << 31)), "ws"):
        bad = codes() if name == "w" else scales()
        bad.data_type = number
        yield left(f"type-{number}-{name}", linear(**{name: bad}))


def odd_attributes() -> Cases:
    for size in (-1, -32, -(1 << 62)):
        text = f"block_size {size} is negative"
        yield left(f"block-{size}", linear(dq=dequantize(block_size=size)), text)
    for size in (3, 24, 33, 48, 63):
        s = scales((-(-K // size), N))
        text = f"block_size {size} of weight 'w' is not a power of 2"
        yield left(f"block-{size}", linear(dq=dequantize(block_size=size), s=s), text)
    for size, use in itertools.product((1 << 40, 1 << 62, (1 << 63) - 1), (matmul, gather)):
        proto = linear(dq=dequantize(block_size=size), s=scales((1, N)), consumer=use())
        yield Case(f"block-{size}-{use.__name__}", proto, slow="fuse")
    for axis in (2, -3, 7, 1 << 62, -(1 << 63)):
        text = f"axis {axis} is out of range for rank 2"
        yield left(f"axis-{axis}", linear(dq=dequantize(axis=axis)), text)
        yield left(f"gather_axis-{axis}", linear(consumer=gather(axis=axis)), text)
    for name, value in itertools.product(("axis", "block_size"), ("a", 0.5, [0])):
        yield Case(f"{name}-{value}", linear(dq=dequantize(**{name: value})))
    text = "axis 0 is out of range for rank 0"
    yield left("axis-scalar", linear(w=codes(()), s=scales(())), text)
    for op_type in ("Gemm", "MatMul", "Gather"):
        inputs = ["d", "i"] if op_type == "Gather" else ["x", "d"]
        consumer = node(op_type, inputs, ["y"], "consumer", domain="some.domain")
        text = f"it feeds input {inputs.index('d')} of {op_type} 'consumer'"
        yield left(f"other_domain-{op_type}", linear(consumer=consumer), text)
    for name in ("transBatchA", "transBatchB"):
        batches = {"domain": "com.microsoft", name: 1}
        consumer = node("FusedMatMul", ["x", "d"], ["y"], "consumer", **batches)
        yield left(f"FusedMatMul-{name}", linear(consumer=consumer), "transposes batches")


def odd_renaming() -> Cases:
    def between(op_type: str, *inputs: str, **attributes: object) -> onnx.NodeProto:
        return node(op_type, ["d", *inputs], ["e"], "between", **attributes)

    for perm in ([], [0], [0, 0], [0, 5], [-1, -2], [1, 0, 2], [1 << 62, 0]):
        transpose = between("Transpose")
        transpose.attribute.append(helper.make_attribute("perm", perm, attr_type=7))
        text = f"Transpose 'between' has perm {perm}: the weight has rank 2"
        yield left(f"perm-{perm}", linear(transpose), text)
    numbers = {
        "Reshape": [[-1, -1], [7, -1], [0, 0, 0], [-2, 8], [K, N + 1], [K], [], [1 << 40, -1],
                    [0, -1, 3], [1 << 62, 1 << 62], [-(1 << 63), 1]],
        "Squeeze": [[0], [9], [-3], [1 << 62], [0, 1]],
        "Unsqueeze": [[0, 0], [0, -4], [9], [-4], [1 << 62]],
    }  # fmt: skip
    unknown = "does not give [64, 8] a constant shape"
    for op_type, lists in numbers.items():
        text = f"{op_type} 'between' {unknown if op_type == 'Reshape' else ''}".rstrip()
        for given in lists:
            a = tensor("a", given, np.int64)
            yield left(f"{op_type}-{given}", linear(between(op_type, "a"), more=[a]), text)
        computed = [dequantize(), node("Shape", ["x"], ["a"], "shape"), between(op_type, "a")]
        proto = model([*computed, matmul("e")], [codes(), scales()])
        yield left(f"{op_type}-computed", proto, f"{op_type} 'between' {unknown}")
    rounding = (T.INT32, T.INT8, T.BOOL, T.FLOAT16, T.BFLOAT16)
    for to, use, slow in itertools.product(rounding, (matmul, gather), POLICIES):
        casts = [between("Cast", to=to), node("Cast", ["e"], ["f"], "back", to=T.FLOAT)]
        proto = linear(*casts, consumer=use("f"))
        name = f"cast_and_back-{to}-{use.__name__}-{slow}"
        yield Case(name, proto, slow=slow, sound=True)
    shape = tensor("a", [K, N] + [1] * 63, np.int64)
    yield Case("Reshape-rank65", linear(between("Reshape", "a"), more=[shape]))
    w = raw("w", T.INT8, [2] + [1] * 64, b"12")
    proto = linear(dq=dequantize(axis=None, block_size=None), w=w, s=scales(()))
    yield Case("weight-rank65", proto)
    # Before opset 13, Squeeze has its axes as an attribute.
    nodes = [
        node("DequantizeLinear", ["w", "s"], ["d"], "dq"),
        between("Squeeze", axes=[0]),
        node("MatMul", ["x", "e"], ["m"], "consumer"),
        node("Transpose", ["m"], ["y"], "last", perm=[1, 0]),
    ]
    for slow in POLICIES:
        proto = model(nodes, [codes((1, K, 1), np.int8), scales(())], opset=11)
        yield Case(f"axes_attribute-{slow}", proto, slow=slow, sound=True)


def odd_graphs() -> Cases:
    again = {
        "initializer": lambda p: p.graph.initializer.append(scales(dtype=np.float16)),
        "node": lambda p: p.graph.node.append(node("Relu", ["x"], ["z"], "consumer")),
        "value": lambda p: p.graph.node.append(node("Relu", ["x"], ["d"], "again")),
        "input": lambda p: p.graph.input.append(p.graph.input[0]),
        "output": lambda p: p.graph.output.append(p.graph.output[0]),
        "weight": lambda p: p.graph.initializer.append(codes(name="d")),
        "order": lambda p: p.graph.node.append(p.graph.node.pop(0)),
        "nowhere": lambda p: setattr(p.graph.output[0], "name", "nowhere"),
        "domain": lambda p: setattr(p.opset_import[0], "domain", "another"),
    }
    for version in (0, -1, 1 << 40):
        again[f"ir_version{version}"] = lambda p, v=version: setattr(p, "ir_version", v)
        again[f"opset{version}"] = lambda p, v=version: setattr(
            p.opset_import[0], "version", v
        )
    for name, change in again.items():
        proto = linear()
        change(proto)
        yield Case(name, proto)


def _cases() -> Cases:
    groups = (other_shapes, odd_numbers, odd_lengths, odd_types, odd_attributes, odd_renaming,
              odd_graphs)  # fmt: skip
    for group in groups:
        for case in group():
            yield dataclasses.replace(case, name=f"{group.__name__}-{case.name}")


@pytest.mark.parametrize(
    "case", pairwise(_cases(), lambda case: case.name), ids=lambda c: c.name
)
def test_bad_input(tmp_path, case):
    if case.texts:
        refused(case.proto, tmp_path, *case.texts, slow=case.slow)
    elif case.sound:
        runs(case.proto, tmp_path, case.slow)
    else:
        endured(case.proto, tmp_path, case.slow)


# What needs more than the table.


@pytest.mark.parametrize("point", [None, 5])
def test_a_scale_of_0_under_codes_that_are_the_zero_point_fuses(tmp_path, point):
    numbers = np.random.default_rng(0).integers(0, 16, (K, N))
    numbers[32:, 3] = point or 0
    array = np.ones((2, N), np.float32)
    array[1, 3] = 0
    z = None if point is None else tensor("z", np.full((2, N), point), ml_dtypes.uint4)
    proto = linear(w=tensor("w", numbers, ml_dtypes.uint4), s=tensor("s", array), z=z)
    report = runs(proto, tmp_path, "float")
    assert report.fired and not report.refused
    opened = session(str(tmp_path / "out.onnx"))
    x = np.float32([[*[0] * 32, *[1] * 32]])
    assert opened.run(None, {"x": x})[0][0, 3] == 0
    assert opened.run(None, {"x": x[:0]})[0].shape == (0, N)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slow_kernels": "fuse"}, "rank 2 fuses"),
        ({"slow_kernels": "keep"}, "rank 2 fuses; kept, as slow_kernels=keep asks"),
        ({"float_limit_mb": "0"}, "rank 2 fuses; as a float constant it would take"),
    ],
)
def test_a_weight_that_no_kernel_takes_is_left_where_it_may_not_be_float(options, text):
    weight = {"w": codes((2, K, N)), "s": scales((2, 2, N))}
    proto = linear(dq=dequantize(axis=1), x=[2, "rows", K], **weight)
    options = {f"{PASS}.{name}": option for name, option in options.items()}
    (remark,) = ortplugins.optimize(proto, options=options).report.refused
    assert text in remark.reason


@pytest.mark.parametrize("consumer", ["MatMul", "Mul", "Gather"])
def test_a_long_chain(tmp_path, consumer):
    names = ["d", *(f"n{i}" for i in range(3000)), "e"]
    pairs = itertools.pairwise(names)
    chain = [node("Identity", [a], [b], f"identity_{b}") for a, b in pairs]
    inputs = ["e", "i"] if consumer == "Gather" else ["x", "e"]
    last = node(consumer, inputs, ["y"], "consumer")
    report = optimised(linear(*chain, consumer=last), tmp_path)
    assert len(report.fired) + len(report.refused) == 1
    same_numbers(tmp_path)


# Graphs, as text.


CYCLES = {
    "weight": "a = Identity (a)  d = DequantizeLinear (a, s)  y = MatMul (x, d)",
    "scale": "a = Identity (a)  d = DequantizeLinear (w, a)  y = MatMul (x, d)",
    "transposes": f"a = Transpose (b)  b = Transpose (a)  {DQ}  y = MatMul (d, b)",
    "shape": f"{DQ}  r = Reshape (d, k)  k = Cast <to = 7> (r)  y = MatMul (x, d)",
    "bias": f"a = Identity (a)  {DQ}  y = Gemm (x, d, a)",
    "product": f"{DQ}  a = Add (x, y)  y = MatMul (a, d)",
}


def conditional(
    text: str,
    own: Sequence[Callable[[float], onnx.TensorProto]],
    outer: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    """The same nodes in both branches of an If, where constants differ by a factor."""
    then, other = (text.replace("NN", name) for name in ("then", "other"))
    text = f"""y = If (c) <then_branch = then () => (y_then) {{ {then} }},
                        else_branch = other () => (y_other) {{ {other} }}>"""
    proto = written(text, outer)
    for attribute, factor in zip(proto.graph.node[0].attribute, (1.0, 5.0), strict=True):
        attribute.g.initializer.extend(make(factor) for make in own)
    return proto


DQ_NN = DQ.replace("d =", "d_NN =")


def scaled(factor: float) -> onnx.TensorProto:
    return tensor("s", numpy_helper.to_array(scales()) * factor, np.float32)


@pytest.mark.parametrize("slow", POLICIES)
@pytest.mark.parametrize("dtype", [ml_dtypes.int4, np.int8, np.uint8])
@pytest.mark.parametrize("captured", ["w", "s", "ws", ""])
def test_bodies_with_constants_of_the_same_name(tmp_path, slow, dtype, captured):
    makers = {"w": lambda _: codes(dtype=dtype), "s": scaled}
    own = [maker for name, maker in makers.items() if name not in captured]
    outer = [makers[name](1.0) for name in captured]
    text = f"{DQ_NN}  y_NN = MatMul (x, d_NN)"
    runs(conditional(text, own, outer), tmp_path, slow)


@pytest.mark.parametrize("slow", ["fuse", "float"])
@pytest.mark.parametrize("name", ["w.T.nbits32", "s.T.nbits", "w.float"])
def test_a_body_with_a_name_that_ours_would_take(tmp_path, slow, name):
    text = f'{DQ_NN}  p_NN = MatMul (x, d_NN)  y_NN = Add (p_NN, "{name}")'
    own = [lambda factor: tensor(name, np.full(N, factor), np.float32)]
    proto = conditional(text, own, [codes(dtype=np.int8), scales()])
    before = proto.SerializeToString()
    runs(proto, tmp_path, slow)
    ortplugins.optimize(proto)
    assert proto.SerializeToString() == before  # a model from memory is not changed


def function(name: str, text: str) -> str:
    """A function of w and s."""
    imports = f'["" : 21, "{FUNCTIONS}" : 1]'
    return (
        f'<domain: "{FUNCTIONS}", opset_import: {imports}> {name} (w, s) => (o) {{ {text} }}'
    )


def test_symbolic_sizes_that_double(tmp_path, monkeypatch):
    # x (x.T), flattened, 40 times: a size with 2**40 factors. Inputs of one size are tried:
    # the second product has terabytes then, and of fewer rows one that takes seconds.
    monkeypatch.setattr("ortplugins.optimization.smoke_check._ATTEMPTS", 1)
    text, value = LINEAR, "x"
    for i in range(40):
        text += f"""  a{i} = Reshape ({value}, column)  b{i} = Transpose <perm = [1, 0]> (a{i})
            c{i} = MatMul (a{i}, b{i})  d{i} = Reshape (c{i}, flat)"""
        value = f"d{i}"
    more = [tensor("column", [-1, 1], np.int64), tensor("flat", [-1], np.int64)]
    proto = written(text, [codes(), scales(), *more], outputs=["y", value])
    assert len(optimised(proto, tmp_path).fired) == 1


@pytest.mark.parametrize("places", [[5, 0], [[0, 5], [0, 0]]])
@pytest.mark.parametrize("node", [False, True])
def test_sparse_constants_are_read(tmp_path, places, node):
    proto = written(f"{DQ}  p = MatMul (x, d)  y = Add (p, sparse)")
    values, where = tensor("sparse", [3, 2], np.float32), tensor("places", places, np.int64)
    sparse = helper.make_sparse_tensor(values, where, [1, N])
    if node:
        made = helper.make_node("Constant", [], ["sparse"], sparse_value=sparse)
        proto.graph.node.insert(0, made)
    else:
        proto.graph.sparse_initializer.append(sparse)
    assert optimised(proto, tmp_path).fired
    same_numbers(tmp_path)


def errors() -> Iterator[tuple[str, onnx.ModelProto, str]]:
    """Yield models that cannot be read, and what the error has to name."""
    for name, text in CYCLES.items():
        yield f"cycle-{name}", written(text), "cycle"
    for through, called in itertools.product((0, 1, 5), (True, False)):
        functions = ""
        for i in range(through + 1):
            call = f"{FUNCTIONS}.F{(i + 1) % (through + 1)} (w, s)"
            functions += function(f"F{i}", f"{DQ}  r = {call}  o = Add (d, r)")
        text = f"d = {FUNCTIONS}.F0 (w, s)  y = MatMul (x, d)" if called else LINEAR
        proto = written(text, functions=functions)
        yield f"function-{through}-{called}", proto, r"(?i)cycl.*F0"
    # Each calls the one before twice; the longer chain is deeper than Python's stack.
    for depth, nodes in ((20, 2621439), (1200, (1 << 40) + 1)):
        functions = function("F0", f"{DQ}  o = Identity (d)")
        for i in range(1, depth):
            call = f"{FUNCTIONS}.F{i - 1} (w, s)"
            functions += function(f"F{i}", f"a = {call}  b = {call}  o = Add (a, b)")
        text = f"d = {FUNCTIONS}.F{depth - 1} (w, s)  y = MatMul (x, d)"
        proto = written(text, functions=functions)
        yield f"functions-that-double-{depth}", proto, f"would have {nodes} nodes"
    for places in ([9 * N], [-1], [[0, -1]], [0, 1], [0]):
        proto = written(f"{DQ}  p = MatMul (x, d)  y = Add (p, sparse)")
        values, where = tensor("sparse", [3], np.float32), tensor("places", places, np.int64)
        dims = [1 << 40 if places == [0] else 1, N]
        sparse = onnx.SparseTensorProto(values=values, indices=where, dims=dims)
        proto.graph.sparse_initializer.append(sparse)
        yield f"sparse-{places}", proto, "not a valid ONNX model"


@pytest.mark.parametrize(
    ("proto", "match"), [pytest.param(*rest, id=name) for name, *rest in errors()]
)
def test_an_error_says_what_is_wrong(tmp_path, proto, match):
    with pytest.raises((ModelFileError, PassError), match=match):
        optimised(proto, tmp_path)


@pytest.mark.parametrize(
    "strings", [{"value_string": "é"}, {"value_strings": ["漢", "b"] * 20}]
)
def test_strings_that_are_not_ascii(tmp_path, strings):
    proto = linear()
    proto.graph.node.append(helper.make_node("Constant", [], ["words"], **strings))
    proto.graph.output.append(helper.make_tensor_value_info("words", T.STRING, None))
    assert optimised(proto, tmp_path).fired
    feeds = {"x": np.ones((1, K), np.float32)}
    files = [str(tmp_path / name) for name in ("model.onnx", "out.onnx")]
    a, b = (session(file).run(["words"], feeds)[0].tolist() for file in files)
    assert a == b


@pytest.mark.parametrize("spoil", ["type", "node", "no outputs", "no opset"])
def test_a_damaged_model_from_memory(spoil):
    proto = linear()
    if spoil == "type":
        proto.graph.initializer[0].data_type = 99
    elif spoil == "node":
        proto.graph.node.append(proto.graph.node[0])
    elif spoil == "no outputs":
        del proto.graph.output[:]
    else:
        del proto.opset_import[:]
    with pytest.raises(ModelFileError, match="model given as object"):
        ortplugins.optimize(proto)
