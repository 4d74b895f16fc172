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
    def beside(
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
    """Return the figures as Markdown, ratios in front."""
    lines = [
        "| figure | ratio | bound | ours | compared with | result |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        cells = (figure.what, *_comparison(figure), _verdict(figure))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _comparison(figure: Figure) -> tuple[str, str, str, str]:
    """Ratio, bound, ours and theirs, with their units."""
    alone = math.isnan(figure.theirs)
    unit = f" {figure.unit}" if figure.unit else ""
    of_ratio = " x" if not (alone or figure.difference) else unit
    return (
        "" if alone else f"{figure.compared:.3g}{of_ratio}",
        "" if math.isnan(figure.bound) else f"<= {figure.bound:g}{of_ratio}",
        f"{figure.ours:.3g}{unit}",
        "" if alone else f"{figure.theirs:.3g}{unit}",
    )


def _verdict(figure: Figure) -> str:
    if math.isnan(figure.bound):
        return ""
    return "kept" if figure.holds else "**missed**"
