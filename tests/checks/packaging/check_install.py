# SPDX-License-Identifier: MIT
"""The distribution in environments of its own: ``make test-packaging``.

pytest collects files called ``test_*.py``, so that this one runs only where it is named. It
needs a package registry and a few minutes.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import call
from builders.sessions import save

ROOT = Path(__file__).resolve().parents[3]
CONSUMER = Path(__file__).with_name("consumer.py")


def python_of(folder: Path) -> Path:
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def run(*command: object, cwd: Path, status: int = 0) -> str:
    """Run a command and return what it printed; it has to end with a status."""
    done = call(*command, cwd=cwd)
    assert done.returncode == status, (
        f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with what builds and checks distributions."""
    folder = tmp_path_factory.mktemp("tools")
    venv.create(folder, with_pip=True)
    python = python_of(folder)
    run(python, "-m", "pip", "install", "--quiet", "build", "twine", "uv", cwd=folder)
    return python


@pytest.fixture(scope="module")
def wheel(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made from the sdist as ``python -m build`` does, both checked by twine."""
    folder = tmp_path_factory.mktemp("dist")
    run(tools, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    run(tools, "-m", "twine", "check", "--strict", *folder.iterdir(), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    venv.create(tmp_path / "venv", with_pip=True)
    return python_of(tmp_path / "venv")


def install(python: Path, *what: object, cwd: Path) -> str:
    quiet = "--quiet", "--disable-pip-version-check"
    return run(python, "-m", "pip", "install", *quiet, *what, cwd=cwd)


def test_alone_it_says_what_is_missing(wheel: Path, empty: Path, tmp_path: Path):
    install(empty, wheel, cwd=tmp_path)
    for command in ((empty, "-c", "import ortplugins"), (empty.with_name("ortplugins"),)):
        *_, last = run(*command, cwd=tmp_path, status=1).splitlines()
        assert last.startswith("ImportError: ortplugins needs one of the onnxruntime wheels")


def test_with_onnxruntime_alone_the_command_names_its_extra(
    wheel: Path, empty: Path, tmp_path: Path
):
    install(empty, f"{wheel}[cpu]", cwd=tmp_path)
    run(empty, "-c", "import ortplugins; ortplugins.optimize", cwd=tmp_path)
    reported = run(empty.with_name("ortplugins"), "--version", cwd=tmp_path, status=2)
    assert reported == "The command line needs: pip install 'ortplugins[cli]'\n"


def test_with_its_extras_it_works_and_its_types_are_strict(
    wheel: Path, empty: Path, tmp_path: Path
):
    install(empty, f"{wheel}[cpu,cli]", "mypy>=1.18", "pyright", cwd=tmp_path)
    run(empty, "-m", "pip", "check", cwd=tmp_path)
    assert run(empty.with_name("ortplugins"), "--version", cwd=tmp_path) == (
        f"ortplugins {wheel.name.split('-')[1]}\n"
    )
    assert "dq_matmulnbits_fusion" in run(empty, "-m", "ortplugins", "inspect", cwd=tmp_path)

    consumer = tmp_path / CONSUMER.name
    shutil.copy(CONSUMER, consumer)
    text = consumer.read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("accuracy_level=4", "accuracy_level=[4]"), encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    mypy = empty, "-m", "mypy", "--strict"
    pyright = empty, "-m", "pyright", "--pythonpath", empty
    for checker in (mypy, pyright):
        run(*checker, consumer, cwd=tmp_path)
        assert "accuracy_level" in run(*checker, wrong, cwd=tmp_path, status=1)


SERVE = """
import sys, onnxruntime, ortplugins
so = onnxruntime.SessionOptions()
for name in sys.argv[2:]:
    so.add_session_config_entry(f"ortplugins.enable_{name}", "1")
session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
print(session.ortplugins_report.source, *sorted({"onnx", "onnxscript"} & set(sys.modules)))
"""


def test_an_image_serves_without_what_builds(
    wheel: Path, empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A warmed cache, read with onnxruntime, numpy and ours without the rest."""
    builder = tmp_path / "builder"
    venv.create(builder, with_pip=True)
    install(python_of(builder), f"{wheel}[cpu]", cwd=tmp_path)
    code = "import onnxruntime; print(onnxruntime.__version__)"
    version = run(python_of(builder), "-c", code, cwd=tmp_path).strip()
    install(empty, f"onnxruntime=={version}", "numpy", cwd=tmp_path)
    install(empty, "--no-deps", wheel, cwd=tmp_path)
    save(DequantizedMatMul(64, 64, 32), model := tmp_path / "model.onnx")
    warm = "import sys, ortplugins; print(ortplugins.warm(sys.argv[1:2], cache_dir='cache'))"
    assert "error=''" in run(python_of(builder), "-c", warm, model, cwd=tmp_path)
    monkeypatch.setenv("ORTPLUGINS_CACHE_DIR", str(tmp_path / "cache"))
    serve = empty, "-c", SERVE, model
    passes = "dq_matmulnbits_fusion", "prepacked_weights"
    assert run(*serve, *passes, cwd=tmp_path) == "cache\n"
    missed = run(*serve, "trim_padding", cwd=tmp_path)
    assert "untouched" in missed and "pip install onnx onnx_ir onnxscript" in missed


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_a_python_runs_the_wheel(version: str, tools: Path, wheel: Path, tmp_path: Path):
    """The first things that users do, on the wheel; skipped where that Python is missing."""
    uv = tools, "-m", "uv"
    venv_of = (*uv, "venv", "--no-python-downloads", "--python", version, tmp_path / "venv")
    made = subprocess.run(venv_of, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    python = python_of(tmp_path / "venv")
    install = *uv, "pip", "install", "--quiet", "--python", python
    run(*install, f"{wheel}[cpu,cli,text]", "pytest", "hypothesis", cwd=tmp_path)
    tests = ("session", "session_options", "optimize", "quantize", "layout_matrix")
    # Not "python -m pytest", which would import the packages of the clone.
    pytest_ = python.with_name("pytest")
    files = [path for name in tests for path in (ROOT / "tests").rglob(f"test_{name}.py")]
    assert len(files) == len(tests)
    done = run(pytest_, "-q", "-p", "no:cacheprovider", *files, cwd=ROOT)
    print(f"Python {version}: {done.splitlines()[-1]}")


def test_the_extra_for_gpus_resolves(tools: Path, wheel: Path, tmp_path: Path):
    # uv reads the metadata of wheels of 300 MB without loading them.
    (tmp_path / "requirements.in").write_text(f"ortplugins[gpu] @ {wheel.as_uri()}\n")
    resolved = run(
        *(tools, "-m", "uv", "pip", "compile", "--quiet", "requirements.in"), cwd=tmp_path
    )
    assert "onnxruntime-gpu==" in resolved
    assert "\nonnxruntime==" not in resolved
