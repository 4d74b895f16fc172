# SPDX-License-Identifier: MIT
"""Where regions of different types meet, DequantizeLinear -> QuantizeLinear; the rules.

``a`` is the type and grid that a tensor has, ``b`` another that a region asks for; the nodes
behind the arrow on the right read what their plan says.

    Inside           Q(x, a)                        ->  Q(x, b)
    Exit             Q(x, a), read as a and b       ->  Q(DQ(Q(x, b), b), a)
    Entry            DQ(codes, a), read as b        ->  DQ(Q(DQ(codes, a), b), b)
    Float            DQ(Q(x, a))                    ->  x, or Clip(x) to the range of a
    Constant         DQ(constant, a), read as b     ->  DQ(constant', b)
    MovedFloat       moved(DQ(codes, int8))         ->  moved(Clip(DQ(codes, int8)))

Types, grids and new constants are planned before (:mod:`.place`), and nothing here refuses. A
pair stands at every change of type; :mod:`.fold_rules` take out what changes no value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, RewriteRule, RewriteRuleClassBase

from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import (
    dequantizer,
    input_of,
    owner,
    producer,
    remove_unused,
    sort_nodes,
)
from rewrite_rules.graph.rule_set import DispatchingRuleSet, own
from rewrite_rules.mixed_precision_boundaries.grids import Grids
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor, read_grid
from rewrite_rules.mixed_precision_boundaries.region_constants import ConstantChange
from rewrite_rules.mixed_precision_boundaries.regions import Region, TensorPlan
from rewrite_rules.remarks import Refusal

_FLOAT = ir.DataType.FLOAT
_MICROSOFT = "com.microsoft"
_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
# Over these, onnxruntime repeats a DequantizeLinear; Identity nodes it has removed by then.
_PASSED_OPERATORS = frozenset(
    {"Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
# From here on, QuantizeLinear and DequantizeLinear take 16 bits, and types by an attribute.
_OPSET_OF_16_BITS = 21


class Boundaries:
    """What is to be written into one model: the plans of its regions, and what rules share.

    Each new node and initializer gets a name of its own.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._opset = model.opset_imports.get("", 0)
        self._names = FreshNames(model)
        self._parameters: dict[
            tuple[QuantizedTensor, QuantizationGrid], Sequence[ir.Value]
        ] = {}
        # Of each tensor the graph of its codes; of each Q and DQ, the tensor and its plan.
        self.graphs: dict[QuantizedTensor, ir.Graph] = {}
        self.plans: dict[ir.Node, tuple[QuantizedTensor, TensorPlan]] = {}
        self.grids: Grids = {}
        self.constants: dict[ir.Node, list[ConstantChange]] = {}
        # The codes of a tensor in a type, and its value in float; where a graph has them.
        self.made: dict[tuple[QuantizedTensor, ir.DataType, object], ir.Value] = {}

    def add(
        self,
        region: Region,
        grids: Grids,
        constants: Sequence[ConstantChange],
        changed: Sequence[QuantizedTensor],
    ) -> None:
        """Have a region written: the tensors of it that change, and constants."""
        self.grids.update(grids)
        for tensor in changed:
            graph = owner(tensor.codes)
            assert isinstance(graph, ir.Graph)
            self.graphs[tensor] = graph
            # The tensor's own, if any node of its graph may read them.
            given = [
                value
                for value in _first_node(tensor).inputs[1:]
                if value is not None and value.is_initializer() and value.graph is graph
            ]
            if len(given) == 2:
                self._parameters[tensor, tensor.grid] = given
            for node in (tensor.quantize, *tensor.dequantizes):
                if node is not None:
                    self.plans[node] = tensor, region.plans[tensor]
        for change in constants:
            self.constants.setdefault(change.dequantize, []).append(change)

    def write(self) -> None:
        """Apply the rules, and remove what nothing reads."""
        sort_nodes(self._model.graph)  # a Q is rewritten before what reads it
        # What computes a tensor that is float from now on.
        left = [t.producer for t, plan in self.plans.values() if plan.produced == _FLOAT]
        laws: list[type[BoundaryRule]] = [Inside, Exit, Float, Entry, Constant]
        candidates = self.plans.keys() | self.constants.keys()
        self._apply([law.rule(self) for law in laws], candidates)
        if self._opset >= _OPSET_OF_16_BITS:
            moved = _moved_int8(left)
            self._apply([MovedFloat.rule(self, moved)], moved.keys())

    def _apply(self, rules: Sequence[RewriteRule], candidates: Collection[ir.Node]) -> None:
        applied = DispatchingRuleSet(rules, candidates.__contains__)
        applied.cleans_up = False  # nodes of one name, which a model may have, keep it
        if candidates and applied.apply_to_model(self._model):
            remove_unused(self._model)

    # What rules emit.

    def emit(
        self,
        op: Any,
        op_type: str,
        value: ir.Value,
        tensor: QuantizedTensor,
        grid: QuantizationGrid,
        like: ir.Node | None = None,
    ) -> ir.Value:
        """Emit a Q or DQ; ``like`` is the node whose place and name it takes, if any."""
        attributes: dict[str, Any] = dict(like.attributes) if like is not None else {}
        if like is not None and grid == tensor.grid:
            parameters: Sequence[ir.Value | None] = like.inputs[1:]
            domain = like.domain
        else:
            parameters = self._grid_inputs(tensor, grid)
            domain = self._domain(grid.bits == 16, _first_node(tensor))
            # The output_dtype of a DequantizeLinear is the float type, which stays.
            for name in ("axis", "saturate", *(["output_dtype"] if op_type == _Q else [])):
                attributes.pop(name, None)
        stem = f"{tensor.name}_convert_{op_type}"
        named = self._names.take(stem) if like is None else like.name
        outputs: int | list[str] = [self._names.take(f"{stem}_Output")] if like is None else 1
        made: ir.Value = getattr(op, op_type)(
            value, *parameters, **attributes, _domain=domain, _name=named, _outputs=outputs
        )
        dtype = grid.dtype if op_type == _Q else ir.DataType.from_numpy(grid.float_dtype)
        made.type, made.shape = ir.TensorType(dtype), value.shape
        if op_type == _DQ and tensor.dequantizes:
            made.shape = tensor.dequantizes[0].outputs[0].shape
        if like is not None and op_type == _Q:
            like.outputs[0].type = made.type  # which the engine passes on
        return made

    def codes(
        self,
        op: Any,
        tensor: QuantizedTensor,
        plan: TensorPlan,
        dtype: ir.DataType,
        at: ir.Node,
    ) -> ir.Value:
        """Return the codes of a tensor in a type; emit ``DQ -> Q``, once for each graph."""
        for graph in (self.graphs[tensor], at.graph):
            if (there := self.made.get((tensor, dtype, graph))) is not None:
                return there
        if dtype == plan.produced:
            assert at.inputs[0] is not None
            return at.inputs[0]
        grids = self.grids[tensor, plan.produced], self.grids[tensor, dtype]
        produced = self.codes(op, tensor, plan, plan.produced, at)
        values = self.emit(op, _DQ, produced, tensor, grids[0])
        made = self.emit(op, _Q, values, tensor, grids[1])
        self.made[tensor, dtype, at.graph] = made
        return made

    def clip(
        self, op: Any, graph: ir.Graph, value: ir.Value, grid: QuantizationGrid, stem: str
    ) -> ir.Value:
        """Emit a Clip to the range of a grid."""
        ends = [
            self.initializer(graph, np.asarray(end), f"{stem}_clip_{name}")
            for end, name in zip(grid.range, ("min", "max"), strict=True)
        ]
        named = self._names.take(f"{stem}_Clip_Output")
        made: ir.Value = op.Clip(
            value, *ends, _name=self._names.take(f"{stem}_Clip"), _outputs=[named]
        )
        made.type, made.shape = value.type, value.shape
        return made

    def initializer(
        self, graph: ir.Graph, array: npt.NDArray[np.generic], name: str
    ) -> ir.Value:
        """Register an initializer under a name that is free."""
        return new_initializer(graph, ir.Tensor(array, name=self._names.take(name)))

    def constant(self, op: Any, change: ConstantChange) -> ir.Value:
        """Emit a DequantizeLinear of other codes of a constant."""
        old = change.dequantize
        graph, value = old.graph, old.outputs[0]
        assert isinstance(graph, ir.Graph)
        stem = value.name or "constant"
        arrays = {
            "codes": change.codes,
            "scale": change.scale,
            "zero_point": change.zero_point,
        }
        inputs: list[ir.Value | None] = [
            self.initializer(graph, array, f"{stem}_{kind}_converted")
            for kind, array in arrays.items()
            if array is not None
        ]
        made: ir.Value = op.DequantizeLinear(
            *inputs,
            *old.inputs[len(inputs) :],
            **(old.attributes if change.zero_point is None else {}),
            _domain=self._domain(change.codes.dtype.itemsize == 2, old),
            _name=self._names.take(f"{stem}_converted"),
            _outputs=[self._names.take(f"{stem}_converted_Output")],
        )
        made.type, made.shape = value.type, value.shape
        return made

    def _grid_inputs(
        self, tensor: QuantizedTensor, grid: QuantizationGrid
    ) -> Sequence[ir.Value]:
        """Return scale and zero point, which all nodes of a tensor share."""
        if (tensor, grid) not in self._parameters:
            zero_point = np.asarray(grid.zero_point, grid.dtype.numpy())
            arrays = {"scale": np.asarray(grid.scale), "zero_point": zero_point}
            self._parameters[tensor, grid] = [
                self.initializer(self.graphs[tensor], array, f"{tensor.name}_{kind}_convert")
                for kind, array in arrays.items()
            ]
        return self._parameters[tensor, grid]

    def _domain(self, wide: bool, beside: ir.Node) -> str:
        """Return the domain of a Q or DQ (``wide``: of 16 bits) beside one of the model."""
        if beside.domain != _MICROSOFT and not (wide and self._opset < _OPSET_OF_16_BITS):
            return ""
        self._model.opset_imports.setdefault(_MICROSOFT, 1)
        return _MICROSOFT


