# SPDX-License-Identifier: MIT
"""The environment variable ORTPLUGINS, as entries."""

import re
from pathlib import Path

import pytest

import ortplugins
from ortplugins import OptionError
from session_options.environment import environment_entries

FUSION = "enable_dq_matmulnbits_fusion=1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [FUSION]),
        ("  ", [FUSION]),
        ("dq_matmulnbits_fusion", [FUSION]),
        ("strict=1 bake=0", [FUSION, "strict=1", "bake=0"]),
        ("hint=latency", ["hint=latency"]),
        (
            "prepacked_weights dq_matmulnbits_fusion.accuracy_level=0 dq_matmulnbits_fusion",
            [FUSION, "enable_prepacked_weights=1", "dq_matmulnbits_fusion.accuracy_level=0"],
        ),
        (
            r"shape_size_reorder shape_size_reorder.dims='a b=1,\c=512'",
            ["enable_shape_size_reorder=1", r"shape_size_reorder.dims=a b=1,\c=512"],
        ),
    ],
)
def test_the_variable_reads(text, expected, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", text)
    pairs = (item.split("=", 1) for item in expected)
    assert environment_entries() == {f"ortplugins.{key}": value for key, value in pairs}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dq_matmul_fusion", "unknown pass .*did you mean 'dq_matmulnbits_fusion'"),
        ("dq_matmulnbits_fusion.acuracy_level=0", "did you mean 'accuracy_level'"),
        ("dq_matmulnbits_fusion.accuracy_level=9", "expected one of auto, 0, 1, 2, 3, 4"),
        ("prepacked_weights.verify=size", "'prepacked_weights' is not among the passes"),
        ("prepacked_weights prepacked_weights", "'prepacked_weights' is given twice"),
        ("hint=latency prepacked_weights", "hint chooses the passes"),
        ("strct=1", "did you mean 'strict'"),
        ("strict=yes", 'is \'yes\'; expected "0" or "1"'),
        ("prepacked_weights 'a", "No closing quotation"),
    ],
)
def test_wrong_text_names_the_variable(text, reason, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", text)
    with pytest.raises(OptionError, match=f"environment variable ORTPLUGINS=.*{reason}"):
        ortplugins.enable()


def test_the_page_has_the_variable_as_it_reads(monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "adopt-anywhere.md"
    (text,) = re.findall('export ORTPLUGINS="(.*)"', page.read_text("utf-8"))
    monkeypatch.setenv("ORTPLUGINS", text)
    assert len(environment_entries()) == 4
