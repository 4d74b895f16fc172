# SPDX-License-Identifier: MIT
"""ModelOpt's AWQ searches, by its names: one weight, or one activation, at a time.

For scripts that drive the search themselves: a session that computes activations, samples, and

    wa_pack = [(activation with .name, weight TensorProto, is weight [N, K], type, node name)]

as :func:`find_quantizable_weights` makes it. ``augmented_onnx_path`` is a file that the
weights' external data lies beside, ``inputs`` are samples, name to array, and ``session`` has
``run([activation], feed)``. The choices are ModelOpt's but for the mistakes that
``docs/moving-from-modelopt.md`` lists. :func:`.quantize` is faster, with less error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortplugins.errors import QuantizationError
from ortplugins.quantization.int4.primitives import (
    Array,
    dq_tensor,
    get_act_scale,
    get_scale,
    get_weight_scale,
    quant_tensor,
    relative_magnitude,
)
from ortplugins.quantization.methods.nearest import BlockFormat, in_blocks

WaPack = Sequence[tuple[Any, onnx.TensorProto, bool, int, str]]
LayerInfo = Mapping[str, Mapping[str, Any]]

_PRODUCTS = ("Gemm", "MatMul")


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
    return [alpha for alpha in steps if alpha <= 1 + 1e-9]


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
    layer_info: LayerInfo | None = None,
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
        assert helper.act_scale is not None and helper.weight_scale is not None
        expected = x @ w
        for alpha in helper.loss:
            scale = get_scale(helper.act_scale, helper.weight_scale, alpha)
            helper.loss[alpha] = _loss(x, w, scale, expected, size, use_zero_point, bits)
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
    for activation, indices in act_to_wa_pack_map.items():
        weights = [_matrix(*wa_pack[index][1:3], augmented_onnx_path) for index in indices]
        x = _tokens(_run(session, activation, inputs), len(weights[0]))
        x_mean, w_mean = get_x_w_mean_for_subgraph(
            wa_pack, indices, augmented_onnx_path, x, block_size
        )
        expected = [x @ w for w in weights]
        best: tuple[float, float | None, Array | None] = (np.inf, None, None)
        # In float64, as ModelOpt's: numpy's scalars, unlike Python's, widen what they meet.
        for alpha in map(np.float64, alphas):
            # The constants are AutoAWQ's.
            scale = (x_mean**alpha / (w_mean ** (1 - alpha) + 1e-4)).clip(min=1e-4)
            with np.errstate(invalid="ignore"):
                scale = scale / np.sqrt(scale.max() * scale.min())
            scale[~np.isfinite(scale)] = 1
            loss = sum(
                _loss(x, w, scale, y, block_size, use_zero_point, 4)
                for w, y in zip(weights, expected, strict=True)
            )
            if loss < best[0]:
                best = (loss, alpha, scale)
        for index in indices:
            helper = awq_lite[index] = AWQLiteHelper(None, None, block_size, **kwargs)
            _, helper.best_alpha, helper.best_scale = best
    return awq_lite


def get_x_w_mean_for_subgraph(
    wa_pack: WaPack,
    wa_pack_idx_list: Iterable[int],
    augmented_onnx_path: str,
    x: Array,
    block_size: int,
) -> tuple[Array, Array]:
    """Return the mean of abs(x) ``[T, K]``, and :func:`relative_magnitude`, ``[K]``."""
    sums = np.sum(np.abs(x), axis=0, dtype=np.float32)
    weights = [_matrix(*wa_pack[i][1:3], augmented_onnx_path) for i in wa_pack_idx_list]
    relative = relative_magnitude(np.concatenate(weights, axis=1), block_size, 1e-6)
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


def _loss(
    x: Array,
    w: Array,
    scale: Array,
    expected: Array,
    block_size: int,
    use_zero_point: bool,
    num_bits: int,
) -> float:
    """Mean squared error of the products when rows of the weight are scaled."""
    codes, scales, zero_points = quant_tensor(
        w * scale[:, None], block_size, use_zero_point=use_zero_point, num_bits=num_bits
    )
    error = expected - (x / scale) @ dq_tensor(codes, scales, block_size, zp=zero_points)
    # Squares of float16 overflow.
    squares = np.square(error, dtype=np.result_type(error, np.float32))
    return float(squares.mean())


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
