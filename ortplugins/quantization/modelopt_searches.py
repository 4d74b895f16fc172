# SPDX-License-Identifier: MIT
"""ModelOpt's numeric primitives and AWQ searches, by its names, on our methods.

Compared with nvidia-modelopt 0.47.0 on float16, float32 and float64 arrays; arithmetic is done
in the type of the arrays, as there. With amax the greatest magnitude of a block, b bits,

    symmetric     s = max(alpha * amax / (2**(b - 1) - 1), 1e-5)
                  codes = clip(rint(w / s), -2**(b - 1), 2**(b - 1) - 1)
    zero points   s = max(hi - lo, 1e-5) / (2**b - 1)    z = clip(-rint(lo / s), 0, 2**b - 1)
                  codes = clip(rint(w / s) + z, 0, 2**b - 1)
    awq           s = clip(x^a / w^(1 - a), 1e-4, 1e4) / sqrt(max * min)

The searches are for scripts that drive them: a session that computes activations, samples, and

    wa_pack = [(activation with .name, weight TensorProto, is weight [N, K], type, node name)]

as :func:`find_quantizable_weights` makes it. ``augmented_onnx_path`` is a file that the
weights' external data lies beside, ``inputs`` are samples, name to array, and ``session`` has
``run([activation], feed)``. ``docs/moving-from-modelopt.md`` lists the values of ModelOpt's
that are mistakes. :func:`.quantize` is faster, with less error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.awq import search_scales
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    dequantize_blocks,
    in_blocks,
    round_to_grid,
)

Array = npt.NDArray[Any]
WaPack = Sequence[tuple[Any, onnx.TensorProto, bool, int, str]]

# Scales, or ranges where there are zero points, are raised to this: AutoAWQ's bound.
_LEAST = 1e-5
_PRODUCTS = ("Gemm", "MatMul")


def find_scales(
    w: Array,
    block_size: int,
    quantize_axis: int = 0,
    alpha: float | Array = 1.0,
    use_zero_point: bool = False,
    num_bits: int = 4,
) -> tuple[Array, Array | None]:
    """Return scales, and zero points where they are asked for, of blocks along an axis.

    Args:
        w: Float ``[K, N]``. Further axes may follow where ``quantize_axis`` is 0.
        block_size: Neighbours that share a scale; -1 for all of them. The last block is filled
            up with zeros.
        quantize_axis: 0, 1 or -1.
        alpha: What the range of symmetric blocks shrinks by: a number, or one for each block
            in the order ``[N, blocks]``, flat or not, such as ``AWQClipHelper.best_alpha``.
        use_zero_point: Whether to make zero points; ``alpha`` is ignored then.
        num_bits: 2, 4 or 8.

    Returns:
        Scales and zero points (or None) in ``w``'s type and shape, but for the axis's blocks.

    Raises:
        QuantizationError: If an argument is out of range.
    """
    matrix = _along_rows(w, quantize_axis)
    form = BlockFormat(num_bits, block_size, not use_zero_point)
    blocks = in_blocks(matrix, form.size_along(len(matrix)))
    if use_zero_point:
        low, high = blocks.min(axis=1).clip(max=0), blocks.max(axis=1).clip(min=0)
        scales = (high - low).clip(min=_LEAST) / form.highest_code
        zeros = (-np.rint(low / scales)).clip(0, form.highest_code)
        return _along_axis(scales, w, quantize_axis), _along_axis(zeros, w, quantize_axis)
    ratios = alpha
    if isinstance(alpha, np.ndarray) and alpha.ndim:
        ratios = alpha.reshape(matrix.shape[1], len(blocks)).T
    scales = (np.abs(blocks).max(axis=1) * ratios / form.highest_code).clip(min=_LEAST)
    return _along_axis(scales, w, quantize_axis), None


def rtn(
    w: Array,
    s: Array,
    block_size: int,
    quantize_axis: int = 0,
    zp: Array | None = None,
    num_bits: int = 4,
) -> npt.NDArray[np.int8 | np.uint8]:
    """Return the codes nearest to a weight on given scales, ties to even, of ``w``'s shape.

    They are int8, but for 8 bits with zero points uint8. ``s`` may have fewer blocks than
    ``block_size`` gives, if these divide the axis evenly; else a QuantizationError.
    """
    matrix = _along_rows(w, quantize_axis)
    scales, zeros, form = _grid(matrix, s, block_size, quantize_axis, zp, num_bits)
    codes = _along_axis(round_to_grid(matrix, scales, zeros, form), w, quantize_axis)
    return codes if num_bits == 8 else codes.view(np.int8)


def dq_tensor(
    w: Array, s: Array, block_size: int, quantize_axis: int = 0, zp: Array | None = None
) -> Array:
    """Return ``(w - zp) * s`` for codes ``w``, in the type that numpy gives the product."""
    dtype = np.result_type(w, s)
    codes = _along_rows(w, quantize_axis)
    scales, zeros, form = _grid(codes, s.astype(dtype), block_size, quantize_axis, zp, 8)
    product = dequantize_blocks(codes, scales, zeros, form)
    # A code times a float16 scale is exact in float32, so this rounds once.
    return _along_axis(product, w, quantize_axis).astype(dtype, copy=False)


def quant_tensor(
    w: Array,
    block_size: int,
    quantize_axis: int = 0,
    alpha: float | Array = 1.0,
    use_zero_point: bool = False,
    num_bits: int = 4,
) -> tuple[npt.NDArray[np.int8 | np.uint8], Array, Array | None]:
    """Return codes, scales and zero points: :func:`find_scales`, then :func:`rtn`."""
    grid = find_scales(w, block_size, quantize_axis, alpha, use_zero_point, num_bits)
    return rtn(w, grid[0], block_size, quantize_axis, grid[1], num_bits), *grid


def get_act_scale(x: Array) -> Array:
    """Return the mean of abs(x) over tokens, ``[T, K]`` to ``[K]``."""
    mean: Array = np.abs(x).mean(0)
    return mean


def get_weight_scale(weight: Array, block_size: int | None = None) -> Array:
    """Return abs(w) over its block's greatest, its mean over columns: ``[K, N]`` to ``[K]``.

    Blocks are of ``block_size`` adjacent rows; None and -1 stand for K.
    """
    tiny = np.finfo(weight.dtype).tiny
    return _relative_magnitude(weight, -1 if block_size is None else block_size, tiny)


def get_scale(x_max: Array, w_max: Array, alpha: float) -> Array:
    """Return AWQ's scales ``[K]``: ``x^alpha / w^(1 - alpha)``, normalised."""
    tiny = np.finfo(w_max.dtype).tiny
    scales = (x_max**alpha / (w_max ** (1 - alpha) + tiny)).clip(1e-4, 1e4)
    normalised: Array = scales / np.sqrt(scales.max() * scales.min())
    return normalised


