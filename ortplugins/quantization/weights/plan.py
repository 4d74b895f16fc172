# SPDX-License-Identifier: MIT
"""Which weights are quantised, how, which share an activation, and which stay in float.

WeightUse   a node, and which of its inputs is the matrix         (uses.py)
Weight      a matrix in one form: its uses, and its codes once it is quantised
Group       weights of one method that read one activation, or none that is known
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ortplugins.errors import ModelFileError
from ortplugins.model_io.loading import initializer_tensors, lift_constants
from ortplugins.quantization.methods.nearest import BlockFormat, Floats
from ortplugins.quantization.selection import check_names
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.report import FloatWeights, NodeReport, QuantizeReport
from ortplugins.quantization.weights.uses import (
    ROLES,
    WeightUse,
    find_uses,
    readers_of,
    state_sizes,
)
from rewrite_rules.graph.nodes import inline_functions, label

# What they read in float are scales.
_READ_CODES = frozenset({
    "DequantizeLinear", "GatherBlockQuantized", "MatMulIntegerToFloat", "MatMulNBits",
    "QLinearConv", "QLinearMatMul", "QuantizeLinear",
})  # fmt: skip


@dataclasses.dataclass(eq=False)
class Weight:
    """A float matrix ``[K, N]`` in one form, and its codes once it is quantised.

    Attributes:
        uses: Nodes that read it.
        rows: What is reported of each of them.
        form: Bits, blocks and grid.
        method: By which it gets its codes.
        k_last: Whether codes are ``[N, K]``; scales and zero points follow.
        tensors: Codes, scales and zero points, if any; empty before it is quantised.
    """

    uses: list[WeightUse]
    rows: list[NodeReport]
    form: BlockFormat
    method: str
    k_last: bool
    tensors: list[ir.TensorProtocol] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the initializer."""
        return self.uses[0].weight.name or ""

    @property
    def K(self) -> int:
        """Size along which the blocks run."""
        return self.uses[0].K

    @property
    def N(self) -> int:
        """Number of columns."""
        return self.uses[0].N

    @property
    def is_table(self) -> bool:
        """Whether a Gather reads it."""
        return any(use.activation is None for use in self.uses)


@dataclasses.dataclass(eq=False)
class Group:
    """Weights of one K, type and method that share the scales of their input channels.

    Attributes:
        weights: These.
        method: ``"rtn"`` where nothing is known of their activation.
        activation: What they read, the first of several; None where nothing is calibrated.
        reason: Why nothing is known, or what else happened.
        channel_scales: float32 ``[K]``, of rows; what the activation is divided by, or None.
        folded: As in :class:`NodeReport`.
    """

    weights: list[Weight]
    method: str
    activation: ir.Value | None = None
    reason: str = ""
    channel_scales: Floats | None = None
    folded: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightPlan:
    """What is to be quantised.

    Attributes:
        model: The model.
        groups: The weights, by activation.
        report: What is known before anything is quantised.
        written: Settings and patterns of rules that the user wrote, as against those of a
            preset, which are for all models; None for all.
    """

    model: ir.Model
    groups: list[Group]
    report: QuantizeReport
    written: Collection[str] | None

    def note_unused(self, setting: str, why: str) -> None:
        """Note that what the user wrote has no effect."""
        if self.written is None or setting in self.written:
            what = f"the rule for {setting!r}" if setting in ROLES else setting
            self.report.notes.append(f"{what} has no effect: {why}")


def plan_weights(
    model: ir.Model, recipe: Recipe, written: Collection[str] | None = None
) -> WeightPlan:
    """Find what is to be quantised; ``written`` is that of the plan.

    Functions of the model are inlined; the graph's larger Constant nodes become initializers.
    A ModelFileError says why, if it is nothing.
    """
    left = inline_functions(model)
    lift_constants(model)
    state_sizes(model)
    found = list(find_uses(model, recipe.op_types))
    uses = [use for _, use in found if isinstance(use, WeightUse)]
    labels = [label(node) for node, _ in found]
    named = (name for use in uses for name in use.names)
    patterns = dict.fromkeys(pattern for pattern, _ in recipe.rules)
    names = dict.fromkeys([*labels, *named])
    check_names("rules", [each for each in patterns if each not in ROLES], names)
    nodes, weights = _chosen(found, recipe)
    functions = [NodeReport(name, "function", reason=reason) for name, reason in left.items()]
    nodes = [*functions, *nodes, *_other_readers(weights, set(labels))]
    why = {row.node: row.reason for row in nodes}
    planned: dict[ir.Value, list[ir.Node]] = {}
    for weight in weights:
        planned.setdefault(weight.uses[0].weight, []).extend(use.node for use in weight.uses)

    def reason(node: ir.Node) -> str:
        if node.op_type in recipe.op_types and not node.domain:
            return why.get(label(node), "")
        return f"{node.op_type} is not among op_types"

    report = QuantizeReport(recipe.method, nodes, _float_weights(model, planned, reason))
    plan = WeightPlan(model, _grouped(weights), report, written)
    roles = {role for use in uses for role in use.roles}
    for role in [each for each in ROLES if each in patterns and each not in roles]:
        plan.note_unused(role, "no node is one")
    _note_unused_settings(plan, recipe, weights)
    if not weights:
        more = f"; and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        asked = ", ".join(recipe.op_types)
        why_not = "; ".join(f"{row.node}: {row.reason}" for row in nodes[:3]) or (
            f"no {asked} reads a constant float matrix on its right; is the model quantised?"
        )
        raise ModelFileError(f"nothing to quantise: {why_not}{more}")
    return plan


