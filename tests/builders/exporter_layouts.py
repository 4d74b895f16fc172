# SPDX-License-Identifier: MIT
"""The quantised layouts that exporters write, node for node, in tiny.

Each builder names the exporter, its version and its options. Names, attributes, shapes and
types are theirs, the numbers are random. What onnxruntime's own quantizers write is in
``test_exporter_layouts.py``, where they run; weights with a scale for each channel or for all,
as torch.onnx, optimum and neural-compressor write them, are rows 4, 7 and 9 of the matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from .layout_matrix import EXACT, FUSED, HALF, LayoutCase, Quantized, left_alone

Shape = tuple[int, ...]
ACROSS = "a scale for each index of K"
FUSED_TABLE = {"GatherBlockQuantized": 1, "DequantizeLinear": 0}


def _case(
    text: str,
    *weights: Quantized,
    x: Shape | None = (3, 64),
    dtype: npt.DTypeLike = np.float32,
    **more: object,
) -> LayoutCase:
    """The weights are w, v in the text."""
    named = dict(zip("wv", weights, strict=False))
    half = any(np.dtype(of) == np.float16 for of in (dtype, weights[0].scale_dtype))
    given = {"expect": {**FUSED, "MatMulNBits": len(weights)}} | more
    tolerance = HALF if half else EXACT
    return LayoutCase("", text, named, x, dtype=dtype, tolerance=tolerance, **given)


def _transpose(node: str, value: str, output: str) -> str:
    return f'["{node}"] "{output}" = Transpose <perm = [1, 0]> ("{value}")'


# onnxruntime-genai 0.18, model builder, use_qdq.


def genai(
    storage: str = "int4",
    zero_points: str = "none",
    dtype: npt.DTypeLike = np.float32,
    block: int = 32,
) -> LayoutCase:
    """A checkpoint that is quantised already (AWQ, GPTQ, ...) with ``use_qdq``.

    DQ on [N, K] with axis -1, scales [N, K / block], Transpose(perm=[1, 0]), MatMul and
    Add(product, bias). A checkpoint in float goes through MatMulNBitsQuantizer, symmetric,
    in blocks of 32.
    """
    K = 4 * block
    between = (K + 24) // block * block  # the builder writes whole blocks only
    qkv, head = "/model/layers.0/attn/qkv_proj", "/lm_head"
    weights = []
    for name, shape in ((qkv, (K + 24, K)), (head, (37, between))):
        prefix = f"{name[1:].replace('/', '.')}.MatMul.DequantizeLinear"
        names = tuple(f"{prefix}.{part}" for part in ("qweight", "scales", "qzeros"))
        weights.append(Quantized(shape, storage, -1, block, zero_points, names=names))
    weights = [dataclasses.replace(w, scale_dtype=dtype) for w in weights]

    def matmul(name: str, x: str, weight: str) -> str:
        dq, turned = f"{name}/MatMul/DequantizeLinear", f"{name}/MatMul/Transpose"
        through = _transpose(turned, f"{dq}/output_0", f"{turned}/output_0")
        return f"""["{dq}"] "{dq}/output_0" = ${weight} {through}
            ["{name}/MatMul"] "{name}/MatMul/output_0" = MatMul ({x}, "{turned}/output_0")"""

    bias = "model.layers.0.attn.qkv_proj.Add.bias"
    text = f"""{matmul(qkv, "x", "w")}
        ["{qkv}/Add"] added = Add ("{qkv}/MatMul/output_0", "{bias}")
        ["/model/tanh"] bounded = Tanh (added)
        ["/model/slice"] sliced = Slice (bounded, first, last, axis)
        {matmul(head, "sliced", "v")}"""
    bounds = {"first": np.array([0]), "last": np.array([between]), "axis": np.array([2])}
    constants = {bias: (K + 24,), **bounds}
    outputs = (f"{head}/MatMul/output_0",)
    return _case(
        text, *weights, x=(2, 3, K), dtype=dtype, constants=constants, outputs=outputs
    )


# Olive 0.13, MatMulNBitsToQDQ.


def olive(
    K: int = 64,
    N: int = 24,
    bits: int = 4,
    *,
    use_transpose_op: bool = False,
    use_signed_int: bool = False,
    add_zero_point: bool = False,
    asymmetric: bool = False,
    bias: bool = False,
    dtype: npt.DTypeLike = np.float32,
) -> LayoutCase:
    """What the pass makes of one MatMulNBits in blocks of 32.

    [K, N] and axis 0, or [N, K], axis 1 and a Transpose. One block of K or less becomes per
    channel: scales [N], the other axis, no block_size. Unsigned codes always have zero points
    (uniformly 2^(bits-1) when symmetric), signed ones when asymmetric or ``add_zero_point``.
    ``use_int4`` is ``use_signed_int`` for 4 bits only. 2 bits make it opset 25.
    """
    zero_points = "none" if use_signed_int and not add_zero_point else "default"
    base = "/model/layers.0/attn/q_proj"
    dq = f"{base}/DequantizeLinear"
    axis = int(use_transpose_op)
    w = Quantized(
        (N, K) if use_transpose_op else (K, N),
        f"{'' if use_signed_int else 'u'}int{bits}",
        1 - axis if K <= 32 else axis,
        32,
        "random" if asymmetric else zero_points,
        "channel" if K <= 32 else "blocks",
        dtype,
        names=(f"{dq}.qweight", f"{dq}.scales", f"{dq}.qzeros"),
    )
    text, value = f'["{dq}"] "{dq}/output_0" = $w ', f"{dq}/output_0"
    if use_transpose_op:
        text += _transpose(f"{base}/Transpose", value, f"{base}/Transpose/output_0")
        value = f"{base}/Transpose/output_0"
    text += f'["{base}/MatMul"] {"p" if bias else "y"} = MatMul (x, "{value}") '
    constant = "model.layers.0.attn.q_proj.MatMul.bias"
    if bias:
        text += f'["{base}/Add"] y = Add (p, "{constant}")'
    constants = {constant: (N,)} if bias else {}
    return _case(text, w, x=(3, K), dtype=dtype, constants=constants)


# NVIDIA ModelOpt 0.47, modelopt.onnx.quantization.int4 (rtn_dq, awq_lite, awq_clip).


def _modelopt_weight(name: str, w: Quantized, column_major: bool = False, key: str = "w"):
    """The text that makes ``name``, and the weight under ModelOpt's names."""
    dq = f"{name}_DequantizeLinear"
    text = f'["{dq}"] "{dq}_Output" = ${key} '
    value = f"{dq}_Output"
    if column_major:
        text += _transpose(f"{dq}_transpose_back", value, f"{dq}_transposed_back")
        value = f"{dq}_transposed_back"
    names = (f"{name}_i4", f"{name}_scale", f"{name}_zp")
    return text, f'"{value}"', dataclasses.replace(w, names=names)