class AWQLiteHelper:
    """The search for the exponent of one weight ``[K, N]``.

    ``loss`` has a place for each exponent; whoever searches fills it in. ``best_scale``
    ``[K]`` and ``best_alpha`` are None before :meth:`update_best_params`.
    """

    alpha_step: float = 0.1

    def __init__(
        self, x: Array | None, w: Array | None, block_size: int, **kwargs: Any
    ) -> None:
        self.alpha_step = kwargs.get("awqlite_alpha_step", type(self).alpha_step)
        self.block_size = len(w) if block_size == -1 and w is not None else block_size
        self.weight_scale = None if w is None else get_weight_scale(w, self.block_size)
        self.act_scale = None if x is None else get_act_scale(x)
        self.loss = dict.fromkeys(exponents(self.alpha_step), 0.0)
        self.best_scale: Array | None = None
        self.best_alpha: float | None = None

    def update_best_params(self) -> None:
        """Set ``best_alpha`` to the exponent of least loss, and ``best_scale``."""
        if self.act_scale is None or self.weight_scale is None:
            raise QuantizationError(
                "the helper was made without activations or without a weight"
            )
        self.best_alpha = min(self.loss, key=self.loss.__getitem__)
        self.best_scale = get_scale(self.act_scale, self.weight_scale, self.best_alpha)


