# SPDX-License-Identifier: MIT
"""A recipe: which weights are quantised, by which method, into what."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.nearest import BlockFormat
from ortplugins.quantization.selection import matches
from ortplugins.quantization.weights.uses import OP_TYPES, WeightUse
from rewrite_rules.closest_name import did_you_mean

METHODS = ("rtn", "awq_lite", "gptq")
QUANT_FORMATS = ("QDQ", "QDQ_transposed", "MatMulNBits")

ROUTER = "it chooses experts (the rule ':router' with keep_float false quantises it)"
ROTATION = "its rows, as cosines of positions, multiply all that is rotated"

_KERNEL_BLOCK_SIZES = (16, 32, 64, 128, 256, -1)
# What a rule may set: fields of a weight's form, and others.
_FORM = ("bits", "block_size", "is_symmetric")
_SETTABLE = (*_FORM, "method", "keep_float")
# What a recipe and the form of a weight have in common.
_SHARED = tuple(field.name for field in dataclasses.fields(BlockFormat))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(BlockFormat):
    """How the weights of a model are quantised; its form is that of weights without a rule.

    Its fields, and those of :class:`BlockFormat`, are the settings of :func:`quantize`.

    Attributes:
        method: How codes are chosen; all but rtn need samples. ``"rtn"`` rounds to nearest.
            ``"awq_lite"`` scales input channels so that those that matter are rounded finer
            (Lin et al., arXiv 2306.00978). ``"gptq"`` makes up for
            each rounding in what is rounded later, in the same weight and in those behind it
            (Frantar et al., arXiv 2210.17323).
        op_types: Operators to quantise: MatMul, Gemm, Gather.
        rules: Settings for some of the nodes, by pattern: ``"float"``, or a mapping of method,
            bits, block_size, is_symmetric, and keep_float (routers stay in float unless a rule
            for ``":router"``, or for one by its name, has False). Later rules win. A pattern
            is a name, a glob, or a regular expression (text that starts with ``re:``; found
            anywhere in the name), of the node, its weight, or a module that torch exported it
            from, and matches one at least;
            ``":head"`` for the product that the model's output is, and a Gather of the same
            table; ``":table"`` for every Gather; ``":router"`` for products that choose
            experts. Nodes without a name go by their first output's.
        share_of_8_bits: Share of the weights, 0 to 1, that get 8 bits: those that rounding to
            nearest adds the most error to. 0.03 of them make 4.6 bits per weight out of 4.5.
            Needs samples.
        quant_format: How the file holds the codes. ``"QDQ"`` has codes ``[K, N]``,
            blocks along axis 0; ``"QDQ_transposed"`` codes ``[N, K]``, and a Transpose;
            ``"MatMulNBits"`` is for onnxruntime alone (Gather becomes GatherBlockQuantized).
        fuse_tables: Write GatherBlockQuantized for Gather in the QDQ formats, too, and
            MatMulNBits for a MatMul that reads the same codes. Plain onnxruntime dequantises
            a QDQ table whole at every run.
        accuracy_level: How MatMulNBits computes: 0 or 1 in float32 (default), 4 with int8
            activations. Only where that is written.

    Raises:
        QuantizationError: If a value is out of range.
    """

    method: str = "rtn"
    op_types: Sequence[str] = ("MatMul", "Gemm")
    rules: Any = ()  # a mapping or pairs; kept as pairs
    share_of_8_bits: float = 0.0
    quant_format: str = "QDQ"
    fuse_tables: bool = False
    accuracy_level: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        types, given = f"a list of {', '.join(OP_TYPES)}", self.op_types
        listed = isinstance(given, Collection) and not isinstance(given, str) and bool(given)
        self._expect("op_types", listed and all(each in OP_TYPES for each in given), types)
        self._expect("method", self.method in METHODS, f"one of {', '.join(METHODS)}")
        is_number = hasattr(self.share_of_8_bits, "__float__")
        self._expect("share_of_8_bits", is_number and 0 <= self.share_of_8_bits <= 1, "0 to 1")
        self._expect("fuse_tables", self.fuse_tables in (False, True), "true or false")
        formats = f"one of {', '.join(QUANT_FORMATS)}"
        self._expect("quant_format", self.quant_format in QUANT_FORMATS, formats)
        level = self.accuracy_level  # a float would be an attribute of another type
        fits = level is None or (hasattr(level, "__index__") and 0 <= level <= 4)
        self._expect("accuracy_level", fits, "0 to 4")
        object.__setattr__(self, "rules", tuple(map(_checked_rule, _pairs(self.rules))))
        if not (self.for_kernels or self.fuse_tables) and self.accuracy_level is not None:
            raise QuantizationError(
                "accuracy_level is an attribute of MatMulNBits: give it where "
                f"{self.quant_format} is fused, or take quant_format='MatMulNBits'"
            )
        sizes = {self.block_size, *(found.get("block_size", -1) for _, found in self.rules)}
        if self.for_kernels and (wrong := sorted(sizes - {*_KERNEL_BLOCK_SIZES})):
            raise QuantizationError(
                f"block_size {wrong[0]} has no MatMulNBits kernel; expected one of "
                f"{', '.join(map(str, _KERNEL_BLOCK_SIZES))}"
            )

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """Return the recipe with other fields; rules are added to its own, and win.

        Raises:
            TypeError: If a setting is not known; names the closest.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in settings:
            if name not in known:
                raise TypeError(f"unknown setting {name!r}{did_you_mean(name, known)}")
        rules = (*self.rules, *_pairs(settings.get("rules", ())))
        return dataclasses.replace(self, **{**settings, "rules": rules})

    @property
    def for_kernels(self) -> bool:
        """Whether MatMulNBits and GatherBlockQuantized are made of all codes."""
        return self.quant_format == "MatMulNBits"

    def fuses(self, *, table: bool) -> bool:
        """Whether they are made of the codes of a weight that Gather reads, or not."""
        return self.for_kernels or (self.fuse_tables and table)

    @property
    def needs_samples(self) -> bool:
        """Whether codes depend on activations."""
        methods = {self.method, *(found.get("method", "rtn") for _, found in self.rules)}
        return self.share_of_8_bits > 0 or methods != {"rtn"}

    def choose(self, use: WeightUse, *, table: bool) -> tuple[BlockFormat, str, str]:
        """Return form and method of a node's weight, and why it stays in float, if it does.

        ``table`` says whether a Gather reads the weight.
        """
        form = {name: getattr(self, name) for name in _SHARED}
        if use.tensor.dtype is ir.DataType.FLOAT16:
            form["scale_type"] = "float16"
        elif self.fuses(table=table):
            form["scale_type"] = "float32"
        method, reason = self.method, ROUTER if use.is_router else ""
        reason = ROTATION if use.is_rotation else reason
        for pattern, found in self.rules:
            if pattern in use.roles or any(matches(pattern, name) for name in use.names):
                form |= {name: found[name] for name in _FORM if name in found}
                method = found.get("method", method)
                if found.get("keep_float"):
                    reason = f"kept in float by {pattern!r}"
                # What chooses experts is small, and nobody means it by a pattern of names.
                elif "keep_float" in found:
                    named = pattern == ":router" or pattern in use.names
                    reason = ROUTER if use.is_router and not named else ""
        return BlockFormat(**form), method, reason


