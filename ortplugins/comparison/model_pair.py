# SPDX-License-Identifier: MIT
"""Runs two models on the same inputs and pairs their outputs by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnxruntime

from ortplugins.comparison.given_model import GivenModel
from ortplugins.comparison.inputs import Inputs, comparison_feeds, fetch
from ortplugins.errors import ModelFileError
from ortplugins.runtime.stock_session import NUMPY_TYPES, open_model, type_of
from ortplugins.samples.kept import KeptSamples


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