class AWQClipHelper:
    """The search for what each block of one weight is clipped to.

    ``alphas`` are the ratios, 1.0 last; ``loss`` has float32 ``[N, blocks]`` for each.
    ``w_amax``, ``best_loss`` and ``best_alpha`` are ``[N * blocks]``, column by column.
    """

    min_alpha: float = 0.5
    alpha_step: float = 0.05

    def __init__(self, w: Array, block_size: int, **kwargs: Any) -> None:
        self.alpha_step = kwargs.get("awqclip_alpha_step", type(self).alpha_step)
        self.min_alpha = kwargs.get("awqclip_alpha_min", type(self).min_alpha)
        self.alphas = ratios(self.min_alpha, self.alpha_step)
        self.block_size = BlockFormat(block_size=block_size).size_along(len(w))
        blocks = np.abs(in_blocks(w, self.block_size))
        self.w_amax: Array = blocks.max(axis=1).T.reshape(-1)
        shape = (w.shape[1], len(blocks))
        self.loss = {alpha: np.zeros(shape, np.float32) for alpha in self.alphas}
        self.best_loss: Array = np.full_like(self.w_amax, np.inf)
        self.best_alpha: Array = np.ones_like(self.w_amax)

    def update_best_params(self) -> None:
        """Set ``best_alpha`` of each block to the ratio of least loss."""
        for alpha, loss in self.loss.items():
            flat = loss.reshape(self.w_amax.shape)
            better = flat < self.best_loss
            self.best_loss = np.where(better, flat, self.best_loss)
            self.best_alpha = np.where(better, alpha, self.best_alpha)


def exponents(step: float) -> list[float]:
    """Return 0, step, ... up to 1."""
    if not 0 < step <= 1:
        raise QuantizationError(
            f"awqlite_alpha_step is {step!r}: more than 0, up to 1, is expected"
        )
    steps: list[float] = np.arange(0, 1.0 + step, step).tolist()
    return [min(alpha, 1.0) for alpha in steps if alpha <= 1 + 1e-9]


def ratios(least: float, step: float) -> list[float]:
    """Return least, least + step, ... and 1."""
    if not 0 < least <= 1:
        raise QuantizationError(
            f"awqclip_alpha_min is {least!r}: more than 0, up to 1, is expected"
        )
    if not step > 0:
        raise QuantizationError(f"awqclip_alpha_step is {step!r}: more than 0 is expected")
    steps = [round(float(ratio), 10) for ratio in np.arange(least, 1.0, step)]
    return [ratio for ratio in steps if ratio < 1] + [1.0]


