# SPDX-License-Identifier: MIT
"""ModelOpt's AWQ searches, by its names: one weight, or one activation, at a time.

For scripts that drive the search themselves: a session that computes activations, samples, and
a list of what is searched,

    wa_pack = [(activation with .name, weight TensorProto, is weight [N, K], type, node name)]

as :func:`find_quantizable_weights` makes it. The formulas are those of
:mod:`~ortplugins.quantization.int4.primitives`, the choices ModelOpt's but for the mistakes
that each docstring tells. :func:`.quantize` searches otherwise: faster,
and with less error.
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

# Activation, weight, whether it is [N, K], its type, and the name of the node.
WaPack = Sequence[tuple[Any, onnx.TensorProto, bool, int, str]]
LayerInfo = Mapping[str, Mapping[str, Any]]

_PRODUCTS = ("Gemm", "MatMul")


class AWQLiteHelper:
    """The search for the exponent of one weight.

    Attributes:
        alpha_step: Distance of exponents; the keyword ``awqlite_alpha_step`` sets it.
        block_size: Rows of a block.
        weight_scale: ``[K]``, see :func:`get_weight_scale`; None without a weight.
        act_scale: ``[K]``, see :func:`get_act_scale`; None without an activation.
        loss: By exponent; whoever searches fills it in. ModelOpt's has the eleven from 0 to 1,
            whatever ``awqlite_alpha_step`` is.
        best_scale: ``[K]``; None before :meth:`update_best_params`.
        best_alpha: Exponent; None likewise.
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
        """Set ``best_alpha`` to the exponent of least loss, and ``best_scale``.

        Raises:
            QuantizationError: If there is no weight or no activation.
        """
        if self.act_scale is None or self.weight_scale is None:
            raise QuantizationError(
                "the helper was made without activations or without a weight"
            )
        self.best_alpha = min(self.loss, key=self.loss.__getitem__)
        self.best_scale = get_scale(self.act_scale, self.weight_scale, self.best_alpha)


class AWQClipHelper:
    """The search for what each block of one weight is clipped to.

    Attributes:
        min_alpha: Least ratio; the keyword ``awqclip_alpha_min`` sets it.
        alpha_step: Distance of ratios; ``awqclip_alpha_step``.
        alphas: The ratios, 1.0 last.
        block_size: Rows of a block; -1, an error in ModelOpt, stands for K.
        w_amax: ``[N * blocks]``, the blocks' greatest magnitudes, column by column.
        loss: By ratio, float32 ``[N, blocks]``.
        best_loss: ``[N * blocks]``.
        best_alpha: ``[N * blocks]``, for :func:`quant_tensor`.
    """

    min_alpha: float = 0.5
    alpha_step: float = 0.05

    def __init__(self, w: Array, block_size: int, **kwargs: Any) -> None:
        self.alpha_step = kwargs.get("awqclip_alpha_step", type(self).alpha_step)
        self.min_alpha = kwargs.get("awqclip_alpha_min", type(self).min_alpha)
        self.alphas = ratios(self.min_alpha, self.alpha_step)
        form = BlockFormat(block_size=block_size)
        self.block_size = form.size_along(len(w))
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
    """Return 0, step, ... up to 1; never beyond, as ModelOpt's for a step of 0.3."""
    if not 0 < step <= 1:
        raise QuantizationError(
            f"awqlite_alpha_step is {step!r}: more than 0, up to 1, is expected"
        )
    steps: list[float] = np.arange(0, 1.0 + step, step).tolist()
    return [alpha for alpha in steps if alpha <= 1 + 1e-9]


