# SPDX-License-Identifier: MIT
"""What planners of activations and of weights share: samples, the search, a plan's figures.

The search works on a simulation. What it finds is made and measured; where that falls short of
the budget, the search goes on for as much more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.model_io.loading import ModelLike, load_model
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.planner.deviation import Deviation
from ortplugins.quantization.planner.search import CurvePoint, Search, Unit
from ortplugins.quantization.planner.switched_model import SwitchedModel
from ortplugins.samples.kept import KeptSamples
from ortplugins.samples.sources import CalibrationSource


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

    ranking: tuple[Unit, ...]
    curve: tuple[CurvePoint, ...]
    before: Deviation
    after: Deviation
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlannerRun:
    """What ends the search of one plan, and what all its measurements use.

    Attributes:
        model: The model as it was given, with its weights where they were.
        samples: What all models run on.
        scratch: A folder that is removed at the end.
        switched: Opens a model, which is taken over, and its switches on the samples.
        budget: Cosine to reach; None: promote as many as the limit allows.
        limit: What may be promoted, in the units' cost (int), or which share of all (float);
            None for anything.
        option: What messages call the limit.
        progress: Called before each measurement.
    """

    model: ir.Model
    samples: KeptSamples
    scratch: Path
    switched: Callable[..., SwitchedModel]
    budget: float | None
    limit: float | None
    option: str
    progress: Progress

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
        budget: float | None,
        limit: float | None,
        option: str,
        progress: Progress | None,
    ) -> Iterator[PlannerRun]:
        """Load a model and its samples.

        Raises:
            QuantizationError: If there is no data, neither budget nor limit, or one of them is
                out of range.
        """
        if budget is None and limit is None:
            raise QuantizationError(f"give a budget, {option} or both")
        if budget is not None and not 0 < budget < 1:
            raise QuantizationError(
                f"budget is {budget}: a cosine above 0 and below 1 is expected"
            )
        if limit is not None and (limit < 0 or (not isinstance(limit, int) and limit > 1)):
            raise QuantizationError(
                f"{option} is {limit}: a number (int), or a share of 0.0 to 1.0, is expected"
            )
        if data is None:
            raise QuantizationError(
                "there is no data: planning takes real samples, as random ones give another "
                "ranking"
            )
        # Weights stay where they are: sessions map them.
        loaded = load_model(model, map_inline=True).model
        with tempfile.TemporaryDirectory(
            prefix="ortplugins-", dir=None if work_dir is None else os.path.abspath(work_dir)
        ) as folder:
            samples = KeptSamples(data, loaded, scratch=Path(folder))
            switched = functools.partial(
                SwitchedModel,
                samples=samples,
                scratch=Path(folder),
                max_memory=max_memory,
                providers=providers,
            )
            limits = budget, limit, option, progress or (lambda done, total, what: None)
            yield cls(loaded, samples, Path(folder), switched, *limits)

    def search(
        self,
        switched: SwitchedModel,
        units: Sequence[Unit],
        made: Callable[[Search, tuple[str, ...]], ir.Model | None],
        *,
        cost: int,
        of: str,
        reference: Iterable[Mapping[str, npt.NDArray[Any]]] | None = None,
        implied: Callable[[Collection[str]], Collection[str]] = lambda names: (),
    ) -> tuple[Search, dict[str, Any]]:
        """Promote, take back what is needless and measure, until the budget is met.

        Args:
            switched: The simulation.
            units: What can be promoted.
            made: Makes a model with the promoted names; None if it banned some of them
                instead.
            cost: Of all candidates together, for a limit that is a share.
            of: What messages call the candidates: "5 activations promoted".
            reference: Outputs to compare with; those with all switches off by default.
            implied: Names that have more bits as soon as others have.

        Returns:
            The search, and the fields of a :class:`Plan`.

        Raises:
            QuantizationError: If the budget is not reached although there is no limit.
        """
        budget, limit = self.budget, self.limit
        most = math.floor(limit * cost) if isinstance(limit, float) else limit
        search = Search(switched, units, self.progress, implied)
        if reference is not None:
            switched.refer_to(reference)
        search.start(budget if most is None else None)
        wanted, notes = budget, list[str]()
        while True:
            search.grow(most, wanted)
            search.prune(wanted)
            names = search.promoted_names()
            model = made(search, names)
            if model is None:
                continue
            after = switched.compare(self.switched(model).values())
            if wanted is None or budget is None or after.cosine >= budget:
                break
            if not search.can_grow(most):
                text = (
                    f"a cosine of {budget:.6g} is not reached: it is {after.cosine:.6g} with "
                    f"{len(names)} of {of}"
                )
                if most is None:
                    raise QuantizationError(text)
                notes.append(f"{text}, as many as {self.option} allows")
                break
            # What is made is less exact than its simulation by so much.
            wanted = search.now.cosine + (budget - after.cosine) + 1e-6
        return search, {
            "ranking": search.ranking,
            "curve": tuple(search.curve),
            "before": search.curve[0].deviation,
            "after": after,
            "notes": tuple(notes),
        }
