# SPDX-License-Identifier: MIT
"""Passes switched on for sessions that others open: in a block, in a process, by a command."""

import concurrent.futures
import dataclasses
import functools
import inspect
import logging
import os
import re
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import python
from builders.sessions import CPU, EXACT, check, options, save
from builders.text_models import proto_of
from onnxruntime import InferenceSession as EarlyBound

import ortplugins
from ortplugins import (
    DqMatMulNBitsFusion,
    MixedPrecisionBoundaries,
    OptionError,
    OrtpluginsWarning,
    PrepackedWeights,
)
from ortplugins.cache.store import ArtifactCache
from rewrite_rules.remarks import PassContext
from session_options import registry
from session_options.environment import plan_entries, plan_text

CASE = DequantizedMatMul(128, 64, 32, "int4", "transposed")

STOCK = onnxruntime.InferenceSession.__init__
FUSION = "ortplugins.enable_dq_matmulnbits_fusion"


@pytest.fixture(autouse=True)
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts and ends with onnxruntime's own constructor, the very same function."""
    for name in [name for name in os.environ if name.startswith("ORTPLUGINS")]:
        if name not in ("ORTPLUGINS_CACHE_DIR", "ORTPLUGINS_BUILD_IN_PROCESS"):
            monkeypatch.delenv(name)
    assert onnxruntime.InferenceSession.__init__ is STOCK
    yield
    ortplugins.disable()
    left = onnxruntime.InferenceSession.__init__
    onnxruntime.InferenceSession.__init__ = STOCK  # for the next test, whatever this one says
    assert left is STOCK


def source(session: onnxruntime.InferenceSession) -> str | None:
    """Where the model came from; None for a session that was not caught."""
    report = getattr(session, "ortplugins_report", None)
    return None if report is None else report.source


def open_stock(model: object, *args: object, **kwargs: object):
    return EarlyBound(model, *args, providers=CPU, **kwargs)


# Who is caught.


def test_a_block_catches_sessions_and_leaves_no_trace(model_path):
    sessions = []
    with ortplugins.enabled(EXACT):
        session = onnxruntime.InferenceSession(str(model_path), providers=CPU)
        thread = threading.Thread(target=lambda: sessions.append(open_stock(model_path)))
        thread.start()
        thread.join()
    assert onnxruntime.InferenceSession.__init__ is STOCK
    assert len(session.ortplugins_report.fired) == 1
    assert [source(session), source(sessions[0])] == ["built", "cache"]
    check(session, CASE)
    assert source(open_stock(model_path)) is None


class Derived(EarlyBound):
    def __init__(self, path: Path) -> None:
        super().__init__(path, providers=CPU)


@pytest.mark.parametrize(
    "start",
    [
        open_stock,
        Derived,
        lambda path: EarlyBound(path_or_bytes=path, sess_options=None, providers=CPU),
        lambda path: EarlyBound(path.read_bytes(), onnxruntime.SessionOptions(), CPU, [{}]),
        lambda path: EarlyBound(os.fspath(path)),
    ],
    ids=["early bound", "subclass", "keywords", "bytes", "path alone"],
)
def test_early_imports_subclasses_and_every_way_to_call(start, model_path):
    # External data is beside the file, which bytes do not name.
    path = save(CASE, model_path.with_name("alone.onnx"), external=False)
    ortplugins.enable(EXACT)
    session = start(path)
    assert source(session) == "built"
    check(session, CASE)


def test_sessions_without_options_get_the_defaults_of_the_moment(model_path, monkeypatch):
    """Some applications replace the function that makes them, to bound threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 3
    state = onnxruntime.capi._pybind_state
    monkeypatch.setattr(state, "get_default_session_options", lambda: options)
    with ortplugins.enabled():
        session = open_stock(model_path)
    assert source(session) == "built"
    assert session.get_session_options().intra_op_num_threads == 3


def test_providers_of_the_options_are_not_taken_for_the_cpu(model_path):
    """onnxruntime's own optimisations for the CPU are not for them."""
    options = onnxruntime.SessionOptions()
    options.set_provider_selection_policy(
        onnxruntime.OrtExecutionProviderDevicePolicy.PREFER_CPU
    )
    with ortplugins.enabled():
        report = EarlyBound(model_path, options).ortplugins_report
    assert "those of the SessionOptions" in str(report) and report.fired == ()


