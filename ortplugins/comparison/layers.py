# SPDX-License-Identifier: MIT
"""Compares the values that the nodes of two models compute, in the order in which they run.

Fusions rename nodes, and keep the names of the values that they still compute, so values are
matched by name. What is fetched from a run is held until its end: values are fetched in chunks
that fit a budget, each by a session of its own, on the part of the model that leads there.
Weights stay in their files, and are packed as in any session: kernels compute otherwise with
packed weights (int8 activations of MatMulNBits for one).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import onnx_ir.passes.common
import onnxruntime

from ortplugins.comparison.difference import Difference, differences_of
from ortplugins.comparison.models import GivenModel, run_both
from ortplugins.errors import ModelFileError
from ortplugins.quantization.statistics.collect import detach_tensors
from ortplugins.runtime.copied_options import DATA_FOLDER_KEY
from ortplugins.runtime.stock_session import NUMPY_TYPES, opened, stock_options, type_of
from ortplugins.samples.sources import Feed, KeptSamples
from rewrite_rules.graph.nodes import label

_COMPARED = NUMPY_TYPES - {"string"}
_MARK = "ortplugins#"
_KERNEL = "_kernel_time"
# Of values to fetch at a time, of both models together; one that takes more is fetched alone.
_MAX_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Layer:
    """A value that both models compute.

    Attributes:
        node: Node of a that makes it.
        op_type: Of that node.
        other_op_type: Operator that makes it in b.
        difference: How far it is off.
    """

    node: str
    op_type: str
    other_op_type: str
    difference: Difference


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """The values of two models, side by side.

    Attributes:
        layers: Values of both, in the order in which a makes them.
        only_a: Nodes of a that make no value of b: their name and operator.
        only_b: Nodes of b that make no value of a.
        not_compared: Values of both that are not tensors of numbers.
    """

    layers: tuple[Layer, ...]
    only_a: tuple[tuple[str, str], ...]
    only_b: tuple[tuple[str, str], ...]
    not_compared: tuple[str, ...]


def compare_layers(
    a: Path,
    b: Path,
    feeds: KeptSamples,
    *,
    scratch: Path,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> LayerComparison:
    """Compare what the nodes of the main graphs compute."""
    sides = [_Side(path, scratch, providers) for path in (a, b)]
    made_a, made_b = (side.made(feeds.largest()) for side in sides)
    common = [name for name in made_a if name in made_b]
    differences: dict[str, Difference] = {}
    for chunk in _chunks(common, made_a, made_b):
        sessions = [(side.name, side.open(chunk)) for side in sides]
        outputs = [item for _, session in sessions for item in session.get_outputs()]
        others = {item.name for item in outputs if type_of(item) not in _COMPARED}
        if names := [name for name in chunk if name not in others]:
            differences |= differences_of(run_both(sessions, names, feeds))
    nodes = ((made_a[name].node, made_b[name].node, differences[name]) for name in differences)
    return LayerComparison(
        tuple(Layer(label(a), a.op_type, b.op_type, found) for a, b, found in nodes),
        sides[0].nodes_without(made_b),
        sides[1].nodes_without(made_a),
        tuple(name for name in common if name not in differences),
    )


def _chunks(
    names: Sequence[str],
    made_a: Mapping[str, _Made],
    made_b: Mapping[str, _Made],
) -> Iterator[list[str]]:
    chunk: list[str] = []
    left = _MAX_BYTES
    for name in names:
        sizes = made_a[name].nbytes, made_b[name].nbytes
        # What the profile is silent about (calls of functions) goes alone.
        need = _MAX_BYTES if None in sizes else sum(size for size in sizes if size is not None)
        if chunk and need > left:
            yield chunk
            chunk, left = [], _MAX_BYTES
        chunk.append(name)
        left -= need
    if chunk:
        yield chunk


class _Made(NamedTuple):
    """Who makes a value, and its bytes; None where they are not known."""

    node: ir.Node
    nbytes: int | None


class _Side:
    """One of the models: its values in order, and sessions on parts of it."""

    def __init__(self, path: Path, scratch: Path, providers: Sequence[Any]) -> None:
        self.name = str(path)
        self._model = GivenModel(path).graph()
        self._folder = detach_tensors(self._model, Path(tempfile.mkdtemp(dir=scratch)))
        self._providers = providers
        self._nodes = list(self._model.graph)

    def made(self, feed: Feed) -> dict[str, _Made]:
        """Run once; return the values of the main graph's nodes, in the executed order."""
        model = self._model.clone()
        for index, node in enumerate(model.graph):
            node.name = f"{_MARK}{index}"
        content = ir.to_proto(model).SerializeToString()
        ran = profiled_run(content, self._options(), feed, self._providers, name=self.name)
        profiled = {node.name: (place, node) for place, node in enumerate(ran)}
        places = _places(self._nodes, {name: place for name, (place, _) in profiled.items()})
        result: dict[str, _Made] = {}
        for index in sorted(range(len(self._nodes)), key=places.__getitem__):
            node = self._nodes[index]
            if node.op_type == "Constant":
                continue  # onnxruntime has no such node
            outputs = [value.name for value in node.outputs if value.name]
            _, record = profiled.get(f"{_MARK}{index}", (0, None))
            for number, name in enumerate(outputs):
                # No record: inlined, or a Cast that onnxruntime did without. Another number of
                # outputs: some are not tensors.
                nbytes = None
                if record is not None and len(record.output_bytes) == len(outputs):
                    nbytes = record.output_bytes[number]
                result[name] = _Made(node, nbytes)
        return result

    def nodes_without(self, others: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Nodes none of whose values has a name among the others."""
        return tuple(
            (label(node), node.op_type)
            for node in self._nodes
            if node.op_type != "Constant"
            and not any(value.name in others for value in node.outputs if value.name)
        )

    def open(self, names: Sequence[str]) -> onnxruntime.InferenceSession:
        """Open a session that computes these values and what leads there."""
        model = self._model.clone()
        values = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.clear()
        model.graph.outputs.extend(values[name] for name in names)
        onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
        what = f"{self.name}, the part that makes {names[0]!r} to {names[-1]!r}"
        content = ir.to_proto(model).SerializeToString()
        return opened(content, self._options(), self._providers, what)

    def _options(self) -> onnxruntime.SessionOptions:
        options = stock_options()
        options.add_session_config_entry(DATA_FOLDER_KEY, str(self._folder))
        return options


def _places(nodes: Sequence[ir.Node], profiled: Mapping[str, int]) -> list[float]:
    """Place of each node in the run; one that was inlined stands behind what it reads."""
    places: list[float] = []
    of_value: dict[ir.Value | None, float] = {}
    for index, node in enumerate(nodes):
        place: float | None = profiled.get(f"{_MARK}{index}")
        if place is None:
            place = max((of_value.get(value, -1.0) for value in node.inputs), default=-1.0)
        places.append(place)
        of_value.update((value, place) for value in node.outputs)
    return places


@dataclasses.dataclass(frozen=True)
class ProfiledNode:
    """A node that ran, in a subgraph or not."""

    name: str
    # Of each output that is a tensor; the bytes of all where its type has none of numpy's.
    output_bytes: tuple[int, ...]


def profiled_run(
    source: str | bytes,
    options: onnxruntime.SessionOptions,
    feed: Feed,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    *,
    name: str = "the model",
) -> list[ProfiledNode]:
    """Run a model once; return its nodes in the order in which they started, by its profile.

    The order of a file is not that of a run: onnxruntime sorts the nodes itself.
    """
    before = options.enable_profiling, options.profile_file_prefix
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(folder, "profile")
        try:
            session = opened(source, options, providers, name)
        finally:
            options.enable_profiling, options.profile_file_prefix = before
        taken = {item.name for item in session.get_inputs()}
        try:
            # Without numpy's arrays, which not every type has.
            values = {
                k: onnxruntime.OrtValue.ortvalue_from_numpy(v)
                for k, v in feed.items()
                if k in taken and v.dtype.kind in "biufc"
            }
            if len(values) == len(taken & feed.keys()):
                session.run_with_ort_values(None, values)
            else:  # texts have no OrtValue of their own
                session.run(None, {k: v for k, v in feed.items() if k in taken})
        except Exception as error:
            raise ModelFileError(f"{name}: onnxruntime failed to run it: {error}") from error
        finally:
            path = Path(session.end_profiling())
        events = json.loads(path.read_text(encoding="utf-8"))
        del session  # Windows removes no file that is open
    nodes = (event for event in events if event.get("cat") == "Node")
    ran = (event for event in nodes if str(event["name"]).endswith(_KERNEL))
    return [_node(event) for event in sorted(ran, key=lambda event: int(event["ts"]))]


def _node(event: Mapping[str, Any]) -> ProfiledNode:
    args = event["args"]
    described = (pair for item in args.get("output_type_shape", ()) for pair in item.items())
    sizes = []
    for kind, shape in described:
        try:
            size = int(ir.DataType[kind.upper()].itemsize * math.prod(shape))
        except (KeyError, TypeError):
            size = int(args.get("output_size", 0))
        sizes.append(size)
    return ProfiledNode(str(event["name"]).removesuffix(_KERNEL), tuple(sizes))
