# SPDX-License-Identifier: MIT
"""``modelopt.onnx.quantization.int4`` as a drop-in: its names, its arguments, our quantizer.

    import modelopt.onnx.quantization.int4 as int4
    import ortplugins.quantization.int4 as int4

A script changes that one line. Positional arguments and their defaults are those of ModelOpt's
documentation of ``int4``; what nvidia-modelopt 0.47.0 has added since are keywords here.
Values are 0.47.0's; ``docs/moving.md`` says what differs. Below
:func:`quantize` lies :func:`.quantize`, which has more to offer.

The primitives compute in the type of their arrays, float16, float32 or float64. With amax the
greatest magnitude of a block, b bits,

    symmetric     s = max(alpha * amax / (2**(b - 1) - 1), 1e-5)
                  codes = clip(rint(w / s), -2**(b - 1), 2**(b - 1) - 1)
    zero points   s = max(hi - lo, 1e-5) / (2**b - 1)    z = clip(-rint(lo / s), 0, 2**b - 1)
                  codes = clip(rint(w / s) + z, 0, 2**b - 1)
    awq           s = clip(x^a / w^(1 - a), 1e-4, 1e4) / sqrt(max * min)

The searches take a ``wa_pack``,

    [(activation with .name, weight TensorProto, is weight [N, K], type, ...)]

samples ``inputs``, name to array, ``augmented_onnx_path``, next to which the weights'
data lies, and a ``session`` with ``run([activation], feed)``.
"""

from __future__ import annotations

__all__ = [
    "AWQClipHelper",
    "AWQLiteHelper",
    "clip_search",
    "dq_tensor",
    "find_scales",
    "get_act_scale",
    "get_act_to_weight_map_and_act_to_wa_pack_map",
    "get_parent_child_nodes_map",
    "get_scale",
    "get_weight_scale",
    "get_x_w_mean_for_subgraph",
    "quant_tensor",
    "quantize",
    "quantize_rtn",
    "rtn",
    "run_awq_scale_search_per_node",
    "run_awq_scale_search_per_subgraph",
]

import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import OrtpluginsWarning, QuantizationError
from ortplugins.model_io.loading import load_model
from ortplugins.quantization.methods.awq import search_scales
from ortplugins.quantization.methods.nearest import BlockFormat, in_blocks
from ortplugins.quantization.selection import matches
from ortplugins.quantization.weights.folds import described
from ortplugins.quantization.weights.quantize import quantize as quantize_weights
from ortplugins.quantization.weights.uses import OP_TYPES, WeightUse, find_uses
from rewrite_rules.closest_name import did_you_mean
from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.nodes import drop_unused_initializers, label

Array = npt.NDArray[Any]
WaPack = Sequence[tuple[Any, ...]]  # 4 or 5 of them
Rules = list[tuple[str, Any]]

# ModelOpt's methods by ours. Error feedback does more than clips, in less time; rtn_trt,
# rtn_trt_dq and awq_clip_trt write operators that only TensorRT has.
_METHODS = {
    "rtn": "rtn",
    "rtn_dq": "rtn",
    "awq_lite": "awq_lite",
    "awq_clip": "gptq",
    "awq_full": "gptq",
}
# Scales, or ranges where there are zero points, are raised to this: AutoAWQ's bound.
_LEAST = 1e-5
_PRODUCTS = ("Gemm", "MatMul")


