# SPDX-License-Identifier: MIT
"""Which weights of a model are quantised, how, and which share an activation."""

from __future__ import annotations

__all__ = [
    "QUANT_FORMATS",
    "Group",
    "QuantizeSettings",
    "Weight",
    "WeightPlan",
    "check_not_empty",
    "plan_weights",
    "reported",
]

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortplugins.errors import ModelFileError, QuantizationError
from ortplugins.model_io.loading import lift_constants
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.selection import Pattern, check_names, matches
from ortplugins.quantization.weights.group import METHODS
from ortplugins.quantization.weights.report import NodeReport, QuantizeReport
from ortplugins.quantization.weights.sites import OP_TYPES, WeightSite, find_sites
from rewrite_rules.dq_matmulnbits_fusion.matmulnbits_inputs import fitting_block_size
from rewrite_rules.graph.nodes import label

QUANT_FORMATS = ("QDQ", "QDQ_transposed", "MatMulNBits")

_KERNELS = frozenset({"MatMulNBits", "GatherBlockQuantized"})
_KERNEL_BLOCK_SIZES = (16, 32, 64, 128, 256, -1)
_CONFIGURABLE = ("bits", "block_size")


@dataclasses.dataclass(frozen=True)
class QuantizeSettings:
    """What to quantise, and how: the arguments of :func:`.quantize` of these names, checked.

    Attributes:
        form: Bits, block size and grid where ``node_config`` says nothing else.

    Raises:
        QuantizationError: If a value is out of range.
    """

    method: str = "rtn"
    form: BlockFormat = dataclasses.field(default_factory=BlockFormat)
    op_types: Sequence[str] = ("MatMul", "Gemm")
    nodes_to_include: Sequence[Pattern] | None = None
    nodes_to_exclude: Sequence[Pattern] = ()
    node_config: Mapping[Any, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    share_of_8_bits: float = 0.0
    quant_format: str = "QDQ"
    accuracy_level: int | None = None
    alphas: tuple[float, ...] | None = None
    clip_ratios: tuple[float, ...] | None = None
    fold_scales: bool = True

    def __post_init__(self) -> None:
        for name, known in (("method", tuple(METHODS)), ("quant_format", QUANT_FORMATS)):
            if (given := getattr(self, name)) not in known:
                raise QuantizationError(f"{name} is {given!r}: one of {known} is expected")
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
        for name, least, range_ in (
            ("alphas", 0, "of 0 to 1"),
            ("clip_ratios", 1e-6, "above 0, up to 1,"),
        ):
            given = getattr(self, name)
            if given is not None and not (given and all(least <= x <= 1 for x in given)):
                raise QuantizationError(f"{name} is {given}: numbers {range_} are expected")
        for pattern, config in self.node_config.items():
            if unknown := set(config) - set(_CONFIGURABLE):
                raise QuantizationError(
                    f"node_config: {pattern!r} has {sorted(unknown)}: {_CONFIGURABLE} can be "
                    "set"
                )
            try:
                dataclasses.replace(self.form, **config)
            except QuantizationError as error:
                raise QuantizationError(f"node_config: {pattern!r}: {error}") from error
        self._check_kernels()

    def _check_kernels(self) -> None:
        if not self.for_kernels:
            if self.accuracy_level is not None:
                raise QuantizationError(
                    "accuracy_level is an attribute of MatMulNBits: give it where "
                    f"{self.quant_format} is fused, or take quant_format='MatMulNBits'"
                )
            return
        if self.accuracy_level not in (None, 0, 1, 2, 3, 4):
            raise QuantizationError(
                f"accuracy_level is {self.accuracy_level!r}: 0 to 4 is expected"
            )
        sizes = {config.get("block_size", -1) for config in self.node_config.values()}
        if wrong := sorted({self.form.block_size, *sizes} - set(_KERNEL_BLOCK_SIZES)):
            raise QuantizationError(
                f"block_size {wrong[0]} has no MatMulNBits kernel: one of "
                f"{_KERNEL_BLOCK_SIZES} is expected"
            )

    @property
    def for_kernels(self) -> bool:
        """Whether MatMulNBits and GatherBlockQuantized are made of the codes."""
        return self.quant_format == "MatMulNBits"

    @property
    def needs_statistics(self) -> bool:
        """Whether activations have to be watched."""
        return bool(METHODS[self.method]) or self.share_of_8_bits > 0

    def stored_bytes(self, weight: Weight, form: BlockFormat) -> int:
        """Return the bytes that codes, scales and zero points take in the model."""
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
                form = dataclasses.replace(form, **config)
        return form


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A float weight in one form.

    Attributes:
        form: How it is quantised.
        sites: The nodes that read it, all in the same orientation.
    """

    form: BlockFormat
    sites: list[WeightSite]

    @property
    def value(self) -> ir.Value:
        """The initializer, or the output of a Constant node."""
        return self.sites[0].weight

    @property
    def K(self) -> int:
        """Size along which the blocks run."""
        return self.sites[0].K

    @property
    def N(self) -> int:
        """Number of columns."""
        return self.sites[0].N


@dataclasses.dataclass(frozen=True, eq=False)
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
        nodes: Every node with a constant matrix, in the model's order: a site of one of the
            weights, or the report of a node that keeps its own.
        notes: Things to know.
    """

    model: ir.Model
    groups: list[Group]
    nodes: list[WeightSite | NodeReport]
    notes: list[str]


def plan_weights(model: ir.Model, settings: QuantizeSettings) -> WeightPlan:
    """Find what is to be quantised; the graph's larger Constant nodes become initializers.

    Raises:
        QuantizationError: If a pattern means no node.
    """
    lift_constants(model)
    nodes: list[WeightSite | NodeReport] = []
    for found in find_sites(model, settings.op_types):
        if isinstance(found, WeightSite):
            nodes.append(found)
        else:
            node, reason = found
            nodes.append(NodeReport(label(node), node.op_type, reason=reason))
    names = [node.label if isinstance(node, WeightSite) else node.node for node in nodes]
    notes = _check_patterns(settings, names)
    weights: dict[object, Weight] = {}
    for position, site in enumerate(nodes):
        if isinstance(site, NodeReport):
            continue
        form = settings.form_of(site)
        if reason := _left_out(settings, site, form):
            nodes[position] = _report(site, reason=reason)
            continue
        key = (site.weight, site.stored_k_last, form)
        weights.setdefault(key, Weight(form, [])).sites.append(site)
    nodes += _other_readers(weights.values(), {label for label in names if label})
    if model.functions:
        notes.append("nodes of model-local functions are not quantised: inline them first")
    groups = _grouped(list(weights.values()), "scales" in METHODS[settings.method])
    return WeightPlan(model, groups, nodes, notes)


def _other_readers(weights: Iterable[Weight], told: Collection[str]) -> list[NodeReport]:
    """Report what keeps a quantised weight's float numbers in the model: a table, mostly."""
    rows: dict[str, NodeReport] = {}
    for weight in weights:
        site = weight.sites[0]
        for name, op_type in _readers(site.weight):
            if name not in told:
                reason = f"reads {site.weight.name!r} in float, which stays for it"
                row = _report(site, node=name, op_type=op_type, K=0, N=0, reason=reason)
                rows.setdefault(name, row)
    return list(rows.values())


def _readers(value: ir.Value) -> Iterator[tuple[str, str]]:
    """Name and operator of all that reads a weight, Identity and Transpose looked through."""
    if value.is_graph_output():
        yield value.name or "", "graph output"
    for node in dict.fromkeys(use.node for use in value.uses()):
        if node.op_type in ("Identity", "Transpose"):
            yield from _readers(node.outputs[0])
        else:
            yield label(node), node.op_type


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


def _left_out(settings: QuantizeSettings, site: WeightSite, form: BlockFormat) -> str:
    """Say why a weight stays in float; empty where it does not."""
    if any(matches(pattern, site.label) for pattern in settings.nodes_to_exclude):
        return "excluded by nodes_to_exclude"
    included = settings.nodes_to_include
    if included is not None and not any(matches(pattern, site.label) for pattern in included):
        return "not among nodes_to_include"
    if settings.for_kernels and site.activation is None and site.K * form.bits % 8:
        return (
            f"GatherBlockQuantized wants rows of whole bytes, not {site.K} x {form.bits} bits"
        )
    return ""


def check_not_empty(plan: WeightPlan, settings: QuantizeSettings) -> None:
    """Refuse a plan that quantises nothing.

    Raises:
        ModelFileError: Saying why nothing is left.
    """
    if plan.groups:
        return
    refused = [node for node in plan.nodes if isinstance(node, NodeReport)]
    left = [node for node in refused if not node.reason.startswith("already quantised")]
    kernels = sum(node.op_type in _KERNELS for node in plan.model.graph.all_nodes())
    done = kernels + len(refused) - len(left)
    if done and not left:
        reason = f"the model is already quantised ({done} nodes)"
    elif refused:
        reason = "; ".join(f"{node.node}: {node.reason}" for node in refused[:3])
        reason += f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
    else:
        reason = f"no {', '.join(settings.op_types)} reads a constant float matrix"
    raise ModelFileError(f"nothing to quantise: {reason}")


def _grouped(weights: Sequence[Weight], scaled: bool) -> list[Group]:
    """Put weights together that read an activation, and activations that read a weight.

    A table that is a head, too, has the head's statistics; not where a method scales input
    channels, since nothing would divide the rows that Gather picks.
    """
    groups: list[Group] = []
    alone = []
    for weight in weights:
        products = [site for site in weight.sites if site.activation is not None]
        watched = weight.sites if scaled or not products else products
        reasons = [site.no_statistics for site in watched if site.no_statistics]
        if reasons:
            alone.append(Group([weight], [], reasons[0]))
            continue
        activations = [site.activation for site in products if site.activation is not None]
        joined = [
            group for group in groups if not set(activations).isdisjoint(group.activations)
        ]
        found = [*(w for group in joined for w in group.weights), weight]
        activations = [*(a for group in joined for a in group.activations), *activations]
        place = groups.index(joined[0]) if joined else len(groups)
        groups[place : place + 1] = [Group(found, list(dict.fromkeys(activations)))]
        groups = [group for group in groups if group not in joined]
    return groups + alone


def reported(
    plan: WeightPlan, settings: QuantizeSettings, done: Mapping[Weight, Mapping[str, Any]]
) -> QuantizeReport:
    """Report a plan.

    Args:
        plan: The plan.
        settings: Its settings.
        done: What became of each weight, fields of :class:`NodeReport`; and ``"form"`` where
            it was not the weight's own.
    """
    weights = {site: w for group in plan.groups for w in group.weights for site in w.sites}
    told: set[tuple[object, ...]] = set()

    def once(size: int, *what: object) -> int:
        """The bytes of something at the first node that reads it, 0 at the others."""
        first = what not in told
        told.add(what)
        return size if first else 0

    rows = []
    for node in plan.nodes:
        if isinstance(node, NodeReport):
            before = once(node.bytes_before, "float", node.weight)
            after = once(node.bytes_after, "kept", node.weight)
        else:
            weight = weights[node]
            form = done[weight].get("form", weight.form)
            before = once(node.tensor.nbytes, "float", node.weight.name)
            after = once(settings.stored_bytes(weight, form), weight)
            items = {key: item for key, item in done[weight].items() if key != "form"}
            node = _report(node, bits=form.bits, block_size=form.block_size, **items)
        rows.append(dataclasses.replace(node, bytes_before=before, bytes_after=after))
    return QuantizeReport(settings.method, tuple(rows), tuple(plan.notes))


def _report(site: WeightSite, **more: Any) -> NodeReport:
    size = site.tensor.nbytes
    fields: dict[str, Any] = {
        "node": site.label,
        "op_type": site.node.op_type,
        "weight": site.weight.name or "",
        "K": site.K,
        "N": site.N,
        "bytes_before": size,
        "bytes_after": size,
    }
    return NodeReport(**fields | more)
