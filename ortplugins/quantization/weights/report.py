# SPDX-License-Identifier: MIT
"""What became of each weight of a model, and of the model as a whole."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


@dataclasses.dataclass
class NodeReport:
    """One node with a constant matrix, or what keeps a quantised one in float besides.

    Attributes:
        node: Its name; its first output's where it has none.
        op_type: MatMul, Gemm or Gather.
        weight: Name of the initializer.
        K: Size along which the blocks run; 0 for a node that was refused.
        N: Number of columns; 0 likewise.
        bits: Bits of a code; 0 where the weight stays in float.
        block_size: -1 for a scale per column; 0 likewise.
        method: What was done: ``"rtn"``, ``"awq_lite"`` and so on; empty likewise.
        folded: Where the activation is divided by scales of its channels: ``"folded"`` into
            the constants that it comes from, ``"mul"`` by a node; empty where there are none.
        weight_error: Frobenius norm of the difference over the weight's; NaN where it was not
            measured.
        output_error: The same of the node's product with sampled tokens; NaN likewise.
        bytes_before: Bytes of the float weight; several nodes may read it.
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

    @property
    def form(self) -> tuple[object, ...]:
        """What nodes have in common that read the same codes, or the same floats."""
        return self.weight, self.bits, self.block_size, self.method, self.K, self.bytes_after


@dataclasses.dataclass(frozen=True)
class FloatWeights:
    """Float weights that one operator reads, for one reason.

    Attributes:
        op_type: The operator; ``"vectors"`` for norms, biases and the like of any, ``"graph
            output"`` for what the model returns.
        weights: How many tensors.
        elements: Numbers in them.
        reason: Why they are float; empty where it is not known.
    """

    op_type: str
    weights: int
    elements: int
    reason: str = ""


@dataclasses.dataclass
class QuantizeReport:
    """What happened to a model.

    Attributes:
        method: What was asked for.
        nodes: One entry per node of the operators that were asked for with a constant matrix,
            in the model's order; then what else reads the float numbers of a quantised one.
        floats: All weights that stay in float, the largest first.
        notes: Things to know that belong to no node.
    """

    method: str
    nodes: list[NodeReport] = dataclasses.field(default_factory=list)
    floats: list[FloatWeights] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def quantized(self) -> list[NodeReport]:
        """The nodes that read codes now."""
        return [node for node in self.nodes if node.quantized]

    @property
    def refused(self) -> list[NodeReport]:
        """The nodes that keep their float weight."""
        return [node for node in self.nodes if not node.quantized]

    @property
    def bytes_before(self) -> int:
        """Bytes of the weights that were looked at, each counted once."""
        return sum({node.weight: node.bytes_before for node in self.nodes}.values())

    @property
    def bytes_after(self) -> int:
        """Bytes of the same in their new forms."""
        return sum({node.form: node.bytes_after for node in self.nodes}.values())

    @property
    def bits_per_weight(self) -> float:
        """Codes, scales and floats that stay, per weight of a product or table; or NaN."""
        sizes = {node.weight: node.K * node.N for node in self.nodes if node.K}
        stored = {n.form: n.bytes_after for n in self.nodes if n.weight in sizes}
        elements = sum(sizes.values())
        return 8 * sum(stored.values()) / elements if elements else math.nan

    @property
    def elements(self) -> int:
        """Numbers in all weights."""
        return self._codes + sum(item.elements for item in self.floats)

    @property
    def share(self) -> float:
        """Share of the elements that are codes, 0 to 1; NaN without weights."""
        return self._codes / self.elements if self.elements else math.nan

    @property
    def _codes(self) -> int:
        return sum({row.weight: row.K * row.N for row in self.quantized}.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON's types; NaN as None."""
        content = {
            "method": self.method,
            "quantized": len(self.quantized),
            "refused": len(self.refused),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": self.bits_per_weight,
            "share": self.share,
            "floats": [dataclasses.asdict(item) for item in self.floats],
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "notes": self.notes,
        }
        plain: dict[str, Any] = json.loads(
            json.dumps(content), parse_constant=lambda nan: None
        )
        return plain

    def __str__(self) -> str:
        if not self.nodes:
            return f"{self.method}: {'; '.join(self.notes)}"
        before, after = self.bytes_before / 1e6, self.bytes_after / 1e6
        refused = f", {len(self.refused)} refused" if self.refused else ""
        text = (
            f"{self.method}: {len(self.quantized)} quantised{refused}; "
            f"{before:.1f} -> {after:.1f} MB"
        )
        if self.quantized:
            text += f", {self.bits_per_weight:.2f} bits per weight"
        # 99.96 % is not all of them.
        return f"{text}; {math.floor(1000 * self.share) / 10:.1f} % of all weights quantised"
