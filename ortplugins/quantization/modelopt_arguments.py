# SPDX-License-Identifier: MIT
"""What ModelOpt's arguments of int4.quantize say in the terms of :func:`.quantize`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import OrtpluginsWarning, QuantizationError
from ortplugins.quantization.weights.recipe import Rule
from ortplugins.quantization.weights.uses import WeightUse, find_uses
from rewrite_rules.closest_name import did_you_mean

ALPHA_STEP = 0.1  # of exponents
RATIO_STEP, LEAST_RATIO = 0.05, 0.5  # of what blocks are clipped to

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "dml": "DmlExecutionProvider",
    "trt": "TensorrtExecutionProvider",
    "NvTensorRtRtx": "NvTensorRTRTXExecutionProvider",
}
# What changes nothing, with its default: weights that read one activation get the same scales,
# and max_calibration_memory of quantize() bounds the memory.
_WITHOUT_EFFECT = {
    "awqclip_bsz_col": None,
    "enable_fast_path_using_high_sysram": False,
    "trt_rtx_backend": None,
    "awqlite_run_per_subgraph": True,
}
_KEYWORDS = (
    *("awqlite_alpha_step", "awqlite_fuse_nodes", "awqclip_alpha_step", "awqclip_alpha_min"),
    *("gather_quantize_axis", "gather_block_size", "enable_mixed_quant", "layers_8bit"),
    *("use_column_major", "force_fp16", *_WITHOUT_EFFECT),
)
# The nodes of a decoder that enable_mixed_quant gives 8 bits, by kind and layer.
_SENSITIVE = re.compile(
    r"/model/layers\.(\d+)/((?:self_)?attn/(?:qkv|v)_proj|mlp/down_proj)/MatMul"
)
_OUR_CODES = re.compile(r"(?P<weight>.+)\.u?int[48]_block-?\d+(_transposed)?(_\d+)?")


def settings_of(
    model: ir.Model, excluded: Sequence[str] | None, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Translate keywords, and patterns for the start of names, into our settings."""
    for name in kwargs:
        if name not in _KEYWORDS:
            hint = did_you_mean(name, _KEYWORDS) or f"; there are {', '.join(_KEYWORDS)}"
            raise TypeError(f"quantize() got an unexpected keyword argument {name!r}{hint}")
    given = {name: value for name, value in kwargs.items() if value is not None}
    if given.get("force_fp16"):
        raise QuantizationError(
            "force_fp16 is not done here: convert the model to float16 before, with "
            "onnxruntime's or onnxconverter_common's converter, and quantise the result"
        )
    for name, usual in _WITHOUT_EFFECT.items():
        if given.get(name, usual) != usual:
            _warn(f"{name} has no effect")
    axis = given.get("gather_quantize_axis")
    if axis not in (None, 1, -1):
        raise QuantizationError(
            f"gather_quantize_axis is {axis!r}: blocks of Gather's tables run along their "
            "rows here (1 or -1), so that a row is dequantised by itself"
        )
    op_types = ("MatMul", "Gemm") if axis is None else ("MatMul", "Gemm", "Gather")
    settings: dict[str, Any] = {
        "op_types": op_types,
        "quant_format": "QDQ_transposed" if given.get("use_column_major") else "QDQ",
        "fold_scales": given.get("awqlite_fuse_nodes", True),
    }
    if "awqlite_alpha_step" in given:
        settings["alphas"] = exponents(given["awqlite_alpha_step"])
    if not given.keys().isdisjoint(("awqclip_alpha_min", "awqclip_alpha_step")):
        least = given.get("awqclip_alpha_min", LEAST_RATIO)
        settings["clip_ratios"] = ratios(least, given.get("awqclip_alpha_step", RATIO_STEP))
    found = (use for _, use in find_uses(model, op_types))
    uses = [use for use in found if isinstance(use, WeightUse)]
    return settings | {"rules": _rules(uses, excluded, given)}


def exponents(step: float) -> list[float]:
    """Return 0, step, ... up to 1."""
    _check("awqlite_alpha_step", step)
    steps: list[float] = np.arange(0, 1.0 + step, step).tolist()
    return [min(alpha, 1.0) for alpha in steps if alpha <= 1 + 1e-9]


