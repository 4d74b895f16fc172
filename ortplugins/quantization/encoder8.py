# SPDX-License-Identifier: MIT
"""Products in 8 bits, weights and activations both: what makes encoders faster on a CPU.

    MatMul(x, W)  ->  MatMulIntegerToFloat(QuantizeLinear(x / s), codes of s * W, bias)
                      + MatMul(Gather(x, channels), W[channels])

Activations have one range for the whole tensor, that of the calibration's tokens: what a text
becomes does not depend on the other texts of a batch, nor on padding, and numbers beyond
the range are clipped. A few input channels of encoders are many times as large as the others
and would stretch it. Scales s of the channels make up for that where a Mul costs less, or goes
into the norm before (SmoothQuant, Xiao et al., arXiv 2211.10438); else these channels are
multiplied in float, apart from the rest (LLM.int8(), Dettmers et al., arXiv 2208.07339).

Codes of weights are symmetric, with one scale per column. Kernels of onnxruntime for x86
without VNNI add two products in 16 bits, and saturate. So no two codes of one sign among four
rows that such a kernel takes together add up to more than 128: 255 * 128 fits. That is right
everywhere, and costs less than 7 bits do; codes of uint8 would be, too, at half of the speed.

MiniLM-L6, 200 texts that calibration did not read, in batches of 8: mean cosine to float's
embeddings, agreement of the rankings (Spearman), time of 8 x 128 tokens on one core with VNNI:

    onnxruntime's quantize_dynamic's scheme, per column     .9940    .9912    .42
    scales of channels, 8 bits                              .9981    .9973    .43
    some channels in float, 7 bits                          .9988    .9984    .49
    what is written here                                    .9989    .9986    .41
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript import TapeBuilder

from ortplugins.errors import ModelFileError, QuantizationError
from ortplugins.model_io.loading import ModelLike
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.codes import checked
from ortplugins.quantization.files import QuantizedFile, QuantizeResult
from ortplugins.quantization.methods.awq import channel_scales
from ortplugins.quantization.methods.nearest import BlockFormat, Floats
from ortplugins.quantization.walk import UNREACHED, Walk
from ortplugins.quantization.weights.folds import divide
from ortplugins.quantization.weights.plan import WeightPlan, plan_weights
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.report import FloatWeights, NodeReport
from ortplugins.quantization.weights.uses import WeightUse, naming
from ortplugins.samples.sources import read_samples
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import label, remove_unused
from rewrite_rules.graph.parameters import constant

# Tokens that ranges come from, and those that errors are measured on, of each activation.
_TOKENS, _MEASURED = 4096, 512
# Exponents of channel scales; numbers of channels that may be multiplied in float. What takes
# more time has to bring the error down to so much of what it was.
_ALPHAS, _OUTLIERS, _WORTH = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (4, 8, 16, 32), 0.6
_TOP = 127  # of codes of weights, and of two of them that are added in 16 bits
_FIRST_OPSET, _IR_VERSION = 10, 10  # of QuantizeLinear
_ONLY_ZEROS = "samples have only zeros for it"
_FORM = BlockFormat(bits=8, block_size=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedProducts:
    """How the products with one activation are computed."""

    scale: np.float32
    zero_point: np.uint8
    outliers: npt.NDArray[np.int64]  # input channels that are multiplied in float
    channel_scales: Floats | None = None  # [K], which activations are divided by
    errors: tuple[float, ...] = ()  # of each weight's output, relative to the output

    @property
    def error(self) -> float:
        """The greatest of the errors."""
        return max(self.errors)

    def codes(self, weight: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
        """Return codes ``[K, N]``, 0 in rows of outliers, and scales ``[N]`` of a weight."""
        scales = self.channel_scales
        scaled = weight.copy() if scales is None else weight * scales[:, None]
        scaled[self.outliers] = 0
        steps = np.maximum(_largest_pair(scaled), _largest_pair(-scaled)) / np.float32(_TOP)
        steps[steps < np.finfo(np.float32).tiny] = 1
        codes = np.rint(scaled / steps).astype(np.int8)
        return codes, steps.astype(np.float32)


def quantize_encoder8(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    calibration_data_reader: Any = None,
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    least_cosine: float = 0.999,
    rules: Sequence[tuple[str, Any]] | Mapping[Any, Any] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Quantise the products of MatMul and Gemm to 8 bits, activations included.

    Args:
        model: As of :func:`.quantize`, like all others that are not below.
        output: File to write.
        calibration_data_reader: Samples.
        calibration_providers: Execution providers that run them.
        least_cosine: Least cosine, 0 to 1, of a layer's output to the float layer's, on
            sampled tokens; layers below it stay in float.
        rules: Nodes to leave in float, ``"float"`` by pattern as in :class:`.Recipe`.
        overwrite: Whether ``output`` may exist.
        progress: Called with steps done, their number and what is done.

    Raises:
        CalibrationError: If a sample is bad.
        ModelFileError: If the model has an opset below 10, or no layer can be kept in 8 bits.
        QuantizationError: If an argument is out of range.
    """
    if not (hasattr(least_cosine, "__float__") and 0 <= least_cosine <= 1):
        raise QuantizationError(f"least_cosine is {least_cosine!r}; expected 0 to 1")
    recipe = Recipe(**vars(_FORM), rules=rules)
    if any(found != {"keep_float": True} for _, found in recipe.rules):
        raise QuantizationError("rules of encoder8 are PATTERN=float, and no others")
    file = QuantizedFile(model, output, overwrite=overwrite, progress=progress)
    plan = plan_weights(file.model, recipe)
    with file.scratch() as scratch:
        samples = read_samples(calibration_data_reader, file.model)
        walk = Walk(file.model, samples, scratch, calibration_providers, progress)
        kept = _quantize_products(plan, least_cosine, walk)
        file.model.ir_version = max(file.model.ir_version or 0, _IR_VERSION)
        report = plan.report
        report.method = "encoder8"
        report.floats += (
            FloatWeights(row.op_type, 1, row.K * row.N, row.reason) for row in kept
        )
        return file.saved(report)


