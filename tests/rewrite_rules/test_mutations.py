# SPDX-License-Identifier: MIT
"""A fixed sample of mutants is rewritten right, or left; `make test-mutations` has more."""

import collections
import itertools

import numpy as np
import pytest
from mutations.__main__ import names
from mutations.forms import FAMILIES
from mutations.judge import Name, judge, mutant_of
from mutations.mutate import MUTATIONS

from rewrite_rules.transformer_fusion.norms import RmsNorm

# Without exports: 100 of them, invalid ones left out.
_SAMPLE = 100


@pytest.mark.parametrize("part", range(2))
def test_mutants_keep_their_numbers(part: int):
    source = names(seed=part, small=True)
    verdicts = ((name, judge(name)) for name in source)
    valid = ((name, verdict) for name, verdict in verdicts if verdict.kind != "invalid")
    found = list(itertools.islice(valid, _SAMPLE // 2))
    wrong = [
        f"{name}: {v.kind}: {v.detail}" for name, v in found if v.kind in ("wrong", "raised")
    ]
    assert not wrong
    counts = collections.Counter(verdict.kind for _, verdict in found)
    assert counts["right"] > 5
    assert counts["refused"] > 5


def test_keys_of_one_text_are_not_rotated_for_all():
    """The kernel wants positions of as many texts; what is not rotated by it is right."""
    name = Name("gptneox-torchscript-eager", "one row for the batch", 857470402)
    assert judge(name).kind == "right"


def test_a_cache_of_values_that_takes_the_new_cache_of_keys_is_left():
    """A kernel makes both, and can't read one of them."""
    name = Name("grouped on an axis", "an operand from elsewhere", 657976331)
    assert judge(name).kind == "right"


def test_sizes_that_are_declared_wrong_stop_no_session():
    """Trimmed, an embedding has other sizes, beside which onnxruntime would believe them."""
    assert judge(Name("bert-torchscript-sdpa", "a stale type", 187712879)).kind == "right"


def test_a_wrong_rewrite_is_found(monkeypatch: pytest.MonkeyPatch):
    mutants = [Name("norm", "a node doubled", seed) for seed in range(3)]
    assert {judge(name).kind for name in mutants} <= {"right", "refused"}
    rewrite = RmsNorm.rewrite
    monkeypatch.setattr(
        RmsNorm, "rewrite", lambda self, op, **v: op.Neg(rewrite(self, op, **v))
    )
    assert {judge(name).kind for name in mutants} & {"wrong"}


def test_every_mutation_applies_to_some_form():
    rng = np.random.default_rng(0)
    left = set(MUTATIONS)
    forms = [forms[0] for _, forms in FAMILIES.values()]
    for form, mutation, seed in itertools.product(forms, MUTATIONS, rng.integers(99, size=3)):
        if mutation in left and mutant_of(Name(form, mutation, int(seed))) is not None:
            left.remove(mutation)
    assert not left
