# SPDX-License-Identifier: MIT
"""What planners of activations and of weights share: samples, the search, a plan's figures.

The search works on a simulation. What it finds is made and measured; where that falls short of
the budget, the search goes on for as much more.
"""

from __future__ import annotations

__all__ = ["Plan", "PlannerRun", "load_model", "search_until"]

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.model_io.loading import from_memory, is_path, load_path
from ortplugins.quantization.planner.deviation import Deviation
from ortplugins.quantization.planner.search import CurvePoint, Effect, Search
from ortplugins.quantization.planner.switched_model import SwitchedModel
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.sources import CalibrationSource

if TYPE_CHECKING:
    from ortplugins.model_io.loading import ModelLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What gets more bits, and what it brings.

    Attributes:
        ranking: All candidates, the worst at few bits first.
        curve: Simulated error against number of promoted candidates.
        before: Deviation of the model without the plan.
        after: With this plan, measured.
        notes: What stood in the way.
    """

    ranking: tuple[Effect, ...]
    curve: tuple[CurvePoint, ...]
    before: Deviation
    after: Deviation
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlannerRun:
    """What every measurement of one plan uses.

    Attributes:
        model: The model as it was given, with its weights where they were.
        samples: What all models run on.
        scratch: A folder that is removed at the end.
        max_memory: Bytes for what is kept of activations and outputs.
        providers: Execution providers that run the samples.
    """

    model: ir.Model
    samples: KeptSamples
    scratch: Path
    max_memory: int
    providers: Sequence[Any]

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        model: ModelLike,
        data: CalibrationSource,
        *,
        max_memory: int,
        providers: Sequence[Any],
        work_dir: str | os.PathLike[str] | None,
    ) -> Iterator[PlannerRun]:
        """Load a model and its samples.

        Raises:
            QuantizationError: If there is no data.
        """
        if data is None:
            raise QuantizationError(
                "there is no data: planning takes real samples, as random ones give another "
                "ranking"
            )
        loaded = load_model(model)
        with tempfile.TemporaryDirectory(
            prefix="ortplugins-", dir=None if work_dir is None else os.path.abspath(work_dir)
        ) as folder:
            samples = KeptSamples(data, loaded, scratch=Path(folder))
            yield cls(loaded, samples, Path(folder), max_memory, providers)

    def switched(self, model: ir.Model, switches: Sequence[str] = ()) -> SwitchedModel:
        """Prepare a model, which is taken over, for runs on the samples."""
        return SwitchedModel(
            model,
            switches,
            self.samples,
            scratch=self.scratch,
            max_memory=self.max_memory,
            providers=self.providers,
        )


def search_until(
    search: Search,
    measured: Callable[[tuple[str, ...]], Deviation | None],
    *,
    budget: float | None,
    limit: int | None,
    option: str,
    of: str,
) -> tuple[Deviation, tuple[str, ...]]:
    """Promote, take back what is needless and measure, until the budget is met.

    Args:
        search: A search that was started.
        measured: Makes a model with the promoted names and measures it; None if it banned some
            of them instead.
        budget: Cosine to reach; None: promote as many as the limit allows.
        limit: How many may be promoted; None for any number.
        option: What messages call the limit.
        of: What messages call the candidates: "5 activations promoted".

    Returns:
        The deviation of what was made, and notes.

    Raises:
        QuantizationError: If the budget is not reached although there is no limit.
    """
    wanted = budget
    while True:
        search.grow(limit, wanted)
        search.prune(wanted)
        names = search.promoted_names()
        after = measured(names)
        if after is None:
            continue
        if wanted is None or budget is None or after.cosine >= budget:
            return after, ()
        if not search.can_grow(limit):
            break
        # What is made is less exact than its simulation by so much.
        wanted = search.now.cosine + (budget - after.cosine) + 1e-6
    text = (
        f"a cosine of {budget:.6g} is not reached: it is {after.cosine:.6g} with "
        f"{len(names)} of {of}"
    )
    if limit is None:
        raise QuantizationError(text)
    return after, (f"{text}, as many as {option} allows",)


def load_model(model: ModelLike) -> ir.Model:
    """Load a model of any kind; one in memory is copied."""
    if not is_path(model):
        return from_memory(model).model  # type: ignore[arg-type]
    # Weights stay where they are: sessions map them.
    return load_path(model, map_inline=True).model  # type: ignore[arg-type]
