# SPDX-License-Identifier: MIT
"""The table of ``make test-strength`` is about the code as it is."""

from checks.strength.check_strength import MUTATIONS, ROOT


def test_each_mutation_applies_to_one_line_and_names_its_tests():
    wrong = []
    for mutation in MUTATIONS:
        missing = [test for test in mutation.tests if not (ROOT / test).exists()]
        file = ROOT / mutation.file
        found = file.read_text("utf-8").count(mutation.old) if file.exists() else None
        if found != 1 or missing or mutation.old == mutation.new:
            wrong.append(f"{mutation.file}, {mutation.old!r}: found {found}, {missing}")
    assert len(MUTATIONS) > 70
    assert not wrong, "\n".join(wrong)
