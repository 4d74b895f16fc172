# SPDX-License-Identifier: MIT
"""An ONNX graph that torch runs and differentiates: a function for each operator.

Only operators that exporters of transformers write are known, in their meaning since opset 13;
others are refused by name. Nodes run in parts, each of which torch runs again while it
differentiates, so that only what passes between parts is kept.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from ortplugins.errors import ModelFileError
from rewrite_rules.graph.nodes import label

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = dict[str, Tensor]

# Nodes of a part: about one layer of a transformer.
_PART = 40

_TYPES = {
    ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16,
    ir.DataType.DOUBLE: torch.float64, ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32, ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8, ir.DataType.BOOL: torch.bool,
}  # fmt: skip


class TorchGraph:
    """The graph of a model, which torch can differentiate.

    Attributes:
        constants: Its initializers by name. What is put in their place, by
            :meth:`run`, is what can be learnt.
    """

    def __init__(self, model: ir.Model, outputs: Sequence[str]) -> None:
        """Take the part of a graph that computes some of its outputs.

        Raises:
            ModelFileError: If an operator of it has no function here; names the node.
        """
        self.outputs = list(outputs)
        wanted = {value for value in model.graph.outputs if value.name in self.outputs}
        self._nodes = _nodes_for(model.graph, wanted)
        for node in self._nodes:
            if node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS:
                raise ModelFileError(
                    f"node {label(node)!r}: {node.domain or 'ai.onnx'}:{node.op_type} can't "
                    "be differentiated here"
                )
        self.constants: Tensors = {}
        for node in self._nodes:
            for value in node.inputs:
                if value is not None and value.const_value is not None and value.name:
                    self.constants.setdefault(value.name, tensor_of(value.const_value))
        self._parts = _parts(self._nodes, self.outputs)

    def run(
        self, feed: Mapping[str, np.ndarray[Any, Any]], learnt: Mapping[str, Tensor] = {}
    ) -> Tensors:
        """Return the outputs for inputs; ``learnt`` are tensors in place of constants.

        They are asked for where a node reads them, and not kept.
        """
        values: Tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
        for nodes, reads, writes, last in self._parts:
            run = functools.partial(self._run_part, nodes, reads, writes, learnt)
            given = [values[name] for name in reads]
            if torch.is_grad_enabled():
                made = checkpoint(run, *given, use_reentrant=False)
            else:
                made = run(*given)
            values.update(zip(writes, made, strict=True))
            for name in last:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}

    def _run_part(
        self,
        nodes: Sequence[ir.Node],
        reads: Sequence[str],
        writes: Sequence[str],
        learnt: Mapping[str, Tensor],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        values = collections.ChainMap(
            dict(zip(reads, given, strict=True)), cast(Any, learnt), self.constants
        )
        for node in nodes:
            inputs = [None if x is None else values[x.name or ""] for x in node.inputs]
            attributes = {name: item.value for name, item in node.attributes.items()}
            made = OPERATORS[node.op_type](inputs, attributes, len(node.outputs))
            outputs = made if isinstance(made, tuple | list) else (made,)
            for value, tensor in zip(node.outputs, outputs, strict=False):
                values[value.name or ""] = tensor
        return tuple(values[name] for name in writes)


def tensor_of(tensor: ir.TensorProtocol) -> Tensor:
    """Return a tensor as torch's; codes of 4 bits as bytes."""
    array = tensor.numpy()
    if tensor.dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        array = array.astype(np.int8 if tensor.dtype is ir.DataType.INT4 else np.uint8)
    return torch.from_numpy(np.array(array))


def _nodes_for(graph: ir.Graph, wanted: set[ir.Value]) -> list[ir.Node]:
    """Return the nodes that some values need, in the graph's order."""
    needed, found = set(wanted), []
    for node in reversed([*graph]):
        if needed & set(node.outputs):
            needed.update(value for value in node.inputs if value is not None)
            found.append(node)
    return found[::-1]


