# SPDX-License-Identifier: MIT
"""One malformed model after another: refused by name, or a documented error, never worse.

Each goes through ``fuse`` and, as a file, through ``ortplugins.optimize``. What onnxruntime
runs all the same must give the same numbers afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from test_fuzz import (
    feeds_of,
    holds_halves,
    run_all,
    serialised,
    session,
    time_limit,
    wrong_numbers,
)

import ortplugins
from ortplugins import ModelFileError, PassError
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks, RewriteError

T = onnx.TensorProto
K, N, BLOCK = 64, 8, 32
SECONDS = 5
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
):  # type: ignore[no-untyped-def]
    numbers = np.random.default_rng(0).integers(-8, 8, shape)
    if dtype in (ml_dtypes.uint4, np.uint8):
        numbers += 8
    return tensor(name, numbers, dtype)


def scales(shape: Sequence[int] = (K // BLOCK, N), dtype: npt.DTypeLike = np.float32):  # type: ignore[no-untyped-def]
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
    functions: Sequence[onnx.FunctionProto] = (),
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    """The inputs that some node reads: x, indices i, a condition c."""
    inputs = [
        helper.make_tensor_value_info("x", T.FLOAT, x),
        helper.make_tensor_value_info("i", T.INT64, ["n"]),
        helper.make_tensor_value_info("c", T.BOOL, []),
    ]
    read = {name for item in nodes for name in item.input}
    if any(item.op_type == "If" for item in nodes):
        read.add("x")
    graph = helper.make_graph(
        nodes,
        "graph",
        [value for value in inputs if value.name in read],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        tensors,
    )
    imports = {"": opset, "com.microsoft": 1, "f": 1}
    made = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(*pair) for pair in imports.items()],
        functions=functions,
    )
    made.ir_version = 10
    return made


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
    return model([dq, *between, consumer], tensors, **options)  # type: ignore[arg-type]


# What is asked of each.


def fused(proto: onnx.ModelProto, slow: str) -> tuple[ir.Model, list[Remark]]:
    rewritten = ir.from_proto(onnx.ModelProto.FromString(proto.SerializeToString()))
    remarks = Remarks(PASS)
    with time_limit(SECONDS):
        fuse(rewritten, FusionOptions(0, slow), PassContext(remarks))
    return rewritten, list(remarks)


def optimised(path: Path, output: Path | None, slow: str) -> ortplugins.OptimizeResult:
    with time_limit(SECONDS):
        options = {f"{PASS}.slow_kernels": slow, f"{PASS}.accuracy_level": 0}
        return ortplugins.optimize(path, output, options=options, overwrite=True)


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder / "model.onnx"


def refused(proto: onnx.ModelProto, folder: Path, *texts: str, slow: str = "float") -> None:
    """Left as it was, with a remark that holds the texts, the node's name among them."""
    before = serialised(ir.from_proto(onnx.ModelProto.FromString(proto.SerializeToString())))
    after, remarks = fused(proto, slow)
    assert serialised(after) == before
    told(remarks, texts)
    path = saved(proto, folder)
    for output in (None, folder / "out.onnx"):
        told(optimised(path, output, slow).report.remarks, texts)
    same_numbers(path, folder / "out.onnx")


def told(remarks: Sequence[Remark], texts: Sequence[str]) -> None:
    assert {remark.outcome.value for remark in remarks} == {"refused"}, remarks
    (remark,) = [item for item in remarks if all(text in str(item) for text in texts)] or [
        None
    ]
    assert remark is not None, (texts, [str(item) for item in remarks])
    assert remark.node in ("consumer", "dq")
    assert "'dq'" in str(remark) or remark.node == "dq"


def endured(proto: onnx.ModelProto, folder: Path, slow: str = "float") -> None:
    """Fused, refused or a documented error that names a node; numbers stay."""
    names = [item.name for item in proto.graph.node if item.name]
    try:
        fused(proto, slow)
    except (RewriteError, ir.serde.SerdeError) as error:
        if isinstance(error, RewriteError):
            assert error.node in names
    path = saved(proto, folder)
    for output in (None, folder / "out.onnx"):
        try:
            optimised(path, output, slow)
        except ModelFileError as error:
            assert str(path) in str(error)
        except PassError as error:
            assert any(f"failed at node {name!r}" in str(error) for name in names), error
            assert "MemoryError" not in str(error)
    if (folder / "out.onnx").exists():
        same_numbers(path, folder / "out.onnx")


def same_numbers(before: Path, after: Path) -> None:
    """Where onnxruntime runs the model as it was."""
    try:
        original = session(str(before))
        feeds = feeds_of(original)
        expected = run_all(original, feeds)
    except Exception:
        return
    halves = holds_halves(onnx.load(before, load_external_data=False))
    actual = run_all(session(str(after)), feeds)
    assert not wrong_numbers(expected, actual, halves=halves)


def runs(proto: onnx.ModelProto, folder: Path, slow: str) -> None:
    """A sound model: onnxruntime runs it, and the optimised one with the same numbers."""
    path = saved(proto, folder)
    run_all(session(str(path)), feeds_of(session(str(path))))
    optimised(path, folder / "out.onnx", slow)
    same_numbers(path, folder / "out.onnx")


def test_the_model_that_the_others_spoil(tmp_path: Path):
    proto = linear(z=codes((2, N), name="z"))
    assert [remark.outcome.value for remark in fused(proto, "float")[1]] == ["fired"]
    runs(proto, tmp_path, "float")


# Shapes and ranks of scales and zero points.


@pytest.mark.parametrize(
    "shape", [(1, N), (3, N), (2, N - 1), (N,), (2,), (), (1,), (2, N, 1), (1, 2, N), (0, N)]
)
def test_scales_of_another_shape(tmp_path: Path, shape: tuple[int, ...]):
    text = (
        f"scale 's' has shape {list(shape)}: weight 'w' of shape [64, 8] in blocks of 32 on "
    )
    refused(linear(s=scales(shape)), tmp_path, text + "axis 0 needs [2, 8]")


@pytest.mark.parametrize("shape", [(1, N), (3, N), (N, 2), (N,), (), (1,), (2, N, 1), (0, N)])
def test_zero_points_of_another_shape(tmp_path: Path, shape: tuple[int, ...]):
    proto = linear(z=codes(shape, name="z"))
    refused(proto, tmp_path, f"zero point 'z' has shape {list(shape)}: [2, 8] is needed")


@pytest.mark.parametrize("shape", [(N + 1,), (K,), (N, 1), (1, N), (0,)])
def test_scales_for_each_column_of_another_shape(tmp_path: Path, shape: tuple[int, ...]):
    proto = linear(dq=dequantize(axis=1, block_size=None), s=scales(shape))
    refused(proto, tmp_path, f"scale 's' has shape {list(shape)}", "[64, 8]", "[8]")


