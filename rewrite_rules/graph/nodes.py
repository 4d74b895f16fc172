# SPDX-License-Identifier: MIT
"""A node's label, kind, producer, owner, subgraphs; removal of nodes; inlined functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

# Of onnxruntime's own operators; those of others that have their names are unknown.
DOMAINS = ("", "com.microsoft")
# Of functions in them, onnxruntime runs its own operators of the same name.
_OWN_DOMAINS = ("ai.onnx", "com.microsoft")
# Domains of others that begin alike: those of onnxruntime-extensions.
_EXTENSIONS = frozenset({"ai.onnx.contrib", "com.microsoft.extensions"})
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def label(node: ir.Node) -> str:
    """How messages call a node: its name, else its first output's, else its operator."""
    names = (output.name for output in node.outputs)
    return node.name or next((name for name in names if name), None) or node.op_type


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The subgraphs of an If, Loop or Scan, none for other nodes."""
    for attribute in node.attributes.data.values():
        if attribute.type not in _GRAPHS or attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        else:
            yield from attribute.as_graphs()


def walk(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of a graph, each before those of its subgraphs.

    onnx_ir's own walk takes four times as long, and passes walk often.
    """
    for node in graph:
        yield node
        if node.attributes.data:
            for inner in subgraphs(node):
                yield from walk(inner)


def sort_nodes(graph: ir.Graph) -> None:
    """Put each node behind what it and its subgraphs read; a sorted graph stays as it is.

    To look takes a tenth of the time of onnx_ir's sort.

    Raises:
        ValueError: If nodes read each other in a cycle.
    """
    seen = set[ir.Node]()
    for node in walk(graph):
        for value in node.inputs:
            maker = None if value is None else value.producer()
            if maker is not None and maker not in seen:
                graph.sort()
                return
        seen.add(node)


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of a model, those of its subgraphs and functions too."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from walk(graph)


def normalize_domains(model: ir.Model) -> None:
    """Import the default domain as ``""``, where a model calls it ``"ai.onnx"``."""
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    holders += [body for node in walk(model.graph) for body in subgraphs(node)]
    for holder in holders:
        version = holder.opset_imports.pop("ai.onnx", None)
        if version is not None:
            holder.opset_imports.setdefault("", version)


def producer(value: ir.Value | None) -> ir.Node:
    """The node that computes a value; there must be one."""
    node = None if value is None else value.producer()
    assert node is not None, "a matched value has a producer"
    return node


def owner(value: ir.Value) -> ir.Graph | ir.Function | None:
    """Return the graph that a value belongs to: its producer's, else its own."""
    node = value.producer()
    return value.graph if node is None else node.graph


def is_constant(node: ir.Node) -> bool:
    """Whether a node becomes an initializer when onnxruntime loads it."""
    return node.op_type == "Constant" and node.domain == ""


def is_dequantize_linear(node: ir.Node) -> bool:
    """Whether a node is ONNX's DequantizeLinear, or onnxruntime's of the same meaning."""
    return node.op_type == "DequantizeLinear" and node.domain in DOMAINS


def is_quantize_linear(node: ir.Node) -> bool:
    """Whether a node is ONNX's QuantizeLinear, or onnxruntime's of the same meaning."""
    return node.op_type == "QuantizeLinear" and node.domain in DOMAINS


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node of some standard operators that computes a value; else None."""
    node = None if value is None else value.producer()
    found = node is not None and node.op_type in op_types and not node.domain
    return node if found else None


def dequantizer(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear that computes a value; None where something else does."""
    node = None if value is None else value.producer()
    return node if node is not None and is_dequantize_linear(node) else None


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def captures(node: ir.Node) -> list[ir.Value]:
    """Values that a node's subgraphs, and those within them, read from outside; each once."""
    found: dict[ir.Value, None] = {}
    # A value belongs to one graph; those of the subgraphs themselves are not from outside.
    inside: set[ir.Graph] = set()
    pending = list(subgraphs(node))
    if not pending:
        return []
    while pending:
        subgraph = pending.pop()
        inside.add(subgraph)
        found.update(dict.fromkeys(subgraph.outputs))
        for inner in subgraph:
            found.update(dict.fromkeys(v for v in inner.inputs if v is not None))
            pending += subgraphs(inner)
    return [value for value in found if owner(value) not in inside]


