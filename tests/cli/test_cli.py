# SPDX-License-Identifier: MIT
"""The command line, through its real entry points, in its own process."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.command_line import ortplugins_command
from builders.dequantized_models import DequantizedMatMul
from builders.processes import call
from builders.sessions import CPU, check, files, save, start
from builders.text_models import normal, proto_of, text_model
from rich.console import Console
from rich.progress import TimeRemainingColumn

import ortplugins
from ortplugins.cli import COMMANDS, application, terminal
from ortplugins.cli.options import GivenSamples
from ortplugins.report import Report
from ortplugins.runtime.machine import instruction_sets

SCRIPT = (os.path.join(sysconfig.get_path("scripts"), "ortplugins"),)

FUSED = DequantizedMatMul(64, 32, 32)
# MatMulNBits has no kernel for blocks of 8.
REFUSED = DequantizedMatMul(64, 32, 24)

FLOAT = "g (float[T, 64] x) => (float[T, 64] y) { [head] y = MatMul(x, W) }"

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ortp(tmp_path: Path) -> Command:
    """Runs the command in an empty folder; ``variables`` add to the environment."""

    def command(
        *arguments: object, entry: tuple[str, ...] = SCRIPT, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return call(*entry, *arguments, cwd=tmp_path, **variables)

    return command


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same in this process."""
    monkeypatch.chdir(tmp_path)
    return ortplugins_command


@pytest.mark.parametrize("missing", ["cyclopts", "rich"])
def test_without_the_extra_one_sentence_says_what_to_install(ortp, missing):
    code = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; "
        "runpy.run_module('ortplugins', run_name='__main__')"
    )
    done = ortp(entry=(sys.executable, "-c", code))
    assert done.returncode == 2
    assert done.stderr == "The command line needs: pip install 'ortplugins[cli]'\n"


IMPORTED = """
import sys
from ortplugins.cli import main
try:
    main()
finally:
    heavy = {"numpy", "onnx", "onnx_ir", "onnxscript", "onnxruntime"} & set(sys.modules)
    print(heavy, sum(name.startswith("ortplugins.cli.") for name in sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["inspect"], ["inspect", "--help"]])
def test_what_opens_no_model_imports_no_onnx(ortp, arguments):
    done = ortp(*arguments, entry=(sys.executable, "-c", IMPORTED))
    heavy, modules = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert heavy == "set()"
    # Only the command that runs, with what it shares with others.
    assert int(modules) <= (1 if arguments == ["--help"] else 4)


def test_the_help_lists_the_table_and_each_command_fits_on_a_screen(main):
    listed = main("--help").stdout
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"\u2502 {name} +{re.escape(summary)} +\u2502", listed)
        shown = main(name, "--help").stdout
        assert f"ortplugins {name}" in shown and len(shown.splitlines()) <= 40


DEFAULTS = {
    "inspect": "text", "optimize": "text", "quantize": "text", "tune": "latency 5 text",
    "compare": "10 5 CPUExecutionProvider text", "run": "", "cache warm": "all True",
    "evaluate": "4096 512 500 CPUExecutionProvider text",
    "quantize-static": "text int16 True CPUExecutionProvider",
}  # fmt: skip


@pytest.mark.parametrize("command", DEFAULTS)
def test_the_help_shows_every_default_that_is_something(main, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    shown = re.findall(r"\[default: (.*?)\]", main(*command.split(), "--help").stdout)
    assert shown == DEFAULTS[command].split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_commands_and_options(shell):
    script = application().generate_completion(shell=shell)
    assert "quantize-static" in script and "max-16bit" in script


# Commands that cannot be used so, and words of the one sentence that says it.
REFUSALS = Path(__file__).with_name("refusals.txt").read_text("utf-8").splitlines()[1:]


@pytest.mark.parametrize("line", REFUSALS)
def test_a_command_that_cannot_be_used(main, tmp_path, cache_dir, line):
    for name in ("m.onnx", "lost.onnx"):
        save(FUSED, tmp_path / name)
    onnx.save(proto_of(FLOAT, {"W": normal(64, 64)}), tmp_path / "f.onnx")
    (tmp_path / "lost.onnx.data").unlink()
    before = files(tmp_path)
    command, words = line.split(" => ")
    done = main(*shlex.split(command.replace(r"\udcff", "\udcff")))
    assert (done.returncode, done.stdout) == (2, "")
    assert [word for word in words.split(" | ") if word not in done.stderr] == [], done.stderr
    assert not done.stderr.startswith("error: ") or done.stderr.count("\n") == 1
    assert files(tmp_path) == before and not cache_dir.exists()


@pytest.mark.parametrize("what", ["ORP503", "orp503", "pool: x [ORP503]", "keep it as it is"])
def test_explain_takes_a_code_a_remark_or_words(main, what):
    shown = main("explain", what).stdout
    assert shown.startswith("ORP503  Padding") and "mask attention" in shown
    assert shown.count("ORP") == 1


TERMINATED = """
import os, signal, time, ortplugins.cli, ortplugins.quantization.files as files
files.QuantizedFile.saved = lambda *_: os.kill(os.getpid(), signal.{}) or time.sleep(9)
ortplugins.cli.main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_command_that_is_terminated_removes_its_temporary_files(ortp, tmp_path, name):
    onnx.save(proto_of(FLOAT, {"W": normal(64, 64)}), tmp_path / "f.onnx")
    entry = (sys.executable, "-c", TERMINATED.format(name))
    done = ortp("quantize", "f.onnx", "-o", "o.onnx", entry=entry)
    assert (done.returncode, done.stderr) == (128 + signal.Signals[name], "")
    assert [path.name for path in tmp_path.iterdir()] == ["f.onnx"]


