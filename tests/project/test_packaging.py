# SPDX-License-Identifier: MIT
"""What is in the distribution, and what it says without onnxruntime.

``make test-packaging`` installs it, in environments of its own.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from builders.processes import python

import ortplugins

ROOT = Path(__file__).parents[2]
PACKAGES = ("ortplugins", "rewrite_rules", "session_options")
MISSING = "ortplugins needs one of the onnxruntime wheels: pip install 'ortplugins[cpu]'"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built offline by the installed hatchling."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> zipfile.ZipFile:
    (path,) = distributions.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_a_program_without_onnxruntime_gets_an_exception(tmp_path: Path):
    text = "import sys\nsys.modules['onnxruntime'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = python("-c", "import ortplugins", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {MISSING}")


@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
@pytest.mark.parametrize("name", ["session_options", "rewrite_rules"])
def test_a_module_of_the_user_that_hides_a_package_is_named(tmp_path: Path, name, file):
    """Imported before, or only found first."""
    own, program = tmp_path / file.format(name), tmp_path / "program.py"
    own.parent.mkdir(exist_ok=True)
    own.write_text("")
    for first in ("", f"import {name}\n"):
        program.write_text(f"{first}import ortplugins")
        done = python(program, PYTHONPATH=str(ROOT))
        expected = f"ImportError: {own} hides the package {name!r} of ortplugins: rename it"
        assert expected in done.stderr.splitlines()[-1]


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    release = f"ortplugins-{ortplugins.__version__}"
    info = f"{release}.dist-info/"
    assert Path(str(wheel.filename)).name == f"{release}-py3-none-any.whl"
    tops = {name.partition("/")[0] for name in names}
    assert tops == {info.rstrip("/"), *PACKAGES}
    for package in PACKAGES:
        ignored = "__pycache__"
        files = (ROOT / package).rglob("*")
        expected = {p.relative_to(ROOT).as_posix() for p in files if p.is_file()}
        expected = {name for name in expected if ignored not in name}
        assert {name for name in names if name.startswith(f"{package}/")} == expected
        assert f"{package}/py.typed" in names
    assert f"{info}licenses/LICENSE" in names


def test_no_onnxruntime_is_a_hard_dependency(metadata: Message):
    required = metadata.get_all("Requires-Dist") or []
    always = [item for item in required if "extra ==" not in item]
    assert always
    assert not [item for item in always if item.startswith("onnxruntime")]
    extras = {"cpu": "onnxruntime", "gpu": "onnxruntime-gpu", "cli": "cyclopts"}
    for extra, package in extras.items():
        pattern = rf"{package}>=[0-9.]+; extra == '{extra}'"
        assert [item for item in required if re.fullmatch(pattern, item)], extra


def test_the_sdist_holds_what_the_tests_need_and_no_cache(distributions: Path):
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.partition("/")[0] for name in names}
    assert {*PACKAGES, "tests", "docs", "examples", "benchmarks", "README.md"} <= tops
    assert {"Makefile", "mkdocs.yml", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= tops
    left_out = (".cache/", ".venv/", "__pycache__", ".onnx", ".whl", ".gguf")
    assert not [name for name in names if any(part in name for part in left_out)]