def ratios(least: float, step: float) -> list[float]:
    """Return least, least + step, ... and 1; ModelOpt rounds them to two digits."""
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

    ModelOpt's ``_clip_search``. Errors are summed in another order than there, so that they
    agree to rounding, and ratios but for ties; the weight is quantised once per ratio.

    Args:
        x: Activation ``[..., K]``; of a longer one, ``max_tokens`` and up to twice as many
            tokens are taken, evenly spread.
        w: ``[K, N]``.
        awq_clip: The weight's helper.
        max_tokens: See ``x``.
        num_bits: Of the codes.
        kwargs: ``awqclip_bsz_col``, columns to work on at a time, 1024 by default.
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
    """Search the scales of each weight by itself.

    Other than in ModelOpt, ``awqlite_alpha_step`` acts, samples may differ in length, and the
    search for clips divides the activation by the scales that the weight was multiplied by.

    Args:
        wa_pack: What to search, see the module.
        augmented_onnx_path: File that the weights' external data lies beside.
        block_size: Rows of a block; -1 for K.
        use_zero_point: Whether codes have zero points.
        session: Has ``run([activation], feed)``.
        awq_lite: One place per weight; gets an :class:`AWQLiteHelper` each.
        inputs: Samples, name to array.
        tqdm_msg_append_str: Not used: there is no progress bar.
        enable_weight_clipping: Whether to search what blocks are clipped to as well.
        enable_fast_path_using_high_sysram: Whether ``output_data`` holds the activations.
        output_data: By sample, then by weight: activations; set to None once read.
        clip_alphas: Gets each weight's :attr:`AWQClipHelper.best_alpha`.
        layer_info: By weight, ``"precision"`` and ``"block_size"`` where they are others.
        kwargs: ``awqlite_alpha_step``, ``awqclip_alpha_step``, ``awqclip_alpha_min`` and
            ``awqclip_bsz_col``.

    Returns:
        ``awq_lite`` and ``clip_alphas``.

    Raises:
        QuantizationError: If there is no place for each weight, or no activations where they
            should be, or a number is out of range.
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
        bits = layer.get("precision", 4)
        size = layer.get("block_size", block_size)
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
    """Search one vector of scales for all weights that read an activation.

    Other than in ModelOpt, no exponent is above 1, samples may differ in length, and a weight
    ``[N, K]`` is taken by its K. ``awq_lite`` gets the same scale in the helpers of an
    activation's weights, and is returned. Arguments as for
    :func:`run_awq_scale_search_per_node`, and both maps of
    :func:`get_act_to_weight_map_and_act_to_wa_pack_map`; the second is not used.
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
    """Return the mean of abs(x), and of abs(w) over its block's greatest, ``[K]`` each.

    Blocks are contiguous along K, and K need not be a multiple of them: see
    :func:`get_weight_scale`. Columns of all the weights count alike.

    Args:
        wa_pack: See the module.
        wa_pack_idx_list: The weights that read the activation.
        augmented_onnx_path: File that their external data lies beside.
        x: The activation, ``[T, K]``.
        block_size: Rows of a block; -1 for K.
    """
    sums = np.sum(np.abs(x), axis=0, dtype=np.float32)
    x_mean = (sums / len(x)).astype(x.dtype)
    weights = [_matrix(*wa_pack[i][1:3], augmented_onnx_path) for i in wa_pack_idx_list]
    # The constant is AutoAWQ's.
    return x_mean, relative_magnitude(np.concatenate(weights, axis=1), block_size, 1e-6)


def get_act_to_weight_map_and_act_to_wa_pack_map(
    wa_pack: WaPack,
) -> tuple[dict[str, list[int]], dict[str, list[Sequence[int]]]]:
    """Return which weights read an activation: their places in ``wa_pack``, and their shapes.

    Weights ``[N, K]`` of different N are fine; ModelOpt takes their first axis for K.

    Raises:
        QuantizationError: If weights of one activation differ in K.
    """
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
    """Return the quantised products behind each node that makes an activation.

    A node of several outputs has the products of all of them, and a product of two activations
    is none of them: ModelOpt has the last output's only, and takes such a product in.

    Args:
        graph: The graph.
        wa_pack: See the module.
        nodes_to_exclude: Names of nodes to leave out.

    Returns:
        By the parent's name, ``"root_0"`` for graph inputs, its MatMul and Gemm nodes; and by
        the name of a tensor all the nodes that read it.
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
    """Return the ``wa_pack`` of a graph; ModelOpt's ``_find_quantizable_weights``.

    Args:
        graph: The graph; subgraphs of If and Loop are not looked at.
        nodes_to_exclude: Names of nodes to leave out.
    """
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
