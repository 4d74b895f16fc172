# SPDX-License-Identifier: MIT
"""Each layout of a weight is fused or refused as its table says, and right either way."""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from builders.coverage import pairwise
from builders.dequantized_models import fuse_weights, relative_error, run
from builders.layout_matrix import LayoutCase, layout_cases

from rewrite_rules.remarks import Outcome, Remark

KERNEL_BLOCKS = {16, 32, 64, 128, 256}


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Nodes of the graph, of every body and of every function."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.graph.all_nodes()


def check_numbers(outputs: list[npt.NDArray], case: LayoutCase) -> None:
    for actual, expected in zip(outputs, case.reference, strict=True):
        assert 1e-3 < np.abs(expected).max() < 2e4, "too small or too large to compare"
        assert actual.shape == expected.shape
        assert np.isfinite(actual).all()
        assert relative_error(actual, expected) <= case.tolerance


def mentions(remark: Remark, name: str) -> bool:
    # Inlining a function may number the names inside it.
    return re.search(rf"{re.escape(name)}(_\d+)?(?!\w)", str(remark)) is not None


def check_fused(model: ir.Model, case: LayoutCase) -> None:
    """Counts of operators, and what only some cases say about the fused nodes."""
    found = Counter(node.op_type for node in all_nodes(model))
    assert {name: found[name] for name in case.expect} == case.expect
    nodes = [node for node in all_nodes(model) if node.op_type == "MatMulNBits"]
    sizes = {node.attributes["block_size"].as_int() for node in nodes}
    assert sizes <= set(case.block_sizes or KERNEL_BLOCKS)
    if case.zero_points is not None:
        given = {len(node.inputs) > 3 and node.inputs[3] is not None for node in nodes}
        assert given == {case.zero_points}
    if case.stored_weights is not None:
        assert len({node.inputs[1] for node in nodes}) == case.stored_weights


def codes_are_constant(node: ir.Node) -> bool:
    codes = node.inputs[0].producer()
    return codes is None or codes.op_type != "QuantizeLinear"


CASES = pairwise(layout_cases(), lambda case: case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout(case: LayoutCase):
    model = case.build()
    before = ir.to_proto(model).SerializeToString()
    names = [
        node.name
        for node in all_nodes(model)
        if node.op_type == "DequantizeLinear" and codes_are_constant(node)
    ]
    if case.runs:
        check_numbers(run(model, case.feeds), case)

    remarks = fuse_weights(model)

    proto = ir.to_proto(model)
    refusals = [str(remark) for remark in remarks if remark.outcome is Outcome.REFUSED]
    if case.refusal is not None:
        assert any(case.refusal in text for text in refusals), refusals
    for name in names:
        assert any(mentions(remark, name) for remark in remarks), f"{name} has no remark"
    if proto.SerializeToString() == before:
        assert not case.expect, refusals
        return
    assert case.expect, "should have stayed as it is"
    check_fused(model, case)
    for optimised in (False, True):
        check_numbers(run(proto, case.feeds, optimised=optimised), case)


def test_matrix_is_whole():
    names = [case.name for case in layout_cases()]
    assert len(names) == len(set(names)) == 1033
    assert {case.row for case in layout_cases()} == set(range(1, 16))
