# SPDX-License-Identifier: MIT
"""Passes switched on for sessions that others open: in a block, or in a process."""

import dataclasses
import functools
import inspect
import logging
import os
import re
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
from ortplugins import DqMatMulNBitsFusion, OptionError, OrtpluginsWarning, PrepackedWeights
from ortplugins.cache.store import ArtifactCache
from ortplugins.optimization import smoke_check
from rewrite_rules.remarks import PassContext
from session_options.presets import PRESETS

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
    for text, expected in (("", 0), ("dq_matmulnbits_fusion.accuracy_level=1", 1)):
        monkeypatch.setenv("ORTPLUGINS", f"dq_matmulnbits_fusion {text}")
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


@pytest.mark.parametrize("stage", ["rewrite", "settings"])
def test_a_pass_that_fails_is_a_warning(model_path, tmp_path, stage, capfd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ortplugins.enabled(Failing(stage=stage)):
            session = EarlyBound(model_path)  # without providers: the fallback is tempting
    assert [warning.category for warning in caught] == [OrtpluginsWarning]
    assert "failing" in str(caught[0].message) and caught[0].filename == __file__
    assert source(session) == "untouched"
    check(session, CASE)
    with (
        ortplugins.enabled(Failing(stage=stage), strict=True, cache_dir=str(tmp_path / "new")),
        pytest.raises(ortplugins.PassError, match="'failing'"),
    ):
        EarlyBound(model_path)
    assert "EP Error" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("strict", [False, True])
def test_a_broken_artifact_is_no_provider_fallback(model_path, strict, capfd, monkeypatch):
    def discard(*_: object) -> list[str]:  # else it would be built again
        raise PermissionError("read-only")

    monkeypatch.setattr(ArtifactCache, "discard_damaged", discard)
    with ortplugins.enabled(EXACT, strict=strict):
        artifact = Path(open_stock(model_path).ortplugins_report.artifact)
        before = artifact.stat()
        artifact.write_bytes(b"\xff" * before.st_size)
        os.utime(artifact, ns=(before.st_atime_ns, before.st_mtime_ns))  # else it is noticed
        if strict:
            with pytest.raises(Exception, match=str(artifact)):
                open_stock(model_path)
        else:
            with pytest.warns(OrtpluginsWarning, match=f"{artifact} cannot be opened"):
                session = open_stock(model_path)
            assert source(session) == "untouched" and session._enable_fallback
            check(session, CASE)
    assert "EP Error" not in "".join(capfd.readouterr())


def test_options_that_went_wrong_meanwhile(model_path, monkeypatch):
    name = "ORTPLUGINS_CACHE_LIMIT"
    with ortplugins.enabled(EXACT):
        monkeypatch.setenv(name, "much")
        with pytest.warns(OrtpluginsWarning, match=f"{name}.*the untouched model runs"):
            assert source(open_stock(model_path)) == "untouched"


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


def test_another_patch_on_top_stays_and_nothing_is_done_twice(model_path, monkeypatch):
    monkeypatch.setattr(smoke_check, "find_failure", lambda *_: None)  # it opens sessions, too
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


def test_general_options_from_the_environment(model_path, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", "strict=1")
    # A bug in ortplugins: callers see it only where strict asks for that.
    monkeypatch.setattr("ortplugins.cache.build.get_or_build", lambda *_: 1 / 0)
    with ortplugins.enabled(), pytest.raises(ZeroDivisionError):
        open_stock(model_path)
    message = "ZeroDivisionError: .*; the untouched"
    with ortplugins.enabled(strict=False), pytest.warns(OrtpluginsWarning, match=message):
        check(open_stock(model_path), CASE)


def test_a_hint_is_taken_instead_of_passes(model_path, monkeypatch):
    """Instead of the default pass, and of those that are switched on for other sessions."""
    own = onnxruntime.SessionOptions()
    ortplugins.configure(own, hint="latency")
    with ortplugins.enabled(EXACT):
        sessions = [open_stock(model_path, own)]
    with ortplugins.enabled(hint="latency"):
        sessions += [open_stock(model_path)]
    monkeypatch.setenv("ORTPLUGINS", "hint=latency")
    with ortplugins.enabled():
        sessions += [open_stock(model_path)]
    for session in sessions:
        names = {one.name for one in session.ortplugins_report.passes}
        assert names == set(PRESETS["latency"].passes)
    with ortplugins.enabled(EXACT):  # named in the program, which counts more
        assert source(open_stock(model_path)) == "built"


FORKED = """
import os, signal, threading
import onnxruntime, ortplugins
from ortplugins.session.patching import _Patch
held, update = threading.Event(), _Patch._update
_Patch._update = lambda self: held.set() or threading.Event().wait(60)
threading.Thread(target=ortplugins.enable, daemon=True).start()
held.wait()
if not (child := os.fork()):
    signal.alarm(10)
    _Patch._update = update
    ortplugins.enable()
    os._exit(0)
os._exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_another_thread_switches():
    done = python("-c", FORKED, ORT_DISABLE_TELEMETRY="1")
    assert done.returncode == 0, done.stderr