def _checked_rule(rule: tuple[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return a pattern and its settings, all of which fit."""
    is_pair = isinstance(rule, tuple | list) and len(rule) == 2
    pattern, settings = rule if is_pair else (rule, None)
    found: Any = {"keep_float": True} if settings == "float" else settings
    try:
        if not isinstance(found, Mapping):
            raise TypeError(f"{settings!r} is neither float nor settings such as bits 8")
        for name in map(str, found):
            if name not in _SETTABLE:
                raise TypeError(f"unknown setting {name!r}{did_you_mean(name, _SETTABLE)}")
        if (keep := found.get("keep_float", True)) not in (False, True):
            raise TypeError(f"keep_float is {keep!r}; expected true or false")
        Recipe(**{name: found[name] for name in (*_FORM, "method") if name in found})
    except (TypeError, ValueError) as error:
        raise QuantizationError(f"rule {pattern!r}: {error}") from error
    return str(pattern), dict(found)


def _pairs(given: Any) -> tuple[tuple[str, Any], ...]:
    """Return patterns and settings of a mapping, or of such pairs."""
    if isinstance(given, str) or not isinstance(given, Iterable | None):
        given = [given]  # which is refused
    return tuple(given.items() if isinstance(given, Mapping) else given or ())


# 4 bits cost most in the head. Rows of most models hold whole blocks of 64, so that
# GatherBlockQuantized and MatMulNBits read the same codes of a tied table.
_FINE = {"bits": 8, "block_size": 64, "method": "rtn"}
_BALANCED = Recipe(
    method="gptq",
    block_size=64,
    op_types=OP_TYPES,
    rules={":table": _FINE, ":head": _FINE},
    share_of_8_bits=0.013,
    scale_type="float16",
    fuse_tables=True,
    accuracy_level=4,
)
PRESETS = {
    "small": dataclasses.replace(
        _BALANCED,
        block_size=128,
        rules={":table": _FINE, ":head": _FINE | {"bits": 4, "method": "gptq"}},
        share_of_8_bits=0.0,
    ),
    "balanced": _BALANCED,
    "best": dataclasses.replace(_BALANCED, block_size=32, share_of_8_bits=0.1),
}
"""Recipes by name; all of them look at samples."""


def read_recipe(recipe: Recipe | str | None) -> Recipe:
    """Return a recipe: as it is, or by its name; the default for None."""
    if recipe is None or isinstance(recipe, Recipe):
        return recipe or Recipe()
    if (name := str(recipe)) not in PRESETS:
        known = f"expected one of {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}"
        raise QuantizationError(f"recipe is {name!r}; {known}")
    return PRESETS[name]
