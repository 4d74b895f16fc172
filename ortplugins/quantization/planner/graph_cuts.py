# SPDX-License-Identifier: MIT
"""Where a graph is cut into segments that run one after the other: where few values cross.

What depends on constants alone, a dequantised weight for one, never crosses: each segment that
reads it makes it.
"""

from __future__ import annotations

__all__ = ["choose_cuts", "first_readers", "lifetimes", "reads"]

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import subgraphs

# Twice as many would save 4 % of the time and cost a session each, and their cuts' memory.
_MOST_SEGMENTS = 12
# Two runs of these differ though they read the same.
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomUniform"}
    | {"RandomNormalLike", "RandomUniformLike"}
)


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, its subgraphs included; values of the subgraphs come along."""
    yield from (value for value in node.inputs if value is not None)
    for body in subgraphs(node):
        for inner in ir.traversal.RecursiveGraphIterator(body):
            yield from (value for value in inner.inputs if value is not None)
        yield from body.outputs


def lifetimes(
    nodes: Sequence[ir.Node], graph: ir.Graph
) -> tuple[dict[ir.Value, int], dict[ir.Value, int]]:
    """Return where each value is read last (outputs: behind the end) and where it is made."""
    made: dict[ir.Value, int] = {}
    varies = {value for value in graph.inputs if not value.is_initializer()}
    for i, node in enumerate(nodes):
        # Dequantised weights and the like are made in each segment that reads them.
        if node.op_type not in _RANDOM and not any(value in varies for value in reads(node)):
            continue
        varies.update(node.outputs)
        made.update((value, i) for value in node.outputs if value.name)
    last = {value: i for i, node in enumerate(nodes) for value in reads(node) if value in made}
    last.update((value, len(nodes)) for value in graph.outputs)
    return last, made


def first_readers(nodes: Sequence[ir.Node], switches: frozenset[str]) -> dict[str, int]:
    """Return the first node that reads each switch."""
    places: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for value in node.inputs:
            if value is not None and value.name in switches:
                places.setdefault(value.name or "", i)
    return places


def choose_cuts(nodes: Sequence[ir.Node], graph: ir.Graph, places: Sequence[int]) -> list[int]:
    """Cut between the switches, where fewest values cross; equally many in each segment."""
    segments = min(_MOST_SEGMENTS, len(places) // 2)
    if segments < 2:
        return []
    last, made = lifetimes(nodes, graph)
    ends = [0] * (len(nodes) + 2)
    for value, at in made.items():
        if (until := last.get(value, at)) > at:
            ends[at + 1] += 1
            ends[until + 1] -= 1
    crossing = np.cumsum(ends)
    cuts: list[int] = []
    width = len(places) / segments
    for k in range(1, segments):
        # A quarter of a segment to either side is looked at.
        low = places[max(0, round((k - 0.25) * width) - 1)] + 1
        high = places[min(len(places) - 1, round((k + 0.25) * width))]
        window = range(low, max(low, high) + 1)
        cut = min(window, key=lambda i: (crossing[i], abs(i - (low + high) / 2)))
        if not cuts or cut > cuts[-1]:
            cuts.append(cut)
    return cuts
