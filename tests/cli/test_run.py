# SPDX-License-Identifier: MIT
"""``ortplugins run``: programs as they are, and what is printed of their sessions."""

import concurrent.futures
import os
import re
import subprocess
from pathlib import Path

import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import python

CASE = DequantizedMatMul(128, 64, 32, "int4", "transposed")

PROGRAM = """
import sys
print(__name__, sys.argv[1:], sys.path[0])
import onnxruntime
session = onnxruntime.InferenceSession({model!r}, providers=["CPUExecutionProvider"])
print(getattr(session, "ortplugins_report", "not caught"))
"""


@pytest.fixture
def program(model_path: Path, tmp_path: Path) -> Path:
    """The folder of a script, and of a package ``shop`` that does the same."""
    folder = tmp_path / "programs"
    for file in ("script.py", "shop/__main__.py", "shop/__init__.py"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(PROGRAM.format(model=str(model_path)))
    (folder / "shop" / "__init__.py").write_text("")
    return folder


def test_run_a_script_and_a_module_with_options_like_ours(program, model_path, tmp_path):
    script = str(program / "script.py")
    done = run(script, "--verbose", "--", "-m", "--set=x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"__main__ ['--verbose', '--', '-m', '--set=x'] {program}",
        "built: fired 1, refused 0",
    ]
    assert re.fullmatch(logged(model_path, "built"), done.stderr.strip())
    done = run("-m", "shop", "-m", "--help", cwd=program, ORTPLUGINS="prepacked_weights")
    assert done.returncode == 0, done.stderr
    first, report = done.stdout.splitlines()
    assert first == f"__main__ ['-m', '--help'] {program}"
    assert "matmul" not in report.lower() and report.startswith("untouched")


def logged(model: Path, source: str) -> str:
    """What ``ortplugins run`` prints of a session, as a regular expression."""
    return rf"ortplugins: {re.escape(str(model))} in [0-9.]+ s: {source}: fired 1, refused 0"


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ortplugins", "run", *arguments, cwd=cwd, **variables)


ENDINGS = {
    "exit": "import sys; sys.exit(7)",
    "text": "raise SystemExit('sorry')",
    "os_error": "open('missing')",
    "ours": "import ortplugins; raise ortplugins.OptionError('mine')",
    "warning": "import warnings; warnings.warn('hm')",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "syntax": "what is this",
    "late": "import atexit, pickle\ndef f(): print(pickle.dumps(f))\natexit.register(f)",
    "last_words": "import atexit; atexit.register(print, 'bye', flush=True)",
}


def test_programs_end_as_they_do_under_python(tmp_path):
    for name, code in ENDINGS.items():
        (tmp_path / f"{name}.py").write_text(code)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        plain = pool.map(lambda name: python(f"{name}.py", cwd=tmp_path), ENDINGS)
        ours = pool.map(lambda name: run(f"{name}.py", cwd=tmp_path), ENDINGS)
    for name, expected, found in zip(ENDINGS, plain, ours, strict=True):
        assert found.returncode == expected.returncode, name
        assert found.stdout == expected.stdout, name
        # The last line says what happened; lines of ours may stand in the traceback above.
        assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:], name


WORKERS = """
import multiprocessing, os, sys
def work(model):
    import onnxruntime
    onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
if __name__ == "__main__":
    import onnxruntime
    worker = multiprocessing.get_context("fork").Process(target=work, args=sys.argv[1:])
    worker.start()
    worker.join()
    if not os.fork():  # ends as a worker of gunicorn does
        sys.exit()
    os.wait()
    work(sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_run_tells_of_the_sessions_of_workers(model_path, tmp_path):
    (tmp_path / "workers.py").write_text(WORKERS)
    arguments = ("workers.py", str(model_path))
    # With its thread for telemetry, forked processes hang when they end (since 1.29).
    variables = {"ORT_DISABLE_TELEMETRY": "1", "TMPDIR": str(tmp_path)}
    done = run(*arguments, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    for line, source in zip(done.stderr.splitlines(), ("built", "cache"), strict=True):
        assert re.fullmatch(logged(model_path, source), line)
