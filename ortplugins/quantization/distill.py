# SPDX-License-Identifier: MIT
"""Learns codes and scales of a quantised model from the float model's own answers.

    scale = scale * (1 + a)         vector = vector + rms(vector) * b
    code = round(place), which starts at w / scale and goes half a code at most

Vectors are biases and the weights of norms. a and b are moved by Adam (Kingma and Ba, arXiv
1412.6980), places by the sign of their gradient, through the rounding as if it were none
(Cheng et al., arXiv 2309.05516, there for one layer at a time). The loss is that of the whole
model, as in mlx-lm's DWQ, which learns scales alone:

    language models  mean over tokens of KL(p || q), p the float model's distribution
    encoders         squared error of tokens over their energy, and 1 - cosine of their mean

A tenth of the samples is held out: what is kept is best on those, and learning stops when they
get worse.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import onnx_ir as ir
import torch
from torch.utils.checkpoint import checkpoint

from ortplugins.errors import CalibrationError, ModelFileError, QuantizationError
from ortplugins.model_io.loading import ModelLike, load_model
from ortplugins.model_io.model_folder import model_in
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.files import QuantizedFile, QuantizeResult
from ortplugins.quantization.torch_graph import Tensor, TorchGraph, dequantized, tensor_of
from ortplugins.quantization.weights.quantize import quantize
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.report import QuantizeReport
from ortplugins.runtime.session_settings import DISABLED_PACKING_KEY
from ortplugins.runtime.stock_session import opened, stock_options
from ortplugins.samples.sources import Feed, read_samples
from rewrite_rules.graph.nodes import label

# Samples that are held out, and how many there have to be.
_HELD_OUT, _LEAST_SAMPLES = 0.1, 10
# Samples of the recipe that learning starts from: of more, GPTQ gains little.
_STARTING_SAMPLES = 128
# Epochs without a gain after which learning stops.
_PATIENCE = 2
# Rows of logits that are compared at a time: 50 MB for 50,000 tokens.
_STRIP = 256
# Steps until the rate is reached; what is left of it at the end.
_WARM_UP, _LAST = 10, 0.05
_BETAS = (0.9, 0.99)
# How far from its code a place is at first, at most.
_WITHIN = 0.45
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# Operators whose vectors are learnt.
_READERS = frozenset({"Add", "Gemm", "LayerNormalization", "Mul", "RMSNormalization"})


@dataclasses.dataclass(frozen=True)
class Learning:
    """How long and how fast is learnt.

    Attributes:
        epochs: How often every sample is seen.
        samples: Of a step, where they are of one shape.
        rate: Of Adam, relative to what is learnt.
        reach: How far a weight may go in all steps together, in codes; 0 keeps all codes.
        seed: Of the order of samples.
    """

    epochs: int = 8
    samples: int = 4
    rate: float = 1e-4
    reach: float = 0.25
    seed: int = 0


class _Outcome(NamedTuple):
    """What came out: the loss on samples that were held out, before and after, and steps."""

    before: float
    after: float
    steps: int


def quantize_distilled(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    calibration_data_reader: Any,
    recipe: Recipe | None = None,
    learning: Learning = Learning(),
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    external_data: bool | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Quantise weights, then learn from the float model's own answers on the same samples.

    Args:
        model: Path of a float model, or of a folder with one; not changed.
        output: As of :func:`.quantize`.
        calibration_data_reader: Samples, as of :func:`.quantize`, ten or more.
        recipe: Which weights are quantised, and where learning starts from; GPTQ in blocks
            of 32 by default. It writes DequantizeLinear alone, which the fusion takes, and
            sees 128 of the samples.
        learning: How long and how fast.
        calibration_providers: Execution providers that run the samples for the recipe.
        external_data: As of :func:`.quantize`.
        overwrite: Whether ``output`` may exist.
        progress: Called as the work goes on: steps done, all steps, what is being done.

    Returns:
        Path, report and model; a note has the loss before and after, on samples held out.

    Raises:
        QuantizationError: If the recipe writes other operators.
        CalibrationError, ModelFileError: As :func:`learn_scales` and :func:`.quantize`.
    """
    recipe = recipe or Recipe(method="gptq")
    if recipe.for_kernels or recipe.fuse_tables:
        name = "quant_format" if recipe.for_kernels else "fuse_tables"
        raise QuantizationError(
            f"{name}: only scales of DequantizeLinear are learnt; fuse the result afterwards, "
            "by `ortplugins optimize`"
        )
    file = QuantizedFile(model, output, overwrite=overwrite)
    _answer(file.model)
    samples = read_samples(calibration_data_reader, file.model)
    _check_count(samples)
    with file.scratch() as scratch:
        first = scratch / ("start" if os.path.isdir(model) else "start.onnx")
        started = quantize(
            model,
            first,
            recipe=recipe,
            calibration_data_reader=starting_samples(samples),
            calibration_providers=calibration_providers,
            progress=progress,
        )
        learnt = learn_scales(
            first,
            output,
            original=model_in(model),
            calibration_data_reader=samples,
            learning=learning,
            external_data=external_data,
            overwrite=overwrite,
            progress=progress,
        )
    notes = (*started.report.notes, *learnt.report.notes)
    report = dataclasses.replace(started.report, notes=notes)
    return dataclasses.replace(learnt, report=report)