def quantize(
    onnx_path: str | os.PathLike[str] | onnx.ModelProto,
    calibration_method: str = "awq_lite",
    calibration_data_reader: Any = None,
    calibration_eps: Sequence[str] = ("cuda:0", "dml:0", "cpu"),
    use_external_data_format: bool = True,
    use_zero_point: bool = False,
    block_size: int | None = None,
    nodes_to_exclude: Sequence[str] | None = (r"/lm_head",),
    **kwargs: Any,
) -> onnx.ModelProto:
    """Quantise the weights of MatMul and Gemm to int4, with ModelOpt's arguments.

    ``docs/moving.md`` says which argument of :func:`.quantize` stands for which
    here, and where results differ. Round to nearest gives ModelOpt's scales and codes;
    ``"rtn"`` keeps the float weights, behind QuantizeLinear and DequantizeLinear. The AWQ
    methods search as :func:`.quantize` does. The model that is given is not changed; the
    result has opset 21 or more and holds all its tensors.

    Raises:
        CalibrationError: If samples do not fit the model, or are none.
        ModelFileError: If the model can't be used, or there is nothing to quantise.
        QuantizationError: If an argument is out of range or asks for what only TensorRT has,
            or a weight holds NaN or infinite values.
        TypeError: If a keyword is not ModelOpt's; names the closest one.
    """
    method = _METHODS.get(calibration_method)
    if method is None:
        raise QuantizationError(
            f"calibration_method is {calibration_method!r}: one of {', '.join(_METHODS)} is "
            "expected; ortplugins.quantization.quantize has GPTQ as well"
        )
    given = _checked(kwargs)
    source = load_model(onnx_path).model
    op_types = _PRODUCTS if given.get("gather_quantize_axis") is None else OP_TYPES
    if method != "rtn":
        given["calibration_data_reader"] = calibration_data_reader
        given["calibration_providers"] = _providers_of(calibration_eps)
    result = quantize_weights(
        source,
        method=method,
        block_size=128 if block_size is None else block_size,
        is_symmetric=not use_zero_point,
        grid="amax" if method == "rtn" else "positive",  # TensorRT reads the result
        op_types=op_types,
        quant_format="QDQ_transposed" if given.pop("use_column_major", False) else "QDQ",
        rules=_rules(source, op_types, nodes_to_exclude or (), given),
        **{name: given[name] for name in given if name.startswith("calibration_")},
    )
    model: ir.Model = result.model
    if calibration_method == "rtn":
        _quantize_in_the_graph(model, source)
    ir.external_data.load_to_model(model)
    return ir.to_proto(model)


def quantize_rtn(
    onnx_model: onnx.ModelProto,
    gemm_io_type: int | None = None,
    block_size: int | None = None,
    dq_only: bool = False,
    *,
    nodes_to_exclude: Sequence[str] = (),
    **kwargs: Any,
) -> onnx.ModelProto:
    """Round to nearest: :func:`quantize` with ``"rtn"``, or ``"rtn_dq"`` for ``dq_only``.

    ``gemm_io_type`` is a ``TensorProto`` type, that of the weights; None takes it from them.

    Raises:
        QuantizationError: If the weights have another type.
        TypeError: If no block size is given.
    """
    if block_size is None:
        raise TypeError(
            "quantize_rtn() needs block_size, the third argument, after gemm_io_type"
        )
    if gemm_io_type is not None:
        wanted = ir.DataType(gemm_io_type)
        for _, use in find_uses(load_model(onnx_model).model, _PRODUCTS):
            if isinstance(use, WeightUse) and use.tensor.dtype is not wanted:
                raise QuantizationError(
                    f"gemm_io_type is {wanted.name}, but weight {use.weight.name!r} is "
                    f"{use.tensor.dtype.name}: convert the model before"
                )
    kwargs |= {"block_size": block_size, "nodes_to_exclude": nodes_to_exclude}
    return quantize(onnx_model, "rtn_dq" if dq_only else "rtn", **kwargs)