def test_zero_points_of_another_type(tmp_path: Path):
    proto = linear(z=codes((2, N), ml_dtypes.uint4, "z"))
    refused(proto, tmp_path, "zero point 'z' is uint4 but weight 'w' is int4")


# Numbers.


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scales_that_are_no_numbers(tmp_path: Path, number: float, dtype: type):
    array = np.ones((2, N), dtype)
    array[1, 3] = number
    refused(linear(s=tensor("s", array)), tmp_path, f"scale 's' holds {number} (element 11)")


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_scale_of_0_under_codes_that_differ_from_the_zero_point(tmp_path: Path, zero: float):
    array = np.ones((2, N), np.float32)
    array[1, 3] = zero
    proto = linear(s=tensor("s", array))
    refused(proto, tmp_path, "scale 's' is 0 (element 11)", "weight 'w'", "zero point")


@pytest.mark.parametrize("point", [None, 5])
def test_a_scale_of_0_under_codes_that_are_the_zero_point_fuses(
    tmp_path: Path, point: int | None
):
    numbers = np.random.default_rng(0).integers(0, 16, (K, N))
    numbers[32:, 3] = point or 0
    array = np.ones((2, N), np.float32)
    array[1, 3] = 0
    z = None if point is None else tensor("z", np.full((2, N), point), ml_dtypes.uint4)
    proto = linear(w=tensor("w", numbers, ml_dtypes.uint4), s=tensor("s", array), z=z)
    assert [remark.outcome.value for remark in fused(proto, "float")[1]] == ["fired"]
    runs(proto, tmp_path, "float")
    x = np.zeros((1, K), np.float32)
    x[0, 32:] = 1
    (y,) = session(str(tmp_path / "out.onnx")).run(None, {"x": x})
    assert y[0, 3] == 0


@pytest.mark.parametrize("number", [-1, 256, 1 << 20])
def test_codes_outside_their_range(tmp_path: Path, number: int):
    w = onnx.TensorProto(name="w", data_type=T.UINT8, dims=[K, N])
    w.int32_data.extend([0] * (K * N - 1) + [number])
    refused(linear(w=w), tmp_path, f"weight 'w' holds {number}, outside the range of uint8")


def test_zero_points_outside_their_range(tmp_path: Path):
    z = onnx.TensorProto(name="z", data_type=T.INT8, dims=[2, N])
    z.int32_data.extend([0] * 15 + [128])
    proto = linear(w=codes(dtype=np.int8), z=z)
    refused(proto, tmp_path, "zero point 'z' holds 128, outside the range of int8")


def test_packed_codes_outside_a_byte(tmp_path: Path):
    w = onnx.TensorProto(name="w", data_type=T.INT4, dims=[K, N])
    w.int32_data.extend([0] * (K * N // 2 - 1) + [256])
    refused(linear(w=w), tmp_path, "weight 'w' holds 256, outside the range of int4")


# Lengths.


@pytest.mark.parametrize("length", [0, 255, 257])
def test_codes_of_another_length(tmp_path: Path, length: int):
    proto = linear(w=raw("w", T.INT4, [K, N], bytes(length)))
    text = f"weight 'w' holds {length} bytes, but shape [64, 8] of int4 takes 256"
    refused(proto, tmp_path, text)


@pytest.mark.parametrize("length", [0, 63, 65, 68])
def test_scales_of_another_length(tmp_path: Path, length: int):
    proto = linear(s=raw("s", T.FLOAT, [2, N], bytes(length)))
    refused(proto, tmp_path, f"scale 's' holds {length} bytes, but shape [2, 8]", "takes 64")


@pytest.mark.parametrize("length", [0, 7, 9])
def test_zero_points_of_another_length(tmp_path: Path, length: int):
    proto = linear(z=raw("z", T.INT4, [2, N], bytes(length)))
    refused(proto, tmp_path, f"zero point 'z' holds {length} bytes", "[2, 8]", "takes 8")


def test_fewer_numbers_than_the_shape_has(tmp_path: Path):
    s = onnx.TensorProto(name="s", data_type=T.FLOAT, dims=[2, N], float_data=[1.0] * 15)
    refused(linear(s=s), tmp_path, "scale 's' holds 15 numbers, but shape [2, 8]", "takes 16")


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float64, "double"), (np.uint64, "uint64"), (np.uint32, "uint32")]
)
def test_numbers_in_fields_of_their_own(tmp_path: Path, dtype: npt.DTypeLike, name: str):
    """double_data and uint64_data are as long as the shape says: the type is what is wrong."""
    s = helper.make_tensor(
        "s", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), (2, N), [1] * 2 * N
    )
    refused(linear(s=s), tmp_path, f"scale 's' is {name}: float32 or float16 scales fuse")


@pytest.mark.parametrize("dims", [[1 << 40, N], [1 << 62, 1 << 62], [1 << 63 - 1]])
@pytest.mark.parametrize("name", ["w", "s", "z"])
def test_sizes_that_nobody_can_hold(tmp_path: Path, dims: list[int], name: str):
    bad = raw(name, T.FLOAT if name == "s" else T.INT4, dims, b"1234")
    proto = linear(**{"z": codes((2, N), name="z"), name: bad})  # type: ignore[arg-type]
    refused(proto, tmp_path, f"{name!r} holds 4 bytes, but shape {dims}")


@pytest.mark.parametrize("dims", [[-1, N], [-K, -N], [K, -(1 << 40)]])
@pytest.mark.parametrize("name", ["w", "s", "z"])
def test_negative_sizes(tmp_path: Path, dims: list[int], name: str):
    bad = raw(name, T.FLOAT if name == "s" else T.INT4, dims, bytes(256))
    proto = linear(**{"z": codes((2, N), name="z"), name: bad})  # type: ignore[arg-type]
    refused(proto, tmp_path, f"{name!r} has shape {dims}, with a negative size")


def outside(proto: onnx.ModelProto, folder: Path) -> Path:
    """Saved with every tensor in a file of its own kind."""
    path = folder / "model.onnx"
    onnx.save_model(
        proto, path, save_as_external_data=True, location="model.data", size_threshold=0
    )
    return path


