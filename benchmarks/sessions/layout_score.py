# SPDX-License-Identifier: MIT
"""The matrix of weight layouts: what becomes of each in onnxruntime, alone and after ours."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort

import ortplugins
from benchmarks.figures.bounds import Figure
from tests.builders.dequantized_models import relative_error
from tests.builders.layout_matrix import LayoutCase, layout_cases

# Both at level 0: native fusion asks the session, ours the pass.
LEVEL = {"session.qdq_matmulnbits_accuracy_level": "0"}
KERNELS = frozenset({"MatMulNBits", "GatherBlockQuantized"})


class Outcome(enum.StrEnum):
    """What became of one layout, in the order of the table."""

    FUSED = "fused right"
    FLOAT = "float constant"
    UNFUSED = "unfused: a weight is unpacked at every inference"
    WRONG = "wrong numbers"
    FAILS = "session or run fails"


def measure_layout_score(folder: Path, rounds: int) -> list[Figure]:
    """Count the outcomes; with the default kernel policy, then with every kernel."""
    del rounds  # nothing is timed
    theirs = Counter(outcomes(folder, None).values())
    without_kernel = sum(not case.expect for case in _cases())
    what = f"of {len(_cases())} layouts: without a kernel, to be left unfused"
    figures = [Figure(what, float(without_kernel), unit="layouts")]
    for policy in ("float", "fuse"):
        fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=0, slow_kernels=policy)
        ours = Counter(outcomes(folder, fusion).values())
        for outcome in Outcome:
            what = f"slow_kernels={policy}: {outcome}"
            counts = (float(ours[outcome]), float(theirs[outcome]))
            figures.append(Figure(what, *counts, unit="layouts", difference=True))
        bad = float(ours[Outcome.WRONG] + ours[Outcome.FAILS])
        what = f"slow_kernels={policy}: wrong or failing after ours"
        figures.append(Figure(what, bad, unit="layouts", bound=0))
    return figures


def outcomes(
    folder: Path, fusion: ortplugins.DqMatMulNBitsFusion | None
) -> dict[str, Outcome]:
    """The outcome of each layout, with or without a pass."""
    return {case.name: _outcome(folder, case, fusion) for case in _cases()}


def _cases() -> list[LayoutCase]:
    """All that can run, be it only once something is fused or optimised."""
    return [case for case in layout_cases() if case.runs or case.expect]


def _outcome(
    folder: Path, case: LayoutCase, fusion: ortplugins.DqMatMulNBitsFusion | None
) -> Outcome:
    model = case.build()
    final = folder / "final.onnx"
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.optimized_model_filepath = str(final)
    for key, value in LEVEL.items():
        options.add_session_config_entry(key, value)
    try:
        if fusion is not None:
            model = ortplugins.optimize(model, passes=[fusion]).model
        session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        outputs = session.run(None, case.feeds)
    except Exception:  # whatever it is, the user's model does not run
        return Outcome.FAILS
    for actual, expected in zip(outputs, case.reference, strict=True):
        same_shape = actual.shape == expected.shape
        # A NaN is wrong too: it compares false.
        if not (same_shape and relative_error(actual, expected) <= case.tolerance):
            return Outcome.WRONG
    return _outcome_of(onnx.load(final), case)


def _outcome_of(final: onnx.ModelProto, case: LayoutCase) -> Outcome:
    """Read the graph that onnxruntime executes."""
    nodes = list(_nodes(final.graph, {}))
    # No case dequantises an activation; what is left of rank 0 or 1 is a bias.
    unknown = (0, 0)
    if any(
        node.op_type == "DequantizeLinear" and len(shapes.get(node.input[0], unknown)) > 1
        for node, shapes in nodes
    ):
        return Outcome.UNFUSED
    kernels = sum(node.op_type in KERNELS for node, _ in nodes)
    wanted = sum(case.expect.get(name, 0) for name in KERNELS)
    return Outcome.FUSED if kernels >= max(wanted, 1) else Outcome.FLOAT


def _nodes(
    graph: onnx.GraphProto, outer: dict[str, tuple[int, ...]]
) -> Iterator[tuple[onnx.NodeProto, dict[str, tuple[int, ...]]]]:
    """Nodes of the graph and its subgraphs, with the shapes of constants in scope."""
    shapes = outer | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            shapes[node.output[0]] = tuple(node.attribute[0].t.dims)
        yield node, shapes
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g, shapes)