class BoundaryRule(RewriteRuleClassBase):
    """A rule for a node whose tensor has a plan.

    A rule that gives a part of the readers another value keeps the node for the others.
    """

    keeps_node = True

    def __init__(self, boundaries: Boundaries) -> None:
        super().__init__(remove_nodes=not self.keeps_node)
        self._boundaries = boundaries

    def check(self, context: MatchContext, out: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        """Whether the plan of the tensor is what the rule is for."""
        planned = self._boundaries.plans.get(producer(out))
        return planned is not None and self.fits(producer(out), *planned)

    def fits(self, node: ir.Node, tensor: QuantizedTensor, plan: TensorPlan) -> bool:
        raise NotImplementedError

    def grid(self, tensor: QuantizedTensor, dtype: ir.DataType) -> QuantizationGrid:
        """Return the grid that a tensor gets in a type."""
        return self._boundaries.grids.get((tensor, dtype), tensor.grid)


class Inside(BoundaryRule):
    """``Q(x, a)`` -> ``Q(x, b)``: a tensor that is only read as b, or on another grid."""

    keeps_node = False

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return own.QuantizeLinear(x, _allow_other_inputs=True, _outputs=["out"])

    def fits(self, node: ir.Node, tensor: QuantizedTensor, plan: TensorPlan) -> bool:
        """Whether all codes change."""
        changes = self.grid(tensor, plan.produced) != tensor.grid
        return plan.produced != _FLOAT and changes and not _keeps_codes(tensor, plan)

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value) -> ir.Value:
        node = producer(out)
        tensor, plan = self._boundaries.plans[node]
        return self._boundaries.emit(
            op, _Q, x, tensor, self.grid(tensor, plan.produced), like=node
        )