def test_a_session_says_that_it_is_of_the_model_that_was_named(model_path):
    """Packages look for files beside it; set_providers opens it again."""
    path = save(CASE, model_path.with_name("alone.onnx"), external=False)
    content = path.read_bytes()
    with ortplugins.enabled(EXACT):
        named, given = open_stock(path), open_stock(content)
        assert named._model_path == os.fspath(path) and named._model_bytes is None
        assert given._model_path is None and given._model_bytes is content
    for session in (named, given):
        assert session._enable_fallback
        session.set_providers(CPU)
        check(session, CASE)
    with ortplugins.enabled():
        assert not open_stock(path, enable_fallback=0)._enable_fallback


# Who is not.


def level_of(session: onnxruntime.InferenceSession) -> int:
    """Accuracy level of its fused node."""
    model = ir.load(session.ortplugins_report.artifact)
    (node,) = [node for node in model.graph if node.op_type == "MatMulNBits"]
    return node.attributes["accuracy_level"].as_int()


def level(model: Path) -> int | None:
    """That of a session that is opened now; None for one that is not caught."""
    session = open_stock(model)
    return None if source(session) is None else level_of(session)


def test_a_session_with_entries_of_its_own_keeps_them(model_path):
    own, out = options(DqMatMulNBitsFusion(accuracy_level=4)), onnxruntime.SessionOptions()
    out.add_session_config_entry(FUSION, "0")
    with ortplugins.enabled(EXACT):
        kept, left = open_stock(model_path, own), open_stock(model_path, out)
    assert level_of(kept) == 4
    assert source(left) == "stock"


def test_onnxruntimes_key_is_not_the_level_of_what_it_leaves(model_path, monkeypatch):
    so = onnxruntime.SessionOptions()
    so.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    for text, expected in (("", 0), (":accuracy_level=1", 1)):
        monkeypatch.setenv("ORTPLUGINS", f"dq_matmulnbits_fusion{text}")
        with ortplugins.enabled():
            assert level_of(open_stock(model_path, so)) == expected


def test_our_own_class_follows_its_options_alone(model_path):
    with ortplugins.enabled(DqMatMulNBitsFusion(), PrepackedWeights()):
        session = ortplugins.InferenceSession(model_path, options(), providers=CPU)
        stock = ortplugins.InferenceSession(model_path, providers=CPU)
    names = [item.name for item in session.ortplugins_report.passes]
    assert names == ["dq_matmulnbits_fusion"]
    assert source(stock) == "stock"


_inner: list[onnxruntime.InferenceSession] = []


@dataclasses.dataclass(frozen=True)
class Peeking(ortplugins.Pass):
    """Opens a session while it works."""

    name = "peeking"
    summary = "opens a session"

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        content = proto_of("g (float[1] x) => (float[1] y) { y = Neg(x) }")
        _inner.append(onnxruntime.InferenceSession(content.SerializeToString(), providers=CPU))


@dataclasses.dataclass(frozen=True)
class Failing(ortplugins.Pass):
    """Raises what onnxruntime's constructor takes for a failing provider."""

    name = "failing"
    summary = "fails"
    stage: str = ortplugins.option("rewrite", "Where it fails.")

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        if self.stage == "rewrite":
            raise RuntimeError("surprise")
        context.remarks.fired("a node", "touched")

    def session_settings(self) -> dict[str, str]:
        return {"no_such_attribute": "1"} if self.stage == "settings" else {}

    def opened(self) -> None:
        if self.stage == "opened":
            raise RuntimeError("surprise")