@pytest.mark.parametrize(
    "dims", [[-K, -N], [-1, N], [K, N + 1], [1 << 40, N], [1 << 62, 1 << 62], [K - 1, N]]
)
@pytest.mark.parametrize("length", [True, False])
def test_shapes_that_disagree_with_external_data(
    tmp_path: Path, dims: list[int], length: bool
):
    path = outside(linear(), tmp_path)
    proto = onnx.load(path, load_external_data=False)
    (w,) = [item for item in proto.graph.initializer if item.name == "w"]
    w.dims[:] = dims
    if not length:
        kept = [entry for entry in w.external_data if entry.key != "length"]
        del w.external_data[:]
        w.external_data.extend(kept)
    path.write_bytes(proto.SerializeToString())
    if not length and dims == [K - 1, N]:
        assert len(optimised(path, tmp_path / "out.onnx", "float").report.fired) == 1
        return
    if not length and dims == [K, N + 1]:  # the file goes on with the scales
        result = optimised(path, tmp_path / "out.onnx", "float")
        told(result.report.remarks, ["scale 's' has shape [2, 8]", "needs [2, 9]"])
        return
    with pytest.raises(ModelFileError, match="tensor 'w'"):
        optimised(path, tmp_path / "out.onnx", "float")


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize(
    "text", ["-1", "abc", "", "1e3", str(1 << 70), "-9223372036854775808"]
)
def test_external_data_at_odd_places(tmp_path: Path, key: str, text: str):
    path = outside(linear(), tmp_path)
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = text
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelFileError, match=r"model\.onnx"):
        optimised(path, tmp_path / "out.onnx", "float")


# Types.


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(np.float32, "float"), (np.int32, "int32"), (np.int16, "int16"), (np.bool_, "bool"),
     (ml_dtypes.float8_e4m3fn, "float8e4m3fn"), (np.float64, "double")],
)  # fmt: skip
def test_weights_that_are_no_codes(tmp_path: Path, dtype: npt.DTypeLike, name: str):
    proto = linear(w=tensor("w", np.ones((K, N)), dtype))
    if dtype in (np.int32, np.float32):  # DequantizeLinear has int32; the pass speaks of it
        endured(proto, tmp_path)
    else:
        refused(proto, tmp_path, f"weight 'w' is {name}: codes of 2, 4 or 8 bits fuse")


def test_a_weight_of_strings(tmp_path: Path):
    w = onnx.TensorProto(name="w", data_type=T.STRING, dims=[2], string_data=[b"a", b"b"])
    refused(linear(w=w), tmp_path, "weight 'w'", "string")


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16, np.int32, np.uint8])
def test_scales_of_other_types(tmp_path: Path, dtype: npt.DTypeLike):
    refused(linear(s=scales(dtype=dtype)), tmp_path, "scale 's' is", "float32 or float16")


@pytest.mark.parametrize("number", [0, 99, -1, -(1 << 31)])
@pytest.mark.parametrize("name", ["w", "s"])
def test_tensors_of_no_type(tmp_path: Path, number: int, name: str):
    proto = linear()
    for item in proto.graph.initializer:
        if item.name == name:
            item.data_type = number
    endured(proto, tmp_path)


# Attributes.


@pytest.mark.parametrize("size", [-1, -32, -(1 << 62)])
def test_negative_block_sizes(tmp_path: Path, size: int):
    refused(linear(dq=dequantize(block_size=size)), tmp_path, f"block_size {size} is negative")


