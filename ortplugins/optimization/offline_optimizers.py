# SPDX-License-Identifier: MIT
"""Runs onnxruntime's own optimisers once, offline, and keeps the resulting graph.

The result is valid for this machine, this onnxruntime and CPU sessions with the same settings;
it is opened with ORT_DISABLE_ALL. Weights are not touched: without the name of an external
file, onnxruntime writes the new graph with the old references.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

from ortplugins.errors import PassError
from ortplugins.model_io.loading import load_result
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.stock_session import open_model
from rewrite_rules.graph.parameters import contents
from rewrite_rules.shape_size_reorder.onnxruntime_orders import PLACE
from session_options.entries import DATA_FOLDER_KEY

# Merges a sum and the LayerNormalization after it into a kernel that works element by element:
# it takes 1.1 to 3.2 times as long (1.31.1, 1 to 1,024 rows of 384 and 576).
SLOW_OPTIMIZERS = ("SkipLayerNormFusion",)


def bake(source: Path, request: BuildRequest, data_folder: Path | None = None) -> ir.Model:
    """Return the optimised graph of a file whose data lies next to it or in a folder.

    ``request`` says which optimisers to run.

    Raises:
        PassError: If they fail.
    """
    target = source.with_name(f"{source.stem}.baked.onnx")
    settings: dict[str, str | int | bool] = {
        "graph_optimization_level": request.level,
        "optimized_model_filepath": str(target),
        "enable_cpu_mem_arena": False,
        # Planning the reuse of buffers takes most of the time of a large graph without shapes.
        "enable_mem_reuse": False,
        "intra_op_num_threads": 1,  # no thread pool for a session that never runs
        **dict(request.entries),
        # Weights are packed for running only; leaving this out keeps memory flat.
        "session.disable_prepacking": "1",
    }
    if data_folder is not None:
        settings[DATA_FOLDER_KEY] = os.fspath(data_folder)
    disabled = (*request.disabled, *SLOW_OPTIMIZERS)
    try:
        open_model(source, "all", settings=settings, disabled=disabled)
        baked = load_result(target)
    except Exception as error:
        raise PassError(
            f"onnxruntime did not optimise {source.name} offline: {error}"
        ) from error
    finally:
        target.unlink(missing_ok=True)
    give_shapes_back(load_result(source), baked)
    return baked


def give_shapes_back(before: ir.Model, after: ir.Model) -> None:
    """Restore the shapes of intermediate values, which onnxruntime does not save, and places.

    Without them, its memory planner takes most of the start of a large graph. A place is where
    a node was in the file; onnxruntime writes nodes in an order of its own.
    """
    places = {v.name: i for i, node in enumerate(before.graph) for v in node.outputs if v.name}
    shaped: dict[str | None, ir.Value] = {
        value.name: value
        for node in before.graph
        for value in node.outputs
        if value.name and value.shape is not None
    }
    for node in after.graph:
        found = [places[value.name] for value in node.outputs if value.name in places]
        if found:
            node.meta[PLACE] = max(found)
        for index, value in enumerate(node.outputs):
            known = shaped.get(value.name)
            # After a Transpose was moved, the same name may stand for another tensor, so the
            # shape counts only if the producer is the same.
            if known is None or not _same_node(known.producer(), node, index, known):
                continue
            value.shape, value.type = known.shape, known.type


def _same_node(before: ir.Node | None, after: ir.Node, index: int, value: ir.Value) -> bool:
    return (
        before is not None
        and before.op_identifier() == after.op_identifier()
        and before.outputs[index : index + 1] == (value,)
        and [x and x.name for x in before.inputs] == [x and x.name for x in after.inputs]
        and _attribute_values(before) == _attribute_values(after)
    )


def _attribute_values(node: ir.Node) -> dict[str, object]:
    """Return attributes for a comparison of two nodes; subgraphs count by name only."""
    values: dict[str, object] = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        if isinstance(value, ir.TensorProtocol):
            value = contents(value)
        elif attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            value = None
        values[name] = value
    return values
