# SPDX-License-Identifier: MIT
"""The cache among processes that race, die, and may not write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul, relative_error

import ortplugins
from ortplugins.artifacts import source_index
from ortplugins.artifacts.directory import cache_root
from ortplugins.artifacts.maintenance import clean, prune
from ortplugins.artifacts.manifest import Entry
from ortplugins.artifacts.store import ArtifactCache

CASE = DequantizedMatMul(512, 512, 32)
CPU = ["CPUExecutionProvider"]

# Starts a session and prints where its model came from and a digest of its output.
START = """
import sys, hashlib, numpy as np, onnxruntime as ort, ortplugins
so = ort.SessionOptions()
so.intra_op_num_threads = 1
ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(accuracy_level=0), strict=True)
session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
x = np.linspace(-1, 1, 2 * 512, dtype=np.float32).reshape(2, 512)
y = session.run(None, {"x": x})[0]
print(session.ortplugins_report.source, hashlib.sha256(y.tobytes()).hexdigest())
"""


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    ir.save(CASE.model(), path, external_data="model.onnx.data")
    return path


def spawn(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", START, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def start(path: Path, **general: bool | str) -> ortplugins.InferenceSession:
    so = ort.SessionOptions()
    ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(accuracy_level=0), **general)
    return ortplugins.InferenceSession(path, so, providers=CPU)


def check(session: ortplugins.InferenceSession) -> None:
    feed = CASE.feed()
    assert relative_error(session.run(None, {"x": feed})[0], CASE.reference(feed)) <= 1e-5


def test_eight_processes_on_an_empty_cache(model_path: Path, cache_dir: Path):
    processes = [spawn(model_path) for _ in range(8)]
    lines = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert sorted(source for source, _ in lines) == ["built"] + ["cache"] * 7
    assert len({digest for _, digest in lines}) == 1
    assert len(list((cache_dir / "entries").iterdir())) == 1
    assert list((cache_dir / "building").iterdir()) == []


def test_a_builder_killed_midway_leaves_nothing_that_a_reader_sees(
    model_path: Path, cache_dir: Path
):
    # The builder stops between baking and publishing, and is killed there.
    stopping = START.replace(
        "so = ort",
        "from ortplugins.artifacts.store import ArtifactCache as C\n"
        "import time\n"
        "C.publish = lambda *a: (print('built', flush=True), time.sleep(60))\n"
        "so = ort",
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", stopping, str(model_path)], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "built\n"
    waiting = spawn(model_path)
    time.sleep(0.5)
    assert waiting.poll() is None, "the second process waits for the builder"
    assert list(cache_dir.glob("entries/*")) == []
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    out, _ = waiting.communicate(timeout=60)
    assert out.startswith("built ")
    assert list(cache_dir.glob("building/*")) == [], "what the dead one left is cleared"
    assert start(model_path).ortplugins_report.source == "cache"


def test_killed_at_any_moment(model_path: Path, cache_dir: Path):
    whole = time.perf_counter()
    spawn(model_path).communicate(timeout=60)
    whole = time.perf_counter() - whole
    clean(ArtifactCache(cache_dir))
    for part in range(1, 8):
        victim = spawn(model_path)
        time.sleep(whole * part / 8)
        victim.kill()
        victim.communicate()
        for entry in ArtifactCache(cache_dir).entries():
            assert entry.model is not None and entry.model.exists()
    check(start(model_path))


def test_files_are_private(model_path: Path, cache_dir: Path):
    start(model_path)
    folders = [cache_dir, *(path for path in cache_dir.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_a_cache_that_cannot_be_written_warns_and_is_done_without(
    model_path: Path, tmp_path: Path
):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(ortplugins.OrtpluginsWarning, match="works without its cache in .*file"):
        session = start(model_path, cache_dir=str(blocked / "cache"))
    assert session.ortplugins_report.source == "built"
    assert not os.path.exists(session.ortplugins_report.artifact), (
        "the temporary files are gone"
    )
    check(session)


def test_it_warns_once(model_path: Path, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            start(model_path, cache_dir=str(blocked / "cache"))
    assert len([w for w in caught if w.category is ortplugins.OrtpluginsWarning]) == 1


def test_a_directory_that_others_may_write_to_is_not_trusted(
    model_path: Path, cache_dir: Path
):
    start(model_path)
    cache_dir.chmod(0o777)
    with pytest.warns(ortplugins.OrtpluginsWarning, match="others may write"):
        session = start(model_path)
    assert session.ortplugins_report.source == "built"
    check(session)


def test_a_cache_that_is_only_readable_serves_hits(model_path: Path, cache_dir: Path):
    start(model_path)
    for path in (cache_dir, *cache_dir.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    before = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")}
    try:
        assert start(model_path).ortplugins_report.source == "cache"
        assert {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")} == before
    finally:
        for path in (cache_dir, *cache_dir.rglob("*")):
            path.chmod(path.stat().st_mode | 0o700)


def test_a_model_replaced_while_it_is_built_is_not_published(
    model_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    import ortplugins.optimization.build as module

    real = module.build_artifact

    def build(*args: object, **kwargs: object) -> object:
        manifest = real(*args, **kwargs)
        other = CASE.model()
        other.doc_string = "another content, the same numbers"
        ir.save(other, model_path, external_data="model.onnx.data")
        return manifest

    monkeypatch.setattr(module, "build_artifact", build)
    with pytest.warns(ortplugins.OrtpluginsWarning, match="changed while it was read"):
        session = start(model_path)
    check(session)
    assert list(cache_dir.glob("entries/*")) == []


def test_a_large_file_is_hashed_once(cache_dir: Path, tmp_path: Path):
    path = tmp_path / "large.onnx"
    path.write_bytes(bytes(5 << 20))
    os.utime(path, (time.time() - 60, time.time() - 60))

    def digest() -> str:
        return ArtifactCache(cache_dir).sources.file_digest(path)

    first = digest()
    # Changed a moment ago by its status: not remembered yet.
    assert not (cache_dir / "digests").exists()
    time.sleep(2.1)
    assert digest() == first
    (memo,) = (cache_dir / "digests").iterdir()
    memo.write_text(memo.read_text().replace(first, "from the memo"))
    assert digest() == "from the memo"
    path.write_bytes(bytes(5 << 20))
    assert digest() == first


def test_a_kept_digest_is_not_believed_where_the_content_differs(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two images of a file system without change times may show two files alike."""
    path = tmp_path / "large.onnx"
    path.write_bytes(bytes(5 << 20))
    status = os.stat(path)
    monkeypatch.setattr(source_index, "_SETTLED_SECONDS", -1)
    monkeypatch.setattr(os, "fstat", lambda _: status)
    first = ArtifactCache(cache_dir).sources.file_digest(path)
    path.write_bytes(b"x" * (5 << 20))
    assert ArtifactCache(cache_dir).sources.file_digest(path) != first