class Exit(BoundaryRule):
    """``Q(x, a)`` -> ``Q(DQ(Q(x, b), b), a)``: a tensor made as b that others read as a."""

    keeps_node = False

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return own.QuantizeLinear(x, _allow_other_inputs=True, _outputs=["out"])

    def fits(self, node: ir.Node, tensor: QuantizedTensor, plan: TensorPlan) -> bool:
        """Whether codes of both types are read."""
        return plan.produced != _FLOAT and _keeps_codes(tensor, plan)

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value) -> ir.Value:
        node, made = producer(out), self._boundaries
        tensor, plan = made.plans[node]
        grids = self.grid(tensor, plan.produced), self.grid(tensor, tensor.grid.dtype)
        first = made.emit(op, _Q, x, tensor, grids[0])
        start = made.emit(op, _DQ, first, tensor, grids[0])
        codes = made.emit(op, _Q, start, tensor, grids[1], like=node)
        made.made[tensor, plan.produced, node.graph] = first
        made.made[tensor, tensor.grid.dtype, node.graph] = codes
        return codes


class Entry(BoundaryRule):
    """``DQ(codes, a)`` -> ``DQ(Q(DQ(codes, a), b), b)`` for each type b that it is read as."""

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return own.DequantizeLinear(codes, _allow_other_inputs=True, _outputs=["out"])

    def fits(self, node: ir.Node, tensor: QuantizedTensor, plan: TensorPlan) -> bool:
        """Whether anything reads another type or grid."""
        types = _readers(node, plan).keys() or {plan.produced}
        return plan.produced != _FLOAT and any(
            self.grid(tensor, dtype) != tensor.grid for dtype in types
        )

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        node, made = producer(out), self._boundaries
        tensor, plan = made.plans[node]
        readers = _readers(node, plan)
        kept, *others = readers or [plan.produced]
        for dtype in others:
            twin = made.codes(op, tensor, plan, dtype, node)
            twin = made.emit(op, _DQ, twin, tensor, self.grid(tensor, dtype))
            for reader, index in readers[dtype]:
                reader.replace_input_with(index, twin)
        read = made.codes(op, tensor, plan, kept, node)
        return made.emit(op, _DQ, read, tensor, self.grid(tensor, kept), like=node)


