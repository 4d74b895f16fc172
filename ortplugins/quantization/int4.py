# SPDX-License-Identifier: MIT
"""``modelopt.onnx.quantization.int4`` as a drop-in: its names, its arguments, our quantizer.

    import modelopt.onnx.quantization.int4 as int4
    import ortplugins.quantization.int4 as int4

A script changes that one line. Names and defaults are those of nvidia-modelopt 0.47.0;
``docs/moving-from-modelopt.md`` says what is the same, what differs, and what was broken.
Below :func:`quantize` and :func:`quantize_rtn` lies :func:`.quantize`,
which has more to offer: formats, GPTQ, bounded memory, a report.
"""

from __future__ import annotations

__all__ = [
    "AWQClipHelper",
    "AWQLiteHelper",
    "clip_search",
    "dq_tensor",
    "find_quantizable_weights",
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

import logging
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import OrtpluginsWarning, QuantizationError
from ortplugins.model_io.loading import load_model
from ortplugins.quantization.modelopt_searches import (
    AWQClipHelper,
    AWQLiteHelper,
    clip_search,
    dq_tensor,
    exponents,
    find_quantizable_weights,
    find_scales,
    get_act_scale,
    get_act_to_weight_map_and_act_to_wa_pack_map,
    get_parent_child_nodes_map,
    get_scale,
    get_weight_scale,
    get_x_w_mean_for_subgraph,
    quant_tensor,
    ratios,
    rtn,
    run_awq_scale_search_per_node,
    run_awq_scale_search_per_subgraph,
)
from ortplugins.quantization.weights.quantize import quantize as quantize_weights
from ortplugins.quantization.weights.recipe import Rule
from ortplugins.quantization.weights.uses import WeightUse, find_uses
from rewrite_rules.closest_name import did_you_mean

_LOG = logging.getLogger(__name__)

_METHODS = ("rtn", "rtn_dq", "awq_lite", "awq_clip", "awq_full")
# Those that write operators which only TensorRT has, and what gives the same in standard ones.
_TENSORRT_METHODS = {"rtn_trt": "rtn", "rtn_trt_dq": "rtn_dq", "awq_clip_trt": "awq_clip"}
_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "dml": "DmlExecutionProvider",
    "trt": "TensorrtExecutionProvider",
    "NvTensorRtRtx": "NvTensorRTRTXExecutionProvider",
}
_KEYWORDS = (
    *("awqlite_alpha_step", "awqlite_fuse_nodes", "awqlite_run_per_subgraph"),
    *("awqclip_alpha_step", "awqclip_alpha_min", "awqclip_bsz_col"),
    *("gather_quantize_axis", "gather_block_size", "enable_mixed_quant", "layers_8bit"),
    *("use_column_major", "enable_fast_path_using_high_sysram"),
    *("force_fp16", "trt_rtx_backend"),
)
# What changes nothing, and for which value it need not be said.
_WITHOUT_EFFECT = {
    "awqclip_bsz_col": (None, "clips are searched in strips that fit into the cache"),
    "enable_fast_path_using_high_sysram": (
        False,
        "samples run once where statistics fit into max_calibration_memory of quantize()",
    ),
    "trt_rtx_backend": (None, "providers are registered before quantize is called"),
    "awqlite_run_per_subgraph": (
        True,
        "all weights that read an activation get the same scales",
    ),
}
# The nodes of a decoder that enable_mixed_quant gives 8 bits, by kind and layer.
_SENSITIVE = re.compile(
    r"/model/layers\.(\d+)/((?:self_)?attn/(?:qkv|v)_proj|mlp/down_proj)/MatMul"
)
_LAYER_LIST = re.compile(r"\s*[/\w.\-]+(\s*,\s*[/\w.\-]+)*\s*")
_OUR_CODES = re.compile(r"(?P<weight>.+)\.u?int[48]_block-?\d+(_transposed)?(_\d+)?")


