# SPDX-License-Identifier: MIT
"""A rule set that tries a rule only on nodes whose operator, and those before, fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.optimizer import basic_constant_propagation
from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter import _pattern_ir as pattern_ir

from rewrite_rules.graph.names import name_apart
from rewrite_rules.graph.nodes import remove_unused


class DispatchingRuleSet(RewriteRuleSet):
    """Rules as ``Rule.rule(...)`` and ``.commute()`` return them, in a table by operator.

    onnxscript's matcher takes 5 microseconds for each node and rule to find that the operator
    is another one; on 20,000 nodes that is half of the time.
    """

    def __init__(
        self,
        rules: Sequence[RewriteRule],
        is_candidate: Callable[[ir.Node], bool] = lambda node: True,
    ) -> None:
        """Build the table of rules, in order of precedence; each pattern ends in one node."""
        super().__init__(rules)
        self.rules = [_Dispatch(rules, is_candidate)]

    def apply_to_model(self, model: ir.Model, **_: Any) -> int:
        """Apply the rules; return how often.

        The engine's own method looks at every output of the graph for each node that it
        removes, and copies all names for each subgraph.
        """
        basic_constant_propagation(model.graph)
        count = self._apply_to_graph_or_function(model, model.graph, verbose=None)
        for function in model.functions.values():
            count += self._apply_to_graph_or_function(model, function, verbose=None)
        if self.remove_unused_nodes:
            remove_unused(model)
        if count:
            name_apart(model)
        return count


# An input of a node, and the operators that may make it.
_Made = tuple[int, frozenset[str]]


def _makers(pattern: Any) -> frozenset[str] | None:
    """The operators that make what a pattern matches; None for any, and for constants."""
    if isinstance(pattern, pattern_ir.NodeOutputPattern):
        return frozenset({pattern.producer().op_type})
    if isinstance(pattern, pattern_ir.OpIdDispatchOr):
        return frozenset(op_type for _, op_type, _ in pattern._op_to_pattern)
    if isinstance(pattern, pattern_ir.BacktrackingOr):
        each = [_makers(one) for one in pattern._values]
        return None if None in each else frozenset().union(*each)  # type: ignore[arg-type]
    return None


class _Dispatch(RewriteRule):
    """The one rule that the engine sees: after a match it stands for the rule that matched."""

    def __init__(
        self, rules: Sequence[RewriteRule], is_candidate: Callable[[ir.Node], bool]
    ) -> None:
        self._table: dict[str, list[tuple[RewriteRule, list[_Made]]]] = {}
        for rule in rules:
            # Not op_identifier(), which is None in what .commute() returns (onnxscript 0.7.2).
            root = rule._target_pattern.output_node
            made = [(i, _makers(value)) for i, value in enumerate(root.inputs)]
            wanted = [(i, makers) for i, makers in made if makers is not None]
            self._table.setdefault(root.op_type, []).append((rule, wanted))
        self._is_candidate = is_candidate
        self.graph_pre_visitor = lambda: _call(rule.graph_pre_visitor for rule in rules)
        self.graph_post_visitor = lambda: _call(rule.graph_post_visitor for rule in rules)

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:  # type: ignore[override]
        """Match and rewrite by the first rule of the node's operator that applies."""
        rules = self._table.get(node.op_type)
        # onnxscript binds no output of a node that has none or several.
        if rules is None or len(node.outputs) != 1 or not self._is_candidate(node):
            return None
        makers = [None if value is None else value.producer() for value in node.inputs]
        made = ["" if maker is None else maker.op_type for maker in makers]
        for rule, wanted in rules:
            if any(i >= len(made) or made[i] not in operators for i, operators in wanted):
                continue
            delta = rule.try_rewrite(model, graph, node, **options)
            if delta is not None:
                # What the engine asks of a rule once it has matched.
                self.name, self.remove_nodes = rule.name, rule.remove_nodes
                self.as_function = rule.as_function
                return delta
        return None


def _call(visitors: Any) -> None:
    for visitor in visitors:
        if visitor is not None:
            visitor()