class Float(BoundaryRule):
    """``DQ(Q(x))`` -> ``x``, or ``Clip(x)`` where a quantiser may have removed a Clip."""

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return own.DequantizeLinear(codes, _allow_other_inputs=True, _outputs=["out"])

    def fits(self, node: ir.Node, tensor: QuantizedTensor, plan: TensorPlan) -> bool:
        """Whether the tensor is not quantised any more."""
        return plan.produced == _FLOAT

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        node, made = producer(out), self._boundaries
        tensor, plan = made.plans[node]
        value = self._value(op, node, tensor, plan)
        uses = list(out.uses())
        floats = [(n, i) for n, i in uses if plan.reads.get(n, _FLOAT) == _FLOAT]
        for reader, index in floats:
            reader.replace_input_with(index, value)
        if not out.is_graph_output() or plan.output != _FLOAT:
            return out
        if len(floats) < len(uses):
            twin = made.emit(op, _DQ, codes, tensor, tensor.grid)
            for reader, index in list(out.uses()):
                reader.replace_input_with(index, twin)
        return value

    def _value(
        self, op: Any, node: ir.Node, tensor: QuantizedTensor, plan: TensorPlan
    ) -> ir.Value:
        made, source = self._boundaries, tensor.source
        assert source is not None
        if not plan.clipped:
            return source
        graph = made.graphs[tensor]
        for place in (graph, node.graph):
            if (there := made.made.get((tensor, _FLOAT, place))) is not None:
                return there
        # To the range that it was quantised for.
        clip = made.clip(op, graph, source, tensor.grid, tensor.name)
        made.made[tensor, _FLOAT, node.graph] = clip
        return clip