def clip_search(
    x: Array,
    w: Array,
    awq_clip: AWQClipHelper,
    max_tokens: int = 64,
    num_bits: int = 4,
    **kwargs: Any,
) -> None:
    """Fill in a clip helper: for each block, the squared error of what it adds to products.

    Of an activation ``[..., K]`` that is longer, ``max_tokens`` and up to twice as many tokens
    are taken, evenly spread. ``awqclip_bsz_col`` columns of ``w`` are worked on at a time.
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
    layer_info: Mapping[str, Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> tuple[list[Any], dict[str, Array]]:
    """Search the scales of each weight by itself; return ``awq_lite`` and ``clip_alphas``.

    ``awq_lite`` has a place for each weight and gets an :class:`AWQLiteHelper` there;
    ``clip_alphas`` gets each :attr:`AWQClipHelper.best_alpha` if clips are searched, too. The
    fast path takes activations from ``output_data``, by sample, then by weight, and sets them
    to None. ``layer_info`` has ``"precision"`` and ``"block_size"`` by weight where they are
    others; keywords are those of the helpers. QuantizationError where these do not fit.
    """
    if len(awq_lite) != len(wa_pack):
        raise QuantizationError(
            f"awq_lite has {len(awq_lite)} places for {len(wa_pack)} weights"
        )
    if enable_fast_path_using_high_sysram and not output_data:
        raise QuantizationError(
            "the fast path is asked for, but output_data holds no activations"
        )
    for index, (activation, weight, transposed, _, _) in enumerate(wa_pack):
        w = _matrix(weight, transposed, augmented_onnx_path)
        if enable_fast_path_using_high_sysram:
            x = _tokens([sample[index] for sample in output_data], len(w))
            for sample in output_data:
                sample[index] = None  # memory is what this path has little of
        else:
            x = _tokens(_run(session, activation.name, inputs), len(w))
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
    """Search one vector of scales for all weights of an activation; return ``awq_lite``.

    The maps are those of :func:`get_act_to_weight_map_and_act_to_wa_pack_map`; the second, and
    the text for a progress bar, are not used.
    """
    alphas = exponents(kwargs.get("awqlite_alpha_step", AWQLiteHelper.alpha_step))
    form = BlockFormat(4, block_size, not use_zero_point, "amax")
    for activation, indices in act_to_wa_pack_map.items():
        weights = [_matrix(*wa_pack[index][1:3], augmented_onnx_path) for index in indices]
        x = _tokens(_run(session, activation, inputs), len(weights[0]))
        x_mean, w_mean = get_x_w_mean_for_subgraph(
            wa_pack, indices, augmented_onnx_path, x, block_size
        )
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
    weights = [_matrix(*wa_pack[i][1:3], augmented_onnx_path) for i in wa_pack_idx_list]
    relative = _relative_magnitude(np.concatenate(weights, axis=1), block_size, 1e-6)
    return (sums / len(x)).astype(x.dtype), relative


def get_act_to_weight_map_and_act_to_wa_pack_map(
    wa_pack: WaPack,
) -> tuple[dict[str, list[int]], dict[str, list[Sequence[int]]]]:
    """Return the places in ``wa_pack`` and the shapes of the weights of each activation."""
    places: dict[str, list[int]] = {}
    shapes: dict[str, list[Sequence[int]]] = {}
    sizes: dict[str, int] = {}
    for index, (activation, weight, transposed, _, _) in enumerate(wa_pack):
        name, k = activation.name, weight.dims[1 if transposed else 0]
        if sizes.setdefault(name, k) != k:
            raise QuantizationError(
                f"weight {weight.name!r} has K = {k}, and others that read {name!r} have "
                f"{sizes[name]}"
            )
        places.setdefault(name, []).append(index)
        shapes.setdefault(name, []).append(weight.dims)
    return places, shapes


def get_parent_child_nodes_map(
    graph: onnx.GraphProto, wa_pack: WaPack, nodes_to_exclude: Collection[str]
) -> tuple[dict[str, list[onnx.NodeProto]], dict[str, list[onnx.NodeProto]]]:
    """Return the quantised MatMul and Gemm nodes behind each node that makes an activation.

    By the parent's name, ``"root_0"`` for graph inputs; and, by the name of a tensor, all the
    nodes that read it.
    """
    producers = {name: node.name for node in graph.node for name in node.output}
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    weights = {weight.name for _, weight, _, _, _ in wa_pack}
    children: dict[str, list[onnx.NodeProto]] = {}
    for name in dict.fromkeys(activation.name for activation, _, _, _, _ in wa_pack):
        children.setdefault(producers.get(name, "root_0"), []).extend(
            node
            for node in consumers.get(name, ())
            if node.op_type in _PRODUCTS
            and node.name not in nodes_to_exclude
            and node.input[0] == name
            and node.input[1] in weights
        )
    return children, consumers


def find_quantizable_weights(
    graph: onnx.GraphProto, nodes_to_exclude: Collection[str]
) -> list[tuple[onnx.ValueInfoProto, onnx.TensorProto, bool, int, str]]:
    """Return the ``wa_pack`` of a graph without its subgraphs, and without nodes by name."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type not in _PRODUCTS or node.name in nodes_to_exclude:
            continue
        weight = initializers.get(node.input[1])
        if weight is None or len(weight.dims) < 2 or node.input[0] in initializers:
            continue
        transposed = any(item.name == "transB" and item.i > 0 for item in node.attribute)
        activation = onnx.ValueInfoProto(name=node.input[0])
        found.append((activation, weight, transposed, weight.data_type, node.name))
    return found