def starting_samples(samples: Sequence[Feed]) -> Sequence[Feed]:
    """Return the samples that learning's start is calibrated on: 128, spread over all."""
    step = max(1, len(samples) // _STARTING_SAMPLES)
    return samples[::step][:_STARTING_SAMPLES]


def learn_scales(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    original: str | os.PathLike[str],
    calibration_data_reader: Any,
    learning: Learning = Learning(),
    external_data: bool | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Learn codes, scales, norms and biases of a quantised model from its float model.

    The file keeps its size and its operators. Needs torch. When interrupted (Ctrl-C), write
    what was reached.

    Args:
        model: A model whose quantised weights are constants behind DequantizeLinear, as
            :func:`.quantize` writes them; not changed.
        output: As of :func:`.quantize`.
        original: Path of the float model, which has the same inputs and outputs.
        calibration_data_reader: Samples, as of :func:`.quantize`, ten or more.
        learning: How long and how fast.
        external_data: As of :func:`.quantize`.
        overwrite: Whether ``output`` may exist.
        progress: Called before each step: done, total, how far outputs were and are apart.

    Returns:
        Path, report and model; a note has the loss before and after, on samples held out.

    Raises:
        CalibrationError: If a sample is bad, or there are fewer than ten.
        ModelFileError: If the model has no quantised weights, neither logits nor hidden
            states, or an operator that can't be differentiated here; names it.
    """
    file = QuantizedFile(
        model, output, external_data=external_data, overwrite=overwrite, progress=progress
    )
    with file.scratch():
        samples = read_samples(calibration_data_reader, file.model)
        found = _learn(file.model, original, samples, learning, progress)
        note = (
            f"learnt in {found.steps} steps: on samples held out, outputs were "
            f"{found.before:.3g} from the float model's and are {found.after:.3g}"
        )
        return file.saved(QuantizeReport("distilled", notes=(note,)))


def _learn(
    model: ir.Model,
    original: str | os.PathLike[str],
    samples: Sequence[Feed],
    learning: Learning,
    progress: Progress | None,
) -> _Outcome:
    """Learn in place."""
    _check_count(samples)
    count = max(1, round(_HELD_OUT * len(samples)))
    held_out, taken = samples[-count:], samples[:-count]
    task = _Task(model, original, codes=learning.reach > 0)
    best = first = task.loss(held_out)
    kept, steps, worse = task.reached(), 0, 0
    total = learning.epochs * sum(1 for _ in _batches(taken, learning, 0))
    optimizer = torch.optim.Adam(task.moves.values(), lr=learning.rate, betas=_BETAS)
    try:
        for epoch in range(learning.epochs):
            for batch in _batches(taken, learning, epoch):
                if progress is not None:
                    progress(steps, total, f"learning: loss {first:.3g}, now {best:.3g}")
                share = _share_of_rate(steps, total)
                for group in optimizer.param_groups:
                    group["lr"] = learning.rate * share
                # The shares add up to about half of the steps.
                task.stride = 2 * learning.reach / total * share
                optimizer.zero_grad()
                task.loss_of(batch).backward()
                optimizer.step()
                steps += 1
            worse += 1
            if (now := task.loss(held_out)) < best:
                best, kept, worse = now, task.reached(), 0
            if worse == _PATIENCE:
                break
    except KeyboardInterrupt:  # what was reached is kept
        pass
    task.write(kept)
    return _Outcome(first, best, steps)


def _check_count(samples: Sequence[Feed]) -> None:
    if len(samples) < _LEAST_SAMPLES:
        raise CalibrationError(
            f"{len(samples)} samples: {_LEAST_SAMPLES} or more are needed to learn from; give "
            "a longer text"
        )


def _batches(samples: Sequence[Feed], learning: Learning, epoch: int) -> Iterator[Feed]:
    """Yield samples in a new order; those of one shape side by side, along the first axis."""
    order = np.random.default_rng((learning.seed, epoch)).permutation(len(samples))
    waiting: dict[object, list[Feed]] = {}
    for number in order:
        feed = samples[number]
        shapes = tuple((name, feed[name].shape) for name in sorted(feed))
        group = waiting.setdefault(shapes, [])
        group.append(feed)
        if len(group) == learning.samples:
            yield _joined(waiting.pop(shapes))
    yield from map(_joined, waiting.values())


def _joined(feeds: Sequence[Feed]) -> Feed:
    if len(feeds) == 1:
        return feeds[0]
    return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


def _share_of_rate(step: int, steps: int) -> float:
    """Return the share of the rate: linear at first, then half a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1, (step + 1) / _WARM_UP) * (_LAST + (1 - _LAST) * cosine)


class _Rounding(torch.autograd.Function):  # type: ignore[misc]  # torch may be absent
    """Codes of places; the derivative is that of the places."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, least: int, most: int) -> Tensor:
        return places.round().clamp(least, most)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Task:
    """A quantised model in torch beside the float model in onnxruntime.

    Attributes:
        start, sizes: Of scales and vectors, by name: their first value, and what a move is
            relative to.
        moves: What Adam moves, by name.
        places: Of codes, by name: where they are before they are rounded, and the least and
            the greatest code.
        stride: How far a step takes places, in codes.
    """

    def __init__(
        self, model: ir.Model, original: str | os.PathLike[str], *, codes: bool
    ) -> None:
        self._output, self._has_logits = _answer(model)
        self._graph = TorchGraph(model, [self._output])
        options = stock_options("all")
        # Threads that spin would take the cores from torch's.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Packed weights would be as much memory as the model.
        options.add_session_config_entry(DISABLED_PACKING_KEY, "1")
        options.enable_cpu_mem_arena = False
        name = os.fspath(original)
        self._original = opened(name, options, ["CPUExecutionProvider"], name)
        self._inputs = {item.name for item in self._original.get_inputs()}
        self._values = {value.name or "": value for value in _learnt_values(model)}
        constants = self._graph.constants
        self.start = {name: constants[name].float() for name in self._values}
        scales = {name for name in self._values if _is_scale(self._values[name])}
        if not scales:
            raise ModelFileError(
                "no weight lies behind DequantizeLinear: quantise the model first, in "
                "quant_format QDQ"
            )
        self.sizes = {
            name: start if name in scales else _size_of(start)
            for name, start in self.start.items()
        }
        self.moves = {
            name: torch.zeros_like(start, requires_grad=True)
            for name, start in self.start.items()
        }
        self.stride = 0.0
        self.places: dict[str, tuple[Tensor, int, int]] = {}
        graph = load_model(original).model.graph if codes else ()
        floats = {(label(node), node.op_type): node for node in graph}
        for value, node in _codes_of(model) if codes else ():
            kind = value.dtype
            assert kind is not None and value.name is not None
            weight = _float_weight(floats, node)
            places = _places(constants, node, weight).requires_grad_()
            constants.pop(value.name)
            places.register_post_accumulate_grad_hook(self._move_places)
            self.places[value.name] = places, int(kind.min), int(kind.max)
            self._values[value.name] = value

    def _move_places(self, places: Tensor) -> None:
        """Move places as soon as their gradient is there, which then is not kept."""
        assert places.grad is not None
        with torch.no_grad():
            places -= self.stride * places.grad.sign()
        places.grad = None

    def loss(self, feeds: Sequence[Feed]) -> float:
        """Return the mean loss; nothing is learnt."""
        with torch.no_grad():
            return float(np.mean([self.loss_of(feed).item() for feed in feeds]))

    def loss_of(self, feed: Feed) -> Tensor:
        """Return how far the output is from the float model's."""
        taken = {name: array for name, array in feed.items() if name in self._inputs}
        (expected,) = self._original.run([self._output], taken)
        found = self._graph.run(feed, _Learnt(self))[self._output]
        rows = _real_rows(feed, found)
        p, q = torch.from_numpy(expected)[rows], found[rows]
        p, q = p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1])
        return _divergence(p, q) if self._has_logits else _distance(p, q)

    def reached(self) -> dict[str, Tensor]:
        """Return what is learnt so far, by name; codes as bytes."""
        with torch.no_grad():
            found = {}
            for name, tensor in _Learnt(self).items():
                if name in self.places:
                    _, least, _ = self.places[name]
                    tensor = tensor.to(torch.int8 if least < 0 else torch.uint8)
                found[name] = tensor
            return found

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Put what was learnt into the model."""
        for name, tensor in tensors.items():
            value = self._values[name]
            assert value.const_value is not None
            array = tensor.numpy().astype(value.const_value.numpy().dtype)
            value.const_value = ir.tensor(array, dtype=value.const_value.dtype, name=name)


class _Learnt(Mapping[str, Tensor]):
    """What is learnt as it is now, computed anew whenever it is read."""

    def __init__(self, task: _Task) -> None:
        self._task = task

    def __getitem__(self, name: str) -> Tensor:
        task = self._task
        if name in task.places:
            return cast(Tensor, _Rounding.apply(*task.places[name]))
        return task.start[name] + task.sizes[name] * task.moves[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._task.moves
        yield from self._task.places

    def __len__(self) -> int:
        return len(self._task.moves) + len(self._task.places)


def _answer(model: ir.Model) -> tuple[str, bool]:
    """Return the name of the output that is learnt from, and whether it holds logits."""
    floats = [
        value
        for value in model.graph.outputs
        if value.dtype in _FLOATS and value.shape is not None and value.shape.rank() in (2, 3)
    ]
    for value in floats:
        if "logits" in (value.name or ""):
            return value.name or "", True
    for value in floats:
        if value.shape is not None and value.shape.rank() == 3:
            return value.name or "", False
    raise ModelFileError(
        "the model has no logits, and no hidden states [batch, sequence, hidden]: there is "
        "nothing to learn from"
    )


def _learnt_values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield constants that are learnt: scales of codes, and vectors along their features."""
    vectors = {(size,) for codes, _ in _codes_of(model) for size in _shape_of(codes)}
    found: dict[ir.Value, None] = {}
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            if value is None or value.const_value is None or value.name is None:
                continue
            is_float = value.const_value.dtype in _FLOATS
            if node.op_type == "DequantizeLinear":
                is_learnt = index == 1
            else:
                is_learnt = node.op_type in _READERS and _shape_of(value) in vectors
            # Frequencies of positions reach further than samples are long.
            if is_float and is_learnt and not _turns_rows(node):
                found[value] = None
    yield from found