class Constant(BoundaryRule):
    """``DQ(constant, a)`` -> ``DQ(constant', b)`` for the nodes that compute in b."""

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return own.DequantizeLinear(codes, _allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, out: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        """Whether its codes change for anything."""
        return producer(out) in self._boundaries.constants

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        for change in self._boundaries.constants[producer(out)]:
            made = self._boundaries.constant(op, change)
            for reader, index in list(out.uses()):
                if reader in change.readers:
                    reader.replace_input_with(index, made)
        return out


class MovedFloat(BoundaryRule):
    """``moved(DQ(codes, int8))`` -> ``moved(Clip(DQ(codes, int8)))``, to all its values.

    Over data movement, onnxruntime repeats the DequantizeLinear before it, towards the readers
    (PropagateDQForward of qdq_propagation.cc, 1.31). Of int8 codes from opset 21 on it makes a
    QuantizeLinear of two types, with which no session loads. It does not pass a Clip.
    """

    def __init__(
        self, boundaries: Boundaries, moved: Mapping[ir.Node, Sequence[ir.Node]]
    ) -> None:
        super().__init__(boundaries)
        self._moved = moved

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return own.DequantizeLinear(codes, _allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, out: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        """Whether the graph holds initializers."""
        return isinstance(producer(out).graph, ir.Graph)

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        node = producer(out)
        assert isinstance(node.graph, ir.Graph)
        grid, stem = read_grid(node), out.name or "moved"
        clip = self._boundaries.clip(op, node.graph, out, grid, stem)
        for reader in self._moved[node]:
            reader.replace_input_with(0, clip)
        return out


def _keeps_codes(tensor: QuantizedTensor, plan: TensorPlan) -> bool:
    """Whether the codes of a tensor of another type are read as they were."""
    own_type = tensor.grid.dtype
    read = {dtype for node in tensor.dequantizes for dtype in _readers(node, plan)}
    return plan.produced != own_type and (own_type in read or tensor.codes_are_read)


def _readers(
    dequantize: ir.Node, plan: TensorPlan
) -> dict[ir.DataType, list[tuple[ir.Node, int]]]:
    """Return what reads a DequantizeLinear, by type; first the type that keeps its name."""
    value = dequantize.outputs[0]
    found: dict[ir.DataType, list[tuple[ir.Node, int]]] = {}
    if value.is_graph_output():
        found[plan.output] = []
    for reader, index in value.uses():
        # A QuantizeLinear that another tensor's rewrite put there is in no plan; what is
        # dequantised is float.
        dtype = plan.reads.get(reader, plan.produced)
        dtype = plan.produced if dtype == _FLOAT else dtype
        found.setdefault(dtype, []).append((reader, index))
    return found


def _first_node(tensor: QuantizedTensor) -> ir.Node:
    return tensor.quantize or tensor.dequantizes[0]


def _moved_int8(left: Sequence[ir.Node | None]) -> dict[ir.Node, list[ir.Node]]:
    """Return each DequantizeLinear of int8 from which data movement leads to some nodes.

    With the nodes that read it on these ways.
    """
    found: dict[ir.Node, list[ir.Node]] = {}
    for node in left:
        while node is not None and node.op_type in _PASSED_OPERATORS:
            value = input_of(node, 0)
            if (before := dequantizer(value)) is not None:
                if _is_int8(before) and node not in found.setdefault(before, []):
                    found[before].append(node)
                break
            node = None if value is None else value.producer()
    return found


def _is_int8(dequantize: ir.Node) -> bool:
    try:
        return read_grid(dequantize).dtype == ir.DataType.INT8
    except Refusal:
        return False  # per axis, for instance: stays where it is
