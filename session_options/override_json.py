# SPDX-License-Identifier: MIT
"""Tensor overrides as users write them: JSON, or the dict that onnxruntime's quantiser takes.

    {"Op4_out": [{"quant_type": "QUInt16",
                  "convert": {"quant_type": "QUInt8", "recv_nodes": ["Op6"]}}]}

The schema is onnxruntime's ``TensorQuantOverrides``. JSON has neither its enumerations nor its
sets and arrays, so types go by name, sets are lists, and arrays of one number are numbers;
a dict may hold either. Unlike there, a misspelt key is an error.

Importing this module imports no onnx_ir: a session that comes from the cache reads its
overrides only to know which entry is its own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    Overrides,
    TensorOverride,
)
from session_options.keys import closest

# onnxruntime's QuantType of activations; ONNX's names are these without the Q.
_QUANT_TYPES = ("QUInt8", "QInt8", "QUInt16", "QInt16")
_GREATEST = float(np.finfo(np.float32).max)


def read_overrides(source: str | Mapping[str, Any]) -> Overrides:
    """Read overrides.

    Args:
        source: JSON text, or a dict of lists of one dict. Types are names (``"QUInt16"``,
            ``"uint16"``), or members of onnxruntime's QuantType or onnx_ir's DataType; numbers
            may be numpy arrays of one element, consumers a list or a set. None counts as left
            out, and so does a tensor that nothing is asked for.
    """
    import onnx_ir as ir

    def made(fields: dict[str, Any]) -> TensorOverride:
        values = dict(fields)
        if "quant_type" in values:
            values["quant_type"] = ir.DataType[values["quant_type"][1:].upper()]
        if "convert" in values:
            values["convert"] = made(values["convert"])
        if "recv_nodes" in values:
            values["recv_nodes"] = frozenset(values["recv_nodes"])
        return TensorOverride(**values)

    return {name: made(entry) for name, entry in _plain(source).items()}


def format_overrides(source: str | Mapping[str, Any]) -> str:
    """Return overrides as JSON: equal ones as equal text, which reads back as they were.

    Arguments and errors are those of :func:`read_overrides`; onnx_ir is not imported.
    """
    return json.dumps({name: [entry] for name, entry in sorted(_plain(source).items())})


def _plain(source: str | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Check the schema; numbers, strings, lists and dicts come out, keys in a fixed order."""
    content = _parsed(source) if isinstance(source, str) else source
    if not isinstance(content, Mapping):
        raise OverrideError(
            f"overrides are {_described(content)}; expected a mapping of tensor names to "
            'lists of entries: {"tensor": [{"quant_type": "QUInt16"}]}'
        )
    plain = {}
    for name, entries in content.items():
        where = f"overrides[{name!r}]"
        if not isinstance(name, str):
            raise OverrideError(f"{where}: the key is not a tensor's name, which is a string")
        if not isinstance(entries, list | tuple) or len(entries) > 1:
            raise OverrideError(
                f"{where} is {_described(entries)}; expected a list of one entry: "
                '[{"quant_type": "QUInt16"}]'
            )
        for entry in entries:
            if found := _entry(entry, f"{where}[0]"):
                plain[name] = found
    return plain


def _parsed(text: str) -> object:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key {twice!r} stands twice in one JSON object")
        return result

    try:
        return json.loads(text, object_pairs_hook=once)
    except (RecursionError, ValueError) as error:
        start = text if len(text) <= 40 else f"{text[:40]}..."
        raise OverrideError(f"overrides are not JSON: {error}; they start {start!r}") from None


def _entry(entry: object, where: str, *, is_convert: bool = False) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise OverrideError(f"{where} is {_described(entry)}; expected a dict")
    found = {}
    for key, value in entry.items():
        if key not in _READERS:
            hint = closest(str(key), _READERS)
            raise OverrideError(f"{where}[{key!r}]: no such key: {hint}")
        if is_convert and key == "convert" and value is not None:
            raise OverrideError(f"{where}['convert']: 'convert' holds another 'convert'")
        if value is not None:
            found[key] = _READERS[key](value, f"{where}[{key!r}]")
    return {key: found[key] for key in _READERS if key in found}


def _scalar(value: Any, where: str, kind: type, noun: str) -> Any:
    """A Python scalar, or numpy's scalar or array of one."""
    if getattr(value, "size", 1) != 1:
        raise OverrideError(
            f"{where} has {value.size} numbers; activations are quantised per tensor"
        )
    plain = value.item() if hasattr(value, "item") else value
    if kind is float and type(plain) in (int, float):
        # The widest type that models store scales in.
        plain = float(plain) if abs(plain) <= _GREATEST else math.inf
    if type(plain) is not kind or plain == math.inf:
        raise OverrideError(f"{where} is {_described(value)}; expected {noun}")
    return plain


def _quant_type(value: object, where: str) -> str:
    name = getattr(value, "name", value)
    if not isinstance(name, str):
        raise OverrideError(f"{where} is {value!r}; expected a type's name, as 'QUInt16'")
    for known in _QUANT_TYPES:
        if name.upper().removeprefix("Q") == known[1:].upper():
            return known
    hint = closest(name, _QUANT_TYPES)
    raise OverrideError(f"{where} is {name!r}, no type of quantised activations: {hint}")


def _names(value: object, where: str) -> list[str]:
    if not isinstance(value, list | tuple | set | frozenset) or not all(
        isinstance(name, str) for name in value
    ):
        raise OverrideError(f"{where} is {_described(value)}; expected a list of node names")
    return sorted(set(value))


_float = functools.partial(_scalar, kind=float, noun="a finite float32")
_int = functools.partial(_scalar, kind=int, noun="an integer")
_bool = functools.partial(_scalar, kind=bool, noun="true or false")
# In the order that canonical JSON has.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "quant_type": _quant_type,
    "scale": _float,
    "zero_point": _int,
    "symmetric": _bool,
    "rmin": _float,
    "rmax": _float,
    "recv_nodes": _names,
    "convert": functools.partial(_entry, is_convert=True),
}


def _described(value: object) -> str:
    text = repr(value)
    kind = type(value).__name__
    return f"{kind} {text}" if len(text) <= 40 else f"{kind} {text[:40]}..."
