# SPDX-License-Identifier: MIT
"""PrepackedWeights where processes die, disks fill and files rot: no output is wrong.

ORTPLUGINS_FAULTS=20 runs every disk size and every way for a child to fail; a few by default.
"""

from __future__ import annotations

import contextlib
import json
import os
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
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.session_process import FEED, digest_of, result_of, spawn
from builders.sessions import CPU, files, options, save

import ortplugins
from ortplugins import DqMatMulNBitsFusion, OrtpluginsWarning, PrepackedWeights
from ortplugins.artifacts.store import ArtifactCache
from rewrite_rules.prepacked_weights.records import read_records

FAULTS = int(os.environ.get("ORTPLUGINS_FAULTS", "5"))
CASE = DequantizedMatMul(512, 256, 32)
OTHER = DequantizedMatMul(512, 256, 32, seed=7)
FUSION = DqMatMulNBitsFusion()

Output = npt.NDArray[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of both cases: to be read, not to be changed."""
    folder = tmp_path_factory.mktemp("models")
    for case, name in ((CASE, "case"), (OTHER, "other")):
        save(case, folder / name / "model.onnx")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Output:
    """What the fused model computes without blobs."""
    return fused_output(folder / "case" / "model.onnx")


def fused_output(path: Path) -> Output:
    fused = ortplugins.optimize(onnx.load(path), passes=[FUSION]).model
    return ort.InferenceSession(fused.SerializeToString(), providers=CPU).run(None, FEED)[0]


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the artifact of the case: to be copied, not to be changed."""
    cache = tmp_path_factory.mktemp("built") / "cache"
    session, told = start(folder / "case" / "model.onnx", cache_dir=cache)
    assert session.ortplugins_report.source == "built"
    assert blobs_in_use(told) == 1
    return cache


@pytest.fixture
def warm(folder: Path, built: Path, cache_dir: Path) -> Path:
    """The model of a cache of this test's own, which holds its artifact."""
    shutil.copytree(built, cache_dir)
    cache_dir.chmod(0o700)
    return folder / "case" / "model.onnx"


def start(
    path: Path, cache_dir: Path | None = None, **prepack: Any
) -> tuple[ortplugins.InferenceSession, str]:
    """Open a session; return what it warned of and remarked, too."""
    general = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    so = options(FUSION, PrepackedWeights(**prepack), **general)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = ortplugins.InferenceSession(path, so, providers=CPU)
    told = [str(item.message) for item in caught if item.category is OrtpluginsWarning]
    return session, "\n".join([*told, session.ortplugins_report.to_text()])


def check(session: ortplugins.InferenceSession, expected: Output) -> None:
    """The output is that of the fused model, or onnxruntime's own of an untouched one."""
    if session.ortplugins_report.source == "untouched":
        so = ort.SessionOptions()
        so.intra_op_num_threads = 1
        plain = ort.InferenceSession(session._ortplugins_source, so, providers=CPU)
        (expected,) = plain.run(None, FEED)
    np.testing.assert_array_equal(session.run(None, FEED)[0], expected)


def blobs_in_use(text: str) -> int:
    match = re.search(r"(\d+) of (\d+) blobs in use", text)
    return int(match[1]) if match else 0


_HOOK = """
import os, shutil, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy" and any({module!r} in item for item in sys.orig_argv):
            {action}
sys.meta_path.insert(0, Finder())
"""
PACKING, BUILDING = (
    "rewrite_rules.prepacked_weights.child",
    "ortplugins.artifacts.build_process",
)


def sabotage(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, action: str) -> None:
    """Have the process that runs a module do something as soon as it imports numpy."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_HOOK.format(module=module, action=action))
    # Children get this process's path; here, sitecustomize was looked for long ago.
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))


_TIDY = re.compile(
    r"entries/[0-9a-f]{40}/(manifest\.json|model\.onnx|probe\.onnx|[\w.]+\.data)"
    r"|sources/[0-9a-f]{64}\.json|digests/[0-9a-f]{64}|locks/[0-9a-f]{40}(\.[a-z]+)?\.lock"
)


def litter(cache_dir: Path) -> list[str]:
    """What lies in a cache and should not."""
    found = [p.relative_to(cache_dir).as_posix() for p in cache_dir.rglob("*") if p.is_file()]
    return [name for name in found if not _TIDY.fullmatch(name)] + [
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
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: Output,
):
    log = tmp_path / "log"
    sabotage(monkeypatch, tmp_path, PACKING, f"open({str(log)!r}, 'a').write('x')")
    results = [result_of(each) for each in [spawn(model_path) for _ in range(8)]]
    assert log.read_text() == "x", "one of them packs"
    assert sorted(result["source"] for result in results) == ["built"] + ["cache"] * 7
    assert {result["digest"] for result in results} == {digest_of(expected)}
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


@pytest.mark.parametrize("module", [PACKING, BUILDING])
def test_a_process_that_is_killed_while_its_child_works(
    tmp_path: Path,
    model_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    expected: Output,
):
    with monkeypatch.context() as patch:
        sabotage(patch, tmp_path, module, "os.kill(os.getppid(), 9)")
        victim = spawn(model_path)
        victim.communicate()
    # The builder is the packing child's parent: the session goes on without its blobs.
    assert victim.returncode == (0 if module == PACKING else -9)
    deadline = time.monotonic() + 60
    while left_behind(cache_dir):
        assert time.monotonic() < deadline, "its children outlive it"
        time.sleep(0.05)
    assert_whole(cache_dir)
    shutil.rmtree(cache_dir / "entries", ignore_errors=True)
    session, told = start(model_path)
    check(session, expected)
    assert blobs_in_use(told) == 1
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


# A build of CASE takes about 600 KB at its peak.
_ROOM_KB = (560, 8, 240, 480, 20, 100, 160, 320, 400, 520)


def test_a_full_disk(tmp_path: Path, model_path: Path, expected: Output):
    with disk(tmp_path / "disk", 1 << 20) as root:
        for room in _ROOM_KB[: max(1, FAULTS // 2 - 1)]:
            cache = root / f"cache{room}"
            filler = root / "filler"
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            filler.write_bytes(bytes(max(free - (room << 10), 0)))
            session, told = start(model_path, cache)
            check(session, expected)
            assert blobs_in_use(told) or "space left" in told or "packing process" in told
            filler.unlink()
            if cache.exists():
                assert_whole(cache)
            # With room again; test_what_failed_once_is_tried_again is about the blobs.
            session, _ = start(model_path, cache)
            check(session, expected)
            assert litter(cache) == []
            del session
            shutil.rmtree(cache)


def test_a_disk_that_is_full_everywhere(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Output
):
    with disk(tmp_path / "disk", 64 << 10) as root, monkeypatch.context() as patch:
        (root / "tmp").mkdir()
        patch.setenv("TMPDIR", str(root / "tmp"))
        patch.setattr("tempfile.tempdir", None)
        session, told = start(model_path, root / "cache")
        check(session, expected)
        assert "space left" in told


def limited() -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The fused weight fits, its blobs do not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (96 << 10, 96 << 10))


def test_files_that_may_not_grow(model_path: Path, cache_dir: Path, expected: Output):
    pytest.importorskip("resource")
    result = result_of(spawn(model_path, preexec_fn=limited))
    assert result["digest"] == digest_of(expected)
    assert not blobs_in_use(result["text"])
    assert "packing process" in result["text"] or result["warnings"]
    assert_whole(cache_dir)


def flip_blob(cache_dir: Path) -> None:
    """Flip a bit in the first blob, which gives wrong numbers without any complaint."""
    (data,) = cache_dir.glob("entries/*/model.onnx.data")
    model = onnx.load(data.with_name("model.onnx"), load_external_data=False)
    ((record, *_), *_) = read_records(model).values()
    offset, length, _ = record.blobs[0]
    content = bytearray(data.read_bytes())
    content[offset + length // 2] ^= 0x40
    data.write_bytes(content)


def test_a_flipped_bit_is_found_by_digests(warm: Path, cache_dir: Path, expected: Output):
    flip_blob(cache_dir)
    session, told = start(warm)
    # onnxruntime says nothing, as the option's help warns.
    assert session.ortplugins_report.source == "cache"
    assert not np.array_equal(session.run(None, FEED)[0], expected)
    for source in ("built", "cache"):
        session, told = start(warm, verify="digest")
        assert session.ortplugins_report.source == source
        assert ("model.onnx.data changed on disk" in told) == (source == "built")
        check(session, expected)
    assert litter(cache_dir) == []


def test_a_damaged_entry_that_cannot_be_removed(
    warm: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, expected: Output
):
    def discard(*_: object) -> None:  # as on Windows, while another session has it open
        raise PermissionError("in use")

    monkeypatch.setattr(ArtifactCache, "discard", discard)
    flip_blob(cache_dir)
    session, told = start(warm, verify="digest")
    assert "model.onnx.data changed on disk" in told
    check(session, expected)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_read_only_cache(
    tmp_path: Path, warm: Path, cache_dir: Path, damaged: bool, expected: Output
):
    if damaged:
        flip_blob(cache_dir)
    with disk(tmp_path / "disk", 4 << 20) as root:
        shutil.copytree(cache_dir, root / "cache")
        (root / "cache").chmod(0o700)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        session, told = start(warm, root / "cache", verify="digest")
        check(session, expected)
        assert ("changed on disk" in told) == damaged
        assert damaged or session.ortplugins_report.source == "cache"
        assert damaged or blobs_in_use(told) == 1
        del session


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
@pytest.mark.parametrize("empty", [False, True])
def test_a_cache_of_another_user_is_refused(
    warm: Path, cache_dir: Path, empty: bool, expected: Output
):
    flip_blob(cache_dir)  # as an attacker would; the sizes are right
    if empty:
        shutil.rmtree(cache_dir)
        cache_dir.mkdir()
    for path in (cache_dir, *cache_dir.rglob("*")):
        os.chown(path, 12345, 12345)
    before = files(cache_dir)
    session, told = start(warm)
    assert "belongs to another user" in told
    assert session.ortplugins_report.source == "built"
    check(session, expected)
    assert files(cache_dir) == before


# Models that change.


def test_a_model_replaced_while_its_child_builds(
    tmp_path: Path,
    model_path: Path,
    folder: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: Output,
):
    """Whatever is published belongs to the model that it is published for."""
    other = folder / "other" / "model.onnx"
    outputs = {"case": expected, "other": fused_output(other)}
    with monkeypatch.context() as patch:
        both = [(str(other), str(model_path)), (f"{other}.data", f"{model_path}.data")]
        sabotage(patch, tmp_path, BUILDING, f"[shutil.copy(*pair) for pair in {both}]")
        result = result_of(spawn(model_path))
    assert result["digest"] in map(digest_of, outputs.values())
    assert_whole(cache_dir)
    for name, output in outputs.items():
        for file in ("model.onnx", "model.onnx.data"):
            shutil.copy(folder / name / file, model_path.with_name(file))
        check(start(model_path)[0], output)
    assert litter(cache_dir) == []


# Children.


@pytest.mark.parametrize(
    ("module", "action", "told"),
    [
        (PACKING, "os.kill(os.getpid(), 11)", "ended with -11"),
        (PACKING, "time.sleep(600)", "took more than"),
        (PACKING, "raise MemoryError('no memory')", "MemoryError"),
        (PACKING, "print('nonsense'); os._exit(0)", "no result"),
        (PACKING, "os.write(2, bytes(range(256))); os._exit(3)", "ended with 3"),
        (BUILDING, "os.kill(os.getpid(), 11)", "ended with -11"),
        (BUILDING, "time.sleep(600)", "took more than 4 s"),
        (BUILDING, "raise MemoryError('no memory')", "ended with 1"),
        (BUILDING, "print('nonsense'); os._exit(0)", "ended with 0"),
        (BUILDING, "os.write(2, bytes(range(256))); os._exit(3)", "ended with 3"),
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
    expected: Output,
):
    if FAULTS < 20 and not action.startswith(("os.kill", "time.sleep")):
        pytest.skip("ORTPLUGINS_FAULTS=20 runs this too")
    sabotage(monkeypatch, tmp_path, module, action)
    if module == BUILDING:
        limit = 4 if "sleep" in action else 60
        monkeypatch.setattr(ortplugins.PrepackedWeights, "child_seconds", lambda _: limit)
    session, text = start(model_path, timeout=2 if "sleep" in action else 60)
    check(session, expected)
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
    expected: Output,
):
    with monkeypatch.context() as patch:
        sabotage(patch, tmp_path, PACKING, "os.kill(os.getpid(), 9)")
        session, told = start(model_path)
        assert "ended with -9" in told
        check(session, expected)
    (path,) = cache_dir.glob("entries/*/manifest.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "created": manifest["created"] - 100}))
    session, told = start(model_path)
    check(session, expected)
    assert blobs_in_use(told) == 1
    assert litter(cache_dir) == []


def test_without_an_interpreter(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Output
):
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr("multiprocessing.spawn._python_exe", None)
    session, text = start(model_path)
    check(session, expected)
    assert "no Python interpreter" in text