def modelopt(
    *,
    column_major: bool = False,
    zero_point: bool = False,
    pre_scale: bool = False,
    dtype: npt.DTypeLike = np.float32,
    K: int = 64,
    block: int = 16,
) -> LayoutCase:
    """MatMul -> Relu -> MatMul; int4, with ``use_zero_point`` uint4.

    [K, N] with axis 0, or with ``use_column_major`` [N, K], axis 1 and a Transpose. AWQ puts
    Mul(x, [1, K]) in front, one for every weight. K need not be a multiple of the block.
    """
    storage, zero_points = ("uint4", "random") if zero_point else ("int4", "none")
    text, value, weights, constants = "", "x", [], {}
    for name, k, n, key in (("fc1", K, 48, "w"), ("fc2", 48, 40, "v")):
        shape = (n, k) if column_major else (k, n)
        w = Quantized(shape, storage, int(column_major), block, zero_points, scale_dtype=dtype)
        made, weight, w = _modelopt_weight(f"{name}.weight", w, column_major, key)
        text += made
        weights.append(w)
        if pre_scale:
            scale, scaled = f"{name}.weight_awq_scale", f"{name}.weight_PQS_Tensor"
            text += f'["{name}.weight_PQS"] "{scaled}" = Mul ({value}, "{scale}") '
            value, constants[scale] = f'"{scaled}"', (1, k)
        output = "y" if name == "fc2" else f'"/{name}/MatMul_out"'
        text += f'["/{name}/MatMul"] {output} = MatMul ({value}, {weight}) '
        if name == "fc1":
            text, value = text + f'["/relu"] hidden = Relu ({output}) ', "hidden"
    return _case(text, *weights, x=(2, 3, K), dtype=dtype, constants=constants)