def write(cache: ArtifactCache, key: str, size: int) -> Entry:
    """Publish an entry of one file."""
    with cache.build(key) as folder:
        assert isinstance(folder, Path)
        (folder / "model.onnx").write_bytes(bytes(size))
        manifest = {"model": key, "made_from": {"digest": key}, "report": {}}
        return cache.publish(key, folder, manifest)


def age(entry: Entry, seconds: float) -> None:
    """Have an entry published, and used, that long ago."""
    moment = time.time() - seconds
    manifest = entry.folder / "manifest.json"
    manifest.write_text(json.dumps({**entry.manifest, "created": moment}))
    os.utime(manifest, (moment, moment))


def test_an_entry_rebuilt_meanwhile_is_not_discarded(cache_dir: Path):
    cache, key = ArtifactCache(cache_dir), "0" * 40
    damaged = write(cache, key, 10)
    cache.discard(key, damaged.manifest)  # by another worker, which then rebuilds it
    rebuilt = write(cache, key, 10)
    cache.discard(key, damaged.manifest)
    assert cache.find(key) == rebuilt
    cache.discard(key, rebuilt.manifest)
    assert cache.find(key) is None


def test_a_limit_is_kept_when_an_entry_is_published(cache_dir: Path):
    cache = ArtifactCache(cache_dir, limit=30_000)
    for index in range(3):
        age(write(cache, f"{index}" * 40, 9_000), 1000 - index)
    assert len(cache.entries()) == 3
    cache.find("0" * 40)
    write(cache, "3" * 40, 9_000)
    names = {entry.folder.name[0] for entry in cache.entries()}
    assert names == {"0", "2", "3"}, "1 was unused longest"
    # An entry above the limit stays, and so does what may be about to be opened.
    write(cache, "4" * 40, 40_000)
    assert {entry.folder.name[0] for entry in cache.entries()} == {"0", "3", "4"}


