# SPDX-License-Identifier: MIT
"""Nothing a test does reaches the user's cache, nor another test's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def cache_dir(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "ortplugins"
    monkeypatch.setenv("ORTPLUGINS_CACHE_DIR", str(folder))
    # A child for each of thousands of models would take most of the time.
    monkeypatch.setenv("ORTPLUGINS_BUILD_IN_PROCESS", "1")
    return folder
