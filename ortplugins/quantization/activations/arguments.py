# SPDX-License-Identifier: MIT
"""What users give quantize_static_mixed, read and checked before any sample runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.model_io.loading import LoadedModel
from ortplugins.quantization.selection import Pattern, check_names, matches
from rewrite_rules.closest_name import did_you_mean
from rewrite_rules.graph.nodes import label
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    Activation,
    OverrideError,
    Overrides,
    check_overrides,
)
from session_options.override_json import read_quant_type


def quant_type_of(given: object, what: str, known: Sequence[ir.DataType]) -> ir.DataType:
    """Read a type by any of its names.

    Raises:
        QuantizationError: If it is none of those known.
    """
    names = ", ".join(kind.name.lower() for kind in known)
    try:
        kind = ir.DataType[read_quant_type(given, what)]
    except OverrideError as error:
        raise QuantizationError(str(error)) from None
    if kind not in known:
        hint = "; name tensors that get 16 in promote" if what == "activation_type" else ""
        raise QuantizationError(f"{what} is {kind.name.lower()}: one of {names}{hint}")
    return kind


def check_float_model(
    loaded: LoadedModel, per_channel: bool, op_types: Sequence[str] | None
) -> None:
    """Refuse what onnxruntime's quantiser would make a broken graph of, or nothing.

    Raises:
        QuantizationError: Saying why.
    """
    if any(node.op_type == "QuantizeLinear" for node in loaded.model.graph):
        raise QuantizationError(
            f"{loaded.name}: is quantised already: give its 8-bit activations 16 bits with "
            f"the pass 'mixed_precision_boundaries'"
        )
    imports = loaded.model.opset_imports
    opset = imports.get("", 0)
    least, reason = (13, "per_channel=True") if per_channel else (10, "QuantizeLinear")
    if opset < least:
        hint = "; or give per_channel=False" if per_channel and opset >= 10 else ""
        raise QuantizationError(
            f"{loaded.name}: has opset {opset}, but {reason} needs {least}: export it anew, "
            f"or convert it with onnx.version_converter{hint}"
        )
    known = {node.op_type for owner in loaded.model.graphs() for node in owner}
    if op_types and known.isdisjoint(op_types):
        hint, named = did_you_mean(op_types[0], known), ", ".join(map(repr, op_types))
        raise QuantizationError(f"op_types_to_quantize: the model has no {named}{hint}")


def check_names_given(
    graph: ir.Graph,
    overrides: Overrides,
    promote: Collection[str],
    activation_type: ir.DataType,
    ranges: Mapping[str, tuple[float, float]],
) -> None:
    """Check every name that the user gave, before samples are run.

    Raises:
        OverrideError: If an override can't be followed.
        QuantizationError: If a name in ``promote`` or ``ranges`` is none.
    """
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    activations = {
        value.name or "": Activation(
            value.name or "", activation_type, frozenset(map(label, value.consumers()))
        )
        for value in values
        if value.name not in graph.initializers
    }
    initializers = {
        name: tuple(value.const_value.shape.numpy())
        for name, value in graph.initializers.items()
        if value.const_value is not None
    }
    nodes = {label(node) for node in graph}
    check_overrides(overrides, activations, initializers, nodes)
    for what, names, known in (
        ("promote", promote, [*activations, *initializers, *nodes]),
        ("ranges", ranges, activations),
    ):
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise QuantizationError(f"{what}: the model has no {name!r}{hint}")
    for name, (low, high) in ranges.items():
        if not (np.isfinite(low) and np.isfinite(high) and low <= high):
            raise QuantizationError(
                f"ranges[{name!r}] is {low} to {high}: two finite numbers are expected, the "
                "smaller first"
            )


def selected_nodes(option: str, patterns: Sequence[Pattern], graph: ir.Graph) -> list[str]:
    """Names of the nodes that patterns mean.

    Raises:
        QuantizationError: If one of them means none.
    """
    names = [node.name for node in graph if node.name]
    check_names(option, patterns, names, all_patterns=True)
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]