def quantize(
    onnx_path: str | os.PathLike[str] | onnx.ModelProto,
    calibration_method: str = "awq_lite",
    calibration_data_reader: Any = None,
    calibration_eps: Sequence[str] = ("cpu", "cuda:0", "trt"),
    use_external_data_format: bool = True,
    use_zero_point: bool = False,
    block_size: int | None = None,
    nodes_to_exclude: Sequence[str] | None = (r"/lm_head",),
    log_level: str = "INFO",
    input_shapes_profile: Sequence[Mapping[str, str]] | None = None,
    **kwargs: Any,
) -> onnx.ModelProto:
    """Quantise the weights of MatMul and Gemm to int4, with ModelOpt's arguments.

    ``docs/moving-from-modelopt.md`` says which argument of :func:`.quantize` stands for which
    here, and where results differ. Round to nearest gives ModelOpt's ``rtn_dq``, its names,
    scales and codes; the AWQ methods search as :func:`.quantize` does.

    Args:
        onnx_path: Path of a model, or a model; it is not changed.
        calibration_method: ``"awq_lite"``, ``"awq_clip"``, ``"awq_full"``, ``"rtn_dq"`` or
            ``"rtn"``, which is the same.
        calibration_data_reader: Samples: an iterable of dicts, or an object with
            ``get_next()``. None for random ones, with a warning.
        calibration_eps: Where samples run, in this order: ``"cpu"``, ``"cuda:0"``,
            ``"dml:0"``, ``"trt"``, ``"NvTensorRtRtx"``; absent providers are left out.
        use_external_data_format: Accepted. As ModelOpt's, the result holds all its tensors.
        use_zero_point: Whether codes are unsigned, with zero points.
        block_size: Elements along K that share a scale, 128 by default; -1 for K.
        nodes_to_exclude: Regular expressions for ``re.match`` with names of nodes, or of first
            outputs where nodes have none, that stay in float.
        log_level: Least level of what goes to the logger of this module.
        input_shapes_profile: Options of each provider of ``calibration_eps``, a dict each.
        kwargs: ModelOpt's; others are a TypeError that names the closest one.

    Returns:
        The quantised model, opset 21 or more.

    Raises:
        CalibrationError: If samples do not fit the model, or are none.
        ModelFileError: If the model can't be used, or there is nothing to quantise.
        QuantizationError: If an argument is out of range or asks for what only TensorRT has,
            or a weight holds NaN or infinite values.
        TypeError: If a keyword is not ModelOpt's.
    """
    if calibration_method in _TENSORRT_METHODS:
        raise QuantizationError(
            f"calibration_method {calibration_method!r} writes TRT_INT4QuantizeLinear and "
            "TRT_INT4DequantizeLinear, which only TensorRT has; "
            f"{_TENSORRT_METHODS[calibration_method]!r} has the same weights in standard ONNX"
        )
    if calibration_method not in _METHODS:
        raise QuantizationError(
            f"calibration_method is {calibration_method!r}: one of {_METHODS} is "
            "expected; ortplugins.quantization.quantize has GPTQ as well"
        )
    method = calibration_method.removesuffix("_dq")
    level = logging.getLevelNamesMapping().get(str(log_level).upper())
    if level is None:
        raise QuantizationError(f"log_level is {log_level!r}: INFO or the like is expected")
    options = _options(kwargs)
    if method == "awq_full":  # error feedback does more than clips, in less time
        method = "awq_gptq"
        if clips := options.pop("clip_ratios", None):
            options["gptq"] = {"ratios": clips}
    if method != "rtn":
        options["calibration_data_reader"] = calibration_data_reader
        options["calibration_providers"] = _providers(calibration_eps, input_shapes_profile)
    source = load_model(onnx_path).model
    found = (use for _, use in find_uses(source, options["op_types"]))
    uses = [use for use in found if isinstance(use, WeightUse)]
    products = [use.label for use in uses if use.activation is not None]
    rules = [
        Rule(":table", block_size=kwargs.get("gather_block_size", 32), optional=True),
        # ModelOpt's 8 bits are per column.
        *(Rule(_exactly(name), bits=8, block_size=-1) for name in _wider(products, kwargs)),
        *_excluded(nodes_to_exclude, [use.label for use in uses]),
    ]
    result = quantize_weights(
        source,
        method=method,
        block_size=128 if block_size is None else block_size,
        is_symmetric=not use_zero_point,
        grid="amax" if method == "rtn" else "positive",  # TensorRT reads the result
        rules=rules,
        **options,
    )
    if level <= logging.INFO:
        _LOG.info("%s", result.report)
        for note in result.report.notes:
            _LOG.info("%s", note)
    model: ir.Model = result.model
    _name_as_modelopt(model)
    ir.external_data.load_to_model(model)
    return ir.to_proto(model)


