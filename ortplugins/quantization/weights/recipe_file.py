# SPDX-License-Identifier: MIT
"""Recipes by name, and recipes in YAML files.

A file has the fields of :class:`Recipe`; ``rules`` are settings by pattern, or ``float``::

    method: gptq
    block_size: 32
    gptq: {damping: 0.02}
    rules:
      "*v_proj*": {bits: 8, method: rtn}
      ":head": {bits: 8}
      "*router*": float
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortplugins.errors import QuantizationError, UsageError
from ortplugins.quantization.methods.gptq import GptqOptions
from ortplugins.quantization.weights.recipe import Recipe, Rule
from ortplugins.quantization.weights.sites import OP_TYPES
from rewrite_rules.closest_name import did_you_mean

# 4 bits cost most in the head. Rows of most models hold whole blocks of 64: of a tied table
# GatherBlockQuantized and MatMulNBits then read the same codes.
_FINE = {"bits": 8, "block_size": 64, "method": "rtn", "optional": True}
_TABLES = Rule.of(":table", _FINE), Rule.of(":head", _FINE)
_COARSE_HEAD = Rule.of(":head", _FINE | {"bits": 4, "method": "gptq"})
_BALANCED = Recipe(
    method="gptq",
    block_size=64,
    op_types=OP_TYPES,
    rules=_TABLES,
    share_of_8_bits=0.013,
    half_scales=True,
    fuse_tables=True,
    accuracy_level=4,
    quantized_inputs=True,
)
PRESETS = {
    "small": dataclasses.replace(
        _BALANCED,
        block_size=128,
        rules=(_TABLES[0], _COARSE_HEAD),
        share_of_8_bits=0.0,
        quantized_inputs=False,
    ),
    "balanced": _BALANCED,
    "best": dataclasses.replace(_BALANCED, block_size=32, share_of_8_bits=0.1),
}
"""Recipes by name; all of them look at samples."""


def read_recipe(recipe: Recipe | str | os.PathLike[str] | None) -> Recipe:
    """Return a recipe: as it is, by its name, or from a file; the default for None.

    Raises:
        QuantizationError: If a file cannot be read or is not a recipe; names file and key.
        UsageError: If a package is missing.
    """
    if recipe is None:
        return Recipe()
    if isinstance(recipe, Recipe):
        return recipe
    if recipe in PRESETS:
        return PRESETS[str(recipe)]
    path = Path(recipe)
    try:
        return _recipe_of(_load(path))
    except QuantizationError as error:
        raise QuantizationError(f"{path}: {error}") from error


def _load(path: Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError("recipes in files need: pip install 'ortplugins[cli]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses keys that come twice, of which YAML would take the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """Return a mapping."""
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            if len(mapping) < len(node.value):
                keys = [self.construct_object(key) for key, _ in node.value]
                twice = next(key for key in keys if keys.count(key) > 1)
                raise QuantizationError(f"{twice!r} comes twice")
            return mapping

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        known = ", ".join(PRESETS)
        hint = did_you_mean(str(path), PRESETS)
        raise QuantizationError(f"is neither a file nor one of {known}{hint}") from None
    except OSError as error:
        raise QuantizationError(f"cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise QuantizationError(f"is not YAML: {reason}") from error


def _recipe_of(content: Any) -> Recipe:
    fields = _mapping("a recipe", content, Recipe)
    if "gptq" in fields:
        fields["gptq"] = GptqOptions(**_mapping("gptq", fields["gptq"], GptqOptions))
    rules = fields.get("rules") or {}
    if not isinstance(rules, dict):
        raise QuantizationError("rules: a mapping, pattern to settings, is expected")
    fields["rules"] = tuple(_rule(str(nodes), given) for nodes, given in rules.items())
    try:
        return Recipe(**fields)
    except (TypeError, AttributeError) as error:
        raise QuantizationError(f"a value has the wrong type: {error}") from error


def _rule(nodes: str, given: Any) -> Rule:
    if given == "float":
        return Rule(nodes, keep_float=True)
    if not isinstance(given, dict) or not given:
        raise QuantizationError(
            f"rule {nodes!r} is {given!r}: float, or settings as {{bits: 8}}, are expected"
        )
    return Rule.of(nodes, given)


def _mapping(what: str, content: Any, kind: Any) -> dict[str, Any]:
    """Return a mapping whose keys are fields of a dataclass."""
    known = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(content, Mapping):
        raise QuantizationError(f"{what} is a {type(content).__name__}: a mapping is expected")
    for key in content:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; it can have {', '.join(known)}"
            raise QuantizationError(f"{what} has no {key!r}{hint}")
    return dict(content)