def _parts(
    nodes: Sequence[ir.Node], outputs: Sequence[str]
) -> list[tuple[list[ir.Node], list[str], list[str], list[str]]]:
    """Cut nodes into parts: what each reads of others, what others read, what ends with it."""
    groups = [list(nodes[i : i + _PART]) for i in range(0, len(nodes), _PART)]
    made = [{v.name for node in group for v in node.outputs if v.name} for group in groups]
    read = [
        {
            v.name
            for node in group
            for v in node.inputs
            if v is not None and v.name and v.const_value is None
        }
        for group in groups
    ]
    parts = []
    for number, group in enumerate(groups):
        later = set(outputs).union(*read[number + 1 :])
        reads = sorted(read[number] - made[number])
        writes = sorted(made[number] & later)
        last = [name for name in reads if name not in later]
        parts.append((group, reads, writes, last))
    return parts


# Operators: from inputs, attributes and the number of outputs to the outputs.
_Inputs: TypeAlias = list[Any]
_Attributes: TypeAlias = Mapping[str, Any]


def _ints(tensor: Tensor) -> list[int]:
    return [int(x) for x in tensor.reshape(-1).tolist()]


def _axes(inputs: _Inputs, attributes: _Attributes, place: int = 1) -> list[int] | None:
    if len(inputs) > place and inputs[place] is not None:
        return _ints(inputs[place])
    return [*attributes["axes"]] if "axes" in attributes else None


def _reshape(x: Tensor, sizes: Sequence[int], allowzero: int) -> Tensor:
    return x.reshape(
        [x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(sizes)]
    )


def _squeeze(inputs: _Inputs, attributes: _Attributes) -> Tensor:
    axes = _axes(inputs, attributes)
    return inputs[0].squeeze() if axes is None else inputs[0].squeeze(tuple(axes))


def _unsqueeze(inputs: _Inputs, attributes: _Attributes) -> Tensor:
    x, axes = inputs[0], _axes(inputs, attributes) or []
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _slice(inputs: _Inputs) -> Tensor:
    x, given_axes, given_steps = inputs[0], *(*inputs[3:], None, None)[:2]
    starts, ends = _ints(inputs[1]), _ints(inputs[2])
    axes = [*range(len(starts))] if given_axes is None else _ints(given_axes)
    steps = [1] * len(starts) if given_steps is None else _ints(given_steps)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places = range(*slice(start, end, step).indices(x.shape[axis]))
        if step == 1:
            x = x.narrow(axis, places.start, len(places))
        else:
            x = x.index_select(axis, torch.tensor([*places], dtype=torch.int64))
    return x