def find_scales(
    w: Array,
    block_size: int,
    alpha: float | Array = 1.0,
    use_zero_point: bool = False,
    *,
    quantize_axis: int = 0,
    num_bits: int = 4,
) -> tuple[Array, Array | None]:
    """Return scales, and zero points or None, of blocks along an axis, in ``w``'s type.

    The range of symmetric blocks shrinks by ``alpha``: a number, or one for each block in the
    order ``[N, blocks]``, such as ``AWQClipHelper.best_alpha``. The last block is filled up
    with zeros.
    """
    form = BlockFormat(num_bits, block_size, not use_zero_point)
    rows = np.moveaxis(w, quantize_axis, 0)
    blocks = in_blocks(rows, form.size_along(len(rows)))
    if use_zero_point:
        low, high = blocks.min(axis=1).clip(max=0), blocks.max(axis=1).clip(min=0)
        scales = (high - low).clip(min=_LEAST) / form.highest_code
        zeros = (-np.rint(low / scales)).clip(0, form.highest_code)
        return _like(scales, w, quantize_axis), _like(zeros, w, quantize_axis)
    if isinstance(alpha, np.ndarray) and alpha.ndim:
        alpha = alpha.reshape(rows.shape[1], len(blocks)).T
    scales = (np.abs(blocks).max(axis=1) * alpha / form.highest_code).clip(min=_LEAST)
    return _like(scales, w, quantize_axis), None


def rtn(
    w: Array,
    s: Array,
    block_size: int,
    zp: Array | None = None,
    *,
    quantize_axis: int = 0,
    num_bits: int = 4,
) -> npt.NDArray[np.int8 | np.uint8]:
    """Return the codes nearest to a weight on given scales, ties to even, of ``w``'s shape.

    They are int8, but for 8 bits with zero points uint8. ``s`` may have fewer blocks than
    ``block_size`` gives, if these divide the axis evenly; else a QuantizationError.
    """
    form = BlockFormat(num_bits, block_size, zp is None)
    blocks, scales, zeros = _on_grid(w, s, block_size, quantize_axis, zp)
    codes = (np.rint(blocks / scales) + zeros).clip(form.lowest_code, form.highest_code)
    dtype = np.uint8 if num_bits == 8 and zp is not None else np.int8
    return _like(codes.astype(dtype), w, quantize_axis)


def dq_tensor(
    w: Array, s: Array, block_size: int, zp: Array | None = None, *, quantize_axis: int = 0
) -> Array:
    """Return ``(w - zp) * s`` for codes ``w``, in the type that numpy gives the product."""
    codes = w.astype(np.result_type(w, s))
    blocks, scales, zeros = _on_grid(codes, s, block_size, quantize_axis, zp)
    return _like((blocks - zeros) * scales, w, quantize_axis)


def quant_tensor(
    w: Array,
    block_size: int,
    alpha: float | Array = 1.0,
    use_zero_point: bool = False,
    *,
    quantize_axis: int = 0,
    num_bits: int = 4,
) -> tuple[npt.NDArray[np.int8 | np.uint8], Array, Array | None]:
    """Return codes, scales and zero points: :func:`find_scales`, then :func:`rtn`."""
    how: dict[str, int] = {"quantize_axis": quantize_axis, "num_bits": num_bits}
    scales, zero_points = find_scales(w, block_size, alpha, use_zero_point, **how)
    return rtn(w, scales, block_size, zero_points, **how), scales, zero_points


def _like(blocks: Array, array: Array, axis: int) -> Array:
    """Undo :func:`.in_blocks` along an axis of a matrix; or of a number for each block."""
    rows = blocks.reshape(-1, blocks.shape[-1])[: array.shape[axis]]
    return np.moveaxis(rows, 0, axis)


