# SPDX-License-Identifier: MIT
"""The smallest set of switches to turn off so that outputs are near enough to a reference.

1. Each switch is turned on alone, all others off: the error at the outputs that it causes by
   itself ranks it.
2. From all on, switches are turned off in that order until the budget is met. Where the next
   few are of about the same rank, the one that leaves the least error is taken.
3. What turns out to be needless is turned on again.

Errors add up where they are small, so the order of step 1 is hard to beat: on MiniLM-L6 (96
activations), from 1 to 24 promoted, a search that measures twelve candidates at each step
finds sets whose error is smaller by 4 % at most.

All of this is measured on a simulation. What is found is made and measured, too; where that
falls short of the budget, the search goes on for as much more.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from ortplugins.quantization.statistics.collect import Calibration
from ortplugins.samples.sources import CalibrationSource, KeptSamples
from ortplugins.static_qdq.switched_model import Deviation, SwitchedModel

# Candidates that are measured for a step, if their effects are this near to the first one's.
_LOOK_AHEAD = 4
_NEAR = 0.7
# Looked at with what they imply, which makes some of them less worthwhile than they were.
_CLOSED = 12


@dataclasses.dataclass(frozen=True)
class Unit:
    """What gets more bits together.

    Attributes:
        names: An activation, several that share a grid, or the nodes that share a weight;
            these are counted.
        switches: That are on as long as it has few bits.
        operator: What computes the first activation (empty for an input of the graph), or the
            nodes' operator.
        cost: What a limit counts: activations, nodes, or elements of a weight.
        error: At the outputs, with only this in few bits: see :class:`Deviation`. NaN before
            it is measured.
    """

    names: tuple[str, ...]
    switches: tuple[str, ...]
    operator: str
    cost: int
    error: float = math.nan


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """A step of the search.

    Attributes:
        promoted: Number of activations (or nodes) that have more bits.
        added: Those that are new; none for the first point.
        deviation: Of the outputs, simulated.
    """

    promoted: int
    added: tuple[str, ...]
    deviation: Deviation


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


@dataclasses.dataclass(eq=False)
class Search:
    """Promotes units one after the other, and measures.

    Attributes:
        model: As it was given, with its weights where they were.
        calibration: Samples, and what it takes to run them.
    """

    model: ir.Model
    calibration: Calibration
    _budget: float | None  # cosine to reach; None: promote as many as the limit allows
    _limit: float | None  # in the units' cost (int), or as a share of all (float)
    _option: str  # what messages call the limit

    def __post_init__(self) -> None:
        self._banned: set[Unit] = set()
        self._promoted: tuple[Unit, ...] = ()

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        model: ModelLike,
        data: CalibrationSource,
        work_dir: str | os.PathLike[str] | None,
        budget: float | None,
        limit: float | None,
        option: str,
        providers: Sequence[Any],
        max_memory: int,
        progress: Progress | None,
    ) -> Iterator[Search]:
        """Check what a user gave; load the model and its samples."""
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
                "no data: planning takes real samples, as random ones give another ranking"
            )
        # Weights stay where they are: sessions map them.
        loaded = load_model(model, map_inline=True).model
        with tempfile.TemporaryDirectory(
            prefix="ortplugins-", dir=None if work_dir is None else os.path.abspath(work_dir)
        ) as folder:
            samples = KeptSamples(data, loaded, scratch=Path(folder))
            progress = progress or Calibration.progress
            calibration = Calibration(samples, Path(folder), providers, max_memory, progress)
            yield cls(loaded, calibration, budget, limit, option)

    def switched(self, model: ir.Model, switches: Collection[str] = ()) -> SwitchedModel:
        """Open a session on a model, which is taken over."""
        return SwitchedModel(model, switches, self.calibration)

    def run(
        self,
        switched: SwitchedModel,
        units: Sequence[Unit],
        made: Callable[[tuple[str, ...]], ir.Model | None],
        *,
        cost: int,
        of: str,
        reference: Iterable[Mapping[str, npt.NDArray[Any]]] | None = None,
        implied: Callable[[Collection[str]], Collection[str]] = lambda names: (),
    ) -> dict[str, Any]:
        """Promote, take back what is needless and measure, until the budget is met.

        ``made`` makes a model with the promoted names, or bans some of them and returns None;
        ``cost`` is that of all candidates, ``of`` what messages call them ("5 activations
        promoted"); names are ``implied`` that have more bits as soon as others have. The
        reference is the model with all switches off by default. Return the fields of a
        :class:`Plan`.
        """
        self._switched, self._implied = switched, implied
        budget, limit = self._budget, self._limit
        self._most = math.floor(limit * cost) if isinstance(limit, float) else limit
        switched.refer_to(switched.values())
        measured = []
        for done, unit in enumerate(units):
            self.calibration.progress(done, len(units), f"ranking {unit.names[0]}")
            error = switched.compare(switched.values(unit.switches)).error
            measured.append(dataclasses.replace(unit, error=error))
        self._ordered = sorted(measured, key=lambda unit: -unit.error / unit.cost)
        self._unit_of = {name: unit for unit in measured for name in unit.names}
        if reference is not None:
            switched.refer_to(reference)
        before = self._now = self._measured(())
        self._curve = [CurvePoint(0, (), before)]
        if budget is not None and self._most is None:
            best = self._measured(self._ordered)
            if best.cosine < budget:
                raise QuantizationError(
                    f"a cosine of {budget:.6g} can't be reached: it is {before.cosine:.6g} "
                    f"now and {best.cosine:.6g} with all {_count(self._ordered)} promoted; "
                    "the rest comes from what can't be"
                )
        wanted, notes = budget, list[str]()
        while True:
            self._grow(wanted)
            self._prune(wanted)
            names = self.promoted_names()
            model = made(names)
            if model is None:
                continue
            after = switched.compare(self.switched(model).values())
            if wanted is None or budget is None or after.cosine >= budget:
                break
            if not self._candidates():
                text = (
                    f"a cosine of {budget:.6g} is not reached: it is {after.cosine:.6g} with "
                    f"{len(names)} of {of}"
                )
                if self._most is None:
                    raise QuantizationError(text)
                notes.append(f"{text}, as many as {self._option} allows")
                break
            # What is made is less exact than its simulation by so much.
            wanted = self._now.cosine + (budget - after.cosine) + 1e-6
        return {
            "ranking": tuple(sorted(measured, key=lambda unit: -unit.error)),
            "curve": tuple(self._curve),
            "before": before,
            "after": after,
            "notes": tuple(notes),
        }

    def promoted_names(self) -> tuple[str, ...]:
        """Return the names of what is promoted."""
        return tuple(name for unit in self._promoted for name in unit.names)

    def _grow(self, wanted: float | None) -> None:
        """Promote until the wanted cosine or the limit is reached, or nothing is left."""
        while (wanted is None or self._now.cosine < wanted) and (
            candidates := self._candidates()
        ):
            most = self._most or _cost(self._ordered)
            self.calibration.progress(_cost(self._promoted), most, "promoting")
            chosen = candidates[0]
            if len(candidates) > 1:
                chosen = max(candidates, key=self._gain)
            added = [unit for unit in chosen if unit not in self._promoted]
            self._set(chosen)
            names = tuple(name for unit in added for name in unit.names)
            self._curve.append(CurvePoint(_count(chosen), names, self._now))

    def _prune(self, wanted: float | None) -> None:
        """Put back what is not needed for the wanted cosine, or adds no error where it is."""
        reached = wanted is not None and self._now.cosine >= wanted
        for unit in sorted(self._promoted, key=lambda unit: unit.error):
            rest = self._closed(item for item in self._promoted if item is not unit)
            if len(rest) >= len(self._promoted):
                continue  # the others imply it
            self.calibration.progress(
                _count(rest), _count(self._promoted), "looking for what is needless"
            )
            without = self._measured(rest)
            if (
                without.cosine >= wanted
                if reached and wanted is not None
                else without.error <= self._now.error
            ):
                self._set(rest)

    def ban(self, names: Collection[str]) -> None:
        """Take back units for good."""
        self._banned |= {self._unit_of[name] for name in names}
        self._set(tuple(unit for unit in self._promoted if unit not in self._banned))

    def _closed(self, units: Iterable[Unit]) -> tuple[Unit, ...]:
        """Add what is implied."""
        closed = dict.fromkeys(units)
        implied = self._implied([name for unit in closed for name in unit.names])
        found = (self._unit_of.get(name) for name in implied)
        closed |= dict.fromkeys(u for u in found if u is not None and u not in self._banned)
        return tuple(closed)

    def _candidates(self) -> list[tuple[Unit, ...]]:
        """What may be promoted next, all that is promoted included; a few of equal rank."""
        promoted = set(self._promoted)
        left = (u for u in self._ordered if u not in promoted and u not in self._banned)
        found: list[tuple[float, tuple[Unit, ...]]] = []
        for unit in left:
            if len(found) == _CLOSED:
                break
            closed = self._closed([*self._promoted, unit])
            if self._most is None or _cost(closed) <= self._most:
                added = [item for item in closed if item not in promoted]
                worth = sum(item.error for item in added) / _cost(added)
                found.append((worth, closed))
        found.sort(key=lambda item: -item[0])
        return [
            closed for worth, closed in found[:_LOOK_AHEAD] if worth >= _NEAR * found[0][0]
        ]

    def _gain(self, units: Sequence[Unit]) -> float:
        """How much error goes for what is added."""
        added = _cost(units) - _cost(self._promoted)
        return (self._now.error - self._measured(units).error) / added

    def _measured(self, promoted: Iterable[Unit]) -> Deviation:
        off = {switch for unit in promoted for switch in unit.switches}
        on = frozenset(self._switched.switches) - off
        return self._switched.compare(self._switched.values(on))

    def _set(self, promoted: tuple[Unit, ...]) -> None:
        self._promoted = promoted
        self._now = self._measured(promoted)


def _cost(units: Iterable[Unit]) -> int:
    return sum(unit.cost for unit in units)


def _count(units: Iterable[Unit]) -> int:
    return sum(len(unit.names) for unit in units)
