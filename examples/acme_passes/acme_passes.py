# SPDX-License-Identifier: MIT
"""A pass of another package: Dropout nodes, which do nothing at inference, go."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import ortplugins

if TYPE_CHECKING:  # not at run time: a start from the cache imports neither
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class DropDropout(ortplugins.Pass):
    """Dropout(x) -> x, unless its mask is read, or its output is one of the graph's."""

    name: ClassVar[str] = "drop_dropout"
    summary: ClassVar[str] = "remove Dropout nodes"

    keep_named: str = ortplugins.option("", "A node of this name stays.")

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Remove the nodes in place; each gets its remark."""
        for node in [node for node in model.graph if node.op_type == "Dropout"]:
            output, *mask = node.outputs
            if self.keep_named and node.name == self.keep_named:
                context.remarks.refused(node.name, "stays, as keep_named asks")
            elif output.is_graph_output() or any(value.uses() for value in mask):
                context.remarks.refused(node.name, "its mask, or the graph, needs the node")
            else:
                output.replace_all_uses_with(node.inputs[0])
                model.graph.remove(node, safe=True)
                context.remarks.fired(node.name, "removed")
