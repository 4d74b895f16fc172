# SPDX-License-Identifier: MIT
"""Runs two models on the same inputs and pairs their outputs by name."""

from __future__ import annotations

__all__ = ["ModelPair"]

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnxruntime

from ortplugins.comparison.given_model import GivenModel
from ortplugins.comparison.inputs import Inputs, comparison_feeds
from ortplugins.errors import ModelFileError
from ortplugins.runtime.stock_session import open_model
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.sources import Feed

# onnxruntime gives numpy no others.
_NUMPY_TYPES = frozenset({
    "bool", "double", "float", "float16", "int16", "int32", "int64", "int8", "string",
    "uint16", "uint32", "uint64", "uint8",
})  # fmt: skip


class ModelPair:
    """Two sessions and the inputs that both are run on.

    Attributes:
        a: The reference.
        b: The other.
        outputs: Names of the outputs that are compared, in a's order.
        not_compared: The others, and why not.
        feeds: The inputs.
    """

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
        optimization_level: str = "disable",
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> None:
        """Open both; sessions are taken as they are.

        Raises:
            MissingFileError, ModelFileError: If a model cannot be used, b takes an input that
                a does not, or no output is left to compare.
            UsageError: As :func:`comparison_feeds` and :func:`open_model`.
        """

        def opened(model: GivenModel) -> onnxruntime.InferenceSession:
            return model.session or open_model(
                model.file(scratch), optimization_level, providers
            )

        self.a, self.b = opened(a), opened(b)
        self.feeds: KeptSamples = comparison_feeds(
            self.a, inputs, scratch=scratch, dims=dims, samples=samples, seed=seed
        )
        self._check_inputs()
        self.outputs, self.not_compared = _common_outputs(self.a, self.b)
        if not self.outputs:
            reasons = "; ".join(f"{name!r}: {why}" for name, why in self.not_compared.items())
            raise ModelFileError(f"there is no output to compare: {reasons}")

    def run(self) -> Iterator[tuple[int, str, npt.NDArray[Any], npt.NDArray[Any]]]:
        """Run each sample through both; yield sample, output, a's array and b's.

        Raises:
            CalibrationError: If a given input does not fit.
            ModelFileError: If onnxruntime fails, chained.
        """
        for index, feed in enumerate(self.feeds):
            found = self._run(self.a, feed, "a", index), self._run(self.b, feed, "b", index)
            for name, x, y in zip(self.outputs, *found, strict=True):
                yield index, name, x, y

    def _run(
        self, session: onnxruntime.InferenceSession, feed: Feed, which: str, index: int
    ) -> list[npt.NDArray[Any]]:
        taken = self._taken_a if which == "a" else self._taken_b
        try:
            arrays: list[npt.NDArray[Any]] = session.run(
                list(self.outputs), {k: v for k, v in feed.items() if k in taken}
            )
        except Exception as error:  # as in open_model
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            raise ModelFileError(
                f"model {which}: onnxruntime failed to run sample {index} ({shapes}): {error}"
            ) from error
        return arrays

    def _check_inputs(self) -> None:
        """Let b take fewer inputs than a, for which nothing was left to read them."""
        required = {item.name: item for item in self.a.get_inputs()}
        self._taken_a = _input_names(self.a)
        self._taken_b = _input_names(self.b)
        for item in self.b.get_inputs():
            if item.name not in self._taken_a:
                names = ", ".join(map(repr, required))
                raise ModelFileError(
                    f"model b takes input {item.name!r}, which model a does not have: "
                    f"it has {names}"
                )
            other = required.get(item.name)
            if other is not None and other.type != item.type:
                raise ModelFileError(
                    f"input {item.name!r} is {other.type} in model a, {item.type} in model b"
                )


def _input_names(session: onnxruntime.InferenceSession) -> set[str]:
    return {
        item.name for item in (*session.get_inputs(), *session.get_overridable_initializers())
    }


def _common_outputs(
    a: onnxruntime.InferenceSession, b: onnxruntime.InferenceSession
) -> tuple[tuple[str, ...], dict[str, str]]:
    outputs_a = {item.name: item.type for item in a.get_outputs()}
    outputs_b = {item.name: item.type for item in b.get_outputs()}
    reasons: dict[str, str] = {}
    for name in {**outputs_a, **outputs_b}:
        for which, types in (("a", outputs_a), ("b", outputs_b)):
            kind = types.get(name)
            if kind is None:
                reasons[name] = f"model {which} has no such output"
            elif kind.removeprefix("tensor(").removesuffix(")") not in _NUMPY_TYPES:
                reasons.setdefault(name, f"is {kind}, which has no numpy array")
    return tuple(name for name in outputs_a if name not in reasons), reasons