@pytest.fixture
def more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Peeking, Failing):
        monkeypatch.setitem(registry.BUILTIN_PASSES, cls.name, cls)


@pytest.mark.usefixtures("more_passes")
def test_sessions_that_passes_open_are_not_caught(model_path):
    _inner.clear()
    with ortplugins.enabled(DqMatMulNBitsFusion(), Peeking()):
        session = open_stock(model_path)
        assert len(session.ortplugins_report.fired) == 1
        assert [source(inner) for inner in _inner] == [None]
        assert source(open_stock(model_path)) == "cache"  # the next one is caught again


def test_sessions_of_our_own_modules_are_not_caught(model_path, monkeypatch, tmp_path):
    """Calibration, baking: an entry in the cache would be the least of it."""
    opened: list[onnxruntime.InferenceSession] = []

    def spy(self: onnxruntime.InferenceSession, *args: object, **kwargs: object) -> None:
        STOCK(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", spy)
    with ortplugins.enabled():
        ortplugins.optimize(model_path, tmp_path / "baked.onnx", bake=True)
        assert opened
    assert [source(session) for session in opened] == [None] * len(opened)
    monkeypatch.undo()


# When something goes wrong.


@pytest.mark.usefixtures("more_passes")
@pytest.mark.parametrize(
    ("stage", "origin"),
    [("rewrite", "untouched"), ("settings", "untouched"), ("opened", "built")],
)
def test_a_pass_that_fails_is_a_warning(model_path, tmp_path, stage, origin, capfd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ortplugins.enabled(Failing(stage=stage)):
            session = EarlyBound(model_path)  # without providers: the fallback is tempting
    assert [warning.category for warning in caught] == [OrtpluginsWarning]
    assert "failing" in str(caught[0].message) and caught[0].filename == __file__
    assert source(session) == origin
    check(session, CASE)
    with (
        ortplugins.enabled(Failing(stage=stage), strict=True, cache_dir=str(tmp_path / "new")),
        pytest.raises(ortplugins.PassError, match="'failing'"),
    ):
        EarlyBound(model_path)
    assert "EP Error" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("strict", [False, True])
def test_a_broken_artifact_is_no_provider_fallback(model_path, strict, capfd, monkeypatch):
    def discard(*_: object) -> None:  # else it would be built again
        raise PermissionError("read-only")

    monkeypatch.setattr(ArtifactCache, "discard", discard)
    with ortplugins.enabled(EXACT, strict=strict):
        artifact = Path(open_stock(model_path).ortplugins_report.artifact)
        before = artifact.stat()
        artifact.write_bytes(b"\xff" * before.st_size)
        os.utime(artifact, ns=(before.st_atime_ns, before.st_mtime_ns))  # else it is noticed
        if strict:
            with pytest.raises(Exception, match=str(artifact)):
                open_stock(model_path)
        else:
            with pytest.warns(OrtpluginsWarning, match="cannot be opened"):
                session = open_stock(model_path)
            assert source(session) == "untouched" and session._enable_fallback
            check(session, CASE)
    assert "EP Error" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("strict", [False, True])
def test_options_that_went_wrong_meanwhile(model_path, tmp_path, strict):
    file = tmp_path / "overrides.json"
    file.write_text("{}")
    with ortplugins.enabled(MixedPrecisionBoundaries(overrides=f"@{file}"), strict=strict):
        file.unlink()
        if strict:
            with pytest.raises(OptionError, match=str(file)):
                open_stock(model_path)
        else:
            with pytest.warns(OrtpluginsWarning, match=f"{file}.*the untouched model runs"):
                assert source(open_stock(model_path)) == "untouched"


@pytest.mark.parametrize("model", ["missing.onnx", b"", b"no model", None, 3, bytearray(b"x")])
def test_what_onnxruntime_refuses_gives_onnxruntimes_own_error(model):
    """Applications expect it: to download a model that is missing, say."""
    with pytest.raises(Exception) as plain:
        EarlyBound(model, providers=CPU)
    with ortplugins.enabled(), pytest.raises(Exception) as caught:
        EarlyBound(model, providers=CPU)
    assert type(caught.value) is type(plain.value)
    assert str(caught.value) == str(plain.value)


# Switching on and off.


def test_switching_on_twice_and_off_twice():
    signature = inspect.signature(onnxruntime.InferenceSession)
    ortplugins.disable()
    ortplugins.enable()
    first = onnxruntime.InferenceSession.__init__
    ortplugins.enable(DqMatMulNBitsFusion(accuracy_level=4))
    assert onnxruntime.InferenceSession.__init__ is first is not STOCK
    # It looks like the constructor that it stands for.
    assert inspect.signature(onnxruntime.InferenceSession) == signature
    assert first.__doc__ == STOCK.__doc__
    ortplugins.disable()
    assert onnxruntime.InferenceSession.__init__ is STOCK
    ortplugins.disable()
    # A block ends by an exception, too.
    with pytest.raises(KeyError), ortplugins.enabled():
        raise KeyError
    assert onnxruntime.InferenceSession.__init__ is STOCK


def test_blocks_nest_and_the_inner_one_counts(model_path):
    ortplugins.enable(DqMatMulNBitsFusion(accuracy_level=1))
    with ortplugins.enabled(DqMatMulNBitsFusion(accuracy_level=4)):
        with ortplugins.enabled(DqMatMulNBitsFusion(accuracy_level=0)):
            assert level(model_path) == 0
        assert level(model_path) == 4
        ortplugins.disable()
        assert level(model_path) == 4
    assert level(model_path) is None
    # Those of two threads may end in any order.
    first = ortplugins.enabled(DqMatMulNBitsFusion(accuracy_level=4))
    second = ortplugins.enabled(DqMatMulNBitsFusion(accuracy_level=1))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert level(model_path) == 1
    second.__exit__(None, None, None)
    assert level(model_path) is None


def test_another_patch_on_top_stays_and_nothing_is_done_twice(model_path):
    calls = []
    ortplugins.enable(bake=False)  # baking opens a session, too
    ours = onnxruntime.InferenceSession.__init__

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        calls.append(self)
        ours(self, *args, **kwargs)

    onnxruntime.InferenceSession.__init__ = theirs
    assert source(open_stock(model_path)) == "built"
    ortplugins.disable()
    assert onnxruntime.InferenceSession.__init__ is theirs
    assert source(open_stock(model_path)) is None
    # On top of theirs, with ours still below it.
    ortplugins.enable(DqMatMulNBitsFusion(accuracy_level=4), bake=False)
    assert level(model_path) == 4
    assert len(calls) == 3
    ortplugins.disable()
    assert onnxruntime.InferenceSession.__init__ is theirs
    onnxruntime.InferenceSession.__init__ = ours  # they take theirs back
    ortplugins.disable()
    assert onnxruntime.InferenceSession.__init__ is STOCK


def test_threads_open_sessions_while_others_switch(model_path):
    with ortplugins.enabled(EXACT):
        open_stock(model_path)  # the entry is there
    stop, seen = threading.Event(), set()

    def opening() -> None:
        while not stop.is_set():
            session = open_stock(model_path)
            seen.add(source(session))
            check(session, CASE)

    def switching(number: int) -> None:
        for _ in range(25):
            if number % 2:
                ortplugins.enable(EXACT)
                ortplugins.disable()
            else:
                with ortplugins.enabled(EXACT):
                    assert source(open_stock(model_path)) == "cache"

    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        openers = [pool.submit(opening) for _ in range(3)]
        try:
            list(pool.map(switching, range(4)))
        finally:
            stop.set()
    for opener in openers:
        opener.result()
    assert onnxruntime.InferenceSession.__init__ is STOCK
    assert seen <= {None, "cache"}


def test_a_line_is_logged_for_each_session(model_path, caplog):
    with caplog.at_level(logging.INFO, "ortplugins"):
        with ortplugins.enabled(EXACT):
            open_stock(model_path)
        ortplugins.InferenceSession(model_path, options(), providers=CPU)
    assert [re.sub(r"[0-9.]+ s:", "N s:", line) for line in caplog.messages] == [
        f"{model_path} in N s: {source}: fired 1, refused 0" for source in ("built", "cache")
    ]


def test_what_is_refused_leaves_what_was_in_force(model_path):
    ortplugins.enable(DqMatMulNBitsFusion(accuracy_level=4))
    for wrong in (DqMatMulNBitsFusion, "dq_matmulnbits_fusion"):
        with pytest.raises(OptionError, match=r"is not a pass: DqMatMulNBitsFusion\(\)"):
            ortplugins.enable(wrong)
    with pytest.raises(OptionError, match="did you mean 'strict'"):
        ortplugins.enable(strct=True)
    assert level(model_path) == 4


# The environment.


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
            r"shape_size_reorder:dims=batch=1\,seq=512;for_default_order=1",
            {"shape_size_reorder": {"dims": "batch=1,seq=512", "for_default_order": "1"}},
        ),
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
    assert entries(plan_text(found), monkeypatch) == found


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


def test_general_options_from_the_environment(model_path, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS_STRICT", "yes")
    with pytest.raises(OptionError, match="variable ORTPLUGINS_STRICT is 'yes'"):
        ortplugins.enable(DqMatMulNBitsFusion())
    monkeypatch.setenv("ORTPLUGINS_STRICT", "1")
    # A bug in ortplugins: callers see it only where strict asks for that.
    monkeypatch.setattr("ortplugins.cache.get_or_build.get_or_build", lambda *_: 1 / 0)
    with ortplugins.enabled(), pytest.raises(ZeroDivisionError):
        open_stock(model_path)
    message = "ZeroDivisionError: .*; the untouched"
    with ortplugins.enabled(strict=False), pytest.warns(OrtpluginsWarning, match=message):
        check(open_stock(model_path), CASE)


def test_a_hint_is_taken_instead_of_passes(model_path, monkeypatch):
    """Instead of the default pass, and of those that are switched on for other sessions."""
    aim = {"hint": "latency", "hint_seconds": 1}
    own = onnxruntime.SessionOptions()
    ortplugins.configure(own, **aim)
    with ortplugins.enabled(EXACT):
        sessions = [open_stock(model_path, own)]
    with ortplugins.enabled(**aim):
        sessions += [open_stock(model_path)]
    for name, value in aim.items():
        monkeypatch.setenv(f"ORTPLUGINS_{name.upper()}", str(value))
    with ortplugins.enabled():
        sessions += [open_stock(model_path)]
    for session in sessions:
        assert session.ortplugins_report.notes[-1].startswith("hint latency: ")
    with ortplugins.enabled(EXACT):  # named in the program, which counts more
        assert source(open_stock(model_path)) == "built"


# The command.


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


def test_run_a_script_and_a_module_with_options_like_ours(program, tmp_path):
    script = str(program / "script.py")
    done = run(script, "--verbose", "--", "-m", "--set=x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"__main__ ['--verbose', '--', '-m', '--set=x'] {program}",
        "built: fired 1, refused 0",
    ]
    reported = r"ortplugins: 1 session \(1 built\), 1 rewrites, slowest start [0-9.]+ s"
    assert re.fullmatch(reported, done.stderr.strip())
    done = run("-m", "shop", "-m", "--help", cwd=program, ORTPLUGINS="prepacked_weights")
    assert done.returncode == 0, done.stderr
    first, report = done.stdout.splitlines()
    assert first == f"__main__ ['-m', '--help'] {program}"
    assert "matmul" not in report.lower() and report.startswith("untouched")


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
        reported = found.stderr.splitlines()
        assert reported.count("ortplugins: no session was opened") == 1, name
        last = [line for line in reported if not line.startswith("ortplugins: ")][-1:]
        assert last == expected.stderr.splitlines()[-1:], name


def test_run_tells_what_is_wrong_before_the_program_starts(program):
    for arguments, reason in (
        (["missing.py"], "missing.py: no such program"),
        (["--pass", "dq_matmul", "script.py"], "did you mean 'dq_matmulnbits_fusion'"),
    ):
        done = run(*arguments, cwd=program)
        assert (done.returncode, done.stdout) == (2, "") and reason in done.stderr


SPAWNING = """
import multiprocessing, subprocess, sys
def work(model):
    import importlib.util
    importlib.util.find_spec("onnxruntime")  # asking for it is not importing it
    import onnxruntime
    assert onnxruntime.__loader__ is onnxruntime.__spec__.loader
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return getattr(session, "ortplugins_report", None).source
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, sys.argv[1:]))
    code = "import sys; print('onnxruntime' in sys.modules, 'ortplugins' in sys.modules)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
"""


def test_python_children_of_a_program_have_it_too(model_path, tmp_path):
    """And import nothing of ours before they import onnxruntime; their own site still runs."""
    (tmp_path / "spawning.py").write_text(SPAWNING)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('theirs', flush=True)")
    done = run("spawning.py", str(model_path), cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    # First the parent's; then the worker's and that of multiprocessing's resource tracker.
    assert lines[0] == "theirs"
    assert "built" in lines
    assert lines[-2:] == ["theirs", "False False"]


WORKERS = """
import multiprocessing, os, sys
def work(model):
    import onnxruntime
    onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
if __name__ == "__main__":
    import onnxruntime
    for method in sys.argv[2:]:
        worker = multiprocessing.get_context(method).Process(target=work, args=sys.argv[1:2])
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
    arguments = ("workers.py", str(model_path), "spawn", "fork")
    # With its thread for telemetry, forked processes hang when they end (since 1.29).
    variables = {"ORT_DISABLE_TELEMETRY": "1", "TMPDIR": str(tmp_path)}
    done = run(*arguments, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    (last,) = done.stderr.splitlines()
    expected = r"3 sessions \(2 from the cache, 1 built\), 3 rewrites, slowest start [0-9.]+ s"
    assert re.fullmatch(f"ortplugins: {expected}", last)
    assert not list(tmp_path.glob("ortplugins-run-*"))


def test_children_without_ortplugins_are_reported_and_run(model_path, tmp_path):
    """Those of another virtual environment."""
    code = """
import sys
sys.modules["ortplugins"] = None  # as if it were not installed
import onnxruntime
onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
print("runs")
"""
    startup = Path(ortplugins.__file__).parent / "session" / "startup"
    done = python("-c", code, str(model_path), cwd=tmp_path, PYTHONPATH=str(startup))
    assert done.stdout == "runs\n", done.stderr
    assert "has no ortplugins: its sessions stay as they are" in done.stderr


def test_nothing_is_patched_at_import():
    code = """
import onnxruntime
before = onnxruntime.InferenceSession.__init__
import ortplugins
ortplugins.enable, ortplugins.InferenceSession
assert onnxruntime.InferenceSession.__init__ is before
"""
    done = python("-c", code, cwd=Path.cwd(), ORTPLUGINS="dq_matmulnbits_fusion")
    assert done.returncode == 0, done.stderr


# The page; test_docs.py runs its blocks.


def test_the_page_has_the_variable_as_it_reads(monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "adopt-anywhere.md"
    (text,) = re.findall('export ORTPLUGINS="(.*)"', page.read_text("utf-8"))
    found = entries(text, monkeypatch)
    assert len(found) == 4
    assert plan_text(found) == text
