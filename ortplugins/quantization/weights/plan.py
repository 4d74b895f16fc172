# SPDX-License-Identifier: MIT
"""Which weights of a model are quantised, how, which share an activation; and the report."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortplugins.errors import ModelFileError, QuantizationError
from ortplugins.model_io.loading import lift_constants
from ortplugins.quantization.coverage import Coverage, coverage, float_weights
from ortplugins.quantization.methods.nearest import BlockFormat, Floats
from ortplugins.quantization.weights.checkpoint import Checkpoint, PackedWeight
from ortplugins.quantization.weights.group import (
    GroupResult,
    GroupTask,
    StoredCodes,
)
from ortplugins.quantization.weights.recipe import METHODS, Recipe
from ortplugins.quantization.weights.uses import (
    OP_TYPES,
    WeightUse,
    find_uses,
    readers_of,
)
from rewrite_rules.dq_matmulnbits_fusion.kernels import fitting_block_size
from rewrite_rules.graph.nodes import inline_functions, label

UNREACHED = "no token of the samples reaches it"
OTHER_OPERATOR = "no weights of"

_KERNELS = frozenset({"MatMulNBits", "GatherBlockQuantized"})


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """One node with a constant matrix, or what keeps a quantised one in float besides.

    Attributes:
        node: Its name; its first output's where it has none.
        op_type: MatMul, Gemm, Gather or FusedMatMul.
        weight: Name of the initializer.
        K: Size along which the blocks run; 0 for a node that was refused.
        N: Number of columns; 0 likewise.
        bits: Of the codes; 0 where the weight stays in float.
        block_size: -1 for a scale per column; 0 likewise.
        method: What was done: ``"rtn"``, ``"awq_lite"`` and so on; empty likewise.
        alpha: Exponent of the scales of input channels; NaN where there are none.
        folded: Where the activation is divided by them: ``"folded"`` into the constants that
            it comes from, ``"mul"`` by a node of its own; empty where there are none.
        weight_error: Frobenius norm of the difference over the weight's; NaN where it was not
            measured.
        output_error: The same of the node's product with sampled tokens; NaN likewise.
        bytes_before: Of the float weight, 0 where an earlier node has counted it.
        bytes_after: Of codes, scales and zero points, or of the float weight that stays.
        reason: Why it was refused, or what else to know.
    """

    node: str
    op_type: str
    weight: str = ""
    K: int = 0
    N: int = 0
    bits: int = 0
    block_size: int = 0
    method: str = ""
    alpha: float = math.nan
    folded: str = ""
    weight_error: float = math.nan
    output_error: float = math.nan
    bytes_before: int = 0
    bytes_after: int = 0
    reason: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the node reads codes now."""
        return self.bits != 0


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """What happened to a model.

    Attributes:
        method: What was asked for.
        nodes: One entry per node with a constant matrix, in the model's order; then what else
            reads the float numbers of a quantised one, and nodes of other operators that hold
            float weights of two axes and more.
        coverage: Which share of all weights is quantised, and what holds the rest.
        notes: Things to know that belong to no node.
    """

    method: str
    nodes: tuple[NodeReport, ...] = ()
    coverage: Coverage = dataclasses.field(default_factory=Coverage)
    notes: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[NodeReport, ...]:
        """The nodes that read codes now."""
        return tuple(node for node in self.nodes if node.quantized)

    @property
    def refused(self) -> tuple[NodeReport, ...]:
        """The nodes that keep their float weight."""
        return tuple(node for node in self.nodes if not node.quantized)

    @property
    def bytes_before(self) -> int:
        """Bytes of the weights that were looked at."""
        return sum(node.bytes_before for node in self.nodes)

    @property
    def bytes_after(self) -> int:
        """Bytes of the same in their new form."""
        return sum(node.bytes_after for node in self.nodes)

    @property
    def bits_per_weight(self) -> float:
        """Of weights of MatMul, Gemm and Gather: codes, scales, floats that stay; or NaN."""
        sizes = {node.weight: node.K * node.N for node in self.nodes if node.K}
        stored = sum(node.bytes_after for node in self.nodes if node.weight in sizes)
        return 8 * stored / sum(sizes.values()) if sizes else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON's types; NaN as None."""
        content = {
            "method": self.method,
            "quantized": len(self.quantized),
            "refused": len(self.refused),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": self.bits_per_weight,
            "coverage": dataclasses.asdict(self.coverage) | {"share": self.coverage.share},
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "notes": self.notes,
        }
        plain: dict[str, Any] = json.loads(
            json.dumps(content), parse_constant=lambda nan: None
        )
        return plain

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def __str__(self) -> str:
        before, after = self.bytes_before / 1e6, self.bytes_after / 1e6
        text = (
            f"{self.method}: {len(self.quantized)} quantised, {len(self.refused)} refused; "
            f"{before:.1f} -> {after:.1f} MB"
        )
        if self.quantized:
            text += f", {self.bits_per_weight:.2f} bits per weight"
        return f"{text}; {self.coverage}"