def quantize_rtn(
    onnx_model: onnx.ModelProto,
    block_size: int,
    dq_only: bool = False,
    nodes_to_exclude: Sequence[str] = (),
    **kwargs: Any,
) -> onnx.ModelProto:
    """Round to nearest: :func:`quantize` with ``"rtn_dq"``; ``dq_only`` is accepted."""
    kwargs |= {"block_size": block_size, "nodes_to_exclude": nodes_to_exclude}
    return quantize(onnx_model, "rtn_dq", **kwargs)


def _options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keywords into arguments of our quantizer."""
    for name in kwargs:
        if name not in _KEYWORDS:
            hint = did_you_mean(name, _KEYWORDS) or f"; there are {', '.join(_KEYWORDS)}"
            raise TypeError(f"quantize() got an unexpected keyword argument {name!r}{hint}")
    if kwargs.get("force_fp16"):
        raise QuantizationError(
            "force_fp16 is not done here: convert the model to float16 before, with "
            "onnxruntime's or onnxconverter_common's converter, and quantise the result"
        )
    for name, (usual, reason) in _WITHOUT_EFFECT.items():
        if kwargs.get(name, usual) not in (usual, None):
            _warn(f"{name} has no effect: {reason}")
    op_types = ["MatMul", "Gemm"]
    axis = kwargs.get("gather_quantize_axis")
    if axis is not None:
        if axis not in (1, -1):
            raise QuantizationError(
                f"gather_quantize_axis is {axis!r}: blocks of Gather's tables run along their "
                "rows here (1 or -1), so that a row is dequantised by itself"
            )
        op_types.append("Gather")
    options: dict[str, Any] = {
        "op_types": op_types,
        "quant_format": "QDQ_transposed" if kwargs.get("use_column_major") else "QDQ",
        "fold_scales": kwargs.get("awqlite_fuse_nodes", True),
    }
    if "awqlite_alpha_step" in kwargs:
        options["alphas"] = exponents(kwargs["awqlite_alpha_step"])
    if "awqclip_alpha_step" in kwargs or "awqclip_alpha_min" in kwargs:
        least = kwargs.get("awqclip_alpha_min", AWQClipHelper.min_alpha)
        step = kwargs.get("awqclip_alpha_step", AWQClipHelper.alpha_step)
        options["clip_ratios"] = ratios(least, step)[::-1]
    return options


def _providers(
    names: Iterable[str], profile: Sequence[Mapping[str, str]] | None
) -> list[str | tuple[str, dict[str, Any]]]:
    """Return onnxruntime's providers for ModelOpt's names, those that there are."""
    names = list(names)
    if profile is not None and len(profile) != len(names):
        raise QuantizationError(
            f"input_shapes_profile has {len(profile)} entries for {len(names)} calibration_eps"
        )
    available = onnxruntime.get_available_providers()
    found: list[str | tuple[str, dict[str, Any]]] = []
    for index, name in enumerate(names):
        kind, _, device = name.partition(":")
        if kind not in _PROVIDERS or (device and not device.isdigit()):
            raise QuantizationError(
                f"calibration_eps has {name!r}: {', '.join(_PROVIDERS)} are expected, with a "
                "device's number after a colon"
            )
        provider = _PROVIDERS[kind]
        if provider not in available:
            continue
        options: dict[str, Any] = {}
        if kind in ("cuda", "dml"):
            options["device_id"] = int(device or 0)
        if profile is not None:
            options |= profile[index]
        found.append((provider, options) if options else provider)
    if not found:
        _warn(f"this onnxruntime has none of calibration_eps {names}: samples run on the CPU")
        found.append("CPUExecutionProvider")
    return found


def _excluded(patterns: Sequence[str] | None, labels: Sequence[str]) -> list[Rule]:
    """Return rules that leave nodes in float, for expressions at the start of names."""
    if isinstance(patterns, str):
        raise QuantizationError("nodes_to_exclude is a string: a list of patterns is expected")
    try:
        compiled = [re.compile(pattern) for pattern in patterns or ()]
    except re.error as error:
        raise QuantizationError(
            f"nodes_to_exclude: {error.pattern!r} is not a regular expression: {error}"
        ) from error
    excluded = [label for label in labels if any(each.match(label) for each in compiled)]
    return [Rule(_exactly(label), keep_float=True) for label in excluded]


def _wider(labels: Sequence[str], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the nodes whose weights get 8 bits."""
    if layers := kwargs.get("layers_8bit"):
        return _listed(layers, labels)
    wider = _sensitive(labels) if kwargs.get("enable_mixed_quant") else []
    if not wider and kwargs.get("enable_mixed_quant"):
        _warn(
            "enable_mixed_quant has no effect: no node is named as in "
            "/model/layers.0/attn/v_proj/MatMul; name them with layers_8bit"
        )
    return wider