def _quantize_products(plan: WeightPlan, least_cosine: float, walk: Walk) -> list[NodeReport]:
    """Quantise the products of a plan, in place; return the rows of those that stay."""
    if (opset := plan.model.opset_imports.get("", 0)) < _FIRST_OPSET:
        raise ModelFileError(
            f"the model has opset {opset}: export it with {_FIRST_OPSET} or later for encoder8"
        )
    layers: dict[str, list[WeightUse]] = {}
    weights = [weight for group in plan.groups for weight in group.weights]
    rows = {use: row for w in weights for use, row in zip(w.uses, w.rows, strict=True)}
    for use, row in rows.items():
        row.reason = use.no_statistics or ""
        if use.node.graph is not plan.model.graph:
            row.reason = "it lies in a subgraph of If, Loop or Scan"
        if not row.reason:
            layers.setdefault(str(use.activation and use.activation.name), []).append(use)
    writer = _Writer(plan.model)
    for name in sorted(layers, key=lambda name: walk.places.get(name, 0)):
        uses = layers[name]
        known = walk.statistics(name, uses[0].K, max_tokens=_TOKENS)
        if known is None or not known.tokens.any():  # which say nothing of its range
            for use in uses:
                rows[use].reason = UNREACHED if known is None else _ONLY_ZEROS
            continue
        found = choose(known.tokens, [float_matrix(use) for use in uses])
        for use, error in zip(uses, found.errors, strict=True):
            # Cosine of two vectors whose difference, at right angles, has this size.
            row, cosine = rows[use], 1 / math.sqrt(1 + error * error)
            if cosine >= least_cosine:  # NaN is not known to be near
                row.bits, row.block_size, row.method = 8, -1, "encoder8"
                row.output_error, row.bytes_after = error, _FORM.stored_bytes(use.K, use.N)
            else:
                row.reason = (
                    f"its output in 8 bits has a cosine of {cosine:.5f} with float's, below "
                    f"least_cosine ({least_cosine})"
                )
        if left := [use for use in uses if rows[use].quantized]:
            writer.write(found, left)
    kept = [row for row in rows.values() if not row.quantized]
    if len(kept) == len(rows):
        reasons = sorted({row.reason for row in kept})
        raise ModelFileError(f"nothing to quantise: {'; '.join(reasons)}")
    remove_unused(plan.model)
    return kept