def _split(inputs: _Inputs, attributes: _Attributes, count: int) -> list[Tensor]:
    x, axis = inputs[0], attributes.get("axis", 0)
    if len(inputs) > 1 and inputs[1] is not None:
        return [*x.split(_ints(inputs[1]), axis)]
    return [*x.split(-(-x.shape[axis] // count), axis)]


def _gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    axis %= x.ndim
    flat = torch.where(indices < 0, indices + x.shape[axis], indices).reshape(-1)
    taken = x.index_select(axis, flat)
    return taken.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def _gather_nd(x: Tensor, indices: Tensor, batch: int) -> Tensor:
    if batch:
        rest = math.prod(x.shape[:batch])
        parts = zip(
            x.reshape(rest, *x.shape[batch:]),
            indices.reshape(rest, *indices.shape[batch:]),
            strict=True,
        )
        made = torch.stack([_gather_nd(a, b, 0) for a, b in parts])
        return made.reshape((*x.shape[:batch], *made.shape[1:]))
    return x[tuple(indices.movedim(-1, 0))]


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(inputs: _Inputs, attributes: _Attributes, count: int) -> Tensor:
        axes = _axes(inputs, attributes)
        if axes is None:
            axes = [] if attributes.get("noop_with_empty_axes") else [*range(inputs[0].ndim)]
        if not axes:
            return inputs[0]
        return function(inputs[0], axes, keepdim=bool(attributes.get("keepdims", 1)))

    return reduce


def _layer_norm(inputs: _Inputs, attributes: _Attributes, count: int) -> Tensor:
    x, scale = inputs[0], inputs[1]
    bias = inputs[2] if len(inputs) > 2 else None
    axis = attributes.get("axis", -1) % x.ndim
    return F.layer_norm(x, x.shape[axis:], scale, bias, attributes.get("epsilon", 1e-5))


def _gemm(inputs: _Inputs, attributes: _Attributes, count: int) -> Tensor:
    a, b = inputs[0], inputs[1]
    a = a.T if attributes.get("transA") else a
    b = b.T if attributes.get("transB") else b
    y = attributes.get("alpha", 1.0) * (a @ b)
    if len(inputs) > 2 and inputs[2] is not None:
        y = y + attributes.get("beta", 1.0) * inputs[2]
    return y


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _constant(attributes: _Attributes) -> Tensor:
    if "value" in attributes:
        return tensor_of(attributes["value"])
    ((name, value),) = attributes.items()
    return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)


def _constant_of_shape(inputs: _Inputs, attributes: _Attributes, count: int) -> Tensor:
    value = attributes.get("value")
    filled = torch.zeros(1) if value is None else tensor_of(value)
    return filled.expand(_ints(inputs[0]) or [1]).reshape(_ints(inputs[0])).clone()


def _clip(inputs: _Inputs, attributes: _Attributes, count: int) -> Tensor:
    x, least, most = (*inputs, None, None)[:3]
    x = x if least is None else torch.maximum(x, least)
    return x if most is None else torch.minimum(x, most)


def _cumsum(inputs: _Inputs, attributes: _Attributes, count: int) -> Tensor:
    x, axis = inputs[0], int(inputs[1])
    x = x.flip(axis) if attributes.get("reverse") else x
    y = x.cumsum(axis, dtype=x.dtype)
    y = y - x if attributes.get("exclusive") else y
    return y.flip(axis) if attributes.get("reverse") else y


def dequantized(
    codes: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int
) -> Tensor:
    """Return ``(codes - zero) * scale``, whatever share a scale.

    Args:
        codes: Any shape.
        scale: One number; one for each index of an axis; or, in blocks, the shape of the codes
            with ``axis`` divided by ``block``.
        zero: Of the scale's shape; None for 0.
        axis: Of the scales, or of the blocks.
        block: Elements along ``axis`` that share a scale; 0 without blocks.
    """
    shape = codes.shape
    if block:
        if shape[axis] % block:  # the last block is shorter
            pad = [0, 0] * (codes.ndim - axis - 1) + [0, -shape[axis] % block]
            codes = F.pad(codes, pad)
        # [..., blocks, block, ...] beside scales of [..., blocks, 1, ...]
        codes = codes.unflatten(axis, (-1, block))
        scale = scale.unsqueeze(axis + 1)
        zero = None if zero is None else zero.unsqueeze(axis + 1)
    elif scale.numel() > 1:
        along = [1] * codes.ndim
        along[axis] = -1
        scale = scale.reshape(along)
        zero = None if zero is None else zero.reshape(along)
    values = codes.to(scale.dtype)
    values = (values if zero is None else values - zero.to(scale.dtype)) * scale
    if block:
        values = values.flatten(axis, axis + 1).narrow(axis, 0, shape[axis])
    return values


def _dequantize(inputs: _Inputs, attributes: _Attributes, count: int) -> Tensor:
    codes, scale, zero = (*inputs, None)[:3]
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    return dequantized(codes, scale, zero, axis % max(codes.ndim, 1), block)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that takes tensors alone."""
    return lambda inputs, attributes, count: function(*inputs)


OPERATORS: Mapping[str, Callable[[_Inputs, _Attributes, int], Any]] = {
    "Abs": _plain(torch.abs),
    "Add": _plain(torch.add),
    "And": _plain(torch.logical_and),
    "ArgMax": lambda x, a, n: x[0].argmax(a.get("axis", 0), bool(a.get("keepdims", 1))),
    "Cast": lambda x, a, n: x[0].to(_TYPES[ir.DataType(a["to"])]),
    "Ceil": _plain(torch.ceil),
    "Clip": _clip,
    "Concat": lambda x, a, n: torch.cat(x, a["axis"]),
    "Constant": lambda x, a, n: _constant(a),
    "ConstantOfShape": _constant_of_shape,
    "Cos": _plain(torch.cos),
    "CumSum": _cumsum,
    "DequantizeLinear": _dequantize,
    "Div": _plain(_divide),
    "Equal": _plain(torch.eq),
    "Erf": _plain(torch.erf),
    "Exp": _plain(torch.exp),
    "Expand": lambda x, a, n: (
        x[0] * torch.ones(_ints(x[1]), dtype=x[0].dtype)
        if x[0].dtype is not torch.bool
        else x[0] & torch.ones(_ints(x[1]), dtype=torch.bool)
    ),
    "Flatten": lambda x, a, n: x[0].reshape(math.prod(x[0].shape[: a.get("axis", 1)]), -1),
    "Gather": lambda x, a, n: _gather(x[0], x[1], a.get("axis", 0)),
    "GatherElements": lambda x, a, n: _gather_elements(x[0], x[1], a.get("axis", 0)),
    "GatherND": lambda x, a, n: _gather_nd(x[0], x[1], a.get("batch_dims", 0)),
    "Gelu": lambda x, a, n: F.gelu(x[0], approximate=a.get("approximate", "none")),
    "Gemm": _gemm,
    "Greater": _plain(torch.gt),
    "GreaterOrEqual": _plain(torch.ge),
    "Identity": _plain(lambda x: x),
    "IsNaN": _plain(torch.isnan),
    "LayerNormalization": _layer_norm,
    "Less": _plain(torch.lt),
    "LessOrEqual": _plain(torch.le),
    "Log": _plain(torch.log),
    "MatMul": _plain(torch.matmul),
    "Max": lambda x, a, n: torch.stack(torch.broadcast_tensors(*x)).amax(0),
    "Min": lambda x, a, n: torch.stack(torch.broadcast_tensors(*x)).amin(0),
    "Mul": _plain(torch.mul),
    "Neg": _plain(torch.neg),
    "Not": _plain(torch.logical_not),
    "Or": _plain(torch.logical_or),
    "Pow": _plain(torch.pow),
    "Range": _plain(lambda a, b, step: torch.arange(a.item(), b.item(), step.item())),
    "Reciprocal": _plain(torch.reciprocal),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "ReduceMax": _reduce(torch.amax),
    "Relu": _plain(torch.relu),
    "Reshape": lambda x, a, n: _reshape(x[0], _ints(x[1]), a.get("allowzero", 0)),
    "Shape": lambda x, a, n: torch.tensor(
        x[0].shape[slice(a.get("start", 0), a.get("end"))], dtype=torch.int64
    ),
    "Sigmoid": _plain(torch.sigmoid),
    "Sign": _plain(torch.sign),
    "Sin": _plain(torch.sin),
    "Slice": lambda x, a, n: _slice(x),
    "Softmax": lambda x, a, n: torch.softmax(x[0], a.get("axis", -1)),
    "Split": _split,
    "Sqrt": _plain(torch.sqrt),
    "Squeeze": lambda x, a, n: _squeeze(x, a),
    "Sub": _plain(torch.sub),
    "Tanh": _plain(torch.tanh),
    "Tile": lambda x, a, n: x[0].tile(_ints(x[1])),
    "Transpose": lambda x, a, n: x[0].permute(*a.get("perm", range(x[0].ndim)[::-1])),
    "Trilu": lambda x, a, n: (torch.triu if a.get("upper", 1) else torch.tril)(
        x[0], int(x[1]) if len(x) > 1 else 0
    ),
    "Unsqueeze": lambda x, a, n: _unsqueeze(x, a),
    "Where": _plain(torch.where),
}
