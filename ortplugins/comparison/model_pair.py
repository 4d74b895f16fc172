# SPDX-License-Identifier: MIT
"""Runs models on the same inputs, the user's or made up, and pairs outputs by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.comparison.given_model import GivenModel
from ortplugins.errors import ModelFileError, UsageError
from ortplugins.runtime.stock_session import NUMPY_TYPES, open_model, quiet_runner, type_of
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.made_up import MadeUpInputs
from ortplugins.samples.sources import CalibrationSource, Feed
from ortplugins.samples.text import TextSamples

Inputs = Mapping[str, Any] | CalibrationSource


class ModelPair:
    """Two sessions and the inputs that both are run on."""

    def __init__(
        self,
        a: GivenModel,
        b: GivenModel,
        inputs: Inputs = None,
        *,
        scratch: Path,
        dims: Mapping[str, int] | None = None,
        samples: int = 1,
        seed: int = 0,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> None:
        """Open both; sessions are taken as they are."""
        self.a, self.b = (
            model.session or open_model(model.file(scratch), "disable", providers)
            for model in (a, b)
        )
        self.feeds: KeptSamples = comparison_feeds(
            self.a, inputs, scratch=scratch, dims=dims, samples=samples, seed=seed
        )
        self._check_inputs()
        self.outputs, self.not_compared = _common_outputs(self.a, self.b)
        if not self.outputs:
            reasons = "; ".join(f"{name!r}: {why}" for name, why in self.not_compared.items())
            raise ModelFileError(f"there is no output to compare: {reasons}")

    def run(self) -> Iterator[tuple[int, str, npt.NDArray[Any], npt.NDArray[Any]]]:
        """Run each sample through both; yield sample, output, a's array and b's."""
        for index, feed in enumerate(self.feeds):
            found = [
                fetch(session, self.outputs, feed, f"model {which}, sample {index}")
                for which, session in (("a", self.a), ("b", self.b))
            ]
            for name, x, y in zip(self.outputs, *found, strict=True):
                yield index, name, x, y

    def _check_inputs(self) -> None:
        """Let b take fewer inputs than a, for which nothing was left to read them."""
        known = {
            item.name: item.type
            for item in (*self.a.get_inputs(), *self.a.get_overridable_initializers())
        }
        for item in self.b.get_inputs():
            if item.name not in known:
                raise ModelFileError(
                    f"model b takes input {item.name!r}, which model a does not have: "
                    f"it has {', '.join(map(repr, known))}"
                )
            if known[item.name] != item.type:
                raise ModelFileError(
                    f"input {item.name!r} is {known[item.name]} in model a, {item.type} in "
                    "model b"
                )


def _common_outputs(
    a: onnxruntime.InferenceSession, b: onnxruntime.InferenceSession
) -> tuple[tuple[str, ...], dict[str, str]]:
    outputs_a = {item.name: item for item in a.get_outputs()}
    outputs_b = {item.name: item for item in b.get_outputs()}
    reasons: dict[str, str] = {}
    for name in {**outputs_a, **outputs_b}:
        for which, outputs in (("a", outputs_a), ("b", outputs_b)):
            if name not in outputs:
                reasons[name] = f"model {which} has no such output"
            elif type_of(outputs[name]) not in NUMPY_TYPES:
                kind = outputs[name].type
                reasons.setdefault(name, f"is {kind}, which has no numpy array")
    return tuple(name for name in outputs_a if name not in reasons), reasons


def comparison_feeds(
    session: onnxruntime.InferenceSession,
    inputs: Inputs,
    *,
    scratch: Path,
    dims: Mapping[str, int] | None = None,
    samples: int = 1,
    seed: int = 0,
) -> KeptSamples:
    """Return feeds of a model, each checked against its inputs."""
    values = [_value(item) for item in session.get_inputs()]
    if samples < 1:
        raise UsageError(f"samples is {samples}: 1 or more is expected")
    source: Any
    if inputs is None:
        for value in values:
            if value.dtype is ir.DataType.STRING:
                raise ModelFileError(
                    f"input {value.name!r} takes strings, which cannot be made up: give inputs"
                )
        run = quiet_runner(session)
        made = MadeUpInputs(_with_uses(values, session), dims)
        made.fit(run)
        source = made.feeds(samples, seed=seed, run=run)
    elif dims:
        raise UsageError("dims are for random inputs, and inputs are given: leave one out")
    elif isinstance(inputs, TextSamples):
        source = inputs.feeds(_with_uses(values, session))
    else:
        source = [inputs] if isinstance(inputs, Mapping) else inputs
    optional = [_value(item) for item in session.get_overridable_initializers()]
    graph = ir.Graph([*values, *optional], [], nodes=[], name="inputs")
    for value in optional:  # may be left out of a sample
        graph.initializers[value.name or ""] = value
    return KeptSamples(source, ir.Model(graph, ir_version=10), scratch=scratch)


def _value(item: Any) -> ir.Value:
    kind = type_of(item)
    if not item.type.startswith("tensor(") or kind not in NUMPY_TYPES:
        raise ModelFileError(
            f"input {item.name!r} is {item.type}: models whose inputs are tensors of numpy's "
            "types can be compared"
        )
    dtype = ir.DataType[kind.upper()]
    return ir.Value(name=item.name, shape=ir.Shape(item.shape), type=ir.TensorType(dtype))


def _with_uses(values: Sequence[ir.Value], session: Any) -> Sequence[ir.Value]:
    """Return the values as inputs of their graph, where the session's model is at hand."""
    try:
        graph = GivenModel(session).graph().graph
    except ModelFileError:
        return values
    inputs = {value.name: value for value in graph.inputs}
    return [inputs.get(value.name, value) for value in values]


def fetch(
    session: onnxruntime.InferenceSession, names: Sequence[str], feed: Feed, what: str
) -> list[npt.NDArray[Any]]:
    """Run a session on those arrays of a feed that it takes; return outputs by name."""
    inputs = (*session.get_inputs(), *session.get_overridable_initializers())
    taken = {item.name: feed[item.name] for item in inputs if item.name in feed}
    try:
        arrays: list[npt.NDArray[Any]] = session.run(list(names), taken)
    except Exception as error:  # onnxruntime's own classes, none of which is documented
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in taken.items())
        raise ModelFileError(
            f"{what}: onnxruntime failed to run it ({shapes}): {error}"
        ) from error
    return arrays
