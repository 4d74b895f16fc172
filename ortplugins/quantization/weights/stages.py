# SPDX-License-Identifier: MIT
"""One progress for all stages of a run, by the time that each is expected to take."""

from __future__ import annotations

from collections.abc import Mapping

from ortplugins.model_io.saving import Progress

_STEPS = 1000


class Stages:
    """Shows how much of a whole run is done; stages may take turns, or be left out."""

    def __init__(self, show: Progress | None, costs: Mapping[str, float]) -> None:
        """Start before the first stage.

        Args:
            show: Called with steps done, steps of the whole run, what is being done.
            costs: Of the stages, in their order and in any unit.
        """
        whole = sum(costs.values()) or 1
        self._shares = {stage: cost / whole for stage, cost in costs.items()}
        self._show, self._done = show, dict.fromkeys(costs, 0.0)
        self._steps = 0

    def of(self, stage: str) -> Progress:
        """Return what a stage reports its own progress to."""

        def show(done: int, total: int, what: str) -> None:
            self._done[stage] = max(self._done[stage], done / (total or 1))
            run, later = 0.0, False
            for each, share in reversed(self._shares.items()):
                # A stage that was not reached before a later one was not needed.
                run += share * (self._done[each] or later)
                later = later or self._done[each] > 0
            self._steps = max(self._steps, int(_STEPS * run))
            if self._show is not None:
                self._show(self._steps, _STEPS, what)

        return show