@np.errstate(over="ignore", invalid="ignore")  # errors are NaN then, and nothing is taken
def choose(tokens: Floats, weights: Sequence[Floats]) -> QuantizedProducts:
    """Find out how products of an activation ``[T, K]`` with weights ``[K, N]`` are rounded.

    What takes more time is tried later, and taken where it brings the error down by enough.
    """
    reach = abs(tokens).max(axis=0)
    rows = np.max([abs(weight).max(axis=1) for weight in weights], axis=0)
    order = np.argsort(-reach, kind="stable")
    sample = tokens[:: max(1, len(tokens) // _MEASURED)]
    exact = [sample @ weight for weight in weights]

    def measured(scales: Floats | None, outliers: npt.NDArray[np.int64]) -> QuantizedProducts:
        scaled = tokens if scales is None else tokens / scales
        scale, zero_point = _range(np.delete(scaled, outliers, axis=1))
        found = QuantizedProducts(scale, zero_point, outliers, scales)
        rounded = _rounded(sample if scales is None else sample / scales, scale, zero_point)
        errors = []
        for weight, expected in zip(weights, exact, strict=True):
            codes, steps = found.codes(weight)
            output = rounded @ (codes * steps) + sample[:, outliers] @ weight[outliers]
            errors.append(_relative(output - expected, expected))
        return dataclasses.replace(found, errors=tuple(errors))

    none = order[:0]
    best = measured(None, none)
    # As in SmoothQuant (Xiao et al., arXiv 2211.10438).
    scaled = (measured(channel_scales(reach, rows, alpha), none) for alpha in _ALPHAS)
    counts = [count for count in _OUTLIERS if count <= len(order) // 8]
    picked = [measured(None, np.sort(order[:count])) for count in counts]
    tried = [min(scaled, key=lambda found: found.error), *picked]
    # A Mul goes over the activation once; what is multiplied apart is written and added.
    if sum(weight.shape[1] for weight in weights) * 2 < len(order):
        tried = [*tried[1:], tried[0]]
    for found in tried:
        if found.error < _WORTH * best.error:
            best = found
    return best


def _largest_pair(weight: Floats) -> Floats:
    """Return the largest sum of positive numbers of each column that a kernel may add first.

    One of them alone, or two of each four rows.
    """
    k, n = weight.shape
    fours = np.zeros((-(-k // 4) * 4, n), np.float32)
    fours[:k] = np.maximum(weight, 0)
    a, b, c, d = (fours[row::4] for row in range(4))
    pairs = np.maximum(a, b) + np.maximum(c, d)
    for pair in (a + b, c + d):
        np.maximum(pairs, pair, out=pairs)
    largest: Floats = pairs.max(axis=0)
    return largest


def float_matrix(use: WeightUse) -> Floats:
    """Return the weight of a use, float32 ``[K, N]``."""
    with naming(use.weight.name or ""):
        return checked(use.matrix)


def _range(tokens: Floats) -> tuple[np.float32, np.uint8]:
    """Return scale and zero point of all numbers; 0 has a code."""
    low, high = min(tokens.min(initial=0), 0), max(tokens.max(initial=0), 0)
    scale = max(np.float32((float(high) - float(low)) / 255), np.finfo(np.float32).tiny)
    return np.float32(scale), np.uint8(np.rint(-low / scale))


def _rounded(x: Floats, scale: np.float32, zero_point: np.uint8) -> Floats:
    zero = np.float32(zero_point)
    rounded: Floats = (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale
    return rounded


def _relative(difference: Floats, of: Floats) -> float:
    """Return the ratio of two Frobenius norms; NaN or infinite where they are."""
    norm = float(np.linalg.norm(of.astype(np.float64)))
    return float(np.linalg.norm(difference.astype(np.float64))) / norm if norm else 0.0


class _Writer:
    """Writes products of integers in the place of float ones."""

    def __init__(self, model: ir.Model) -> None:
        self._model, self._names = model, FreshNames(model)
        model.opset_imports.setdefault("com.microsoft", 1)

    def write(self, how: QuantizedProducts, uses: Sequence[WeightUse]) -> None:
        """Replace products with one activation."""
        # The activation, or what took its place where that is such a product as well.
        x = uses[0].node.inputs[0]
        assert x is not None
        name, first, op = x.name or "", _first_reader(x), TapeBuilder()
        half = uses[0].tensor.dtype is ir.DataType.FLOAT16
        if how.channel_scales is not None:
            reads = [(use.node, 0) for use in uses]
            divide(x, reads, how.channel_scales, uses[0].tensor.dtype, self._names)
            x = uses[0].node.inputs[0]
            assert x is not None
        if half:
            x = op.Cast(x, to=ir.DataType.FLOAT)
        scale = self._constant(np.array(how.scale), f"{name}.scale")
        zero_point = self._constant(np.array(how.zero_point), f"{name}.zero_point")
        codes, picked = op.QuantizeLinear(x, scale, zero_point), None
        if how.outliers.size:
            index = self._constant(how.outliers, f"{name}.outlier_channels")
            picked = op.Gather(x, index, axis=-1)
        self._put_before(first, op, name)
        for use in uses:
            node, weight, op = use.node, float_matrix(use), TapeBuilder()
            matrix, steps = how.codes(weight)
            last, bias = _bias_behind(node, use.N)
            base = use.weight.name or ""
            factors = [
                self._constant(matrix, f"{base}.int8"),
                scale,
                self._constant(steps, f"{base}.scales"),
                zero_point,
            ]
            if bias is not None:
                zeros = np.zeros(use.N, np.int8)
                factors.append(self._constant(zeros, f"{base}.zero_points"))
                factors.append(self._constant(bias, f"{base}.bias"))
            y = op.MatMulIntegerToFloat(codes, *factors, _domain="com.microsoft")
            if picked is not None:
                rows = self._constant(weight[how.outliers], f"{base}.outlier_rows")
                y = op.Add(y, op.MatMul(picked, rows))
            if half:
                y = op.Cast(y, to=ir.DataType.FLOAT16)
            if node.op_type == "Gemm" and bias is None and len(node.inputs) > 2:
                y = op.Add(y, node.inputs[2])
            self._put_before(node, op, base)
            replaced, node.name = last.outputs[0], label(node)  # its output may have given it
            y.dtype, y.shape = use.tensor.dtype, replaced.shape
            if replaced.is_graph_output():
                y.name, replaced.name = replaced.name, y.name
            replaced.replace_all_uses_with(y, replace_graph_outputs=True)

    def _constant(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        tensor = ir.tensor(array.copy(), name=self._names.take(name))
        return new_initializer(self._model.graph, tensor)

    def _put_before(self, node: ir.Node, op: TapeBuilder, name: str) -> None:
        for made in op.nodes:
            made.name = made.outputs[0].name = self._names.take(f"{name}.{made.op_type}")
        assert isinstance(node.graph, ir.Graph)
        node.graph.insert_before(node, op.nodes)


def _first_reader(value: ir.Value) -> ir.Node:
    """Return the node of the main graph that reads a value first."""
    graph = value.graph
    assert isinstance(graph, ir.Graph)
    readers = {use.node for use in value.uses()}
    return next(node for node in graph if node in readers)


def _bias_behind(node: ir.Node, n: int) -> tuple[ir.Node, Floats | None]:
    """Return a constant vector that is added to a product, and the last node it replaces."""
    if node.op_type == "Gemm":
        return node, _vector(node.inputs[2] if len(node.inputs) > 2 else None, n)
    (output,) = node.outputs
    uses = list(output.uses())
    if output.is_graph_output() or len(uses) != 1 or uses[0].node.op_type != "Add":
        return node, None
    behind, index = uses[0]
    # A branch of If gives no value of the graph around it as its own.
    alone = behind.domain or behind.graph is not node.graph
    bias = None if alone else _vector(behind.inputs[1 - index], n)
    return (node, None) if bias is None else (behind, bias)


def _vector(value: ir.Value | None, n: int) -> Floats | None:
    """Return a constant ``[N]`` as float32; None for all else."""
    tensor = constant(value)
    if tensor is None or tuple(tensor.shape.numpy()) != (n,):
        return None
    return tensor.numpy().astype(np.float32)
