# SPDX-License-Identifier: MIT
"""The nodes and initializers that the rules of boundaries emit, and the plans they go by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor
from rewrite_rules.mixed_precision_boundaries.regions import ConstantChange, TensorPlan

FLOAT = ir.DataType.FLOAT
_MICROSOFT = "com.microsoft"
Q, DQ = "QuantizeLinear", "DequantizeLinear"
# From here on, QuantizeLinear and DequantizeLinear take 16 bits, and types by an attribute.
OPSET_OF_16_BITS = 21


class Boundaries:
    """What is to be written into one model: the plans of its regions, and what rules share.

    Each new node and initializer gets a name of its own.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.opset = model.opset_imports.get("", 0)
        self._names = FreshNames(model)
        self._parameters: dict[
            tuple[QuantizedTensor, QuantizationGrid], Sequence[ir.Value]
        ] = {}
        # Of each Q and DQ, the plan of the tensor.
        self.plans: dict[ir.Node, TensorPlan] = {}
        self.constants: dict[ir.Node, list[ConstantChange]] = {}
        # The codes of a tensor in a type, and its value in float.
        self.made: dict[tuple[QuantizedTensor, ir.DataType], ir.Value] = {}

    def add(self, plans: Iterable[TensorPlan], constants: Iterable[ConstantChange]) -> None:
        """Have a region written: the tensors of it that change, and constants."""
        for plan in plans:
            tensor = plan.tensor
            given = [
                value
                for value in _first_node(tensor).inputs[1:]
                if value is not None and value.is_initializer()
            ]
            if len(given) == 2:
                self._parameters[tensor, tensor.grid] = given
            for node in (tensor.quantize, *tensor.dequantizes):
                if node is not None:
                    self.plans[node] = plan
        for change in constants:
            self.constants.setdefault(change.dequantize, []).append(change)

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
            for name in ("axis", "saturate", *(["output_dtype"] if op_type == Q else [])):
                attributes.pop(name, None)
        stem = f"{tensor.name}_convert_{op_type}"
        named = self._names.take(stem) if like is None else like.name
        outputs: int | list[str] = [self._names.take(f"{stem}_Output")] if like is None else 1
        made: ir.Value = getattr(op, op_type)(
            value, *parameters, **attributes, _domain=domain, _name=named, _outputs=outputs
        )
        dtype = grid.dtype if op_type == Q else FLOAT
        made.type, made.shape = ir.TensorType(dtype), value.shape
        if op_type == DQ and tensor.dequantizes:
            made.shape = tensor.dequantizes[0].outputs[0].shape
        if like is not None and op_type == Q:
            like.outputs[0].type = made.type  # which the engine passes on
        return made

    def codes(
        self,
        op: Any,
        plan: TensorPlan,
        dtype: ir.DataType,
        at: ir.Node,
    ) -> ir.Value:
        """Return the codes of a tensor in a type; emit ``DQ -> Q``, once."""
        tensor = plan.tensor
        if (there := self.made.get((tensor, dtype))) is not None:
            return there
        if dtype == plan.produced:
            assert at.inputs[0] is not None
            return at.inputs[0]
        produced = self.codes(op, plan, plan.produced, at)
        values = self.emit(op, DQ, produced, tensor, plan.grid(plan.produced))
        made = self.emit(op, Q, values, tensor, plan.grid(dtype))
        self.made[tensor, dtype] = made
        return made

    def clip(self, op: Any, value: ir.Value, grid: QuantizationGrid, stem: str) -> ir.Value:
        """Emit a Clip to the range of a grid."""
        ends = [
            self.initializer(np.asarray(end), f"{stem}_clip_{name}")
            for end, name in zip(grid.range, ("min", "max"), strict=True)
        ]
        named = self._names.take(f"{stem}_Clip_Output")
        made: ir.Value = op.Clip(
            value, *ends, _name=self._names.take(f"{stem}_Clip"), _outputs=[named]
        )
        made.type, made.shape = value.type, value.shape
        return made

    def initializer(self, array: npt.NDArray[np.generic], name: str) -> ir.Value:
        """Register an initializer under a name that is free."""
        return new_initializer(self.model.graph, ir.Tensor(array, name=self._names.take(name)))

    def constant(self, op: Any, change: ConstantChange) -> ir.Value:
        """Emit a DequantizeLinear of other codes of a constant."""
        old, value = change.dequantize, change.dequantize.outputs[0]
        stem = value.name
        arrays = {
            "codes": change.codes,
            "scale": change.scale,
            "zero_point": change.zero_point,
        }
        inputs: list[ir.Value | None] = [
            self.initializer(array, f"{stem}_{kind}_converted")
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
                self.initializer(array, f"{tensor.name}_{kind}_convert")
                for kind, array in arrays.items()
            ]
        return self._parameters[tensor, grid]

    def _domain(self, wide: bool, beside: ir.Node) -> str:
        """Return the domain of a Q or DQ (``wide``: of 16 bits) beside one of the model."""
        if beside.domain != _MICROSOFT and not (wide and self.opset < OPSET_OF_16_BITS):
            return ""
        self.model.opset_imports.setdefault(_MICROSOFT, 1)
        return _MICROSOFT


def _first_node(tensor: QuantizedTensor) -> ir.Node:
    return tensor.quantize or tensor.dequantizes[0]
