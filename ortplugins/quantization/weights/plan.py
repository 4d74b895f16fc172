# SPDX-License-Identifier: MIT
"""Which weights of a model are quantised, how, and which share an activation."""

from __future__ import annotations

__all__ = [
    "Group",
    "QuantizeSettings",
    "Weight",
    "WeightPlan",
    "check_not_empty",
    "plan_weights",
]

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortplugins.errors import ModelFileError, QuantizationError
from ortplugins.model_io.loading import lift_constants
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.selection import Pattern, check_names, matches
from ortplugins.quantization.weights.group import METHODS
from ortplugins.quantization.weights.report import NodeReport
from ortplugins.quantization.weights.sites import OP_TYPES, WeightSite, find_sites
from rewrite_rules.dq_matmulnbits_fusion.matmulnbits_inputs import fitting_block_size
from rewrite_rules.graph.nodes import label

_KERNELS = frozenset({"MatMulNBits", "GatherBlockQuantized"})
_CONFIGURABLE = ("bits", "block_size")


@dataclasses.dataclass(frozen=True)
class QuantizeSettings:
    """What to quantise, and how.

    Attributes:
        method: One of :data:`~ortplugins.quantization.weights.group.METHODS`.
        form: Bits, block size and grid where ``node_config`` says nothing else.
        op_types: Some of MatMul, Gemm and Gather.
        nodes_to_include: Names, globs and regular expressions; None for all nodes.
        nodes_to_exclude: The same; they keep their float weight.
        node_config: ``{pattern: {"bits": ..., "block_size": ...}}``; later ones win.
        codes_k_last: Whether codes are stored as ``[N, K]``.
        for_kernels: Whether MatMulNBits and GatherBlockQuantized are made of them.
        share_of_8_bits: Share of the weights, 0 to 1, that get 8 bits: those whose codes add
            the most error to their outputs.
        alphas: Exponents that AWQ tries for the scales of input channels; None for its own.
        clip_ratios: Ratios that it tries for what blocks are clipped to; None for its own.
        fold_scales: Whether scales may be folded into the constants of a producer.

    Raises:
        QuantizationError: If a value is none of these.
    """

    method: str = "rtn"
    form: BlockFormat = dataclasses.field(default_factory=BlockFormat)
    op_types: Sequence[str] = ("MatMul", "Gemm")
    nodes_to_include: Sequence[Pattern] | None = None
    nodes_to_exclude: Sequence[Pattern] = ()
    node_config: Mapping[Any, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    codes_k_last: bool = False
    for_kernels: bool = False
    share_of_8_bits: float = 0.0
    alphas: tuple[float, ...] | None = None
    clip_ratios: tuple[float, ...] | None = None
    fold_scales: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise QuantizationError(
                f"method is {self.method!r}: one of {tuple(METHODS)} is expected"
            )
        if wrong := set(self.op_types) - set(OP_TYPES):
            raise QuantizationError(
                f"op_types has {sorted(wrong)}: {OP_TYPES} can be quantised"
            )
        if not 0 <= self.share_of_8_bits <= 1:
            raise QuantizationError(
                f"share_of_8_bits is {self.share_of_8_bits}: 0 to 1 is expected"
            )
        for name in ("nodes_to_include", "nodes_to_exclude"):
            if isinstance(getattr(self, name), str):
                raise QuantizationError(f"{name} is a string: a list of patterns is expected")
        if self.alphas is not None and not _within(self.alphas, 0):
            raise QuantizationError(f"alphas is {self.alphas}: numbers of 0 to 1 are expected")
        if self.clip_ratios is not None and not _within(self.clip_ratios, 1e-6):
            raise QuantizationError(
                f"clip_ratios is {self.clip_ratios}: numbers above 0, up to 1, are expected"
            )
        for pattern, config in self.node_config.items():
            if unknown := set(config) - set(_CONFIGURABLE):
                raise QuantizationError(
                    f"node_config: {pattern!r} has {sorted(unknown)}: {_CONFIGURABLE} can be "
                    "set"
                )
            try:
                _configured(self.form, config)
            except QuantizationError as error:
                raise QuantizationError(f"node_config: {pattern!r}: {error}") from error

    @property
    def needs_statistics(self) -> bool:
        """Whether activations have to be watched."""
        return bool(METHODS[self.method]) or self.share_of_8_bits > 0

    @property
    def needs_gram(self) -> bool:
        """Whether the method searches on their second moments."""
        return bool(METHODS[self.method])

    def gram_tokens(self, k: int) -> int | None:
        """Return how many tokens the second moments need: all for feedback between rows.

        Searches of scales and ranges find the same in twice as many as there are channels.
        """
        return None if "gptq" in METHODS[self.method] else 2 * k

    def stored_bytes(self, weight: Weight) -> int:
        """Return the bytes that codes, scales and zero points take in the model."""
        form = weight.form
        if self.for_kernels and weight.sites[0].activation is not None:
            size = fitting_block_size(form.bits, form.size_along(weight.K), weight.K)
            if size is not None:
                # MatMulNBits' blocks and rows of zero points are filled up.
                blocks = -(-weight.K // size)
                scales = blocks * np.dtype(form.scale_type).itemsize
                zero_points = 0 if form.is_symmetric else -(-blocks * form.bits // 8)
                row = blocks * size * form.bits // 8 + scales + zero_points
                return weight.N * row
        return form.stored_bytes(weight.K, weight.N)

    def form_of(self, site: WeightSite) -> BlockFormat:
        """Return how a site's weight is quantised."""
        half = site.tensor.dtype is ir.DataType.FLOAT16
        form = dataclasses.replace(self.form, scale_type="float16" if half else "float32")
        for pattern, config in self.node_config.items():
            if matches(pattern, site.label):
                form = _configured(form, config)
        return form


def _configured(form: BlockFormat, config: Mapping[str, int]) -> BlockFormat:
    bits = config.get("bits", form.bits)
    block_size = config.get("block_size", form.block_size)
    return dataclasses.replace(form, bits=bits, block_size=block_size)


def _within(numbers: Sequence[float], least: float) -> bool:
    return bool(numbers) and all(least <= number <= 1 for number in numbers)


@dataclasses.dataclass(eq=False)
class Weight:
    """A float weight in one form, and the nodes that read it.

    Attributes:
        value: The initializer, or the output of a Constant node.
        stored_k_last: Whether it is ``[N, K]``.
        form: How it is quantised.
        K: Size along which the blocks run.
        N: Number of columns.
        sites: The nodes.
    """

    value: ir.Value
    stored_k_last: bool
    form: BlockFormat
    K: int
    N: int
    sites: list[WeightSite]

    @property
    def nbytes(self) -> int:
        """Bytes in float."""
        return self.tensor.nbytes

    @property
    def tensor(self) -> ir.TensorProtocol:
        """What it holds in float."""
        return self.sites[0].tensor


@dataclasses.dataclass(eq=False)
class Group:
    """Weights that share the scales of their input channels.

    Attributes:
        weights: The weights, all of the same K.
        activations: What they are multiplied with; empty where there are no statistics.
        reason: Why there are none.
    """

    weights: list[Weight]
    activations: list[ir.Value]
    reason: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightPlan:
    """What is to be quantised.

    Attributes:
        model: The model.
        groups: The weights, by activation.
        refused: The nodes that keep their weight, and why.
        notes: Things to know.
        kernels: Number of nodes that compute on codes already.
        order: Label of every node with a constant matrix, in the model's order.
    """

    model: ir.Model
    groups: list[Group]
    refused: list[NodeReport]
    notes: list[str]
    kernels: int
    order: list[str]


def plan_weights(model: ir.Model, settings: QuantizeSettings) -> WeightPlan:
    """Find what is to be quantised; the graph's larger Constant nodes become initializers.

    Raises:
        QuantizationError: If a pattern means no node.
    """
    lift_constants(model)
    sites: list[WeightSite] = []
    refused: list[NodeReport] = []
    order: list[str] = []
    for found in find_sites(model, settings.op_types):
        if isinstance(found, WeightSite):
            sites.append(found)
            order.append(found.label)
        else:
            node, reason = found
            order.append(label(node))
            refused.append(NodeReport(label(node), node.op_type, reason=reason))
    notes = _check_patterns(settings, order)
    chosen = []
    for site in sites:
        if reason := _excluded(settings, site.label) or _no_kernel(settings, site):
            refused.append(_untouched(site, reason))
        else:
            chosen.append(site)
    weights: dict[object, Weight] = {}
    for site in chosen:
        form = settings.form_of(site)
        key = (site.weight, site.stored_k_last, form)
        if key not in weights:
            weights[key] = Weight(site.weight, site.stored_k_last, form, site.K, site.N, [])
        weights[key].sites.append(site)
    if model.functions:
        notes.append("nodes of model-local functions are not quantised: inline them first")
    groups = _grouped(list(weights.values()))
    kernels = sum(node.op_type in _KERNELS for node in model.graph.all_nodes())
    return WeightPlan(model, groups, refused, notes, kernels, order)


def _check_patterns(settings: QuantizeSettings, names: Sequence[str]) -> list[str]:
    notes = []
    for option, patterns, strict in (
        ("node_config", settings.node_config, True),
        ("nodes_to_include", settings.nodes_to_include or (), True),
        ("nodes_to_exclude", settings.nodes_to_exclude, False),
    ):
        unmatched = check_names(option, patterns, names, all_patterns=strict)
        notes += [f"{option}: {text!r} matches no node" for text in unmatched]
    return notes


def _excluded(settings: QuantizeSettings, name: str) -> str:
    for pattern in settings.nodes_to_exclude:
        if matches(pattern, name):
            return "excluded by nodes_to_exclude"
    included = settings.nodes_to_include
    if included is not None and not any(matches(pattern, name) for pattern in included):
        return "not among nodes_to_include"
    return ""


def _no_kernel(settings: QuantizeSettings, site: WeightSite) -> str:
    """Say why a table has no GatherBlockQuantized; empty where it has, or needs none."""
    bits = settings.form_of(site).bits
    if settings.for_kernels and site.activation is None and site.K * bits % 8:
        return f"GatherBlockQuantized wants rows of whole bytes, not {site.K} x {bits} bits"
    return ""


def _untouched(site: WeightSite, reason: str) -> NodeReport:
    size = site.tensor.nbytes
    return NodeReport(
        site.label,
        site.node.op_type,
        site.weight.name or "",
        site.K,
        site.N,
        bytes_before=size,
        bytes_after=size,
        reason=reason,
    )


def check_not_empty(plan: WeightPlan, settings: QuantizeSettings) -> None:
    """Refuse a plan that quantises nothing.

    Raises:
        ModelFileError: Saying why nothing is left.
    """
    if not plan.groups:
        raise ModelFileError(_nothing(settings, plan))


def _nothing(settings: QuantizeSettings, plan: WeightPlan) -> str:
    kinds, refused = ", ".join(settings.op_types), plan.refused
    left = [node for node in refused if not node.reason.startswith("already quantised")]
    done = plan.kernels + len(refused) - len(left)
    if done and not left:
        return f"nothing to quantise: the model is already quantised ({done} nodes)"
    if not refused:
        return f"nothing to quantise: no {kinds} reads a constant float matrix"
    shown = "; ".join(f"{node.node}: {node.reason}" for node in refused[:3])
    more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
    return f"nothing to quantise: {shown}{more}"


def _grouped(weights: Sequence[Weight]) -> list[Group]:
    """Put weights together that read an activation, and activations that read a weight."""
    watched = [w for w in weights if all(s.no_statistics is None for s in w.sites)]
    parent: dict[object, object] = {}

    def root(item: object) -> object:
        while (above := parent.setdefault(item, item)) is not item:
            parent[item] = parent[above]
            item = above
        return item

    for weight in watched:
        for site in weight.sites:
            parent[root(site.activation)] = root(weight)
    members: dict[object, list[Weight]] = {}
    for weight in watched:
        members.setdefault(root(weight), []).append(weight)
    groups = []
    for group in members.values():
        activations = dict.fromkeys(s.activation for w in group for s in w.sites)
        groups.append(Group(group, [a for a in activations if a is not None]))
    for weight in weights:
        if weight not in watched:
            reason = next(s.no_statistics for s in weight.sites if s.no_statistics)
            groups.append(Group([weight], [], reason))
    return groups