def _codes_of(model: ir.Model) -> Iterator[tuple[ir.Value, ir.Node]]:
    """Yield the codes that DequantizeLinear reads, each once, and the node."""
    found: dict[ir.Value, ir.Node] = {}
    for node in model.graph:
        codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if codes is not None and codes.const_value is not None:
            found.setdefault(codes, node)
    yield from found.items()


def _float_weight(floats: Mapping[tuple[str, str], ir.Node], node: ir.Node) -> Tensor | None:
    """Return the float weight that codes stand for, by the node that reads them.

    A name only suggests where places start, which is within the codes anyway.
    """
    for reader, index in node.outputs[0].uses():
        if reader.op_type == "Transpose":
            found = _float_weight(floats, reader)
            return None if found is None or found.ndim != 2 else found.T
        other = floats.get((label(reader), reader.op_type))
        value = None if other is None else other.inputs[index]
        if value is not None and value.const_value is not None:
            return tensor_of(value.const_value)
    return None


def _places(constants: Mapping[str, Tensor], node: ir.Node, weight: Tensor | None) -> Tensor:
    """Return where codes are before they are rounded: near the float weight's place."""
    codes, scale, zero = (
        None if value is None else constants[value.name or ""]
        for value in (*node.inputs, None)[:3]
    )
    assert codes is not None and scale is not None
    centre = codes.float()
    if weight is None or weight.shape != codes.shape:
        return centre
    axis = node.attributes.get_int("axis", 1) % codes.ndim
    block = node.attributes.get_int("block_size", 0)
    ones, nothing = torch.ones_like(centre), torch.zeros_like(centre)
    steps = dequantized(ones, scale.float(), None, axis, block)
    # By a scale of 1 these are minus the zero points.
    offset = (
        0 if zero is None else dequantized(nothing, torch.ones_like(scale), zero, axis, block)
    )
    place = weight.float() / steps - offset
    return torch.minimum(torch.maximum(place, centre - _WITHIN), centre + _WITHIN)


