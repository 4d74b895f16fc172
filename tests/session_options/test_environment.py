# SPDX-License-Identifier: MIT
"""The environment variable ORTPLUGINS, as entries."""

import re
from pathlib import Path

import pytest

import ortplugins
from ortplugins import OptionError
from session_options.environment import environment_entries

# The variable => the entries that it stands for, or a reason of the error.
READ, WRONG = (
    [line.split(" => ") for line in part.splitlines()[1:]]
    for part in Path(__file__).with_name("environment.txt").read_text("utf-8").split("\n\n")
)


@pytest.mark.parametrize(("text", "entries"), READ)
def test_the_variable_reads(text, entries, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", text)
    pairs = (item.split("=", 1) for item in entries.split(" | "))
    assert environment_entries() == {f"ortplugins.{key}": value for key, value in pairs}


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_wrong_text_names_the_variable(text, reason, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", text)
    with pytest.raises(OptionError, match=f"environment variable ORTPLUGINS=.*{reason}"):
        ortplugins.enable()


def test_the_page_has_the_variable_as_it_reads(monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "adopt-anywhere.md"
    (text,) = re.findall('export ORTPLUGINS="(.*)"', page.read_text("utf-8"))
    monkeypatch.setenv("ORTPLUGINS", text)
    assert len(environment_entries()) == 4
