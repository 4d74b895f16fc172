# SPDX-License-Identifier: MIT
"""A recipe: which weights are quantised, by which method, into what; by name, or a YAML file.

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
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortplugins.errors import QuantizationError, UsageError
from ortplugins.quantization.methods.gptq import GptqOptions
from ortplugins.quantization.methods.nearest import GRIDS, BlockFormat
from ortplugins.quantization.schema import (
    check_keys,
    check_settings,
    is_int,
    is_number,
    setting,
)
from ortplugins.quantization.selection import Pattern, check_names, matches, text_of
from ortplugins.quantization.weights.uses import OP_TYPES, ROLES, WeightUse
from rewrite_rules.closest_name import did_you_mean

# What each method does: scales per input channel, ratios per block, error feedback.
METHODS = {
    "rtn": (),
    "awq_lite": ("scales",),
    "awq_clip": ("clip",),
    "gptq": ("gptq",),
    "w8a8": ("activations",),
}
# What methods with a step read, and no others.
_SETTINGS = {
    "scales": ("alphas", "fold_scales"),
    "clip": ("clip_ratios",),
    "gptq": ("gptq", "quantized_inputs"),
    "activations": ("least_cosine",),
}
QUANT_FORMATS = ("QDQ", "QDQ_transposed", "MatMulNBits")

ROUTER = "it chooses experts (a rule ':router': {keep_float: false} quantises it)"
ROTATION = "its rows, as cosines of positions, multiply all that is rotated"

_KERNEL_BLOCK_SIZES = (16, 32, 64, 128, 256, -1)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Settings of some nodes; None keeps what the recipe, or an earlier rule, says.

    Attributes:
        nodes: The nodes: a name, a glob, or a regular expression (compiled, or text that
            starts with ``re:``; found anywhere in the name), of the node, its weight, or a
            module that torch exported it from; ``":head"`` for the product that the model's
            output is, and a Gather of the same table; ``":table"`` for every Gather;
            ``":router"`` for products that choose experts. Nodes without a name go by their
            first output's.
        method: A method of :class:`Recipe`.
        bits: 4 or 8.
        block_size: Elements along K that share a scale; -1 for a scale per column.
        is_symmetric: Signed codes without zero points; else unsigned ones with.
        keep_float: Whether the weight stays in float; routers do, unless a rule for ":router",
            or for one by its name, says False.
        optional: Whether a rule that matches no node is allowed.
    """

    nodes: Pattern
    method: str | None = setting(None, choices=(None, *METHODS))
    bits: int | None = None
    block_size: int | None = None
    is_symmetric: bool | None = None
    keep_float: bool | None = setting(
        None, "True or False", lambda given: given is None or isinstance(given, bool)
    )
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, str | re.Pattern):
            raise QuantizationError(f"rule {self.nodes!r}: a pattern is a text")
        what = f"rule {text_of(self.nodes)!r}: "
        check_settings(self, what)
        try:
            self.changed(BlockFormat())
        except QuantizationError as error:
            raise QuantizationError(f"{what}{error}") from error

    @classmethod
    def of(cls, nodes: Pattern, settings: Any) -> Rule:
        """Return the rule of settings by name, or of ``"float"``."""
        if settings == "float":
            return cls(nodes, keep_float=True)
        what = f"rule {text_of(nodes)!r}"
        if not isinstance(settings, Mapping):
            raise QuantizationError(
                f"{what} is {settings!r}: float, or settings as {{bits: 8}}, are expected"
            )
        return cls(nodes, **check_keys(what, settings, cls))

    def changed(self, form: BlockFormat) -> BlockFormat:
        """Return a form with what the rule says of it."""
        names = ("bits", "block_size", "is_symmetric")
        given = {name: getattr(self, name) for name in names}
        return dataclasses.replace(form, **{k: v for k, v in given.items() if v is not None})

    def means(self, use: WeightUse) -> bool:
        """Whether the rule is for a node."""
        named = any(matches(self.nodes, name) for name in use.names)
        return named or self.nodes in use.roles


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the weights of a model are quantised.

    Its fields are the settings of :func:`quantize`, the keys of a YAML file and options of the
    command line.

    Attributes:
        method: How codes are chosen; all but rtn need samples. ``"rtn"`` rounds to nearest.
            ``"awq_lite"`` scales input channels so that those that matter are rounded finer,
            ``"awq_clip"`` clips blocks (Lin et al., arXiv 2306.00978). ``"gptq"`` makes up for
            each rounding in what is rounded later (Frantar et al., arXiv 2210.17323).
            ``"w8a8"`` computes products of 8-bit integers,
            activations included, in onnxruntime's MatMulIntegerToFloat: for the whole model,
            with 8 bits and a block_size of -1.
        bits: Bits of a code: 4 or 8.
        block_size: Elements along K that share a scale; -1 for a scale per column.
        is_symmetric: Signed codes without zero points, or unsigned codes with zero points.
        grid: How symmetric codes are scaled: extreme uses all codes, positive keeps scales
            positive, amax is ModelOpt's. See :class:`BlockFormat`. ``"positive"`` is for
            runtimes that refuse negative scales, such as TensorRT's parser: blocks lose a
            code of one sign, and the perplexity comes close to that of "amax".
        op_types: Operators to quantise: MatMul (with FusedMatMul), Gemm, Gather.
        rules: Other settings for the nodes that a pattern matches; later rules win. A mapping,
            as in a file, of patterns to settings or ``"float"`` is accepted, too.
        share_of_8_bits: Share of the weights, 0 to 1, that get 8 bits: those whose codes add
            the most error to outputs. They are rounded to nearest. 0.03 of them make 4.6 bits
            per weight out of 4.5. Needs samples.
        quant_format: How the file holds the codes. ``"QDQ"`` has codes ``[K, N]``,
            blocks along axis 0; ``"QDQ_transposed"`` codes ``[N, K]``, and a Transpose;
            ``"MatMulNBits"`` is for onnxruntime alone (Gather becomes GatherBlockQuantized).
        half_scales: Store the scales of float32 weights in float16, behind a Cast that
            onnxruntime folds when a session starts. Half a bit less for each weight in
            blocks of 32. Not where MatMulNBits or GatherBlockQuantized is written, which take
            scales of the activations' type.
        fuse_tables: Write GatherBlockQuantized for Gather in the QDQ formats, too, and
            MatMulNBits for a MatMul that reads the same codes. Plain onnxruntime dequantises
            a QDQ table whole at every run.
        accuracy_level: How MatMulNBits computes: 0 or 1 in float32 (default), 4 with int8
            activations. Only where that is written.
        alphas: Exponents that AWQ tries for the scales of input channels, 0 to 1.
        clip_ratios: Ratios that AWQ tries when it clips blocks, above 0 and up to 1.
        fold_scales: Fold AWQ's scales into the constants that an activation comes from, where
            possible; else a Mul divides by them.
        gptq: Damping and searches of GPTQ; a mapping of its options is accepted, too.
        least_cosine: Least cosine, 0 to 1, of a layer's output in w8a8 to the float layer's,
            on sampled tokens; layers below it stay in float.
        kv_bits: 8 to keep the cache of GroupQueryAttention in int8; ranges come from samples.
            None leaves it.
        quantized_inputs: Compensate the errors of earlier weights with GPTQ, too. Weights
            are quantised one after the other, for the inputs that they get in the quantised
            model. It takes about twice as long.

    Raises:
        QuantizationError: If a value is out of range.
    """

    method: str = setting("rtn", choices=METHODS)
    bits: int = 4
    block_size: int = 32
    is_symmetric: bool = True
    grid: str = setting("extreme", choices=GRIDS)
    op_types: Sequence[str] = setting(
        ("MatMul", "Gemm"),
        f"a list of {OP_TYPES}",
        lambda given: not isinstance(given, str) and set(given) <= set(OP_TYPES),
    )
    rules: Sequence[Rule] | Mapping[Any, Any] = ()
    share_of_8_bits: float = setting(
        0.0, "0 to 1", lambda share: is_number(share) and 0 <= share <= 1
    )
    quant_format: str = setting("QDQ", choices=QUANT_FORMATS)
    half_scales: bool = False
    fuse_tables: bool = False
    accuracy_level: int | None = setting(
        None, "0 to 4", lambda level: level is None or (is_int(level) and 0 <= level <= 4)
    )
    alphas: Sequence[float] | None = setting(
        None, "a list of numbers of 0 to 1", lambda given: _within(given, 0)
    )
    clip_ratios: Sequence[float] | None = setting(
        None, "a list of numbers above 0, up to 1,", lambda given: _within(given, 1e-6)
    )
    fold_scales: bool = True
    gptq: GptqOptions = dataclasses.field(default_factory=GptqOptions)
    least_cosine: float = setting(
        0.999, "0 to 1", lambda given: is_number(given) and 0 <= given <= 1
    )
    quantized_inputs: bool = False
    kv_bits: int | None = setting(None, "8", lambda bits: bits is None or bits == 8)

    def __post_init__(self) -> None:
        gptq: Any = self.gptq
        if not isinstance(gptq, GptqOptions):
            gptq = GptqOptions(**check_keys("gptq", gptq, GptqOptions))
        object.__setattr__(self, "gptq", gptq)
        object.__setattr__(self, "rules", _rules(self.rules))
        check_settings(self)
        for name in ("alphas", "clip_ratios"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(given))
        _ = self.form
        if not (self.for_kernels or self.fuse_tables) and self.accuracy_level is not None:
            raise QuantizationError(
                "accuracy_level is an attribute of MatMulNBits: give it where "
                f"{self.quant_format} is fused, or take quant_format='MatMulNBits'"
            )
        sizes = {self.block_size, *(rule.block_size or -1 for rule in self.rules)}
        wrong = sorted(sizes - set(_KERNEL_BLOCK_SIZES)) if self.for_kernels else ()
        if wrong:
            raise QuantizationError(
                f"block_size {wrong[0]} has no MatMulNBits kernel: one of "
                f"{_KERNEL_BLOCK_SIZES} is expected"
            )
        methods = {self.method, *(rule.method or self.method for rule in self.rules)}
        form = (self.bits, self.block_size, self.share_of_8_bits)
        if "w8a8" in methods and (len(methods) > 1 or form != (8, -1, 0)):
            raise QuantizationError(
                "w8a8 is for the whole model, no other method beside it, and has 8 bits, a "
                "block_size of -1 and no share_of_8_bits"
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
        rules = (*_rules(self.rules), *_rules(settings.get("rules", ())))
        return dataclasses.replace(self, **{**settings, "rules": rules})

    @property
    def form(self) -> BlockFormat:
        """Bits, block size and grid where no rule says anything else."""
        return BlockFormat(self.bits, self.block_size, self.is_symmetric, self.grid)

    @property
    def for_kernels(self) -> bool:
        """Whether MatMulNBits and GatherBlockQuantized are made of all codes."""
        return self.quant_format == "MatMulNBits"

    def fuses(self, *, table: bool) -> bool:
        """Whether they are made of the codes of a weight that Gather reads, or not."""
        return self.for_kernels or (self.fuse_tables and table)

    @property
    def for_integers(self) -> bool:
        """Whether products are computed on integers."""
        return self.method == "w8a8"

    @property
    def chooses_by_samples(self) -> bool:
        """Whether the codes of a weight depend on its activations."""
        methods = [self.method, *(rule.method or self.method for rule in self.rules)]
        return self.share_of_8_bits > 0 or any(METHODS[name] for name in methods)

    @property
    def needs_statistics(self) -> bool:
        """Whether activations have to be calibrated."""
        return self.chooses_by_samples or self.kv_bits is not None

    def choose(self, use: WeightUse, *, table: bool) -> tuple[BlockFormat, str, str]:
        """Return form and method of a node's weight, and why it stays in float, if it does.

        ``table`` says whether a Gather reads the weight.
        """
        half = use.tensor.dtype is ir.DataType.FLOAT16
        half = half or (self.half_scales and not self.fuses(table=table))
        form = dataclasses.replace(self.form, scale_type="float16" if half else "float32")
        method, reason = self.method, ROUTER if use.is_router else ""
        reason = ROTATION if use.is_rotation else reason
        for rule in self.rules:
            if rule.means(use):
                form, method = rule.changed(form), rule.method or method
                kept = f"kept in float by {text_of(rule.nodes)!r}"
                if rule.keep_float:
                    reason = kept
                # What chooses experts is small, and nobody means it by a pattern of names.
                elif rule.keep_float is False:
                    named = rule.nodes == ":router" or rule.nodes in use.names
                    reason = ROUTER if use.is_router and not named else ""
        return form, method, reason

    def without_effect(self, methods: Iterable[str], *, has_tables: bool) -> list[str]:
        """Say which settings change nothing where weights are quantised by these methods.

        ``has_tables`` says whether a Gather reads one of the weights.
        """
        notes = []
        if self.half_scales and self.for_kernels:
            notes.append(
                "half_scales has no effect: MatMulNBits has scales of the weight's type"
            )
        if self.fuse_tables and not (has_tables or self.for_kernels):
            notes.append("fuse_tables has no effect: no Gather reads a quantised weight")
            if self.accuracy_level is not None:
                notes.append("accuracy_level has no effect: no MatMulNBits is made")
        steps = {step for method in methods for step in METHODS[method]}
        readers = {
            step: [name for name in METHODS if step in METHODS[name]] for step in _SETTINGS
        }
        return notes + [
            f"{name} has no effect: no weight is quantised by {', '.join(readers[step])}"
            for step, names in _SETTINGS.items()
            for name in names
            if step not in steps and getattr(self, name) != getattr(Recipe(), name)
        ]

    def check_against(self, uses: Sequence[WeightUse], names: Collection[str]) -> list[str]:
        """Check that every pattern means a node; return notes on optional ones that do not."""
        roles = {role for use in uses for role in use.roles}
        others = [rule for rule in self.rules if rule.nodes not in ROLES]
        wanted = [rule.nodes for rule in self.rules if not rule.optional]
        check_names("rules", [nodes for nodes in wanted if nodes in ROLES], roles)
        check_names("rules", [nodes for nodes in wanted if nodes not in ROLES], names)
        return [
            f"{text_of(rule.nodes)!r} matches no node"
            for rule in others
            if not any(matches(rule.nodes, name) for name in names)
        ]


def _rules(given: Any) -> tuple[Rule, ...]:
    """Return rules, or those of patterns and their settings."""
    if isinstance(given, Mapping):
        return tuple(Rule.of(pattern, settings) for pattern, settings in given.items())
    return tuple(given)


def _within(given: Sequence[float] | None, least: float) -> bool:
    """Whether all of some numbers, if any are given, are of this and up to 1."""
    return given is None or (bool(given) and all(least <= number <= 1 for number in given))


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
    "encoder8": Recipe(method="w8a8", bits=8, block_size=-1),
}
"""Recipes by name; all of them look at samples. ``encoder8`` is for encoders on a CPU."""


def read_recipe(recipe: Recipe | str | os.PathLike[str] | None) -> Recipe:
    """Return a recipe: as it is, by its name, or from a file; the default for None."""
    if recipe is None:
        return Recipe()
    if isinstance(recipe, Recipe):
        return recipe
    if recipe in PRESETS:
        return PRESETS[str(recipe)]
    path = Path(recipe)
    try:
        return _recipe_of(read_yaml(_text_of(path)))
    except QuantizationError as error:
        raise QuantizationError(f"{path}: {error}") from error


def read_yaml(text: str) -> Any:
    """Read YAML; a key that comes twice, of which YAML would take the last, is refused."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError("recipes in files need: pip install 'ortplugins[cli]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            if len(mapping) < len(node.value):
                keys = [self.construct_object(key) for key, _ in node.value]
                twice = next(key for key in keys if keys.count(key) > 1)
                raise QuantizationError(f"{twice!r} comes twice")
            return mapping

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise QuantizationError(f"is not YAML: {' '.join(str(error).split())}") from error


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = ", ".join(PRESETS)
        hint = did_you_mean(str(path), PRESETS)
        raise QuantizationError(f"neither a file nor one of {known}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizationError(f"cannot be read: {error}") from error


def _recipe_of(content: Any) -> Recipe:
    fields = check_keys("a recipe", content, Recipe)
    if not isinstance(fields.get("rules", {}), dict | None):
        raise QuantizationError("rules: a mapping, pattern to settings, is expected")
    return Recipe(**fields | {"rules": fields.get("rules") or {}})
