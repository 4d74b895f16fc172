# SPDX-License-Identifier: MIT
"""PrepackedWeights where processes die, disks fill and files rot: no output is wrong.

ORTPLUGINS_FAULTS is the number of kills and the like (5 by default); 20 is what a release
takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul

import ortplugins
from ortplugins import DqMatMulNBitsFusion, OrtpluginsWarning, PrepackedWeights
from ortplugins.artifacts.store import ArtifactCache
from rewrite_rules.prepacked_weights.records import read_records

FAULTS = int(os.environ.get("ORTPLUGINS_FAULTS", "5"))
CPU = ["CPUExecutionProvider"]
CASE = DequantizedMatMul(512, 256, 32)
OTHER = DequantizedMatMul(512, 256, 32, seed=7)
FEED = CASE.feed()

# Starts a session; prints its source, a digest of its output, and its remarks and warnings.
START = """
import hashlib, json, sys, warnings
import numpy as np, onnxruntime as ort, ortplugins
so = ort.SessionOptions()
so.intra_op_num_threads = 1
passes = ortplugins.DqMatMulNBitsFusion(), ortplugins.PrepackedWeights()
ortplugins.configure(so, *passes)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
y = session.run(None, {"x": np.load(sys.argv[2])})[0]
report = session.ortplugins_report
print(json.dumps({
    "source": report.source,
    "digest": hashlib.sha256(y.tobytes()).hexdigest(),
    "text": report.to_text(),
    "warnings": [str(item.message) for item in caught],
}))
"""


def save(case: DequantizedMatMul, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(case.model(), path, external_data=f"{path.name}.data")
    return path


def digest_of(y: npt.NDArray[Any]) -> str:
    return hashlib.sha256(y.tobytes()).hexdigest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, npt.NDArray[Any]]:
    """Outputs of the fused models without blobs."""
    found = {}
    for name, case in (("case", CASE), ("other", OTHER)):
        result = ortplugins.optimize(case.model())
        session = ort.InferenceSession(ir.to_proto(result.model).SerializeToString())
        (found[name],) = session.run(None, {"x": FEED})
    return found


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return save(CASE, tmp_path / "models" / "model.onnx")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a cache that holds its artifact: to be copied, not to be changed."""
    folder = tmp_path_factory.mktemp("built")
    path = save(CASE, folder / "models" / "model.onnx")
    session = start(path, cache_dir=folder / "cache")
    assert session.ortplugins_report.source == "built"
    assert blobs_in_use(session.ortplugins_report.to_text()) == 1
    return path, folder / "cache"


@pytest.fixture
def warm(built: tuple[Path, Path], cache_dir: Path) -> Path:
    """The model of a cache of this test's own, which holds its artifact."""
    shutil.copytree(built[1], cache_dir)
    cache_dir.chmod(0o700)
    return built[0]


def options(cache_dir: Path | None = None, **prepack: Any) -> ort.SessionOptions:
    so = ort.SessionOptions()
    so.intra_op_num_threads = 1
    general = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    ortplugins.configure(so, DqMatMulNBitsFusion(), PrepackedWeights(**prepack), **general)
    return so


def start(
    path: Path, cache_dir: Path | None = None, **prepack: Any
) -> ortplugins.InferenceSession:
    return ortplugins.InferenceSession(path, options(cache_dir, **prepack), providers=CPU)


def check(session: ortplugins.InferenceSession, expected: npt.NDArray[Any]) -> None:
    """The output is that of the fused model, or onnxruntime's own of an untouched one."""
    if session.ortplugins_report.source == "untouched":
        so = ort.SessionOptions()
        so.intra_op_num_threads = 1
        plain = ort.InferenceSession(session._ortplugins_source, so, providers=CPU)
        (expected,) = plain.run(None, {"x": FEED})
    np.testing.assert_array_equal(session.run(None, {"x": FEED})[0], expected)


def blobs_in_use(text: str) -> int:
    match = re.search(r"(\d+) of (\d+) blobs in use", text)
    return int(match[1]) if match else 0


@pytest.fixture
def feed_path(tmp_path: Path) -> Path:
    path = tmp_path / "feed.npy"
    np.save(path, FEED)
    return path


