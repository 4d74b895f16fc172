# SPDX-License-Identifier: MIT
"""Overrides: the types that a user wants single activations and their consumers to have.

    {"h1": [{"quant_type": "QUInt16"}],
     "h2": [{"convert": {"quant_type": "QUInt16", "recv_nodes": ["Op6"]}}]}

The keys are those of ``TensorQuantOverrides`` in onnxruntime's quantiser that name types; as
JSON, or as a dict with its enumerations. Scales and ranges are that quantiser's: a boundary
refines the grid that a tensor has.

Importing this module imports no onnx_ir: a session that comes from the cache reads its
overrides only to know which entry is its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

# onnxruntime's QuantType of activations; ONNX's names are these without the Q.
_QUANT_TYPES = ("QUInt8", "QInt8", "QUInt16", "QInt16")


class OverrideError(ValueError):
    """An override asks for what can't be; the text names the tensor or node and says why."""


@dataclasses.dataclass(frozen=True)
class TensorOverride:
    """What an activation is to be; None: as it is.

    Attributes:
        quant_type: Type of the codes.
        convert: The second type, for some of its consumers.
        recv_nodes: Names of the consumers that get it (unnamed nodes are called by their first
            output); None: all.
    """

    quant_type: ir.DataType | None = None
    convert: ir.DataType | None = None
    recv_nodes: frozenset[str] | None = None


# By tensor.
Overrides = Mapping[str, TensorOverride]


def read_overrides(source: str | Mapping[str, Any]) -> Overrides:
    """Read overrides, from what :func:`format_overrides` takes."""
    import onnx_ir as ir

    def dtype(entry: dict[str, Any]) -> ir.DataType | None:
        name = entry.get("quant_type")
        return None if name is None else ir.DataType[name[1:].upper()]

    found = {}
    for name, (entry,) in json.loads(format_overrides(source)).items():
        convert = entry.get("convert", {})
        nodes = convert.get("recv_nodes")
        readers = None if nodes is None else frozenset(nodes)
        found[name] = TensorOverride(dtype(entry), dtype(convert), readers)
    return found


def format_overrides(source: str | Mapping[str, Any]) -> str:
    """Return overrides as JSON: equal ones as equal text, which reads back as they were.

    Args:
        source: JSON text, or a dict of lists of one dict. Types are names (``"QUInt16"``) or
            members of onnxruntime's QuantType, consumers a list or a set. A tensor that
            nothing is asked for is left out.

    Raises:
        OverrideError: Where the schema is another.
    """
    content = source
    if isinstance(source, str):
        try:
            content = json.loads(source, object_pairs_hook=_each_once)
        except (RecursionError, ValueError) as error:
            raise OverrideError(f"overrides cannot be read as JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise OverrideError(
            f"overrides are {_described(content)}; expected a mapping of tensor names to "
            'lists of entries: {"tensor": [{"quant_type": "QUInt16"}]}'
        )
    plain = {}
    for name, entries in content.items():
        where = f"overrides[{name!r}]"
        if not isinstance(entries, list | tuple) or len(entries) > 1:
            raise OverrideError(
                f"{where} is {_described(entries)}; expected a list of one entry: "
                '[{"quant_type": "QUInt16"}]'
            )
        for entry in entries:
            found = _fields(entry, f"{where}[0]", ("quant_type", "convert"))
            if "convert" in found:
                inner = f"{where}[0]['convert']"
                convert = _fields(found["convert"], inner, ("quant_type", "recv_nodes"))
                if "quant_type" not in convert:
                    raise OverrideError(f"{inner} has no 'quant_type' for the consumers")
                found["convert"] = convert
            if found:
                plain[str(name)] = [found]
    return json.dumps(plain, sort_keys=True)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; of two equal keys the first would be lost without a word."""
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} is there twice")
    return dict(pairs)


def _fields(entry: object, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise OverrideError(f"{where} is {_described(entry)}; expected a dict")
    found = dict(entry)
    if wrong := [key for key in found if key not in known]:
        raise OverrideError(
            f"{where}[{wrong[0]!r}]: no such key; known are {', '.join(known)}"
        )
    if "quant_type" in found:
        name = getattr(found["quant_type"], "name", found["quant_type"])
        if name not in _QUANT_TYPES:
            types = ", ".join(_QUANT_TYPES)
            raise OverrideError(f"{where}['quant_type'] is {name!r}; expected one of {types}")
        found["quant_type"] = name
    if "recv_nodes" in found:
        nodes = found["recv_nodes"]
        is_collection = isinstance(nodes, list | tuple | set | frozenset) and len(nodes) > 0
        if not is_collection or not all(isinstance(node, str) for node in nodes):
            raise OverrideError(
                f"{where}['recv_nodes'] is {_described(nodes)}; expected a list of node names"
            )
        found["recv_nodes"] = sorted(set(nodes))
    return found


def _described(value: object) -> str:
    text = repr(value)
    kind = type(value).__name__
    return f"{kind} {text}" if len(text) <= 40 else f"{kind} {text[:40]}..."
