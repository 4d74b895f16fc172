# SPDX-License-Identifier: MIT
"""Withdraws the smallest part of a result that fails a trial: a rule, a form, some layers.

The pass runs again without any of its candidates, then takes up group after group of them:
the candidates of a rule, those of them whose remark says the same, halves of these. A group
that fails is split; one that passes stays.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping

import onnx_ir as ir

from ortplugins.optimization.trials import OriginalOnTrials, trials_of
from rewrite_rules.graph.nodes import sort_nodes
from rewrite_rules.remarks import Candidate, Outcome, PassContext, Remark, Remarks

# How often a pass is run again, and after how many failures in a row no more: the halves and
# quarters of a group, where all of it is wrong. Sixteen find one layer of 30.
_MAX_ATTEMPTS, _MAX_IN_A_ROW = 16, 7
_MAX_PARTS = 8
# Other rules may apply where one is left.
_MAX_LEVELS = 3

Withheld = Mapping[Candidate, Remark]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What a pass made of a model, and whether it says that it modified it."""

    model: ir.Model
    context: PassContext
    modified: bool | None


def keep_what_passes(
    original: ir.Model, result: Attempt, run_without: Callable[[Withheld], Attempt]
) -> Attempt:
    """Return the result, or what is left of it without what fails its trials.

    ``run_without`` runs the pass again on the original, without some candidates.

    Raises:
        ValueError: If nothing may be left out, because a trial is required.
    """
    context = result.context
    with trials_of(original, context.trials, context.providers) as beside:
        failure = _failure(result, beside)
        if failure is None:
            return result
        if any(trial.required for trial in context.trials):
            raise ValueError(failure)
        candidates = context.remarks.rewritten
        kept = _search(candidates, failure, run_without, beside) if candidates else None
    if kept is None:
        remarks = Remarks(context.remarks.pass_name)
        remarks.refused("model", failure)
    elif any(remark.outcome is Outcome.FIRED for remark in kept.context.remarks):
        return kept
    else:
        remarks = kept.context.remarks
    return Attempt(original, dataclasses.replace(context, remarks=remarks), False)


def _failure(attempt: Attempt, beside: OriginalOnTrials) -> str | None:
    sort_nodes(attempt.model.graph)
    wanted = {trial.name for trial in attempt.context.trials}
    return beside.failure(attempt.model, wanted)


def _search(
    candidates: Withheld,
    failure: str,
    run_without: Callable[[Withheld], Attempt],
    beside: OriginalOnTrials,
) -> Attempt | None:
    """Return the best attempt that passes; None where not even one without candidates does."""
    kept, withheld = _without_all(candidates, failure, run_without, beside)
    waiting, in_a_row = collections.deque(_split(candidates)), 0
    for _ in range(_MAX_ATTEMPTS if kept else 0):
        if not waiting or in_a_row == _MAX_IN_A_ROW:
            break
        group = waiting.popleft()
        tried = {key: remark for key, remark in withheld.items() if key not in group}
        attempt, failure_of_it = _attempt(tried, run_without, beside)
        if attempt is not None and failure_of_it is None:
            kept, withheld, in_a_row = attempt, tried, 0
        else:
            in_a_row += 1
            waiting += _split(group)
    return kept


def _without_all(
    candidates: Withheld,
    failure: str,
    run_without: Callable[[Withheld], Attempt],
    beside: OriginalOnTrials,
) -> tuple[Attempt | None, dict[Candidate, Remark]]:
    """Leave all candidates, and those that others are left for; None where that fails."""
    withheld = _refused(candidates, failure)
    for _ in range(_MAX_LEVELS):
        attempt, found = _attempt(withheld, run_without, beside)
        if attempt is None or found is None:
            return attempt, withheld
        withheld |= _refused(attempt.context.remarks.rewritten, found)
    return None, withheld


def _attempt(
    withheld: Withheld, run_without: Callable[[Withheld], Attempt], beside: OriginalOnTrials
) -> tuple[Attempt | None, str | None]:
    """Run the pass without some candidates; return its result and what fails of that."""
    try:
        attempt = run_without(withheld)
    except Exception as error:  # a pass that cannot do without one of them
        return None, str(error)
    return attempt, _failure(attempt, beside)


def _refused(candidates: Withheld, failure: str) -> dict[Candidate, Remark]:
    return {
        key: dataclasses.replace(
            remark,
            outcome=Outcome.REFUSED,
            reason=f"{failure} ({remark.reason})",
        )
        for key, remark in candidates.items()
    }


def _split(group: Withheld) -> list[Withheld]:
    """Part candidates by rule, then by remark, then in the middle."""
    names: tuple[Callable[[Candidate], str], ...] = (
        lambda key: key.rule,
        lambda key: group[key].reason,
    )
    for name_of in names:
        parts = collections.defaultdict[str, dict[Candidate, Remark]](dict)
        for key, remark in group.items():
            parts[name_of(key)][key] = remark
        # Remarks that name tensors are all different.
        if 1 < len(parts) <= _MAX_PARTS:
            return list(parts.values())
    items, middle = list(group.items()), len(group) // 2
    return [dict(items[:middle]), dict(items[middle:])] if middle else []