def test_the_limit_of_a_session(model_path: Path, cache_dir: Path, monkeypatch):
    old = write(ArtifactCache(cache_dir), "0" * 40, 10_000)
    age(old, 1000)
    monkeypatch.setenv("ORTPLUGINS_CACHE_LIMIT", "1GB")
    start(model_path)
    assert old.folder.exists()
    assert start(model_path, cache_limit="1kB").ortplugins_report.source == "cache"
    clean_folder = model_path.with_name("other.onnx")
    ir.save(DequantizedMatMul(64, 64, 32).model(), clean_folder)
    start(clean_folder, cache_limit="1kB")
    assert not old.folder.exists()
    assert len(ArtifactCache(cache_dir).entries()) == 2, "used a moment ago"
    with pytest.raises(ortplugins.OptionError, match=r"cache_limit is '1 parsec': a size"):
        start(model_path, cache_limit="1 parsec")
    monkeypatch.setenv("ORTPLUGINS_CACHE_LIMIT", "much")
    with pytest.raises(ortplugins.OptionError, match="ORTPLUGINS_CACHE_LIMIT is 'much'"):
        start(model_path)


def test_a_file_system_without_locks(
    model_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(ortplugins.OrtpluginsWarning, match="has no locks") as caught:
        session = start(model_path)
    assert len(caught) == 1
    assert session.ortplugins_report.source == "built"
    check(session)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert start(model_path).ortplugins_report.source == "cache"
    # What another process builds is not known to be abandoned.
    half = cache_dir / "building" / f"{'0' * 40}.half"
    half.mkdir()
    with pytest.warns(ortplugins.OrtpluginsWarning, match="has no locks"):
        prune(ArtifactCache(cache_dir), max_size=0)
    assert half.exists()


def test_two_that_publish_one_key_without_locks(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    cache, key = ArtifactCache(cache_dir), "0" * 40
    with cache.build(key) as first:
        assert isinstance(first, Path)
        write(ArtifactCache(cache_dir), "1" * 40, 5)
        other = cache_dir / "building" / f"{key}.other"
        other.mkdir()
        manifest = {"model": "", "made_from": {"digest": ""}}
        cache.publish(key, other, manifest)
        cache.publish(key, first, manifest)
    assert cache.find(key) is not None
    assert list((cache_dir / "building").iterdir()) == []


def test_pruning_forgets_what_belongs_to_no_entry(
    model_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(source_index, "_MEMO_SIZE", 0)
    monkeypatch.setattr(source_index, "_SETTLED_SECONDS", -1)
    start(model_path)
    cache = ArtifactCache(cache_dir)
    (entry,) = cache.entries()
    for path in (*cache.own("locks"), *cache.own("sources")):
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    names = ("sources", "digests")
    assert all(cache.own(name) for name in (*names, "locks"))
    prune(cache, older_than=1e9)
    assert all(cache.own(name) for name in names)
    cache.discard(entry.folder.name, entry.manifest)
    model_path.unlink()
    model_path.with_name("model.onnx.data").unlink()
    for path in cache.own("locks"):
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    prune(cache, older_than=1e9)
    assert [cache.own(name) for name in (*names, "locks")] == [[], [], []]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert cache_root(str(tmp_path / "chosen")) == tmp_path / "chosen"
    monkeypatch.setenv("ORTPLUGINS_CACHE_DIR", str(tmp_path / "env"))
    assert cache_root() == tmp_path / "env"
    monkeypatch.delenv("ORTPLUGINS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root().name == "ortplugins"


def test_list_and_clean(model_path: Path, cache_dir: Path):
    session = start(model_path)
    cache = ArtifactCache(cache_dir)
    (entry,) = cache.entries()
    assert isinstance(entry, Entry)
    assert entry.manifest["model"] == str(model_path)
    assert entry.size == sum(
        file.stat().st_size for file in entry.folder.iterdir() if file.name != "manifest.json"
    )
    size = sum(file.stat().st_size for file in entry.folder.iterdir())
    assert clean(cache) == (1, size)
    assert cache.entries() == []
    check(session)  # a session that has an entry open keeps it
    assert start(model_path).ortplugins_report.source == "built"


def test_clean_leaves_what_is_not_the_caches(model_path: Path, cache_dir: Path):
    start(model_path)
    for name in ("entries", "sources", "building"):
        (cache_dir / name / "mine").mkdir()
    (cache_dir / "sources" / "code.py").write_text("mine")
    clean(ArtifactCache(cache_dir))
    assert sorted(path.name for path in (cache_dir / "sources").iterdir()) == [
        "code.py",
        "mine",
    ]
    assert [path.name for path in (cache_dir / "entries").iterdir()] == ["mine"]