@pytest.mark.parametrize("arguments", [(), ("cache",)])
def test_without_a_command_there_is_help(main, arguments):
    shown = main(*arguments)
    assert (shown.returncode, shown.stderr) == (0, "") and "Commands" in shown.stdout
    assert main("--version").stdout == f"ortplugins {ortplugins.__version__}\n"


@pytest.mark.parametrize("arguments", ["optimize m.onnx -o there", "quantize f.onnx -o there"])
def test_nothing_is_overwritten_without_force(main, tmp_path, arguments):
    save(FUSED, tmp_path / "m.onnx")
    onnx.save(proto_of(FLOAT, {"W": normal(64, 64)}), tmp_path / "f.onnx")
    there = tmp_path / "there"
    there.write_text("somebody's")
    done = main(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there: exists; --force")
    assert there.read_text() == "somebody's"
    done = main(*arguments.split(), "--force")
    assert done.returncode == 0, done.stderr
    assert there.read_bytes() != b"somebody's"


@pytest.fixture
def doctor(main) -> Callable[..., dict[str, tuple[str, str]]]:
    """Returns what doctor finds, and what is wrong with it; then it exits with 1."""

    def rows(*arguments: object) -> dict[str, tuple[str, str]]:
        done = main("doctor", "--format", "json", *arguments)
        found = {
            row["name"]: (row["value"], row["problem"]) for row in json.loads(done.stdout)
        }
        assert done.returncode == any(problem for _, problem in found.values())
        return found

    return rows


def test_doctor_looks_at_the_cache_and_makes_none(doctor, tmp_path):
    start(save(FUSED, tmp_path / "m.onnx"), cache_dir=str(tmp_path / "full"))
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    before = files(tmp_path)
    named = "set ORTPLUGINS_CACHE_DIR to a folder of your own"
    for name, entries, writable, problem in (
        ("none", "0, 0 bytes", "yes, once it is created", ""),
        ("full", "1, ", "yes", ""),
        ("file/x", "0, 0 bytes", "no", f"{tmp_path / 'file'} cannot be written: {named}"),
        ("open", "not used", "yes", ""),
        (300 * "x", "", "yes, once it is created", ""),
    ):
        rows = doctor("--cache-dir", tmp_path / name)
        assert rows["cache entries"][0].startswith(entries), name
        assert ("others may write" in rows["cache entries"][1]) == (name == "open")
        assert rows["cache writable"] == (writable, problem)
    assert files(tmp_path) == before


def test_doctor_finds_variables_that_no_session_can_read(doctor, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", "conv_fusoin")
    monkeypatch.setenv("ORTPLUGINS_CACHE_LIMIT", "lots")
    rows = doctor()
    assert "unknown pass 'conv_fusoin'" in rows["environment: ORTPLUGINS"][1]
    assert "'lots'" in rows["environment: ORTPLUGINS_CACHE_LIMIT"][1]


def test_doctor_finds_an_onnxruntime_that_is_too_old(doctor, monkeypatch):
    for version, problem in (
        ("1.24.0", ""),
        ("1.23.2", "ortplugins needs 1.24 or later: pip install -U onnxruntime"),
    ):
        monkeypatch.setattr(ort, "__version__", version)
        rows = doctor()
        assert rows["onnxruntime"] == (version, problem)
        assert rows["instruction sets"][0] == ", ".join(instruction_sets())
        assert rows["memory"][0].endswith("B")


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({"memory.max": "5000000"}, "5.0 MB"),
        ({"memory.max": "max"}, None),
        ({"memory/memory.limit_in_bytes": "6000000"}, "6.0 MB"),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_doctor_shows_the_memory_of_a_container(doctor, monkeypatch, limits, shown):
    monkeypatch.setattr(
        "ortplugins.runtime.machine.text_of", lambda *parts: limits.get(parts[-1], "")
    )
    assert doctor().get("memory limit (cgroup)", (None, ""))[0] == shown


def test_instruction_sets_are_known_without_proc(monkeypatch):
    known = [name for name in instruction_sets() if name.startswith(("avx", "asimd"))]
    monkeypatch.setattr("ortplugins.runtime.machine.text_of", lambda *_: "")
    assert [name for name in instruction_sets() if not name.startswith("i8")] == known


def test_a_quota_below_the_threads_of_a_session(main, monkeypatch):
    monkeypatch.setattr("ortplugins.runtime.machine.usable_cores", lambda: 2)
    monkeypatch.setattr("ortplugins.runtime.machine.host_cores", lambda: 8)
    monkeypatch.setattr(ort, "__version__", "1.29.0")  # the first that reads the variable
    advice = "set intra_op_num_threads=2, or ORT_INTRA_OP_NUM_THREADS=2 in the environment"
    assert f"8, on 2 physical cores\t{advice}" in main("doctor").stdout
    monkeypatch.setenv("ORT_INTRA_OP_NUM_THREADS", "0")  # no number of its own
    assert f"8, on 2 physical cores\t{advice}" in main("doctor").stdout
    monkeypatch.setenv("ORT_INTRA_OP_NUM_THREADS", "2")
    assert "intra_op" not in main("doctor").stdout
    monkeypatch.setattr(ort, "__version__", "1.28.0")
    assert "8, on 2 physical cores\tset intra_op_num_threads=2\n" in main("doctor").stdout


@pytest.mark.parametrize("external", [False, True], ids=["one file", "external data"])
def test_optimize_writes_a_model_that_plain_onnxruntime_runs(ortp, tmp_path, external):
    model = save(FUSED, tmp_path / "model.onnx", external=external)
    before = files(tmp_path)
    exact = ("--set", "dq_matmulnbits_fusion.accuracy_level=0")
    done = ortp("optimize", model, "-o", "out.onnx", *exact)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fired 1, refused 0\n")
    check(ort.InferenceSession(tmp_path / "out.onnx", providers=CPU), FUSED)
    nodes = onnx.load(tmp_path / "out.onnx", load_external_data=False).graph.node
    assert [node.op_type for node in nodes] == ["MatMulNBits"]
    after = files(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() <= {"out.onnx", "out.onnx.data"}
    # What the file reads is named, and what lay there before with a word.
    content = (tmp_path / "out.onnx").read_bytes()
    needed = {name for name in after if name.endswith(".data") and name.encode() in content}
    assert {name for name in after if f"out.onnx reads {name}\n" in done.stdout} == needed
    kept = needed & before.keys()
    assert [
        name for name in kept if f"{name}, which was there before" not in done.stdout
    ] == []


@pytest.mark.parametrize("case", [FUSED, REFUSED], ids=["fused", "refused"])
def test_json_on_stdout_is_the_report(main, tmp_path, case):
    model = save(case, tmp_path / "model.onnx")
    expected = ortplugins.optimize(model).report
    for command in (("inspect",), ("optimize", "-o", "out.onnx")):
        done = main(*command, "model.onnx", "--format", "json")
        report = Report.from_json(done.stdout)
        assert (done.returncode, done.stderr, report.remarks) == (0, "", expected.remarks)
    assert report.artifact == "out.onnx"
    assert all("reads model.onnx.data" in note for note in report.notes)


def test_the_bar_tells_the_time_that_a_stage_has_left(monkeypatch):
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(terminal, "console", lambda *, stderr: screen)
    monkeypatch.setattr(TimeRemainingColumn, "max_refresh", None)
    with terminal.progress_bar() as show:
        for stage, total, begun in (("first", 9, 0), ("second", 4, 0), ("third", 6, 3)):
            for done in range(begun, begun + 3):
                show(done, total, stage)
    assert re.search(r"83%\S* \S*\d:\d\d:\d\d\S* third", out.getvalue())


def test_on_a_terminal_the_first_column_is_whole_and_others_fold(monkeypatch):
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, color_system=None, width=40)
    monkeypatch.setattr(terminal, "console", lambda: screen)
    key, words = "a_key_that_is_one_word", "words " * 20
    terminal.print_table(("Key", "What"), [(key, words)])
    assert key in out.getvalue() and max(map(len, out.getvalue().splitlines())) == 40


@pytest.mark.parametrize(("asked", "count"), [(None, 128), (3, 3)])
def test_a_text_is_read_in_as_many_windows_as_are_asked_for(asked, count):
    given = GivenSamples(text=Path("text.txt"), tokenizer=Path("t.json"), count=asked)
    assert given.read(Path("m.onnx")).count == count


def test_a_hint_names_the_settings_of_its_sessions(main, tmp_path):
    save(FUSED, tmp_path / "m.onnx")
    done = main("optimize", "m.onnx", "-o", "o.onnx", "--hint", "memory", "-v")
    assert "MatMulNBits" in done.stdout and "shape_size_reorder" in done.stdout
    assert "set for its sessions: enable_cpu_mem_arena = 0" in done.stdout


def test_inspect_tells_of_a_refusal_and_writes_nothing(main, tmp_path, cache_dir):
    model = save(REFUSED, tmp_path / "m.onnx")
    before = files(tmp_path)
    done = main("inspect", model)
    assert (done.returncode, done.stderr) == (0, "")
    counts, refusal, *_ = done.stdout.splitlines()
    assert counts == "fired 0, refused 1"
    assert refusal.startswith("refused dq_matmulnbits_fusion: matmul: ")
    assert "block_size 24" in refusal
    assert files(tmp_path) == before
    assert not cache_dir.exists()


def test_inspect_names_other_passes_that_fire(main, tmp_path):
    constants = {"w": normal(8, 8, 1, 1), "c": normal(8, 1, 1)}
    image = {"x": (onnx.TensorProto.FLOAT, (1, 8, 4, 4))}
    onnx.save(
        text_model("a = Conv(x, w) y = Mul(a, c)", constants, image), tmp_path / "m.onnx"
    )
    shown = main("inspect", "m.onnx").stdout
    assert re.findall(r"pass (\w+) would fire \(rewrites: 1\)", shown) == ["conv_fusion"]
    shown = main("inspect", "m.onnx", "--pass", "transformer_fusion").stdout
    assert "would" not in shown and "model: nothing to do in this model" in shown


def test_inspect_without_a_model_lists_the_session_keys(main):
    rows = json.loads(main("inspect", "--format", "json").stdout)
    heading, *lines = main("inspect").stdout.splitlines()
    assert heading == "Session key\tDefault\tWhat it does"
    assert [line.split("\t") for line in lines] == [[*row.values()] for row in rows]


@pytest.mark.parametrize("case", [DequantizedMatMul(512, 256, 32), REFUSED])
def test_inspect_finds_out_what_packing_would_do(main, tmp_path, case):
    save(case, tmp_path / "m.onnx")
    before = files(tmp_path)
    passes = ["--pass", "dq_matmulnbits_fusion", "--pass", "prepacked_weights"]
    reported = json.loads(main("inspect", "m.onnx", *passes, "--format", "json").stdout)
    (remark,) = next(
        item["remarks"] for item in reported["passes"] if item["name"] == "prepacked_weights"
    )
    fires = case is not REFUSED
    assert remark["outcome"] == ("fired" if fires else "refused")
    assert ("1 of 1 blobs in use" in remark["reason"]) == fires
    assert files(tmp_path) == before


def test_verbose_shows_what_fired_under_its_own_name(main, tmp_path):
    # Brackets and colons are markup to rich, and stand in many exporters' names.
    model, name = FUSED.model(), "/layers[0]/[red]mlp:smile:" + "x" * 200
    model.graph.node("matmul").name = name
    ir.save(model, tmp_path / "m.onnx")
    assert name not in main("inspect", "m.onnx").stdout
    fired = main("inspect", "m.onnx", "-v").stdout.splitlines()[1]
    assert fired.startswith(f"fired   dq_matmulnbits_fusion: {name}: ")


def test_a_failing_pass_leaves_no_output(main, tmp_path, monkeypatch):
    monkeypatch.setattr(ortplugins.DqMatMulNBitsFusion, "rewrite", lambda *_: 1 / 0)
    save(FUSED, tmp_path / "m.onnx")
    done = main("optimize", "m.onnx", "-o", "o.onnx", "--pass", "dq_matmulnbits_fusion")
    assert done.returncode == 2
    assert done.stderr.startswith("error: pass 'dq_matmulnbits_fusion' failed")
    assert not (tmp_path / "o.onnx").exists()