def _shape_of(value: ir.Value | None) -> tuple[int, ...]:
    """Return the shape of a constant; of anything else none."""
    if value is None or value.const_value is None:
        return ()
    return tuple(int(size) for size in value.const_value.shape.numpy())


def _turns_rows(node: ir.Node) -> bool:
    """Whether a Cos or Sin is near behind a node."""
    nodes = [node]
    for _ in range(4):
        nodes = [reader for item in nodes for out in item.outputs for reader, _ in out.uses()]
        if any(item.op_type in ("Cos", "Sin") for item in nodes):
            return True
    return False


def _size_of(vector: Tensor) -> Tensor:
    """Return the root mean square of a vector; 1 for zeros, which say nothing of a size."""
    size = vector.square().mean().sqrt()
    return torch.where(size > 0, size, torch.ones(()))


def _is_scale(value: ir.Value) -> bool:
    return any(node.op_type == "DequantizeLinear" for node, _ in value.uses())


def _real_rows(feed: Feed, output: Tensor) -> Any:
    """Return which rows of an output ``[batch, sequence, ...]`` stand for tokens."""
    mask = feed.get("attention_mask")
    if mask is None or mask.shape != tuple(output.shape[:2]):
        return ...
    return torch.from_numpy(mask.astype(bool))


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the mean of KL(p || q), from logits ``[tokens, vocabulary]``, in nats."""

    def of_strip(a: Tensor, b: Tensor) -> Tensor:
        log_a, log_b = a.float().log_softmax(-1), b.float().log_softmax(-1)
        return (log_a.exp() * (log_a - log_b)).sum()

    total = torch.zeros(())
    for start in range(0, len(p), _STRIP):
        strips = p[start : start + _STRIP], q[start : start + _STRIP]
        total = total + checkpoint(of_strip, *strips, use_reentrant=False)
    return total / len(p)


def _distance(p: Tensor, q: Tensor) -> Tensor:
    """Return how far hidden states ``[tokens, hidden]`` are apart, with their mean."""
    p = p.float()
    tokens = (q - p).square().sum() / p.square().sum()
    pooled = 1 - torch.cosine_similarity(p.mean(0), q.mean(0), dim=0)
    return tokens + pooled
