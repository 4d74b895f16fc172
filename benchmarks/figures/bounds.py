# SPDX-License-Identifier: MIT
"""A measured figure, what it is compared with, and the bound that it must keep."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of a table.

    Attributes:
        what: What was measured.
        ours: With ortplugins.
        theirs: What it is compared with; NaN for a figure that stands alone.
        unit: Of both.
        bound: Greatest value allowed of the ratio, or of ``ours`` where it stands alone; NaN
            where the figure has none.
        difference: Whether the bound is on the difference and not on the ratio.
    """

    what: str
    ours: float
    theirs: float = math.nan
    unit: str = ""
    bound: float = math.nan
    difference: bool = False

    @classmethod
    def versus(
        cls, what: str, both: Iterable[float], unit: str = "", bound: float = math.nan
    ) -> Figure:
        """Return the figure of a pair, ours first."""
        ours, theirs = both
        return cls(what, ours, theirs, unit, bound)

    @property
    def compared(self) -> float:
        """Ratio, difference or the figure itself: what the bound is on."""
        if math.isnan(self.theirs):
            return self.ours
        return self.ours - self.theirs if self.difference else self.ours / self.theirs

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; a figure that could not be measured misses it."""
        return math.isnan(self.bound) or self.compared <= self.bound


def report_missed(figures: Iterable[Figure]) -> int:
    """Print which bounds are missed; return the exit status."""
    missed = [figure.what for figure in figures if not figure.holds]
    if missed:
        print("bounds missed: " + "; ".join(missed), file=sys.stderr)
    return 1 if missed else 0


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as Markdown; a ratio beyond its bound, in parentheses, is bold."""
    lines = ["| figure | ratio (bound) | ours | theirs |", "|---|---|---|---|"]
    lines += [f"| {' | '.join((figure.what, *_cells(figure)))} |" for figure in figures]
    return "\n".join(lines)


def _cells(figure: Figure) -> tuple[str, str, str]:
    """Ratio and bound, ours and theirs, with their units."""
    alone = math.isnan(figure.theirs)
    of_ratio = "" if alone or figure.difference else " x"
    compared = "" if alone else f"{figure.compared:.3g}{of_ratio or f' {figure.unit}'}"
    if not math.isnan(figure.bound):
        compared = f"{compared} (<= {figure.bound:g})".strip()
    return (
        compared if figure.holds else f"**{compared}**",
        _with_unit(figure.ours, figure.unit),
        "" if alone else _with_unit(figure.theirs, figure.unit),
    )


def _with_unit(number: float, unit: str) -> str:
    """Return a number as people write it: ``1.57 GB`` for 1,570 MB."""
    larger = {"ms": "s", "MB": "GB"}
    if unit in larger and number >= 1000:
        number, unit = number / 1000, larger[unit]
    return f"{number:.3g} {unit}".rstrip()
