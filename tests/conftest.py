# SPDX-License-Identifier: MIT
"""A cache and a model for each test; nothing reaches the user's cache."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None)  # no race against a clock
settings.load_profile("suite")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    """Have workers, which start later, multiply on one core each: more threads only wait."""
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def cache_dir(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "ortplugins"
    monkeypatch.setenv("ORTPLUGINS_CACHE_DIR", str(folder))
    # The cache where that one can't be written, in this process and its children.
    monkeypatch.setenv("TMPDIR", str(folder.parent))
    monkeypatch.setattr("tempfile.tempdir", None)
    # A child for each of thousands of models would take most of the time.
    monkeypatch.setenv("ORTPLUGINS_BUILD_IN_PROCESS", "1")
    return folder


@pytest.fixture
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The model of the test file's CASE, with its data beside it."""
    from builders.sessions import save  # what opens no session imports none of it

    return save(request.module.CASE, tmp_path / "model.onnx")
