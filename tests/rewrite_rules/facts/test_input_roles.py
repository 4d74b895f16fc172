# SPDX-License-Identifier: MIT
"""What an input is, by its name, its type and shape, and by the nodes that read it."""

from pathlib import Path

import pytest
from builders.text_cases import text_cases
from builders.text_models import model_of

from rewrite_rules.facts.input_roles import role_of, rows_below

CASES = text_cases(Path(__file__).with_name("roles.txt"))
TABLES = "float[9, 5] table, float[7, 5] small, float[5] vector, int64[1] one, int64[n, m] ids"


@pytest.mark.parametrize("name", CASES)
def test_what_an_input_is(name: str):
    case = CASES[name]
    model = model_of(f"g ({name}, {TABLES}) => (y) {{ y = Neg(one) {case.nodes} }}")
    value = model.graph.inputs[0]
    role, rows = role_of(value), rows_below(value)
    found = [role.kind.name, *(axis or "-" for axis in role.axes)]
    case.expect(" ".join(found) + (f", {rows} rows" if rows else ""))