def _on_grid(
    array: Array, s: Array, block_size: int, axis: int, zp: Array | None
) -> tuple[Array, Array, Array | int]:
    """Return ``[blocks, size, N]``, and scales and zero points ``[blocks, 1, N]``."""
    rows, scales = np.moveaxis(array, axis, 0), np.moveaxis(s, axis, 0)
    form = BlockFormat(block_size=block_size)
    size = form.size_along(len(rows))
    padded = form.blocks(len(rows)) * size
    if not len(scales) or padded % len(scales):
        raise QuantizationError(
            f"scales have shape {list(s.shape)}; expected {padded // size} blocks of {size} "
            f"along axis {axis}"
        )
    zeros = 0 if zp is None else np.moveaxis(zp, axis, 0)[:, None]
    return in_blocks(rows, padded // len(scales)), scales[:, None], zeros


def get_act_scale(x: Array) -> Array:
    """Return the mean of abs(x) over tokens, ``[T, K]`` to ``[K]``."""
    mean: Array = np.abs(x).mean(0)
    return mean


def get_weight_scale(weight: Array, block_size: int | None = None) -> Array:
    """Return abs(w) over its block's greatest, its mean over columns: ``[K, N]`` to ``[K]``.

    As in ModelOpt, the ``block_size`` rows of a block are K / ``block_size`` apart. None and
    -1 stand for K.
    """
    k, n = weight.shape
    size = BlockFormat(block_size=-1 if block_size is None else block_size).size_along(k)
    blocks = np.abs(in_blocks(weight, size).reshape(size, -1))
    relative = blocks / (blocks.max(axis=0) + np.finfo(weight.dtype).tiny)
    mean: Array = relative.reshape(-1, n)[:k].mean(1)
    return mean


def get_scale(
    x_max: Array, w_max: Array, alpha: float, reduce_across_tp: bool = False
) -> Array:
    """Return AWQ's scales ``[K]``: ``x^alpha / w^(1 - alpha)``, normalised.

    Raises:
        QuantizationError: With ``reduce_across_tp``: one process has the whole model here.
    """
    if reduce_across_tp:
        raise QuantizationError("reduce_across_tp is True: no ranks share a tensor here")
    tiny = np.finfo(w_max.dtype).tiny
    scales = (x_max**alpha / (w_max ** (1 - alpha) + tiny)).clip(1e-4, 1e4)
    normalised: Array = scales / np.sqrt(scales.max() * scales.min())
    return normalised


class AWQLiteHelper:
    """The exponents of one weight ``[K, N]``, with a ``loss`` that whoever searches fills in.

    ``best_alpha`` and ``best_scale``, ``[K]``, are None before :meth:`update_best_params`.
    """

    alpha_step: float = 0.1

    def __init__(
        self, x: Array | None, w: Array | None, block_size: int, **kwargs: Any
    ) -> None:
        self.alpha_step = kwargs.get("awqlite_alpha_step", type(self).alpha_step)
        self.block_size = len(w) if block_size == -1 and w is not None else block_size
        self.weight_scale = None if w is None else get_weight_scale(w, self.block_size)
        self.act_scale = None if x is None else get_act_scale(x)
        self.loss = dict.fromkeys(_exponents(self.alpha_step), 0.0)
        self.best_scale: Array | None = None
        self.best_alpha: float | None = None

    def update_best_params(self) -> None:
        """Set ``best_alpha`` to the exponent of least loss, and ``best_scale``."""
        assert self.act_scale is not None and self.weight_scale is not None
        self.best_alpha = min(self.loss, key=self.loss.__getitem__)
        self.best_scale = get_scale(self.act_scale, self.weight_scale, self.best_alpha)


class AWQClipHelper:
    """What each block of one weight may be clipped to: ``alphas``, 1.0 last.

    ``loss`` has float32 ``[N, blocks]`` for each; ``w_amax``, ``best_loss`` and ``best_alpha``
    are ``[N * blocks]``, column by column.
    """

    min_alpha: float = 0.5
    alpha_step: float = 0.05

    def __init__(self, w: Array, block_size: int, **kwargs: Any) -> None:
        self.alpha_step = kwargs.get("awqclip_alpha_step", type(self).alpha_step)
        self.min_alpha = kwargs.get("awqclip_alpha_min", type(self).min_alpha)
        self.alphas = _ratios(self.min_alpha, self.alpha_step)[::-1]
        self.block_size = BlockFormat(block_size=block_size).size_along(len(w))
        blocks = np.abs(in_blocks(w, self.block_size))
        self.w_amax: Array = blocks.max(axis=1).T.reshape(-1)
        shape = (w.shape[1], len(blocks))
        self.loss = {alpha: np.zeros(shape, np.float32) for alpha in self.alphas}
        self.best_loss: Array = np.full_like(self.w_amax, np.inf)
        self.best_alpha: Array = np.ones_like(self.w_amax)

    def update_best_params(self) -> None:
        """Set ``best_alpha`` of each block to the ratio of least loss."""
        losses = np.stack([loss.reshape(-1) for loss in self.loss.values()])
        self.best_loss = losses.min(axis=0)
        self.best_alpha = np.array(list(self.loss), self.w_amax.dtype)[losses.argmin(axis=0)]


def clip_search(
    x: Array,
    w: Array,
    awq_clip: AWQClipHelper,
    max_tokens: int = 64,
    num_bits: int = 4,
    **kwargs: Any,
) -> None:
    """Fill in a clip helper: for each block, the squared error of what it adds to products.

    From an activation ``[..., K]`` with more tokens, ``max_tokens`` to twice as many are
    taken, evenly spread.
    """
    size = awq_clip.block_size
    tokens = x.reshape(-1, x.shape[-1])
    tokens = tokens[:: max(1, len(tokens) // max_tokens)]
    by_block = np.ascontiguousarray(in_blocks(tokens.T, size).transpose(0, 2, 1))
    width = kwargs.get("awqclip_bsz_col", 1024)
    for alpha, losses in awq_clip.loss.items():
        codes, scales, _ = quant_tensor(w, size, alpha=alpha, num_bits=num_bits)
        error = in_blocks(dq_tensor(codes, scales, size) - w, size)
        for start in range(0, w.shape[1], width):
            columns = slice(start, start + width)
            product = by_block @ error[:, :, columns]
            losses[columns] += np.square(product).mean(axis=1).T
    awq_clip.update_best_params()


def run_awq_scale_search_per_node(
    wa_pack: WaPack,
    augmented_onnx_path: str,
    block_size: int,
    use_zero_point: bool,
    session: Any,
    awq_lite: list[Any],
    inputs: Sequence[Mapping[str, Any]],
    tqdm_msg_append_str: str,
    enable_weight_clipping: bool,
    enable_fast_path_using_high_sysram: bool,
    output_data: list[list[Any]],
    clip_alphas: dict[str, Array],
    *,
    layer_info: Mapping[str, Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> tuple[list[Any], dict[str, Array]]:
    """Search the scales of each weight by itself; fill in ``awq_lite`` and ``clip_alphas``.

    Keywords are those of the helpers. The fast path of ModelOpt, by ``output_data``, finds the
    same: activations come from the session.
    """
    for index, (activation, weight, transposed, *_) in enumerate(wa_pack):
        w = _matrix(weight, transposed, augmented_onnx_path)
        x = _tokens(session, activation.name, inputs, len(w))
        layer = (layer_info or {}).get(weight.name, {})
        bits, size = layer.get("precision", 4), layer.get("block_size", block_size)
        helper = awq_lite[index] = AWQLiteHelper(x, w, size, **kwargs)
        form = BlockFormat(bits, size, not use_zero_point, "amax")
        helper.loss = _losses(x, [w], form, list(helper.loss))
        helper.update_best_params()
        if enable_weight_clipping:
            assert helper.best_scale is not None
            scaled = w * helper.best_scale[:, None]
            clip = AWQClipHelper(scaled, size, **kwargs)
            clip_search(x / helper.best_scale, scaled, clip, num_bits=bits, **kwargs)
            clip_alphas[weight.name] = clip.best_alpha
    return awq_lite, clip_alphas


def run_awq_scale_search_per_subgraph(
    wa_pack: WaPack,
    act_to_wa_pack_map: Mapping[str, Sequence[int]],
    act_to_quant_nodes_weight_shape_map: Mapping[str, Sequence[Sequence[int]]],
    augmented_onnx_path: str,
    block_size: int,
    use_zero_point: bool,
    session: Any,
    awq_lite: list[Any],
    inputs: Sequence[Mapping[str, Any]],
    tqdm_msg_append_str: str,
    **kwargs: Any,
) -> list[Any]:
    """Search one vector of scales for all weights of an activation; fill in ``awq_lite``."""
    alphas = _exponents(kwargs.get("awqlite_alpha_step", AWQLiteHelper.alpha_step))
    form = BlockFormat(4, block_size, not use_zero_point, "amax")
    for activation, indices in act_to_wa_pack_map.items():
        weights = [
            _matrix(wa_pack[index][1], wa_pack[index][2], augmented_onnx_path)
            for index in indices
        ]
        x = _tokens(session, activation, inputs, len(weights[0]))
        means = wa_pack, indices, augmented_onnx_path, x, block_size
        x_mean, w_mean = get_x_w_mean_for_subgraph(*means)
        losses = _losses(x, weights, form, alphas)
        # In float64, as ModelOpt's: numpy's scalars, unlike Python's, widen what they meet.
        best = np.float64(min(losses, key=losses.__getitem__))
        # The constants are AutoAWQ's.
        scale = (x_mean**best / (w_mean ** (1 - best) + 1e-4)).clip(min=1e-4)
        with np.errstate(invalid="ignore"):
            scale = scale / np.sqrt(scale.max() * scale.min())
        scale[~np.isfinite(scale)] = 1
        for index in indices:
            helper = awq_lite[index] = AWQLiteHelper(None, None, block_size, **kwargs)
            helper.best_alpha, helper.best_scale = best, scale
    return awq_lite


def get_x_w_mean_for_subgraph(
    wa_pack: WaPack,
    wa_pack_idx_list: Iterable[int],
    augmented_onnx_path: str,
    x: Array,
    block_size: int,
) -> tuple[Array, Array]:
    """Return the means of abs(x) ``[T, K]``, and of abs(w) over its block's greatest."""
    sums = np.sum(np.abs(x), axis=0, dtype=np.float32)
    weights = [
        _matrix(wa_pack[i][1], wa_pack[i][2], augmented_onnx_path) for i in wa_pack_idx_list
    ]
    together = np.concatenate(weights, axis=1)
    # Blocks of adjacent rows, unlike :func:`get_weight_scale`'s.
    size = BlockFormat(block_size=block_size).size_along(len(together))
    blocks = np.abs(in_blocks(together, size))
    relative = (blocks / (blocks.max(axis=1, keepdims=True) + 1e-6)).reshape(
        -1, together.shape[1]
    )
    return (sums / len(x)).astype(x.dtype), relative[: len(together)].mean(1)


def get_act_to_weight_map_and_act_to_wa_pack_map(
    wa_pack: WaPack,
) -> tuple[dict[str, list[int]], dict[str, list[Sequence[int]]]]:
    """Return the places in ``wa_pack`` and the shapes of the weights of each activation."""
    places: dict[str, list[int]] = {}
    shapes: dict[str, list[Sequence[int]]] = {}
    for index, (activation, weight, *_) in enumerate(wa_pack):
        places.setdefault(activation.name, []).append(index)
        shapes.setdefault(activation.name, []).append(weight.dims)
    return places, shapes


def get_parent_child_nodes_map(
    graph: onnx.GraphProto, wa_pack: WaPack, nodes_to_exclude: Collection[str] = ()
) -> tuple[dict[str, list[onnx.NodeProto]], dict[str, list[onnx.NodeProto]]]:
    """Return the nodes of a ``wa_pack`` by what makes their activation; readers by tensor.

    The producer of a graph input is called ``"root_0"``.
    """
    producers = {name: node.name for node in graph.node for name in node.output}
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    weights = {entry[1].name for entry in wa_pack}
    children: dict[str, list[onnx.NodeProto]] = {}
    for name in dict.fromkeys(entry[0].name for entry in wa_pack):
        children.setdefault(producers.get(name, "root_0"), []).extend(
            node
            for node in consumers.get(name, ())
            if node.op_type in _PRODUCTS
            and node.name not in nodes_to_exclude
            and node.input[0] == name
            and node.input[1] in weights
        )
    return children, consumers


def _losses(
    x: Array, weights: Sequence[Array], form: BlockFormat, alphas: Sequence[float]
) -> dict[float, float]:
    """Return the squared error of products for each exponent, on all columns."""
    x = x.astype(np.float32, copy=False)
    mean_abs, forms = np.abs(x).mean(axis=0, dtype=np.float32), [form] * len(weights)
    gram = (x.T @ x / len(x)).astype(np.float32, copy=False)
    found = search_scales(weights, mean_abs, gram, forms, alphas=alphas)
    return found[2]


def _matrix(weight: onnx.TensorProto, transposed: bool, model_path: str) -> Array:
    folder = os.path.dirname(model_path)
    array: Array = onnx.numpy_helper.to_array(weight, base_dir=folder)
    return array.T if transposed else array


def _tokens(session: Any, name: str, inputs: Sequence[Mapping[str, Any]], k: int) -> Array:
    feeds = ({key: np.asarray(value) for key, value in feed.items()} for feed in inputs)
    # By token before they are put together: samples may differ in length.
    return np.concatenate([session.run([name], feed)[0].reshape(-1, k) for feed in feeds])


# ModelOpt's arguments, translated into settings of ortplugins.quantization.quantize().

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "dml": "DmlExecutionProvider",
    "trt": "TensorrtExecutionProvider",
    "NvTensorRtRtx": "NvTensorRTRTXExecutionProvider",
}
# What changes nothing: weights that read one activation get the same scales, the walk bounds
# the memory, and the searches of quantize() have their own steps.
_WITHOUT_EFFECT = (
    *("awqlite_alpha_step", "awqlite_fuse_nodes", "awqlite_run_per_subgraph"),
    *("awqclip_alpha_min", "awqclip_alpha_step", "awqclip_bsz_col"),
    *("enable_fast_path_using_high_sysram", "input_shapes_profile", "trt_rtx_backend"),
)
_REFUSED = {
    "force_fp16": "convert the model to float16 before, with onnxruntime's or "
    "onnxconverter_common's converter, and quantise the result",
    "enable_mixed_quant": "name the layers in layers_8bit, or take share_of_8_bits of "
    "ortplugins.quantization.quantize",
}
_KEYWORDS = (
    *("gather_quantize_axis", "gather_block_size", "layers_8bit", "use_column_major"),
    "log_level",  # nothing is logged
    *_REFUSED,
    *_WITHOUT_EFFECT,
)


def _checked(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that say something; refuse what is not done here."""
    for name in kwargs:
        if name not in _KEYWORDS:
            hint = did_you_mean(name, _KEYWORDS) or f"; there are {', '.join(_KEYWORDS)}"
            raise TypeError(f"quantize() got an unexpected keyword argument {name!r}{hint}")
    given = {name: value for name, value in kwargs.items() if value is not None}
    for name, advice in _REFUSED.items():
        if given.get(name):
            raise QuantizationError(f"{name} is not supported: {advice}")
    for name in given.keys() & {*_WITHOUT_EFFECT}:
        warnings.warn(f"{name} has no effect", OrtpluginsWarning, stacklevel=3)
    if (axis := given.get("gather_quantize_axis")) not in (None, 1, -1):
        raise QuantizationError(
            f"gather_quantize_axis is {axis!r}: blocks of Gather's tables run along their "
            "rows here (1 or -1), so that each row is dequantised separately"
        )
    return given


def _exponents(step: float) -> list[float]:
    """Return 0, step, ... up to 1."""
    steps: list[float] = np.arange(0, 1.0 + step, step).tolist()
    return [min(alpha, 1.0) for alpha in steps if alpha <= 1 + 1e-9]


def _ratios(least: float, step: float) -> list[float]:
    """Return 1, and then the greatest of least, least + step, ... first."""
    steps = [round(float(ratio), 10) for ratio in np.arange(least, 1.0, step)]
    return [1.0, *(ratio for ratio in reversed(steps) if ratio < 1)]


def _providers_of(names: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Return onnxruntime's providers for ModelOpt's names, those that there are."""
    available = onnxruntime.get_available_providers()
    found = []
    for name in names:
        kind, _, device = name.partition(":")
        if kind not in _PROVIDERS:
            raise QuantizationError(
                f"calibration_eps has {name!r}; expected {', '.join(_PROVIDERS)}, with a "
                "device's number after a colon"
            )
        if _PROVIDERS[kind] in available:
            found.append((_PROVIDERS[kind], {"device_id": device} if device else {}))
    return found or [("CPUExecutionProvider", {})]


def _rules(
    model: ir.Model,
    op_types: Sequence[str],
    excluded: Sequence[str],
    given: Mapping[str, Any],
) -> Rules:
    """Return the rules of a model: tables' blocks, wider weights, and what stays in float."""
    if isinstance(excluded, str):
        raise QuantizationError("nodes_to_exclude is a string; expected a list of patterns")
    layers = given.get("layers_8bit", ())
    layers = layers.split(",") if isinstance(layers, str) else layers
    # Parts of paths, between slashes or dots. ModelOpt's 8 bits are per column.
    paths = [re.split("[./]", layer.strip().strip("/")) for layer in layers if layer.strip()]
    wider = [rf"(^|[./]){'[./]'.join(map(re.escape, path))}($|[./])" for path in paths]
    found = find_uses(model, op_types)
    names = [label(node) for node, use in found if isinstance(use, WeightUse)]
    # Expressions match at the start of a name; matches() reports an invalid one. Globs would
    # read brackets in a name as their own.
    found_in = [(n, each) for n in names for each in excluded if matches(f"re:{each}", n)]
    left = dict.fromkeys(name for name, each in found_in if re.match(each, name))
    return [
        (":table", {"block_size": given.get("gather_block_size", 32)}),
        *((f"re:{pattern}", {"bits": 8, "block_size": -1}) for pattern in wider),
        *((rf"re:\A{re.escape(name)}\Z", "float") for name in left),
    ]


def _quantize_in_the_graph(model: ir.Model, source: ir.Model) -> None:
    """Have the graph make the codes of its float weights, which onnxruntime folds."""
    found = (use for _, use in find_uses(source, OP_TYPES))
    uses = {use.weight.name: use for use in found if isinstance(use, WeightUse)}
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "DequantizeLinear"]
    for node in nodes:
        codes, *grid = node.inputs
        name, _, form = str(codes and codes.name).rpartition(".")
        if codes is None or codes.dtype is None or name not in uses or node.graph is None:
            continue
        matrix = uses[name].matrix.T if "_transposed" in form else uses[name].matrix
        graph = codes.graph
        assert isinstance(graph, ir.Graph)
        tensor = ir.tensor(np.ascontiguousarray(matrix), name=f"{codes.name}.float")
        attributes = {key: attribute.value for key, attribute in node.attributes.items()}
        rounded = ir.node(
            "QuantizeLinear",
            [new_initializer(graph, tensor), *grid],
            attributes | {"output_dtype": int(codes.dtype)},
            name=f"{codes.name}.quantized",
        )
        node.graph.insert_before(node, rounded)
        node.replace_input_with(0, described(rounded, codes.dtype, codes.shape))
        drop_unused_initializers([codes])