def is_custom(node: ir.Node, model: ir.Model) -> bool:
    """Whether a node's operator is neither onnxruntime's nor a function of the model."""
    own = not node.domain or node.domain.startswith(_OWN_DOMAINS)
    own = own and node.domain not in _EXTENSIONS
    return not own and node.op_identifier() not in model.functions


def _holds_custom(node: ir.Node, model: ir.Model, *calls: ir.Function) -> bool:
    """Whether a node is custom, or something in its subgraphs or in the function it calls."""
    called = model.functions.get(node.op_identifier())
    inner = [body for graph in subgraphs(node) for body in graph]
    if called is not None and called not in calls:
        inner, calls = [*called, *inner], (*calls, called)
    return is_custom(node, model) or any(_holds_custom(each, model, *calls) for each in inner)


def remove_unused(model: ir.Model) -> None:
    """Remove nodes that nothing reads, and initializers; graph outputs stay.

    So do custom operators, which may do more than compute, and a QuantizeLinear of what a
    subgraph reads: without it onnxruntime 1.31 repeats a DequantizeLinear over data movement
    towards the subgraph, and aborts (PropagateDQForward of qdq_propagation.cc).
    """
    functions = (function.graph for function in model.functions.values())
    for graph in reversed([*functions, *model.graphs()]):
        unused = set[ir.Node]()
        for node in reversed(graph):
            readers = (use.node for value in node.outputs for use in value.uses())
            kept = any(value.is_graph_output() for value in node.outputs)
            source = input_of(node, 0) if is_quantize_linear(node) else None
            if source is not None and source.graph is graph:
                kept |= any(use.node.graph is not graph for use in source.uses())
            if not kept and unused.issuperset(readers) and not _holds_custom(node, model):
                unused.add(node)
        graph.remove(unused, safe=True)
        drop_unused_initializers(list(graph.initializers.values()))


def drop_unused_initializers(values: Iterable[ir.Value | None]) -> None:
    """Drop initializers that nothing reads any more."""
    for value in values:
        if (
            value is not None
            and value.is_initializer()
            and not value.uses()
            and not value.is_graph_output()
            and not value.is_graph_input()
            and value.graph is not None
        ):
            assert value.name is not None
            del value.graph.initializers[value.name]


def inline_functions(model: ir.Model) -> dict[str, str]:
    """Put the nodes of the model's functions where they are called.

    Return why some stay as they are, by the names of these functions. None calls itself.
    """
    if not model.functions:
        return {}
    import onnx_ir.passes.common

    kept: dict[str, str] = {}

    def is_inlined(function: ir.Function) -> bool:
        reason = _why_not_inlined(function, model)
        if reason is not None:
            kept[function.name] = reason
        return reason is None

    onnx_ir.passes.common.InlinePass(criteria=is_inlined)(model)
    return kept


def _why_not_inlined(function: ir.Function, model: ir.Model) -> str | None:
    """Say why the calls of a function stay; the model's imports grow by those of others."""
    name = f"{function.domain}::{function.name}"
    if function.domain.startswith(_OWN_DOMAINS) or not function.domain:
        return (
            f"function {name!r} is of a domain whose operators onnxruntime has itself: it is "
            "not inlined"
        )
    for domain, version in function.opset_imports.items():
        own = model.opset_imports.get(domain, version)
        if own != version:
            return (
                f"function {name!r} imports opset {version} of {domain!r}, and the model "
                f"{own}: it is not inlined"
            )
    return None