@dataclasses.dataclass(eq=False)
class Weight:
    """A float weight in one form, and its codes once it is quantised."""

    form: BlockFormat
    method: str  # by which it gets its codes
    uses: list[WeightUse]  # the nodes that read it, all in the same orientation
    given: PackedWeight | None = None  # codes that are there already
    # The codes that the model gets; before that is decided, others of more bits as well.
    outputs: list[StoredCodes] = dataclasses.field(default_factory=list)

    @property
    def value(self) -> ir.Value:
        """The initializer, or the output of a Constant node."""
        return self.uses[0].weight

    @property
    def is_table(self) -> bool:
        """Whether a Gather reads it."""
        return any(use.activation is None for use in self.uses)

    @property
    def K(self) -> int:
        """Size along which the blocks run."""
        return self.uses[0].K

    @property
    def N(self) -> int:
        """Number of columns."""
        return self.uses[0].N

    @property
    def stored(self) -> StoredCodes:
        """The codes that the model gets."""
        return self.outputs[0]


@dataclasses.dataclass(eq=False)
class Group:
    """Weights of one K and method that share the scales of their input channels.

    What became of it is there once it is quantised.
    """

    weights: list[Weight]
    activations: list[ir.Value]  # empty without statistics
    method: str  # "rtn" without statistics
    reason: str = ""  # why there are none
    task: GroupTask = dataclasses.field(init=False)
    reached: bool = False  # as in GroupResult, and the two below
    channel_scales: Floats | None = None
    alpha: float = math.nan
    folded: str = ""  # as in NodeReport

    @property
    def names(self) -> list[str]:
        """Of the activations."""
        return [activation.name or "" for activation in self.activations]

    @property
    def elements(self) -> int:
        """Of all its weights."""
        return sum(weight.K * weight.N for weight in self.weights)

    def take_in(self, result: GroupResult) -> None:
        """Note what became of the task."""
        self.channel_scales, self.alpha = result.channel_scales, result.alpha
        self.reached = result.reached
        if METHODS[self.method] and not result.reached:
            self.method, self.reason = "rtn", UNREACHED
        for weight, outputs in zip(self.weights, result.outputs, strict=True):
            weight.method, weight.outputs = self.method, list(outputs)

    def reads_of(self, activation: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return where an activation meets the weights of the group."""
        uses = (use for weight in self.weights for use in weight.uses)
        return [(s.node, 1 - s.index) for s in uses if s.activation is activation]


@dataclasses.dataclass(frozen=True, eq=False)
class WeightPlan:
    """What is to be quantised."""

    model: ir.Model
    groups: list[Group]  # the weights, by activation
    # Every node with a constant matrix, in the model's order: a use of one of the weights, or
    # the report of a node that keeps its own.
    nodes: list[WeightUse | NodeReport]
    others: list[NodeReport]  # nodes of other operators that hold weights
    coverage: Coverage  # less the bytes of codes
    notes: list[str]


def plan_weights(
    model: ir.Model, recipe: Recipe, checkpoint: Checkpoint | None = None
) -> WeightPlan:
    """Find what is to be quantised.

    Functions of the model are inlined; the graph's larger Constant nodes become initializers.
    """
    if checkpoint is not None and recipe.needs_statistics:
        raise QuantizationError(
            "a checkpoint brings its own codes: leave out methods that calibrate and "
            "share_of_8_bits"
        )
    try:
        left = inline_functions(model)
    except ValueError as error:
        raise ModelFileError(str(error)) from None
    lift_constants(model)
    found = list(find_uses(model, recipe.op_types))
    uses = [use for _, use in found if isinstance(use, WeightUse)]
    labels = [label(node) for node, _ in found]
    names = list(dict.fromkeys([*labels, *(name for use in uses for name in use.names)]))
    notes = recipe.check_against(uses, names)
    tables = {use.weight for use in uses if use.activation is None}
    weights: dict[object, Weight] = {}
    nodes: list[WeightUse | NodeReport] = [
        NodeReport(name, "function", reason=reason) for name, reason in left.items()
    ]
    for node, use in found:
        if isinstance(use, str):
            nodes.append(NodeReport(label(node), node.op_type, reason=use))
            continue
        form, method, reason = recipe.choose(use, table=use.weight in tables)
        given = None
        if checkpoint is not None and not reason:
            if given := checkpoint.layer_of(use):
                form = given.form(form.scale_type)
            else:
                reason = "not in the checkpoint"
        by_rows = use.activation is None and recipe.fuses(table=True)
        if not reason and by_rows and use.K * form.bits % 8:
            size = f"{use.K} x {form.bits} bits"
            reason = f"GatherBlockQuantized wants rows of whole bytes, not {size}"
        nodes.append(_report(use, reason=reason) if reason else use)
        if not reason:
            key = (use.weight, use.stored_k_last, form, method)
            weights.setdefault(key, Weight(form, method, [], given)).uses.append(use)
    nodes += _other_readers(weights.values(), set(labels))
    others = _other_operators(model, nodes)
    reported = [row for row in (*nodes, *others) if isinstance(row, NodeReport)]
    reasons = {row.node: row.reason for row in reported}
    planned: dict[ir.Value, list[ir.Node]] = {}
    for weight in weights.values():
        planned.setdefault(weight.value, []).extend(use.node for use in weight.uses)
    covered = coverage(model, planned, reasons)
    by_method: dict[str, list[Weight]] = {}
    for weight in weights.values():
        by_method.setdefault(weight.method, []).append(weight)
    groups = [group for each in by_method.values() for group in _grouped(each)]
    return WeightPlan(model, groups, nodes, others, covered, notes)


def _other_readers(weights: Iterable[Weight], reported: Collection[str]) -> list[NodeReport]:
    """Report what keeps a quantised weight's float numbers in the model: a table, mostly."""
    rows: dict[str, NodeReport] = {}
    for weight in weights:
        use = weight.uses[0]
        for node, name in readers_of(use.weight):
            if name not in reported:
                op_type = "graph output" if node is None else node.op_type
                reason = f"reads {use.weight.name!r} in float, which stays for it"
                row = _report(use, node=name, op_type=op_type, K=0, N=0, reason=reason)
                rows.setdefault(name, row)
    return list(rows.values())


def _other_operators(
    model: ir.Model, found: Sequence[WeightUse | NodeReport]
) -> list[NodeReport]:
    """Report the nodes of other operators that hold weights, vectors apart."""
    reported = {row.node if isinstance(row, NodeReport) else row.label for row in found}
    rows = []
    for weight in float_weights(model, {}):
        node, size = weight.readers[0], weight.tensor.nbytes
        name = label(node)
        if weight.is_vector or name in reported:
            continue
        reason = f"{OTHER_OPERATOR} {node.op_type} are quantised"
        if node.op_type in OP_TYPES and not node.domain:
            reason = f"{node.op_type} is not among op_types"
        given = weight.value.name or ""
        row = NodeReport(name, node.op_type, given, bytes_before=size, bytes_after=size)
        rows.append(dataclasses.replace(row, reason=reason))
    return rows


def check_not_empty(plan: WeightPlan, recipe: Recipe) -> None:
    """Refuse a plan that quantises nothing, and say why."""
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
        reason = f"no {', '.join(recipe.op_types)} reads a constant float matrix"
    raise ModelFileError(f"nothing to quantise: {reason}")


def _grouped(weights: Sequence[Weight]) -> list[Group]:
    """Put weights of one method together that share an activation, and the reverse.

    A table that is a head, too, has the head's statistics; not where a method scales input
    channels, since nothing would divide the rows that Gather picks.
    """
    groups: list[Group] = []
    alone = []
    method = weights[0].method
    scaled = "scales" in METHODS[method]
    for weight in weights:
        products = [use for use in weight.uses if use.activation is not None]
        calibrated = weight.uses if scaled or not products else products
        reasons = [use.no_statistics for use in calibrated if use.no_statistics]
        if reasons:
            weight.method = "rtn"
            alone.append(Group([weight], [], "rtn", reasons[0]))
            continue
        activations = [use.activation for use in products if use.activation is not None]
        joined = [
            group for group in groups if not set(activations).isdisjoint(group.activations)
        ]
        found = [*(w for group in joined for w in group.weights), weight]
        activations = [*(a for group in joined for a in group.activations), *activations]
        place = groups.index(joined[0]) if joined else len(groups)
        groups[place : place + 1] = [Group(found, list(dict.fromkeys(activations)), method)]
        groups = [group for group in groups if group not in joined]
    return groups + alone


def reported(plan: WeightPlan, recipe: Recipe) -> QuantizeReport:
    """Report a plan, with what became of each weight where it is quantised."""
    weights = {
        use: (group, weight)
        for group in plan.groups
        for weight in group.weights
        for use in weight.uses
    }
    counted: set[tuple[object, ...]] = set()

    def once(size: int, *what: object) -> int:
        """The bytes of something at the first node that reads it, 0 at the others."""
        first = what not in counted
        counted.add(what)
        return size if first else 0

    rows = []
    for node in [*plan.nodes, *plan.others]:
        if isinstance(node, NodeReport):
            before = once(node.bytes_before, "float", node.weight)
            after = once(node.bytes_after, "kept", node.weight)
        else:
            group, weight = weights[node]
            before = once(node.tensor.nbytes, "float", node.weight.name)
            after = once(_stored_bytes(recipe, weight), weight)
            node = _report(
                node,
                bits=weight.form.bits,
                block_size=weight.form.block_size,
                method=weight.given.method if weight.given else weight.method,
                alpha=group.alpha,
                folded=group.folded,
                weight_error=weight.stored.weight_error if weight.outputs else math.nan,
                output_error=weight.stored.output_error if weight.outputs else math.nan,
                reason=group.reason if recipe.needs_statistics or weight.outputs else "",
            )
        rows.append(dataclasses.replace(node, bytes_before=before, bytes_after=after))
    stored = sum(row.bytes_after for row in rows if row.quantized)
    covered = dataclasses.replace(
        plan.coverage,
        bytes=plan.coverage.bytes + stored,
        quantized_bytes=plan.coverage.quantized_bytes + stored,
    )
    return QuantizeReport(recipe.method, tuple(rows), covered, tuple(plan.notes))


def _stored_bytes(recipe: Recipe, weight: Weight) -> int:
    """Return the bytes that codes, scales and zero points take in the model."""
    k, form = weight.K, weight.form
    table = form.stored_bytes(k, weight.N)
    size = fitting_block_size(form.bits, form.size_along(k), k)
    multiplied = any(use.activation is not None for use in weight.uses)
    if size is None or not (multiplied and recipe.fuses(table=weight.is_table)):
        return table
    # MatMulNBits' blocks and rows of zero points are filled up.
    blocks = -(-k // size)
    codes = blocks * size * form.bits // 8
    grid = blocks * np.dtype(form.scale_type).itemsize
    grid += 0 if form.is_symmetric else -(-blocks * form.bits // 8)
    if not weight.is_table:
        return weight.N * (codes + grid)
    # GatherBlockQuantized reads the same tensors, but for what is filled up or repeated.
    filled = codes if k % size else 0
    repeated = grid if size != form.size_along(k) else 0
    return table + weight.N * (filled + repeated)


def _report(use: WeightUse, **more: Any) -> NodeReport:
    size = use.tensor.nbytes
    fields: dict[str, Any] = {
        "node": use.label,
        "op_type": use.node.op_type,
        "weight": use.weight.name or "",
        "K": use.K,
        "N": use.N,
        "bytes_before": size,
        "bytes_after": size,
    }
    return NodeReport(**fields | more)