def _listed(layers: str | Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return the nodes whose names hold one of a list of names, part by part."""
    text = layers if isinstance(layers, str) else ",".join(layers)
    if not _LAYER_LIST.fullmatch(text):
        raise QuantizationError(
            f"layers_8bit is {layers!r}: names of nodes, or parts of them, divided by commas "
            "are expected"
        )

    def parts(name: str) -> str:
        return f".{name.lstrip('/').replace('/', '.')}."

    found: list[str] = []
    for pattern in filter(None, map(str.strip, text.split(","))):
        matching = [label for label in labels if parts(pattern) in parts(label)]
        if not matching:
            _warn(f"layers_8bit: {pattern!r} matches no node")
        found += matching
    return list(dict.fromkeys(found))


def _sensitive(labels: Sequence[str]) -> list[str]:
    """Return ModelOpt's choice: of a kind the first and last eighth, each third between."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for label in labels:
        if match := _SENSITIVE.fullmatch(label):
            kinds.setdefault(match[2], []).append((int(match[1]), label))
    chosen = []
    for nodes in kinds.values():
        names = [name for _, name in sorted(nodes)]
        eighth = len(names) // 8
        last = len(names) - eighth
        chosen += names[:eighth] + names[eighth:last:3] + names[last:]
    return chosen


def _exactly(label: str) -> re.Pattern[str]:
    # A name may hold brackets, which a glob would take for its own.
    return re.compile(rf"\A{re.escape(label)}\Z")


def _name_as_modelopt(model: ir.Model) -> None:
    """Give codes, scales, zero points and DequantizeLinear the names that ModelOpt gives."""
    for graph in model.graphs():
        taken = {value.name for value in graph.initializers.values()}
        for node in graph:
            codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
            match = None if codes is None else _OUR_CODES.fullmatch(codes.name or "")
            if match is None or node.name != f"{match[0]}.dequantized":
                continue
            base = name = match["weight"]
            count = 0
            while f"{name}_i4" in taken:  # one weight in two forms
                count += 1
                name = f"{base}_{count}"
            for value, suffix in zip(node.inputs, ("_i4", "_scale", "_zp"), strict=False):
                if value is not None and f"{name}{suffix}" not in taken:
                    value.name = f"{name}{suffix}"
                    taken.add(value.name)
            node.name = f"{name}_DequantizeLinear"
            node.outputs[0].name = f"{name}_DequantizeLinear_Output"


def _warn(message: str) -> None:
    warnings.warn(message, OrtpluginsWarning, stacklevel=4)
