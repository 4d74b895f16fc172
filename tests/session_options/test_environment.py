# SPDX-License-Identifier: MIT
"""The environment variable ORTPLUGINS, as entries."""

import re
from pathlib import Path

import pytest

import ortplugins
from ortplugins import OptionError
from session_options.environment import plan_entries


def entries(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("ORTPLUGINS", text)
    return plan_entries()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"dq_matmulnbits_fusion": {}}),
        ("  ", {"dq_matmulnbits_fusion": {}}),
        ("dq_matmulnbits_fusion", {"dq_matmulnbits_fusion": {}}),
        (
            " dq_matmulnbits_fusion : accuracy_level = 0;slow_kernels=keep ,prepacked_weights",
            {
                "dq_matmulnbits_fusion": {"accuracy_level": "0", "slow_kernels": "keep"},
                "prepacked_weights": {},
            },
        ),
        (
            r"shape_size_reorder:dims=batch=1\,seq=512",
            {"shape_size_reorder": {"dims": "batch=1,seq=512"}},
        ),
        (
            r"trim_padding:mask=a\\;multiple=8,shape_size_reorder:dims=\\n\;m=3\,b=1",
            {
                "trim_padding": {"mask": "a\\", "multiple": "8"},
                "shape_size_reorder": {"dims": r"\\n;m=3,b=1"},
            },
        ),
        ("trim_padding:mask=a\\", {"trim_padding": {"mask": "a\\"}}),
        (
            r"mixed_precision_boundaries:overrides=@C:\new\over.json",
            {"mixed_precision_boundaries": {"overrides": r"@C:\new\over.json"}},
        ),
    ],
)
def test_the_variable_reads(text, expected, monkeypatch):
    found = entries(text, monkeypatch)
    keys = {f"ortplugins.enable_{name}": "1" for name in expected}
    for name, settings in expected.items():
        keys |= {f"ortplugins.{name}.{key}": value for key, value in settings.items()}
    assert found == keys


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dq_matmul_fusion", "unknown pass .*did you mean 'dq_matmulnbits_fusion'"),
        ("dq_matmulnbits_fusion:acuracy_level=0", "did you mean 'accuracy_level'"),
        ("dq_matmulnbits_fusion:accuracy_level=9", "one of auto, 0, 1, 2, 3, 4 is expected"),
        ("dq_matmulnbits_fusion:accuracy_level=x", "one of auto, 0, 1, 2, 3, 4 is expected"),
        ("dq_matmulnbits_fusion:accuracy_level", "'accuracy_level' .* is not OPTION=VALUE"),
        ("dq_matmulnbits_fusion:", "'' of pass 'dq_matmulnbits_fusion' is not OPTION=VALUE"),
        (
            "dq_matmulnbits_fusion:accuracy_level=0;accuracy_level=1",
            "'dq_matmulnbits_fusion.accuracy_level' is given twice",
        ),
        ("prepacked_weights,prepacked_weights", "'prepacked_weights' is given twice"),
        ("prepacked_weights,", "no pass in front of ''"),
        (":accuracy_level=0", "no pass in front of ':accuracy_level=0'"),
        ("dq_matmulnbits_fusion;prepacked_weights", "a comma stands between passes"),
        ("1", "unknown pass '1'"),
    ],
)
def test_wrong_text_names_the_variable(text, reason, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", text)
    with pytest.raises(OptionError, match=f"environment variable ORTPLUGINS=.*{reason}"):
        ortplugins.enable()


def test_the_page_has_the_variable_as_it_reads(monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "adopt-anywhere.md"
    (text,) = re.findall('export ORTPLUGINS="(.*)"', page.read_text("utf-8"))
    found = entries(text, monkeypatch)
    assert len(found) == 4