@pytest.mark.parametrize("size", [3, 24, 33, 48, 63])
def test_block_sizes_that_are_no_power_of_2(tmp_path: Path, size: int):
    proto = linear(dq=dequantize(block_size=size), s=scales((-(-K // size), N)))
    refused(proto, tmp_path, f"block_size {size} of weight 'w' is no power of 2")


@pytest.mark.parametrize("size", [1 << 40, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("consumer", [matmul, gather])
def test_huge_blocks(tmp_path: Path, size: int, consumer):  # type: ignore[no-untyped-def]
    proto = linear(dq=dequantize(block_size=size), s=scales((1, N)), consumer=consumer())
    endured(proto, tmp_path, "fuse")


@pytest.mark.parametrize("axis", [2, -3, 7, 1 << 62, -(1 << 63)])
def test_axes_out_of_range(tmp_path: Path, axis: int):
    proto = linear(dq=dequantize(axis=axis))
    refused(proto, tmp_path, f"axis {axis} is out of range for rank 2")


def test_a_weight_without_axes(tmp_path: Path):
    proto = linear(w=codes(()), s=scales(()))
    refused(proto, tmp_path, "axis 0 is out of range for rank 0")


@pytest.mark.parametrize("slow", ["fuse", "float", "keep"])
@pytest.mark.parametrize("consumer", [matmul, gather])
def test_a_scalar_weight(tmp_path: Path, consumer, slow: str):  # type: ignore[no-untyped-def]
    dq = dequantize(block_size=None, axis=None)
    endured(linear(dq=dq, w=codes(()), s=scales(()), consumer=consumer()), tmp_path, slow)


@pytest.mark.parametrize("shape", [(0, N), (K, 0), (0,), (0, 0)])
def test_empty_weights(tmp_path: Path, shape: tuple[int, ...]):
    proto = linear(w=codes(shape), s=scales(shape))
    refused(proto, tmp_path, f"weight 'w' of shape {list(shape)} is empty")


@pytest.mark.parametrize("value", ["0", 0.0, [0], ["0"], [0.5]])
@pytest.mark.parametrize("name", ["axis", "block_size", "output_dtype"])
def test_attributes_of_another_type(tmp_path: Path, name: str, value: object):
    endured(linear(dq=dequantize(**{name: value})), tmp_path)


@pytest.mark.parametrize("name", ["axis", "block_size"])
def test_attributes_that_refer_to_a_function_s_own(tmp_path: Path, name: str):
    proto = linear()
    for attribute in proto.graph.node[0].attribute:
        if attribute.name == name:
            attribute.ref_attr_name = "outer"
    endured(proto, tmp_path)


@pytest.mark.parametrize("dtype", [99, -1, T.INT8, T.INT4, T.STRING, T.BOOL, T.COMPLEX64])
@pytest.mark.parametrize("consumer", [matmul, gather])
@pytest.mark.parametrize("slow", ["fuse", "float"])
def test_odd_output_types(tmp_path: Path, dtype: int, consumer, slow: str):  # type: ignore[no-untyped-def]
    proto = linear(dq=dequantize(output_dtype=dtype), consumer=consumer(), opset=23)
    endured(proto, tmp_path, slow)


def test_an_attribute_given_twice(tmp_path: Path):
    proto = linear()
    proto.graph.node[0].attribute.append(helper.make_attribute("axis", 1))
    endured(proto, tmp_path)


# Inputs and outputs.


@pytest.mark.parametrize("inputs", [[], [""], ["", ""], ["w"], ["w", ""], ["", "s"]])
@pytest.mark.parametrize("use", ["weight", "activation", "bias"])
def test_dequantize_without_inputs(tmp_path: Path, inputs: list[str], use: str):
    bad = node("DequantizeLinear", inputs, ["b"], "bad")
    w8 = codes(dtype=np.int8)
    if use == "weight":
        proto = model([bad, matmul("b")], [w8, scales()])
    elif use == "activation":
        consumer = node("MatMul", ["b", "d"], ["y"], "consumer")
        proto = model([bad, dequantize(), consumer], [w8, scales()])
    else:
        add = node("Add", ["p", "b"], ["y"], "add")
        product = node("MatMul", ["x", "d"], ["p"], "consumer")
        proto = model([bad, dequantize(), product, add], [codes(), scales()])
    endured(proto, tmp_path)


@pytest.mark.parametrize("op_type", ["Identity", "Transpose", "Reshape", "Cast", "Flatten"])
@pytest.mark.parametrize("inputs", [[], [""]])
def test_renaming_nodes_without_inputs(tmp_path: Path, op_type: str, inputs: list[str]):
    bad = node(op_type, inputs, ["e"], "bad")
    endured(model([bad, dequantize(("e", "s")), matmul()], [scales()]), tmp_path)
    endured(model([bad, dequantize(("w", "e")), matmul()], [codes()]), tmp_path)
    nodes = [bad, dequantize(), node("MatMul", ["e", "d"], ["y"], "consumer")]
    endured(model(nodes, [codes(dtype=np.int8), scales()]), tmp_path)
    nodes = [bad, dequantize(), node("Gemm", ["x", "d", "e"], ["y"], "consumer")]
    endured(model(nodes, [codes(), scales()]), tmp_path)
    nodes = [bad, dequantize(), node("Reshape", ["d", "e"], ["r"], "reshape"), matmul("r")]
    endured(model(nodes, [codes(), scales()]), tmp_path)


@pytest.mark.parametrize("op_type", ["MatMul", "Gemm", "Gather", "FusedMatMul", "Transpose"])
@pytest.mark.parametrize("outputs", [[], [""], ["y", "more"]])
def test_consumers_with_other_outputs(tmp_path: Path, op_type: str, outputs: list[str]):
    domain = "com.microsoft" if op_type == "FusedMatMul" else ""
    inputs = ["d", "i"] if op_type == "Gather" else ["x", "d"]
    inputs = ["d"] if op_type == "Transpose" else inputs
    bad = node(op_type, inputs, outputs, "bad", domain=domain)
    good = node("MatMul", ["x", "d"], ["good"], "consumer")
    proto = model([dequantize(), bad, good], [codes(), scales()], outputs=["good"])
    endured(proto, tmp_path)
    proto.graph.node[1].name = ""
    endured(proto, tmp_path)


@pytest.mark.parametrize("outputs", [[], [""], ["d", "more"]])
def test_dequantize_with_other_outputs(tmp_path: Path, outputs: list[str]):
    bad = node("DequantizeLinear", ["w", "s"], outputs, "bad", axis=0, block_size=BLOCK)
    good = node("DequantizeLinear", ["w", "s"], ["g"], "dq", axis=0, block_size=BLOCK)
    endured(model([bad, good, matmul("g")], [codes(), scales()]), tmp_path)
    endured(model([bad, matmul("d")], [codes(), scales()]), tmp_path)


def test_a_dequantized_constant_that_nothing_reads(tmp_path: Path):
    proto = model([dequantize(), node("Relu", ["x"], ["y"], "relu")], [codes(), scales()])
    assert fused(proto, "float")[1] == []
    runs(proto, tmp_path, "float")


@pytest.mark.parametrize("inputs", [["d"], ["", "d"], ["d", ""], ["x", "d", "x"]])
@pytest.mark.parametrize("op_type", ["MatMul", "Gather"])
def test_consumers_with_other_inputs(tmp_path: Path, op_type: str, inputs: list[str]):
    endured(linear(consumer=node(op_type, inputs, ["y"], "consumer")), tmp_path)


def test_an_operator_of_another_domain_by_that_name(tmp_path: Path):
    proto = linear()
    proto.graph.node[0].domain = "some.domain"
    assert not [remark for remark in fused(proto, "float")[1] if remark.outcome == "fired"]


@pytest.mark.parametrize("op_type", ["Gemm", "MatMul", "Gather"])
def test_a_consumer_of_another_domain_by_that_name(tmp_path: Path, op_type: str):
    inputs = ["d", "i"] if op_type == "Gather" else ["x", "d"]
    consumer = node(op_type, inputs, ["y"], "consumer", domain="some.domain")
    proto = linear(consumer=consumer)
    refused(proto, tmp_path, f"it feeds input {inputs.index('d')} of {op_type} 'consumer'")


# What renames the weight.


@pytest.mark.parametrize("perm", [[], [0], [0, 0], [0, 5], [-1, -2], [1, 0, 2], [1 << 62, 0]])
def test_transposes_that_permute_nothing(tmp_path: Path, perm: list[int]):
    between = node("Transpose", ["d"], ["e"], "between")
    between.attribute.append(helper.make_attribute("perm", perm, attr_type=7))
    proto = linear(between)
    refused(proto, tmp_path, f"Transpose 'between' has perm {perm}: the weight has rank 2")


@pytest.mark.parametrize("perm", ["a", 1, 0.5, [0.5, 1.0], ["a"]])
def test_transposes_with_a_perm_of_another_type(tmp_path: Path, perm: object):
    endured(linear(node("Transpose", ["d"], ["e"], "between", perm=perm)), tmp_path)


@pytest.mark.parametrize(
    "shape",
    [[-1, -1], [7, -1], [0, 0, 0], [-2, 8], [K, N + 1], [K], [], [1 << 40, -1], [0, -1, 3],
     [1 << 62, 1 << 62], [-(1 << 63), 1]],
)  # fmt: skip
def test_reshapes_to_what_is_no_shape(tmp_path: Path, shape: list[int]):
    proto = linear(
        node("Reshape", ["d", "shape"], ["e"], "between"),
        more=[tensor("shape", shape, np.int64)],
    )
    refused(proto, tmp_path, "Reshape 'between' does not give [64, 8] a constant shape")


@pytest.mark.parametrize("op_type", ["Reshape", "Squeeze", "Unsqueeze"])
def test_shapes_and_axes_that_are_computed(tmp_path: Path, op_type: str):
    shape = node("Shape", ["x"], ["shape"], "shape")
    nodes = [dequantize(), shape, node(op_type, ["d", "shape"], ["e"], "between"), matmul("e")]
    proto = model(nodes, [codes(), scales()])
    refused(proto, tmp_path, f"{op_type} 'between' does not give [64, 8] a constant shape")


@pytest.mark.parametrize("op_type", ["Reshape", "Squeeze", "Unsqueeze"])
@pytest.mark.parametrize(
    "bad",
    [raw("a", T.INT64, [2], b"123"), raw("a", T.INT64, [1 << 40], b""),
     raw("a", T.INT64, [-1], b""), tensor("a", [0.5]),
     raw("a", T.INT64, [2], bytes(24)), tensor("a", [[0]])],
    ids=str,
)  # fmt: skip
def test_shapes_and_axes_that_are_damaged(tmp_path: Path, op_type: str, bad: onnx.TensorProto):
    endured(linear(node(op_type, ["d", "a"], ["e"], "between"), more=[bad]), tmp_path)


@pytest.mark.parametrize("axes", [[0], [9], [-3], [1 << 62], [0, 1]])
def test_squeezes_of_what_is_not_one(tmp_path: Path, axes: list[int]):
    between = node("Squeeze", ["d", "a"], ["e"], "between")
    proto = linear(between, more=[tensor("a", axes, np.int64)])
    refused(proto, tmp_path, "Squeeze 'between'")


@pytest.mark.parametrize("axes", [[0, 0], [0, -4], [9], [-4], [1 << 62], []])
def test_unsqueezes_at_no_axis(tmp_path: Path, axes: list[int]):
    between = node("Unsqueeze", ["d", "a"], ["e"], "between")
    proto = linear(between, more=[tensor("a", axes, np.int64)])
    refused(proto, tmp_path, "Unsqueeze 'between'")


@pytest.mark.parametrize("consumer", [matmul, gather])
@pytest.mark.parametrize("slow", ["fuse", "float", "keep"])
@pytest.mark.parametrize(
    "to", [0, 99, -1, T.STRING, T.INT4, T.UINT8, T.INT64, T.BOOL, T.COMPLEX64, T.DOUBLE,
           T.FLOAT8E4M3FN, T.BFLOAT16, "x", 1.0, None],
)  # fmt: skip
def test_casts_to_other_types(tmp_path: Path, to: object, consumer, slow: str):  # type: ignore[no-untyped-def]
    attributes = {} if to is None else {"to": to}
    between = node("Cast", ["d"], ["e"], "between", **attributes)
    endured(linear(between, consumer=consumer("e")), tmp_path, slow)


@pytest.mark.parametrize("consumer", [matmul, gather])
@pytest.mark.parametrize("slow", ["fuse", "float", "keep"])
@pytest.mark.parametrize("to", [T.INT32, T.INT8, T.BOOL, T.FLOAT16, T.BFLOAT16])
def test_casts_to_and_fro_keep_what_they_round(
    tmp_path: Path,
    to: int,
    consumer,  # type: ignore[no-untyped-def]
    slow: str,
):
    between = [
        node("Cast", ["d"], ["r"], "between", to=to),
        node("Cast", ["r"], ["e"], "back", to=T.FLOAT),
    ]
    runs(linear(*between, consumer=consumer("e")), tmp_path, slow)


@pytest.mark.parametrize("op_type", ["Reshape", "Unsqueeze"])
@pytest.mark.parametrize("rank", [65, 1000])
@pytest.mark.parametrize("slow", ["fuse", "float"])
def test_more_axes_than_numpy_has(tmp_path: Path, op_type: str, rank: int, slow: str):
    numbers = [K, N] + [1] * (rank - 2) if op_type == "Reshape" else list(range(rank))
    between = node(op_type, ["d", "a"], ["e"], "between")
    endured(linear(between, more=[tensor("a", numbers, np.int64)]), tmp_path, slow)


@pytest.mark.parametrize("rank", [65, 1000, 100_000])
@pytest.mark.parametrize("slow", ["fuse", "float"])
def test_weights_of_more_axes_than_numpy_has(tmp_path: Path, rank: int, slow: str):
    w = raw("w", T.INT8, [2] + [1] * (rank - 1), b"12")
    dq = dequantize(axis=None, block_size=None)
    endured(linear(dq=dq, w=w, s=scales(())), tmp_path, slow)


@pytest.mark.parametrize("consumer", ["MatMul", "Mul", "Gather"])
def test_a_long_chain(tmp_path: Path, consumer: str):
    names = ["d", *(f"n{i}" for i in range(3000)), "e"]
    pairs = itertools.pairwise(names)
    chain = [node("Identity", [a], [b], f"identity_{b}") for a, b in pairs]
    inputs = ["e", "i"] if consumer == "Gather" else ["x", "e"]
    last = node(consumer, inputs, ["y"], "consumer")
    _, remarks = fused(linear(*chain, consumer=last), "float")
    assert len(remarks) == 1
    endured(linear(*chain, consumer=last), tmp_path)


def test_squeeze_with_its_axes_as_attribute(tmp_path: Path):
    # Before opset 13.
    shape = (1, K, 1)
    between = node("Squeeze", ["d"], ["e"], "between", axes=[0])
    dq = node("DequantizeLinear", ["w", "s"], ["d"], "dq")
    consumer = node("Transpose", ["m"], ["y"], "last", perm=[1, 0])
    product = node("MatMul", ["x", "e"], ["m"], "consumer")
    tensors = [codes(shape, np.int8), scales(())]
    proto = model([dq, between, product, consumer], tensors, opset=11)
    for slow in ("fuse", "float", "keep"):
        folder = tmp_path / slow
        folder.mkdir()
        runs(proto, folder, slow)


# Consumers.


@pytest.mark.parametrize("axis", [2, -3, 7, 1 << 62, -(1 << 63)])
def test_gather_along_no_axis(tmp_path: Path, axis: int):
    proto = linear(consumer=gather(axis=axis))
    refused(proto, tmp_path, f"axis {axis} is out of range for rank 2")


@pytest.mark.parametrize("axis", ["0", 0.0, [0]])
def test_gather_along_an_axis_of_another_type(tmp_path: Path, axis: object):
    endured(linear(consumer=gather(axis=axis)), tmp_path)


@pytest.mark.parametrize(
    "number",
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 1e-38, 3e38, -1.0, 1, "a", [1.0]],
)
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_odd_factors_of_gemm(tmp_path: Path, name: str, number: object, dtype: type):
    bias = tensor("b", np.arange(N), np.float32)
    between = node("Cast", ["d"], ["e"], "between", to=T.FLOAT)
    consumer = node("Gemm", ["x", "e", "b"], ["y"], "consumer", **{name: number})
    proto = linear(between, s=scales(dtype=dtype), consumer=consumer, more=[bias])
    endured(proto, tmp_path, "fuse")


@pytest.mark.parametrize("number", [2, -1, 1 << 62, 0.5, "a", [1]])
@pytest.mark.parametrize("name", ["transA", "transB"])
@pytest.mark.parametrize("op_type", ["Gemm", "FusedMatMul", "MatMul"])
def test_odd_transposes_of_products(tmp_path: Path, name: str, number: object, op_type: str):
    domain = "com.microsoft" if op_type == "FusedMatMul" else ""
    consumer = node(op_type, ["x", "d"], ["y"], "consumer", domain=domain, **{name: number})
    w, s = codes((K, K)), scales((2, K))
    endured(linear(w=w, s=s, consumer=consumer, x=[K, K]), tmp_path, "fuse")


@pytest.mark.parametrize(
    "attributes", [{"transBatchA": 1}, {"transBatchB": 1}, {"alpha": "a"}]
)
def test_odd_attributes_of_fused_matmul(tmp_path: Path, attributes: dict[str, object]):
    consumer = node("FusedMatMul", ["x", "d"], ["y"], "consumer", domain="com.microsoft")
    consumer.attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
    endured(linear(consumer=consumer), tmp_path)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("trans_x", [0, 1])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("size", [K, 2 * K])
def test_fused_matmul_with_one_row(
    tmp_path: Path, trans: int, trans_x: int, left: bool, size: int
):
    # What onnxruntime makes of transA and transB beside an operand of rank 1. One of them is a
    # defect: with transA it takes the bytes of W[K, N] for those of [N, K] (1.31.1).
    if left and trans:
        pytest.skip("onnxruntime's own numbers are wrong")
    names, inputs = ["transA", "transB"], ["d", "x"]
    if not left:
        names, inputs = names[::-1], inputs[::-1]
    attributes = dict(zip(names, (trans, trans_x), strict=True))
    consumer = node(
        "FusedMatMul", inputs, ["y"], "consumer", "", "com.microsoft", **attributes
    )
    w, s = codes((K, size)), scales((2, size))
    for k in {K, size}:
        folder = tmp_path / str(k)
        folder.mkdir()
        endured(linear(w=w, s=s, consumer=consumer, x=[k]), folder, "fuse")


@pytest.mark.parametrize("k", [K - 1, K + 1, 2 * K, 1, 0])
@pytest.mark.parametrize("op_type", ["MatMul", "Gemm"])
def test_operands_that_do_not_fit(tmp_path: Path, k: int, op_type: str):
    consumer = node(op_type, ["x", "d"], ["y"], "consumer")
    endured(linear(consumer=consumer, x=["rows", k]), tmp_path)
    proto = linear(consumer=consumer, x=["rows", "columns"])
    path = saved(proto, tmp_path)
    optimised(path, tmp_path / "dynamic.onnx", "float")
    for file in (path, tmp_path / "dynamic.onnx"):
        opened = session(str(file))
        with pytest.raises(Exception, match=r"(?i)dimension|shape|K"):
            opened.run(None, {"x": np.ones((3, k), np.float32)})


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows(tmp_path: Path, rows: int):
    proto = linear()
    runs(proto, tmp_path, "float")
    feed = {"x": np.ones((rows, K), np.float32)}
    (before,) = session(str(tmp_path / "model.onnx")).run(None, feed)
    (after,) = session(str(tmp_path / "out.onnx")).run(None, feed)
    assert before.shape == after.shape == (rows, N)


@pytest.mark.parametrize("groups", [0, 2, 3, 65])
@pytest.mark.parametrize("x", [2, 0, "groups"])
def test_groups_that_do_not_fit(tmp_path: Path, groups: int, x: int | str):
    w, s = codes((groups, K, N)), scales((groups, 2, N))
    proto = linear(dq=dequantize(axis=1), w=w, s=s, x=[x, "rows", K])
    endured(proto, tmp_path, "fuse")


@pytest.mark.parametrize("slow", ["fuse", "float", "keep"])
def test_groups_that_start_within_a_byte(tmp_path: Path, slow: str):
    dq = dequantize(axis=None, block_size=None)
    proto = linear(dq=dq, w=codes((3, 15, 7)), s=scales(()), x=[3, "rows", 15])
    runs(proto, tmp_path, slow)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slow", ["fuse", "float", "keep"])
def test_groups_before_opset_13(tmp_path: Path, groups: int, slow: str):
    # Split and Unsqueeze have attributes there, not inputs.
    dq = node("DequantizeLinear", ["w", "s"], ["d"], "dq")
    x = ["rows", K] if groups == 1 else [groups, "rows", K]
    proto = linear(dq=dq, w=codes((groups, K, N), np.int8), s=scales(()), x=x, opset=11)
    runs(proto, tmp_path, slow)


@pytest.mark.parametrize(
    "bad",
    [raw("b", T.FLOAT, [N], b"123"), raw("b", T.FLOAT, [N], bytes(64)),
     raw("b", T.FLOAT, [-1], b""), raw("b", T.FLOAT, [1], b""),
     tensor("b", np.full(N, np.nan), np.float32),
     raw("b", T.FLOAT, [1 << 40], b""), tensor("b", np.ones((1, 1, N)), np.float32),
     tensor("b", np.ones((N, 1)), np.float32), tensor("b", np.ones(N), np.float16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("op_type", ["Gemm", "Add"])
def test_odd_biases(tmp_path: Path, op_type: str, bad: onnx.TensorProto):
    nodes = [dequantize(), node("Gemm", ["x", "d", "b"], ["y"], "consumer")]
    if op_type == "Add":
        nodes[1:] = [
            node("MatMul", ["x", "d"], ["p"], "consumer"),
            node("Add", ["p", "b"], ["y"], "add"),
        ]
    endured(model(nodes, [codes(), scales(), bad]), tmp_path)


@pytest.mark.parametrize(
    "attributes", [{"block_size": "a"}, {"axis": 9}, {"axis": "a"}, {"block_size": -4}]
)
@pytest.mark.parametrize("op_type", ["Gemm", "Add"])
def test_odd_dequantized_biases(tmp_path: Path, op_type: str, attributes: dict[str, object]):
    bias = node("DequantizeLinear", ["bq", "bs"], ["b"], "bias", **attributes)
    nodes = [dequantize(), bias, node("Gemm", ["x", "d", "b"], ["y"], "consumer")]
    if op_type == "Add":
        nodes[2:] = [
            node("MatMul", ["x", "d"], ["p"], "consumer"),
            node("Add", ["p", "b"], ["y"], "add"),
        ]
    more = [tensor("bq", np.arange(N), np.int32), tensor("bs", 0.5, np.float32)]
    endured(model(nodes, [codes(), scales(), *more]), tmp_path)


@pytest.mark.parametrize("spoil", ["scales", "N", "N type"])
def test_a_matmulnbits_of_the_model_s_own(tmp_path: Path, spoil: str):
    # Such scales are sound: the kernel takes them at run time.
    attributes: dict[str, object] = {"K": K, "N": N, "bits": 4, "block_size": 32}
    if spoil == "N":
        del attributes["N"]
    if spoil == "N type":
        attributes["N"] = "a"
    own = [
        node("Relu", ["os"], ["or"], "relu"),
        node(
            "MatMulNBits", ["x", "ow", "or" if spoil == "scales" else "os"], ["p"], "own",
            domain="com.microsoft", **attributes,
        ),
        node("Add", ["p", "b"], ["q"], "add"),
    ]  # fmt: skip
    more = [
        tensor("ow", np.random.default_rng(2).integers(0, 255, (N, 2, 16)), np.uint8),
        tensor("os", np.ones(2 * N), np.float32),
        tensor("b", np.arange(N), np.float32),
    ]
    tensors = [codes(), scales(), *more]
    proto = model([dequantize(), matmul(), *own], tensors, outputs=["y", "q"])
    (runs if spoil == "scales" else endured)(proto, tmp_path, "float")


# Graphs.


CYCLES = {
    "weight": [node("Identity", ["a"], ["a"], "a"), dequantize(("a", "s")), matmul()],
    "two": [
        node("Identity", ["b"], ["a"], "a"),
        node("Identity", ["a"], ["b"], "b"),
        dequantize(("a", "s")),
        matmul(),
    ],
    "scale": [node("Identity", ["a"], ["a"], "a"), dequantize(("w", "a")), matmul()],
    "transposes": [
        node("Transpose", ["b"], ["a"], "a"),
        node("Transpose", ["a"], ["b"], "b"),
        dequantize(),
        node("MatMul", ["d", "b"], ["y"], "consumer"),
    ],
    "activation": [
        node("Transpose", ["b"], ["a"], "a"),
        node("Transpose", ["a"], ["b"], "b"),
        dequantize(),
        node("MatMul", ["b", "d"], ["y"], "consumer"),
    ],
    "shape": [
        dequantize(),
        node("Reshape", ["d", "k"], ["r"], "reshape"),
        node("Cast", ["r"], ["k"], "cast", to=T.INT64),
        gather(),
    ],
    "bias": [
        node("Identity", ["a"], ["a"], "a"),
        dequantize(),
        node("Gemm", ["x", "d", "a"], ["y"], "consumer"),
    ],
    "product": [
        dequantize(),
        node("Add", ["x", "y"], ["a"], "add"),
        node("MatMul", ["a", "d"], ["y"], "consumer"),
    ],
    "dequantize": [dequantize(("d", "s")), matmul()],
}


@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize("dtype", [ml_dtypes.int4, np.int8])
def test_graphs_that_go_round(tmp_path: Path, cycle: str, dtype: npt.DTypeLike):
    proto = model(CYCLES[cycle], [codes(dtype=dtype), scales()])
    path = saved(proto, tmp_path)
    for output in (None, tmp_path / "out.onnx"):
        with pytest.raises((ModelFileError, PassError), match="cycle"):
            optimised(path, output, "float")


@pytest.mark.parametrize("order", ["reversed", "output nowhere"])
def test_graphs_out_of_order(tmp_path: Path, order: str):
    proto = linear()
    if order == "reversed":
        nodes = list(proto.graph.node)[::-1]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    else:
        proto.graph.output[0].name = "nowhere"
    endured(proto, tmp_path)


@pytest.mark.parametrize("what", ["initializer", "node", "value", "input", "output", "weight"])
def test_names_given_twice(tmp_path: Path, what: str):
    proto = linear()
    if what == "initializer":
        proto.graph.initializer.append(tensor("s", np.full((2, N), 9), np.float32))
    elif what == "node":
        proto.graph.node.append(node("Relu", ["x"], ["z"], "consumer"))
    elif what == "value":
        proto.graph.node.append(node("Relu", ["x"], ["d"], "again"))
    elif what == "input":
        proto.graph.input.append(proto.graph.input[0])
    elif what == "output":
        proto.graph.output.append(proto.graph.output[0])
    else:
        proto.graph.initializer.append(tensor("d", np.ones((K, N)), np.float32))
    endured(proto, tmp_path)


@pytest.mark.parametrize("where", ["input", "node"])
@pytest.mark.parametrize("slow", ["fuse", "float"])
def test_names_that_ours_would_take(tmp_path: Path, where: str, slow: str):
    for name in ("w.T.nbits32", "s.T.nbits", "w.float", "w.zero_points32"):
        folder = tmp_path / name
        folder.mkdir()
        consumer = node("MatMul", [name, "d"], ["y"], "consumer")
        nodes = [dequantize(), consumer]
        if where == "node":
            nodes.insert(1, node("Relu", ["x"], [name], "relu"))
        proto = model(nodes, [codes(dtype=np.uint8), scales()])
        if where == "input":
            proto.graph.input.append(helper.make_tensor_value_info(name, T.FLOAT, ["rows", K]))
        runs(proto, folder, slow)


def branch(name: str, nodes: Sequence[onnx.NodeProto], tensors: Sequence[onnx.TensorProto]):  # type: ignore[no-untyped-def]
    """A body of If; the values of its nodes get the body's name."""
    renamed = []
    own = {output for item in nodes for output in item.output}
    for item in nodes:
        copy = onnx.NodeProto.FromString(item.SerializeToString())
        copy.name = f"{item.name}_{name}"
        copy.input[:] = [f"{i}_{name}" if i in own else i for i in item.input]
        copy.output[:] = [f"{o}_{name}" for o in item.output]
        renamed.append(copy)
    outputs = [helper.make_tensor_value_info(f"y_{name}", T.FLOAT, None)]
    return helper.make_graph(renamed, name, [], outputs, tensors)


def conditional(
    then: onnx.GraphProto, other: onnx.GraphProto, tensors: Sequence[onnx.TensorProto] = ()
) -> onnx.ModelProto:
    nodes = [node("If", ["c"], ["y"], "if", then_branch=then, else_branch=other)]
    return model(nodes, tensors)


def scaled(factor: float) -> onnx.TensorProto:
    return tensor("s", numpy_helper.to_array(scales()) * factor, np.float32)


@pytest.mark.parametrize("slow", ["fuse", "float", "keep"])
@pytest.mark.parametrize("dtype", [ml_dtypes.int4, np.int8, np.uint8])
@pytest.mark.parametrize("captured", ["codes", "scales", "all", "none"])
def test_bodies_with_constants_of_the_same_name(
    tmp_path: Path, slow: str, dtype: npt.DTypeLike, captured: str
):
    bodies, nodes = [], [dequantize(), matmul()]
    for name, factor in (("then", 1.0), ("else", 5.0)):
        own = []
        if captured in ("scales", "none"):
            own.append(codes(dtype=dtype))
        if captured in ("codes", "none"):
            own.append(scaled(factor))
        bodies.append(branch(name, nodes, own))
    outer = [codes(dtype=dtype)] * (captured in ("codes", "all"))
    outer += [scales()] * (captured in ("scales", "all"))
    runs(conditional(*bodies, outer), tmp_path, slow)


def test_bodies_with_biases_of_the_same_name(tmp_path: Path):
    bodies = []
    for name, factor in (("then", 1.0), ("else", 5.0)):
        nodes = [
            dequantize(),
            node("DequantizeLinear", ["bq", "bs"], ["b"], "bias"),
            node("Gemm", ["x", "d", "b"], ["y"], "consumer"),
        ]
        bodies.append(branch(name, nodes, [tensor("bs", factor, np.float32)]))
    outer = [codes(), scales(), tensor("bq", np.arange(N), np.int32)]
    runs(conditional(*bodies, outer), tmp_path, "float")


@pytest.mark.parametrize("slow", ["fuse", "float"])
def test_a_body_with_a_name_that_ours_would_take(tmp_path: Path, slow: str):
    for name in ("w.T.nbits32", "s.T.nbits", "w.float"):
        folder = tmp_path / name
        folder.mkdir()
        nodes = [dequantize(), node("MatMul", ["x", "d"], ["p"], "consumer")]
        nodes.append(node("Add", ["p", name], ["y"], "add"))
        bodies = [
            branch(body, nodes, [tensor(name, np.full(N, factor), np.float32)])
            for body, factor in (("then", 1.0), ("else", 2.0))
        ]
        runs(conditional(*bodies, [codes(dtype=np.int8), scales()]), folder, slow)


def test_a_body_that_reads_a_computed_weight(tmp_path: Path):
    bodies = [branch(name, [matmul()], []) for name in ("then", "else")]
    nodes = [dequantize(), node("If", ["c"], ["y"], "if", then_branch=bodies[0])]
    nodes[1].attribute.append(helper.make_attribute("else_branch", bodies[1]))
    runs(model(nodes, [codes(), scales()]), tmp_path, "fuse")


def function(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    return helper.make_function("f", name, ["w", "s"], ["o"], nodes, imports)


def call(name: str, output: str, inputs: Sequence[str] = ("w", "s")) -> onnx.NodeProto:
    return node(name, inputs, [output], f"call_{name}_{output}", domain="f")


@pytest.mark.parametrize("through", [0, 1, 5])
@pytest.mark.parametrize("called", [True, False])
def test_functions_that_call_themselves(tmp_path: Path, through: int, called: bool):
    functions = [
        function(f"F{i}", [dequantize(), call(f"F{(i + 1) % (through + 1)}", "r"),
                           node("Add", ["d", "r"], ["o"], "add")])
        for i in range(through + 1)
    ]  # fmt: skip
    nodes = [call("F0", "e") if called else dequantize(), matmul("e" if called else "d")]
    path = saved(model(nodes, [codes(), scales()], functions=functions), tmp_path)
    with pytest.raises((ModelFileError, PassError), match=r"(?i)cycl.*F0"):
        optimised(path, tmp_path / "out.onnx", "float")


def test_functions_that_double(tmp_path: Path):
    # 20 functions that each call the one before twice: a million nodes when inlined.
    functions = [function("F0", [dequantize(), node("Identity", ["d"], ["o"], "identity")])]
    for i in range(1, 20):
        calls = [call(f"F{i - 1}", "a"), call(f"F{i - 1}", "b")]
        functions.append(function(f"F{i}", [*calls, node("Add", ["a", "b"], ["o"], "add")]))
    nodes = [call("F19", "e"), matmul("e")]
    path = saved(model(nodes, [codes(), scales()], functions=functions), tmp_path)
    with pytest.raises((ModelFileError, PassError), match=r"F\d"):
        optimised(path, tmp_path / "out.onnx", "float")


def test_symbolic_sizes_that_double(tmp_path: Path):
    # x (x.T), flattened, 40 times: a size with 2**40 factors.
    nodes, value = [dequantize(), matmul()], "x"
    for i in range(40):
        nodes += [
            node("Reshape", [value, "column"], [f"a{i}"], f"a{i}"),
            node("Transpose", [f"a{i}"], [f"b{i}"], f"b{i}", perm=[1, 0]),
            node("MatMul", [f"a{i}", f"b{i}"], [f"c{i}"], f"c{i}"),
            node("Reshape", [f"c{i}", "flat"], [f"d{i}"], f"d{i}"),
        ]
        value = f"d{i}"
    more = [tensor("column", [-1, 1], np.int64), tensor("flat", [-1], np.int64)]
    proto = model(nodes, [codes(), scales(), *more], outputs=["y", value])
    assert len(optimised(saved(proto, tmp_path), None, "float").report.fired) == 1


def test_a_sparse_initializer_is_not_lost(tmp_path: Path):
    product = node("MatMul", ["x", "d"], ["p"], "consumer")
    proto = model(
        [dequantize(), product, node("Add", ["p", "sparse"], ["y"], "add")],
        [codes(), scales()],
    )
    values, indices = tensor("sparse", [3.0], np.float32), tensor("sparse_i", [5], np.int64)
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1, N]))
    path = saved(proto, tmp_path)
    try:
        optimised(path, tmp_path / "out.onnx", "float")
    except ModelFileError as error:
        assert "sparse" in str(error)
    else:
        same_numbers(path, tmp_path / "out.onnx")


@pytest.mark.parametrize(
    "bad",
    [raw("b", T.FLOAT, [1 << 40], b""), raw("b", T.FLOAT, [-1], b"12"),
     raw("b", T.FLOAT, [2], b"123"), raw("b", T.FLOAT, [1 << 62, 1 << 62], b""),
     onnx.TensorProto(name="b", data_type=T.STRING, dims=[3], string_data=[b"a"])],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("external", [None, True])
def test_damaged_tensors_elsewhere(
    tmp_path: Path, bad: onnx.TensorProto, external: bool | None
):
    nodes = [dequantize(), matmul(), node("Identity", ["b"], ["z"], "identity")]
    proto = model(nodes, [codes(), scales(), bad], outputs=["y", "z"])
    path = saved(proto, tmp_path)
    try:
        with time_limit(SECONDS):
            ortplugins.optimize(path, tmp_path / "out.onnx", external_data=external)
    except ModelFileError as error:
        assert "'b'" in str(error)


@pytest.mark.parametrize("spoil", ["type", "node", "no outputs", "no opset"])
def test_a_damaged_model_from_memory(spoil: str):
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


def test_a_model_from_memory_is_not_changed():
    nodes = [dequantize(), node("MatMul", ["x", "d"], ["p"], "consumer")]
    nodes.append(node("Add", ["p", "w.T.nbits32"], ["y"], "add"))
    bodies = [
        branch(name, nodes, [tensor("w.T.nbits32", np.full(N, 2.0), np.float32)])
        for name in ("then", "else")
    ]
    proto = conditional(*bodies, [codes(), scales()])
    before = proto.SerializeToString()
    ortplugins.optimize(proto)
    assert proto.SerializeToString() == before


@pytest.mark.parametrize("version", [0, -1, 1 << 40])
@pytest.mark.parametrize("what", ["opset", "ir", "default opset"])
def test_odd_versions(tmp_path: Path, version: int, what: str):
    proto = linear()
    if what == "ir":
        proto.ir_version = version
    elif what == "opset":
        proto.opset_import[0].version = version
    else:
        proto.opset_import[0].domain = "another"
    endured(proto, tmp_path)