def modelopt_gemm(
    *, column_major: bool = False, transposed: bool = False, per_channel: bool = False
) -> LayoutCase:
    """Gemm with a bias; blocks always run along the stored weight's first axis.

    That is K where transB is 0. Where transB is 1 it is N, so the blocks run across the output
    columns; column-major then stores [K, N] with axis 1, blocks along N too, and transB=0.
    ``per_channel`` (``block_size=-1``) with transB=1: axis 1, a scale per input feature.
    """
    K, N = 40, 24
    # For transB=1 the column-major form drops the flag instead of adding a Transpose.
    flag = int(transposed and not column_major)
    shape = (N, K) if transposed != column_major else (K, N)
    w = Quantized(shape, "int4", int(column_major), 16, "none")
    if per_channel:
        w = dataclasses.replace(w, axis=1, scaled="channel")
    made, weight, w = _modelopt_weight("gemm.weight", w, column_major and not transposed)
    attributes = f"<transB = {flag}>" if transposed else ""
    text = f'{made} ["/gemm/Gemm"] y = Gemm {attributes} (x, {weight}, "gemm.bias")'
    more = left_alone(ACROSS) if transposed else {}
    return _case(text, w, x=(3, K), constants={"gemm.bias": (N,)}, **more)


def modelopt_tied(*, column_major: bool = False) -> LayoutCase:
    """A table that Gather reads as [V, H] and the head, Gemm(transB=1), as its transpose."""
    w = Quantized((48, 64), "int4", 1, 32, "none")
    made, table, w = _modelopt_weight("embed.weight", w)
    head = f'["/head/Gemm"] y = Gemm <transB = 1> (hidden, {table})'
    if column_major:
        head = _transpose("/head/Transpose", table.strip('"'), "turned")
        head += '["/head/MatMul"] y = MatMul (hidden, turned)'
    text = f"""{made} ["/embed/Gather"] embedded = Gather ({table}, input_ids)
        ["/tanh"] hidden = Tanh (embedded) {head}"""
    ids = {"input_ids": np.array([0, 47, 13])}
    return _case(text, w, x=None, inputs=ids, expect={**FUSED_TABLE, "MatMulNBits": 1})


# ModelOpt's torch export, and what onnxruntime's DQMatMulNBitsFusion was written for.


def three_dimensional(
    *,
    cast: str = "none",
    zero_points: str = "none",
    storage: str = "uint4",
    gemm: bool = False,
    target: tuple[int, int] = (24, 96),
    constant_node: bool = False,
) -> LayoutCase:
    """DQ [N, blocks, block], scales [N, blocks, 1], axis 2 -> Reshape [N, K] -> Transpose.

    ``cast``: ``"before"`` or ``"after"`` the Transpose, from float16 scales to float32.
    ``target`` is the Reshape's shape ([N, -1] and [-1, K] occur), ``constant_node`` its form.
    """
    scale = np.float32 if cast == "none" else np.float16
    names = tuple(f"model.q_proj.{part}" for part in ("weight", "scale", "zero_point"))
    w = Quantized((24, 3, 32), storage, 2, 32, zero_points, "blocks", scale, names=names)
    prefix = "/model/q_proj/weight_quantizer"
    steps = [f'["{prefix}/Reshape"] {{}} = Reshape ({{}}, shape)']
    if cast == "before":
        steps.append(f'["{prefix}/Cast"] {{}} = Cast <to = 1> ({{}})')
    steps.append('["/model/q_proj/Transpose"] {} = Transpose <perm = [1, 0]> ({})')
    if cast == "after":
        steps.append(f'["{prefix}/Cast"] {{}} = Cast <to = 1> ({{}})')
    text, constants = f'["{prefix}/DequantizeLinear"] v0 = $w ', {}
    if constant_node:
        sizes = f"value = int64[2] {{{target[0]}, {target[1]}}}"
        text = f'["{prefix}/Constant"] shape = Constant <{sizes}> () ' + text
    else:
        constants["shape"] = np.int64(target)
    for number, step in enumerate(steps):
        text += step.format(f"v{number + 1}", f"v{number}") + " "
    value = f"v{len(steps)}"
    if gemm:
        constants["model.q_proj.bias"] = (24,)
        text += f'["/model/q_proj/Gemm"] y = Gemm (x, {value}, "model.q_proj.bias")'
    else:
        text += f'["/model/q_proj/MatMul"] y = MatMul (x, {value})'
    return _case(text, w, x=(3, 96), constants=constants)