def spawn(path: Path, feed: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START, str(path), str(feed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return dict(json.loads(out.splitlines()[-1]))


_HOOK = """
import os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy" and any({module!r} in item for item in sys.orig_argv):
            {action}
sys.meta_path.insert(0, Finder())
"""
_PACKING, _BUILDING = (
    "rewrite_rules.prepacked_weights.child",
    "ortplugins.artifacts.build_process",
)


def sabotage(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, action: str) -> None:
    """Have the process that runs a module do something as soon as it imports numpy."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK.format(module=module, action=action))
    # Children get this process's path; here, sitecustomize was looked for long ago.
    monkeypatch.syspath_prepend(folder)


_TIDY = re.compile(
    r"entries/[0-9a-f]{40}/(manifest\.json|model\.onnx|probe\.onnx|[\w.]+\.data)"
    r"|sources/[0-9a-f]{64}\.json|digests/[0-9a-f]{64}|locks/[0-9a-f]{40}(\.[a-z]+)?\.lock"
)


def litter(cache_dir: Path) -> list[str]:
    """What lies in a cache and should not."""
    files = [p.relative_to(cache_dir).as_posix() for p in cache_dir.rglob("*") if p.is_file()]
    return [name for name in files if not _TIDY.fullmatch(name)] + [
        f"building/{path.name}" for path in cache_dir.glob("building/*")
    ]


def assert_whole(cache_dir: Path) -> None:
    """Every published entry is as its builder left it."""
    for entry in ArtifactCache(cache_dir).entries():
        assert entry.damaged_files() == []


@pytest.fixture(autouse=True)
def builds_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTPLUGINS_BUILD_IN_PROCESS")


# Many processes, and dying ones.


def test_eight_processes_on_an_empty_cache(
    tmp_path: Path,
    model_path: Path,
    feed_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
):
    log = tmp_path / "log"
    sabotage(monkeypatch, tmp_path / "site", _PACKING, f"open({str(log)!r}, 'a').write('x')")
    path = str(tmp_path / "site")
    started = [spawn(model_path, feed_path, PYTHONPATH=path) for _ in range(8)]
    results = [result_of(each) for each in started]
    assert log.read_text() == "x", "one of them packs"
    assert sorted(result["source"] for result in results) == ["built"] + ["cache"] * 7
    assert {result["digest"] for result in results} == {digest_of(expected["case"])}
    assert [blobs_in_use(result["text"]) for result in results] == [1] * 8
    assert [result["warnings"] for result in results] == [[]] * 8
    assert len(list((cache_dir / "entries").iterdir())) == 1
    assert litter(cache_dir) == []


def left_behind(cache_dir: Path) -> list[int]:
    """Processes that work on this cache."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(cache_dir) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_killed_at_random_moments(
    model_path: Path, feed_path: Path, cache_dir: Path, expected: dict[str, Any]
):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # shown if this fails
    rng = random.Random(seed)
    whole = time.perf_counter()
    assert result_of(spawn(model_path, feed_path))["source"] == "built"
    whole = time.perf_counter() - whole
    for kill in range(FAULTS):
        shutil.rmtree(cache_dir / "entries", ignore_errors=True)
        victim = spawn(model_path, feed_path)
        # Most of the first fifth is Python's own start.
        time.sleep(whole * rng.uniform(0.2, 1.0))
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        assert_whole(cache_dir)
        # One that goes on for ever would be in the way of the next.
        deadline = time.monotonic() + 20
        while left_behind(cache_dir):
            assert time.monotonic() < deadline, "its children outlive it"
            time.sleep(0.05)
        if (kill + 1) % 5 == 0:
            session = start(model_path)
            check(session, expected["case"])
            assert blobs_in_use(session.ortplugins_report.to_text()) == 1
            assert litter(cache_dir) == []


# Disks.


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """A small file system of its own."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def limited(bytes_each: int) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_each, bytes_each))


def start_watched(path: Path, **prepack: Any) -> tuple[ortplugins.InferenceSession, str]:
    """Start a session; return what it warned of and remarked, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = start(path, **prepack)
    told = [str(item.message) for item in caught if item.category is OrtpluginsWarning]
    return session, "\n".join([*told, session.ortplugins_report.to_text()])


# A build of CASE takes about 600 KB at its peak.
_ROOM_KB = (560, 8, 240, 480, 20, 100, 160, 320, 400, 520)


def test_a_full_disk(tmp_path: Path, model_path: Path, expected: dict[str, Any]):
    with disk(tmp_path / "disk", 1 << 20) as root:
        for room in _ROOM_KB[: max(1, FAULTS // 2 - 1)]:
            cache = root / f"cache{room}"
            filler = root / "filler"
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            filler.write_bytes(bytes(max(free - (room << 10), 0)))
            session, told = start_watched(model_path, cache_dir=cache)
            check(session, expected["case"])
            assert blobs_in_use(told) or "space left" in told or "packing process" in told
            filler.unlink()
            if cache.exists():
                assert_whole(cache)
            # With room again; test_what_failed_once_is_tried_again is about the blobs.
            session = start(model_path, cache_dir=cache)
            check(session, expected["case"])
            assert litter(cache) == []
            del session
            shutil.rmtree(cache)


def test_a_disk_that_is_full_everywhere(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
):
    import tempfile

    with disk(tmp_path / "disk", 64 << 10) as root:
        (root / "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(root / "tmp"))
        monkeypatch.setattr(tempfile, "tempdir", None)
        session, told = start_watched(model_path, cache_dir=root / "cache")
        check(session, expected["case"])
        assert "space left" in told
        monkeypatch.undo()


def test_files_that_may_not_grow(
    model_path: Path, feed_path: Path, cache_dir: Path, expected: dict[str, Any]
):
    pytest.importorskip("resource")
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(model_path), str(feed_path)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: limited(96 << 10),  # the fused weight fits, its blobs do not
    )
    result = result_of(process)
    assert result["digest"] == digest_of(expected["case"])
    assert not blobs_in_use(result["text"])
    assert "packing process" in result["text"] or result["warnings"]
    assert_whole(cache_dir)


def data_file(cache_dir: Path) -> Path:
    (found,) = cache_dir.glob("entries/*/model.onnx.data")
    return found


def flip_blob(data: Path) -> None:
    """Flip a bit in the first blob, which gives wrong numbers without any complaint."""
    model = onnx.load(data.with_name("model.onnx"), load_external_data=False)
    ((record, *_), *_) = read_records(model).values()
    offset, length, _ = record.blobs[0]
    content = bytearray(data.read_bytes())
    content[offset + length // 2] ^= 0x40
    data.write_bytes(content)


@pytest.mark.parametrize("damage", ["truncated", "empty", "deleted", "longer"])
def test_a_data_file_of_another_size_is_not_used(
    warm: Path, cache_dir: Path, damage: str, expected: dict[str, Any]
):
    data = data_file(cache_dir)
    if damage == "deleted":
        data.unlink()
    elif damage == "longer":
        data.write_bytes(data.read_bytes() + b"x")
    else:
        data.write_bytes(data.read_bytes()[: -5 if damage == "truncated" else 0])
    cache = ArtifactCache(cache_dir)
    key = data.parent.name
    assert cache.find(key) is None
    if damage == "truncated" or FAULTS >= 20:
        session = start(warm)
        assert session.ortplugins_report.source == "built"
        check(session, expected["case"])
        assert start(warm).ortplugins_report.source == "cache"
        assert litter(cache_dir) == []


def test_a_flipped_bit_is_found_by_digests(
    warm: Path, cache_dir: Path, expected: dict[str, Any]
):
    flip_blob(data_file(cache_dir))
    session = start(warm)
    with pytest.raises(AssertionError):  # onnxruntime says nothing, as the option's help warns
        check(session, expected["case"])
    with pytest.warns(OrtpluginsWarning, match=r"model\.onnx\.data"):
        session = start(warm, verify="digest")
    assert session.ortplugins_report.source == "built"
    check(session, expected["case"])
    assert start(warm, verify="digest").ortplugins_report.source == "cache"
    assert litter(cache_dir) == []


def test_a_damaged_entry_that_cannot_be_removed(
    warm: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
):
    def discard(*_: object) -> None:  # as on Windows, while another session has it open
        raise PermissionError("in use")

    monkeypatch.setattr(ArtifactCache, "discard", discard)
    flip_blob(data_file(cache_dir))
    with pytest.warns(OrtpluginsWarning) as told:
        session = start(warm, verify="digest")
    assert any("model.onnx.data changed on disk" in str(item.message) for item in told)
    check(session, expected["case"])


@contextlib.contextmanager
def read_only(folder: Path, cache_dir: Path) -> Iterator[Path]:
    """A copy of a cache on a file system that is then mounted read-only."""
    with disk(folder, 4 << 20) as root:
        shutil.copytree(cache_dir, root / "cache")
        (root / "cache").chmod(0o700)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        yield root / "cache"


def test_a_read_only_cache(
    tmp_path: Path, warm: Path, cache_dir: Path, expected: dict[str, Any]
):
    with read_only(tmp_path / "disk", cache_dir) as cache:
        session, told = start_watched(warm, cache_dir=cache)
        assert session.ortplugins_report.source == "cache"
        assert blobs_in_use(told) == 1
        assert "OrtpluginsWarning" not in told
        check(session, expected["case"])
        del session


def test_a_read_only_cache_that_is_damaged(
    tmp_path: Path, warm: Path, cache_dir: Path, expected: dict[str, Any]
):
    flip_blob(data_file(cache_dir))
    with read_only(tmp_path / "disk", cache_dir) as cache:
        session, told = start_watched(warm, cache_dir=cache, verify="digest")
        check(session, expected["case"])
        assert "changed on disk" in told
        del session


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
def test_a_cache_of_another_user_is_refused(
    warm: Path, cache_dir: Path, expected: dict[str, Any]
):
    flip_blob(data_file(cache_dir))  # as an attacker would; the sizes are right
    for path in (cache_dir, *cache_dir.rglob("*")):
        os.chown(path, 12345, 12345)
    before = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")}
    with pytest.warns(OrtpluginsWarning, match="belongs to another user"):
        session = start(warm)
    assert session.ortplugins_report.source == "built"
    check(session, expected["case"])
    assert {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")} == before


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
def test_nothing_is_written_to_an_empty_directory_of_another_user(
    model_path: Path, cache_dir: Path, expected: dict[str, Any]
):
    cache_dir.mkdir(parents=True)
    os.chown(cache_dir, 12345, 12345)
    with pytest.warns(OrtpluginsWarning, match="belongs to another user"):
        session = start(model_path)
    check(session, expected["case"])
    assert list(cache_dir.iterdir()) == []


# Models that change.


def test_a_model_replaced_while_a_session_starts(
    tmp_path: Path, feed_path: Path, cache_dir: Path, expected: dict[str, Any]
):
    folder = tmp_path / "models"
    cases = {"case": CASE, "other": OTHER}
    variants = {name: save(case, folder / f"{name}.onnx") for name, case in cases.items()}
    path = folder / "model.onnx"
    whole = 2.5
    known = {digest_of(expected[name]): name for name in variants}
    moments = np.linspace(0.5, 0.95, max(1, FAULTS // 3))
    for moment in moments:
        shutil.rmtree(cache_dir, ignore_errors=True)
        shutil.copy(variants["case"], path)
        began = time.perf_counter()
        process = spawn(path, feed_path)
        time.sleep(whole * float(moment))
        shutil.copy(variants["other"], folder / "new")
        os.replace(folder / "new", path)
        assert result_of(process)["digest"] in known
        whole = max(whole, time.perf_counter() - began)
        assert_whole(cache_dir)
    # Whatever was published belongs to the model that it was published for.
    for name in ("other", "case"):
        shutil.copy(variants[name], path)
        check(start(path), expected[name])
    assert litter(cache_dir) == []


@pytest.mark.parametrize(
    "data_is_linked",
    [True, False],
)
def test_a_symlinked_model(
    tmp_path: Path, cache_dir: Path, data_is_linked: bool, expected: dict[str, Any]
):
    # As in Hugging Face's cache; onnxruntime also finds data beside the file linked to.
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    original = save(CASE, blobs / "model.onnx")
    link = snapshot / "model.onnx"
    os.rename(original, blobs / "aaaa")
    link.symlink_to("../../blobs/aaaa")
    if data_is_linked:
        os.rename(blobs / "model.onnx.data", blobs / "bbbb")
        (snapshot / "model.onnx.data").symlink_to("../../blobs/bbbb")
    for source in ("built", "cache"):
        session = start(link)
        assert session.ortplugins_report.source == source
        assert blobs_in_use(session.ortplugins_report.to_text()) == 1
        check(session, expected["case"])
    assert sorted(path.name for path in tmp_path.rglob("*") if not path.is_dir()) == sorted(
        ["aaaa", "model.onnx", *(["bbbb"] if data_is_linked else []), "model.onnx.data"]
    )


def test_a_clock_that_goes_backwards(
    warm: Path,
    tmp_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 1e6)
    session = start(warm)
    assert session.ortplugins_report.source == "cache"
    check(session, expected["case"])
    # Another model in the place of one, and older than it by its times.
    path = save(CASE, tmp_path / "models" / "model.onnx")
    check(start(path), expected["case"])
    save(OTHER, path)
    for file in path.parent.iterdir():
        os.utime(file, (real() - 2e6, real() - 2e6))
    session = start(path)
    assert session.ortplugins_report.source == "built"
    check(session, expected["other"])
    assert litter(cache_dir) == []


# Children.


@pytest.mark.parametrize(
    ("module", "action", "told"),
    [
        (_PACKING, "os.kill(os.getpid(), 11)", "ended with -11"),
        (_PACKING, "time.sleep(600)", "took more than"),
        (_PACKING, "raise MemoryError('no memory')", "MemoryError"),
        (_PACKING, "print('nonsense'); os._exit(0)", "no result"),
        (_PACKING, "os.write(2, bytes(range(256))); os._exit(3)", "ended with 3"),
        (_BUILDING, "os.kill(os.getpid(), 11)", "ended with -11"),
        (_BUILDING, "time.sleep(600)", "took more than 4 s"),
        (_BUILDING, "raise MemoryError('no memory')", "ended with 1"),
        (_BUILDING, "print('nonsense'); os._exit(0)", "ended with 0"),
        (_BUILDING, "os.write(2, bytes(range(256))); os._exit(3)", "ended with 3"),
    ],
)
def test_a_child_that_fails(
    tmp_path: Path,
    model_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    action: str,
    told: str,
    expected: dict[str, Any],
):
    if FAULTS < 20 and not action.startswith(("os.kill", "time.sleep")):
        pytest.skip("ORTPLUGINS_FAULTS=20 runs this too")
    sabotage(monkeypatch, tmp_path / "site", module, action)
    if module == _BUILDING:
        limit = 4 if "sleep" in action else 60
        monkeypatch.setattr(ortplugins.PrepackedWeights, "child_seconds", lambda _: limit)
    session, text = start_watched(model_path, timeout=2 if "sleep" in action else 60)
    check(session, expected["case"])
    assert not blobs_in_use(text)
    assert told in text
    assert_whole(cache_dir)
    # What a killed builder leaves is removed by the next one.
    assert [name for name in litter(cache_dir) if not name.startswith("building/")] == []
    assert left_behind(cache_dir) == []


def test_what_failed_once_is_tried_again(
    tmp_path: Path,
    model_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
):
    with monkeypatch.context() as patch:
        sabotage(patch, tmp_path / "site", _PACKING, "os.kill(os.getpid(), 9)")
        with pytest.warns(OrtpluginsWarning, match="ended with -9"):
            session = start(model_path)
        check(session, expected["case"])
    (path,) = cache_dir.glob("entries/*/manifest.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "created": manifest["created"] - 100}))
    session = start(model_path)
    check(session, expected["case"])
    assert blobs_in_use(session.ortplugins_report.to_text()) == 1
    assert litter(cache_dir) == []


def test_without_an_interpreter(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
):
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr("multiprocessing.spawn._python_exe", None)
    session, text = start_watched(model_path)
    check(session, expected["case"])
    assert "no Python interpreter" in text