def _losses(
    x: Array, weights: Sequence[Array], form: BlockFormat, alphas: Sequence[float]
) -> dict[float, float]:
    """Return the squared error of products for each exponent, on all columns."""
    choice = search_scales(
        weights,
        np.abs(x).mean(axis=0, dtype=np.float32),
        x.astype(np.float32, copy=False),
        None,
        [form] * len(weights),
        alphas=alphas,
        all_columns=True,
    )
    return dict(choice.losses)


def _relative_magnitude(weight: Array, block_size: int, least: Any) -> Array:
    """Return the mean over columns of abs(w) / (its block's greatest + least), ``[K]``."""
    size = BlockFormat(block_size=block_size).size_along(len(weight))
    blocks = np.abs(in_blocks(weight, size))
    relative = blocks / (blocks.max(axis=1, keepdims=True) + least)
    mean: Array = relative.reshape(-1, weight.shape[1])[: len(weight)].mean(1)
    return mean


def _grid(
    matrix: Array, s: Array, block_size: int, axis: int, zp: Array | None, num_bits: int
) -> tuple[Array, Array | None, BlockFormat]:
    """Lay scales and zero points out as ``[blocks, N]``; the form has their block size."""
    scales = _along_rows(s, axis)
    wanted = BlockFormat(num_bits, block_size, zp is None)
    size = wanted.size_along(len(matrix))
    padded = wanted.blocks(len(matrix)) * size
    if not len(scales) or padded % len(scales):
        raise QuantizationError(
            f"scales have shape {list(s.shape)}: {padded // size} blocks of {size} along axis "
            f"{axis} are expected"
        )
    form = BlockFormat(num_bits, padded // len(scales), zp is None)
    return scales, None if zp is None else _along_rows(zp, axis), form


def _along_rows(array: Array, axis: int) -> Array:
    """Return ``[axis, others]``."""
    if axis == 0 and array.ndim:
        return array.reshape(len(array), -1)
    if axis in (1, -1) and array.ndim == 2:
        return array.T
    raise QuantizationError(
        f"axis {axis} of an array of shape {list(array.shape)}: 0, or 1 of a matrix, is "
        "expected"
    )


def _along_axis(matrix: Array, like: Array, axis: int) -> Array:
    """Undo :func:`_along_rows`."""
    return matrix.reshape(len(matrix), *like.shape[1:]) if axis == 0 else matrix.T


def _matrix(weight: onnx.TensorProto, transposed: bool, model_path: str) -> Array:
    array: npt.NDArray[Any] = onnx.numpy_helper.to_array(
        weight, base_dir=os.path.dirname(model_path)
    )
    return array.T if transposed else array


def _run(session: Any, name: str, inputs: Sequence[Mapping[str, Any]]) -> list[Array]:
    return [
        session.run([name], {key: np.asarray(value) for key, value in feed.items()})[0]
        for feed in inputs
    ]


def _tokens(arrays: Sequence[Any], k: int) -> Array:
    # By token before they are put together: samples may differ in length.
    return np.concatenate([np.asarray(array).reshape(-1, k) for array in arrays])