Built = tuple[str, Callable[..., LayoutCase], dict[str, object]]


def _grid() -> Iterator[Built]:
    half = {"dtype": np.float16}
    for storage, points in product(("int4", "uint4"), ("none", "random", "default")):
        given = {"storage": storage, "zero_points": points}
        yield f"genai-{storage}-{points}", genai, given
    yield "genai-float16", genai, half
    yield "genai-float16-zp", genai, {"storage": "uint4", "zero_points": "random", **half}
    yield "genai-block128", genai, {"block": 128}

    points = {
        "symmetric": {},
        "asymmetric": {"asymmetric": True},
        "add": {"add_zero_point": True},
    }
    for bits, transposed in product((4, 8, 2), (False, True)):
        layout = {"bits": bits, "use_transpose_op": transposed}
        for signed, (name, given) in product((False, True), points.items()):
            given = {**layout, **given, "use_signed_int": signed}
            name = (
                f"olive-{bits}-{'NK' if transposed else 'KN'}-{'s' if signed else 'u'}-{name}"
            )
            yield name, olive, given
            yield f"{name}-channel", olive, {"K": 24, **given}
        ragged = {"K": 70, "N": 33, "asymmetric": True}
        yield f"olive-{bits}-{transposed}-ragged", olive, {**layout, **ragged}
    yield "olive-bias", olive, {"bias": True}
    yield "olive-bias-channel", olive, {"K": 32, "bias": True, "use_signed_int": True}
    yield "olive-float16", olive, {"bias": True, **half}
    yield "olive-float16-NK", olive, {"use_transpose_op": True, **half}

    for column in (False, True):
        name, layout = f"modelopt-{'NK' if column else 'KN'}", {"column_major": column}
        yield name, modelopt, layout
        yield f"{name}-ragged", modelopt, {"K": 70, **layout}
        yield f"{name}-awq", modelopt, {"pre_scale": True, **layout}
        yield f"{name}-float16", modelopt, {**half, **layout}
        yield f"{name}-block128", modelopt, {"block": 128, **layout}
        yield f"{name}-gemm", modelopt_gemm, layout
        yield f"{name}-gemm-transB", modelopt_gemm, {"transposed": True, **layout}
        yield f"{name}-tied", modelopt_tied, layout
    yield "modelopt-awq-zp", modelopt, {"pre_scale": True, "zero_point": True}
    given = {"transposed": True, "per_channel": True}
    yield "modelopt-gemm-per-channel", modelopt_gemm, given
    for cast, points in product(("none", "before", "after"), ("none", "random", "default")):
        yield f"3d-{cast}-{points}", three_dimensional, {"cast": cast, "zero_points": points}
    yield "3d-int4", three_dimensional, {"storage": "int4"}
    yield "3d-gemm", three_dimensional, {"gemm": True, "zero_points": "random"}
    yield "3d-minus-one", three_dimensional, {"target": (24, -1)}
    yield "3d-minus-one-first", three_dimensional, {"target": (-1, 96)}
    yield "3d-keep", three_dimensional, {"target": (0, -1)}
    yield "3d-constant-node", three_dimensional, {"constant_node": True}


def exporter_cases() -> list[LayoutCase]:
    """Return what every exporter writes, with every option."""
    return [dataclasses.replace(build(**given), name=name) for name, build, given in _grid()]
