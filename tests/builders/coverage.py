# SPDX-License-Identifier: MIT
"""Which cases of a large table run in ``make test``: every pair of features, once at least."""

import itertools
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")
# make test-exhaustive runs every case.
EXHAUSTIVE = bool(os.environ.get("ORTPLUGINS_EXHAUSTIVE"))


def pairwise(cases: Iterable[Case], name: Callable[[Case], str]) -> list[Case]:
    """Return the cases whose name, split at hyphens, has a pair of parts not met before."""
    chosen, met = [], set()
    for case in cases:
        pairs = set(itertools.combinations(name(case).split("-"), 2))
        if EXHAUSTIVE or not pairs <= met:
            chosen.append(case)
        met |= pairs
    return chosen