def ratios(least: float, step: float) -> list[float]:
    """Return 1, and then the greatest of least, least + step, ... first."""
    _check("awqclip_alpha_min", least)
    _check("awqclip_alpha_step", step)
    steps = [round(float(ratio), 10) for ratio in np.arange(least, 1.0, step)]
    return [1.0, *(ratio for ratio in reversed(steps) if ratio < 1)]


def _check(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise QuantizationError(f"{name} is {value!r}: more than 0, up to 1, is expected")


def providers_of(
    names: Sequence[str], profiles: Sequence[Mapping[str, str]] | None
) -> list[str | tuple[str, dict[str, Any]]]:
    """Return onnxruntime's providers for ModelOpt's names, those that there are."""
    profiles = [{}] * len(names) if profiles is None else profiles
    if len(profiles) != len(names):
        raise QuantizationError(
            f"input_shapes_profile has {len(profiles)} entries for {len(names)} "
            "calibration_eps"
        )
    available = onnxruntime.get_available_providers()
    found: list[str | tuple[str, dict[str, Any]]] = []
    for name, profile in zip(names, profiles, strict=True):
        kind, _, device = name.partition(":")
        if kind not in _PROVIDERS or (device and not device.isdigit()):
            raise QuantizationError(
                f"calibration_eps has {name!r}: {', '.join(_PROVIDERS)} are expected, with a "
                "device's number after a colon"
            )
        options: dict[str, Any] = dict(profile)
        if kind in ("cuda", "dml"):
            options.setdefault("device_id", int(device or 0))
        if (provider := _PROVIDERS[kind]) in available:
            found.append((provider, options) if options else provider)
    if not found:
        _warn(f"this onnxruntime has none of calibration_eps {names}: samples run on the CPU")
    return found or ["CPUExecutionProvider"]


def _rules(
    uses: Sequence[WeightUse], excluded: Sequence[str] | None, given: Mapping[str, Any]
) -> list[Rule]:
    """Return the rules of a model: tables' blocks, wider weights, and what stays in float."""
    if isinstance(excluded, str):
        raise QuantizationError("nodes_to_exclude is a string: a list of patterns is expected")
    try:
        patterns = [re.compile(pattern) for pattern in excluded or ()]
    except re.error as error:
        raise QuantizationError(
            f"nodes_to_exclude: {error.pattern!r} is not a regular expression: {error}"
        ) from error
    left = [use.label for use in uses if any(p.match(use.label) for p in patterns)]
    wider = _wider([use.label for use in uses if use.activation is not None], given)
    return [
        Rule(":table", block_size=given.get("gather_block_size", 32), optional=True),
        # ModelOpt's 8 bits are per column.
        *(Rule(_exactly(label), bits=8, block_size=-1) for label in wider),
        *(Rule(_exactly(label), keep_float=True) for label in left),
    ]


def _exactly(label: str) -> re.Pattern[str]:
    # A name may hold brackets, which a glob would take for its own.
    return re.compile(rf"\A{re.escape(label)}\Z")


def _wider(labels: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """Return the nodes whose weights get 8 bits: those that are listed, or ModelOpt's."""
    layers = given.get("layers_8bit", ())
    found: list[str] = []
    for name in layers.split(",") if isinstance(layers, str) else layers:
        layer = name.strip()
        matching = [label for label in labels if _path(layer) in _path(label)]
        if layer and not matching:
            _warn(f"layers_8bit: {layer!r} matches no node")
        found += matching if layer else []
    if layers or not given.get("enable_mixed_quant"):
        return list(dict.fromkeys(found))
    if not (found := sensitive(labels)):
        _warn(
            "enable_mixed_quant has no effect: no node is named as in "
            "/model/layers.0/attn/v_proj/MatMul; name them with layers_8bit"
        )
    return found


def _path(name: str) -> str:
    """Return a name as parts between dots."""
    return f".{name.lstrip('/').replace('/', '.')}."


def sensitive(labels: Iterable[str]) -> list[str]:
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


def name_as_modelopt(model: ir.Model) -> None:
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
