# SPDX-License-Identifier: MIT
"""A rule set that tries a rule where the operator fits, and takes no constant for another.

A rule's ``rewrite`` may also return a value that is there already, which is read from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRule, RewriteRuleSet
from onnxscript.rewriter._matcher import SimplePatternMatcher
from onnxscript.rewriter._pattern_ir import OpPatternBuilder, StringPattern
from onnxscript.rewriter._rewrite_rule import ReplacementSubgraph
from onnxscript.rewriter.pattern import OpsetPatternBuilder

from rewrite_rules.graph.initializers import name_apart
from rewrite_rules.graph.nodes import DOMAINS, is_constant, label, remove_unused
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal, Remarks


class _OwnDomains(StringPattern):
    def matches(self, item: str) -> bool:
        return item in DOMAINS

    def __str__(self) -> str:
        return "own"


# Builds patterns of onnxruntime's operators that have one meaning in both of its domains.
own = OpsetPatternBuilder(_OwnDomains())


class _OneOf(StringPattern):
    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def matches(self, item: str) -> bool:
        return item in self.names

    def __str__(self) -> str:
        return " | ".join(sorted(self.names))


def one_of(op: OpsetPatternBuilder, operators: Collection[str]) -> Any:
    """Return what builds the pattern of any of some operators, by its builder of one."""
    return OpPatternBuilder(op, _OneOf(operators))


@contextlib.contextmanager
def matching(remarks: Remarks, node: ir.Node, what: str) -> Iterator[MatchResult]:
    """Yield the result of a match; a Refusal fails it, and is a remark behind ``what``."""
    result = MatchResult()
    with remarks.at(label(node)):
        try:
            yield result
        except Refusal as refusal:
            remarks.refused(label(node), refusal.behind(what))
            result.fail(str(refusal), node)


class DispatchingRuleSet(RewriteRuleSet):
    """Rules as ``Rule.rule(...)`` and ``.commute()`` return them, in a table by operator.

    onnxscript's matcher takes 5 microseconds for each node and rule to find that the operator
    is another one; on 20,000 nodes that is half of the time.

    ``cleans_up``: remove what is unused then, and rename what has another value's name.
    """

    cleans_up = True

    def __init__(
        self,
        rules: Sequence[RewriteRule],
        is_candidate: Callable[[ir.Node], bool] = lambda node: True,
    ) -> None:
        """Build the table of rules, in order of precedence; each pattern ends in one node."""
        super().__init__(rules)
        self._dispatch = _Dispatch(rules, is_candidate)
        self.rules = [self._dispatch]

    def apply_to_model(self, model: ir.Model, **_: Any) -> int:
        """Apply the rules; return how often.

        The engine's own method looks at every output of the graph for each node that it
        removes, and copies all names for each subgraph.
        """
        _mark_constants(model.graph)
        count = self._apply_to_graph_or_function(model, model.graph, verbose=None)
        for function in model.functions.values():
            count += self._apply_to_graph_or_function(model, function, verbose=None)
        count += self._dispatch.gave_way
        if count and self.cleans_up:
            remove_unused(model)
            name_apart(model)
        return count


def _mark_constants(graph: ir.Graph) -> None:
    """Give outputs of Constant nodes their values, which patterns may ask for, and types."""
    for node in graph:
        tensor = constant(node.outputs[0]) if is_constant(node) and node.outputs else None
        if tensor is not None:
            node.outputs[0].shape = ir.Shape(tensor.shape.numpy())
            node.outputs[0].dtype = tensor.dtype


class _ExactMatcher(SimplePatternMatcher):
    """Matches numbers in the type of the constant, and none that a caller may feed.

    onnxscript's own takes 2.00001 for 2, and the default of an input for a constant.
    """

    def _match_constant(self, pattern_constant: Any, value: ir.Value) -> bool:
        tensor, expected = constant(value), np.asarray(pattern_constant.value)
        if tensor is None or tensor.dtype.is_string() or tensor.shape != expected.shape:
            return self.fail(f"{value.name!r} is not the constant {expected}")
        array = tensor.numpy()
        if array.dtype.kind != "i":
            expected = expected.astype(array.dtype)
        if not np.array_equal(array, expected):
            return self.fail(f"{value.name!r} is not {expected}")
        return True


class _Dispatch(RewriteRule):
    """The one rule that the engine sees: after a match it stands for the rule that matched."""

    def __init__(
        self,
        rules: Sequence[RewriteRule],
        is_candidate: Callable[[ir.Node], bool],
    ) -> None:
        self._table: dict[str, list[RewriteRule]] = {}
        for rule in rules:
            # Not op_identifier(), which is None in what .commute() returns (onnxscript 0.7.2).
            root = rule._target_pattern.output_node.op
            rule._matcher = _ExactMatcher(rule._target_pattern)
            for name in root.names if isinstance(root, _OneOf) else [str(root)]:
                self._table.setdefault(name, []).append(rule)
        self._is_candidate = is_candidate
        self.gave_way = 0
        # The engine reads these, too; none of our rules sets them.
        self.graph_pre_visitor = self.graph_post_visitor = None
        self.as_function = False

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:  # type: ignore[override]
        """Match and rewrite by the first rule of the node's operator that applies."""
        rules = self._table.get(node.op_type)
        # onnxscript binds no output of a node that has none or several.
        if rules is None or len(node.outputs) != 1 or not self._is_candidate(node):
            return None
        for rule in rules:
            delta = rule.try_rewrite(model, graph, node, **options)
            if delta is not None and self._gives_way(delta, node):
                return None
            if delta is not None:
                self.name, self.remove_nodes = rule.name, rule.remove_nodes
                return delta
        return None

    def _gives_way(self, delta: ReplacementSubgraph, node: ir.Node) -> bool:
        """Have a value that is there already read for the one that matched, if a rule says so.

        The engine would give it the name of the other, which is right for outputs only. A
        rule that has changed some readers itself returns what matched.
        """
        old, there = delta.match.outputs[0], delta.new_outputs[0]
        if len(delta.new_outputs) > 1 or there.producer() in delta.new_nodes:
            return False
        if there is not old and old.is_graph_output():
            takes_name = there.producer() is not None and there.graph is old.graph
            if there.is_graph_output() or not takes_name:
                copy = ir.node("Identity", [there], name=node.name)
                delta.new_nodes = [*delta.new_nodes, copy]
                delta.new_outputs = copy.outputs
            return False
        if there is not old:
            old.replace_all_uses_with(there)
        assert node.graph is not None
        node.graph.insert_after(node, delta.new_nodes)
        self.gave_way += 1
        return True