def _note_unused_settings(plan: WeightPlan, recipe: Recipe, weights: Iterable[Weight]) -> None:
    """Note the settings of a recipe that change nothing in these weights."""
    if recipe.scale_type == "float16" and recipe.for_kernels:
        plan.note_unused("scale_type", "MatMulNBits has scales of the weight's type")
    tables = any(weight.is_table for weight in weights)
    if recipe.fuse_tables and not (tables or recipe.for_kernels):
        plan.note_unused("fuse_tables", "no Gather reads a quantised weight")
        if recipe.accuracy_level is not None:
            plan.note_unused("accuracy_level", "no MatMulNBits is made")
    if recipe.grid == "positive" and not any(weight.form.is_symmetric for weight in weights):
        plan.note_unused("grid", "scales are positive wherever codes have zero points")


def _chosen(
    found: Sequence[tuple[ir.Node, WeightUse | str]],
    recipe: Recipe,
) -> tuple[list[NodeReport], list[Weight]]:
    """Return what is reported of each node with a constant; the weights to quantise."""
    tables = {
        use.weight for _, use in found if isinstance(use, WeightUse) and use.activation is None
    }
    nodes: list[NodeReport] = []
    weights: dict[object, Weight] = {}
    for node, use in found:
        if isinstance(use, str):
            nodes.append(NodeReport(label(node), node.op_type, reason=use))
            continue
        form, method, reason = recipe.choose(use, table=use.weight in tables)
        by_rows = use.activation is None and recipe.fuses(table=True)
        if not reason and by_rows and use.K * form.bits % 8:
            size = f"{use.K} x {form.bits} bits"
            reason = f"GatherBlockQuantized needs rows of whole bytes, not {size}"
        nodes.append(report_of(use, reason=reason))
        if not reason:
            k_last = recipe.quant_format != "QDQ" or use.weight in tables
            key = (use.weight, use.stored_k_last, form, method)
            weight = weights.setdefault(key, Weight([], [], form, method, k_last))
            weight.uses.append(use)
            weight.rows.append(nodes[-1])
    return nodes, list(weights.values())


def _float_weights(
    model: ir.Model,
    planned: Mapping[ir.Value, Collection[ir.Node]],
    why: Callable[[ir.Node], str],
) -> list[FloatWeights]:
    """Return what is read in float, the largest first.

    ``planned`` are the nodes that are to read codes of a weight; ``why`` says why another
    does not.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for value, tensor in initializer_tensors(model):
        readers = [node for node, _ in readers_of(value) if node not in planned.get(value, ())]
        kinds = {"graph output" if node is None else node.op_type for node in readers}
        nodes = filter(None, readers)
        if not tensor.dtype.is_floating_point() or not kinds or kinds & _READ_CODES:
            continue
        reason = next(filter(None, map(why, nodes)), "")
        is_vector = sum(size != 1 for size in tensor.shape.numpy()) < 2
        key = ("vectors", "") if is_vector else (", ".join(sorted(kinds)), reason)
        found.setdefault(key, []).append(tensor.size)
    rows = [
        FloatWeights(operators, len(sizes), sum(sizes), reason)
        for (operators, reason), sizes in found.items()
    ]
    return sorted(rows, key=lambda row: -row.elements)


def _other_readers(weights: Iterable[Weight], reported: Collection[str]) -> list[NodeReport]:
    """Report what keeps a quantised weight's float numbers in the model: a table, mostly."""
    rows: dict[str, NodeReport] = {}
    for weight in weights:
        use = weight.uses[0]
        for node, name in readers_of(use.weight):
            if name not in reported:
                op_type = "graph output" if node is None else node.op_type
                reason = f"reads {use.weight.name!r} in float, which stays for it"
                row = report_of(use, node=name, op_type=op_type, K=0, N=0, reason=reason)
                rows.setdefault(name, row)
    return list(rows.values())


def _grouped(weights: Iterable[Weight]) -> list[Group]:
    """Put weights of one method together that read one activation.

    A table that is a head, too, has the head's statistics; not where a method scales input
    channels, since nothing would divide the rows that Gather picks, nor a second activation.
    """
    groups: dict[object, Group] = {}
    for weight in weights:
        scaled = weight.method == "awq_lite"
        products = [use for use in weight.uses if use.activation is not None]
        calibrated = weight.uses if scaled or not products else products
        reason = next((use.no_statistics for use in calibrated if use.no_statistics), None)
        if scaled and len({use.activation for use in weight.uses}) > 1:
            reason = reason or "several activations are multiplied by it"
        if reason:
            rounded = dataclasses.replace(weight, method="rtn")
            groups[weight] = Group([rounded], "rtn", reason=reason)
            continue
        activation = products[0].activation
        group = Group([], weight.method, activation)
        groups.setdefault((weight.method, activation), group).weights.append(weight)
    return list(groups.values())


def reported(plan: WeightPlan, recipe: Recipe) -> QuantizeReport:
    """Return the report, with what becomes of each weight."""
    for group in plan.groups:
        for weight in group.weights:
            for row in weight.rows:
                row.bits, row.block_size = weight.form.bits, weight.form.block_size
                row.method, row.folded = weight.method, group.folded
                row.bytes_after = weight.form.stored_bytes(weight.K, weight.N)
                row.reason = group.reason if recipe.needs_samples or weight.tensors else ""
    return plan.report


def report_of(use: WeightUse, **more: Any) -> NodeReport:
    """Report a node with a constant matrix, which stays in float if nothing else is said."""
    size = use.tensor.nbytes
    fields: dict[str, Any] = {
        "node": label(use.node),
        "op_type": use.node.op_type,
        "weight": use.weight.name or "",
        "K": use.K,
        "N": use.N,
        "bytes_before": size,
        "bytes_after": size,
    }
    return NodeReport(**fields | more)
