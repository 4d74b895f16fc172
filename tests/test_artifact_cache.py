# SPDX-License-Identifier: MIT
"""The cache among processes that race, die, and may not write."""

import errno
import fcntl
import os
import re
import stat
import time
import warnings
from pathlib import Path

import onnx_ir as ir
import pytest
from builders.cache_entries import backdate
from builders.dequantized_models import DequantizedMatMul
from builders.processes import result_of, spawn
from builders.sessions import check, save, source, start

import ortplugins
from ortplugins.cache import store
from ortplugins.cache.store import ArtifactCache, Entry, cache_root, prune
from ortplugins.optimization import build

CASE = DequantizedMatMul(512, 512, 32)
OTHER = DequantizedMatMul(64, 64, 32)


# The builder stops between baking and publishing, and is killed there.
STOP = """
from ortplugins.cache.store import ArtifactCache as C
import time
C.publish = lambda *a: (print('built', flush=True), time.sleep(60))
"""


def test_a_builder_killed_midway_leaves_nothing_that_a_reader_sees(model_path, cache_dir):
    fusion = "dq_matmulnbits_fusion"
    victim = spawn(model_path, fusion, prelude=STOP)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "built\n"
    waiting = spawn(model_path, fusion)
    assert list(cache_dir.glob("entries/*")) == []
    victim.kill()
    victim.wait()
    reported = result_of(waiting)
    assert (reported["source"], reported["warnings"]) == ("built", [])
    assert list(cache_dir.glob("building/*")) == [], "what the dead one left is cleared"
    assert result_of(spawn(model_path, fusion))["source"] == "cache"


def test_files_are_private_and_a_directory_that_others_may_write_to_is_not_trusted(
    model_path, cache_dir
):
    start(model_path)
    folders = [cache_dir, *(path for path in cache_dir.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    cache_dir.chmod(0o777)
    with pytest.warns(ortplugins.OrtpluginsWarning, match="others may write"):
        session = start(model_path)
    assert session.ortplugins_report.source == "built"
    check(session, CASE)


def test_a_cache_that_cannot_be_written_warns_once_and_is_done_without(
    model_path, tmp_path, monkeypatch
):
    """The model is built in a child all the same."""

    def build(*_: object) -> None:
        raise AssertionError("this process builds")

    monkeypatch.delenv("ORTPLUGINS_BUILD_IN_PROCESS")
    monkeypatch.setattr("ortplugins.cache.build.build_entry", build)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            session = start(model_path, cache_dir=str(blocked / "cache"))
            assert session.ortplugins_report.source == "built"
            artifact = session.ortplugins_report.artifact
            assert not os.path.exists(artifact), "the temporary files are gone"
            check(session, CASE)
    (reported,) = (w for w in caught if w.category is ortplugins.OrtpluginsWarning)
    assert re.search("works without its cache in .*file", str(reported.message))


def test_a_model_replaced_meanwhile_is_not_published(model_path, cache_dir, monkeypatch):
    real = build.build_artifact

    def build_and_replace(*args: object, **kwargs: object) -> object:
        manifest = real(*args, **kwargs)
        other = CASE.model()
        other.doc_string = "another content, the same numbers"
        ir.save(other, model_path, external_data="model.onnx.data")
        return manifest

    monkeypatch.setattr(build, "build_artifact", build_and_replace)
    with pytest.warns(ortplugins.OrtpluginsWarning, match="changed while it was read"):
        session = start(model_path)
    check(session, CASE)
    assert list(cache_dir.glob("entries/*")) == []


def all_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SETTLED_SECONDS", -1)


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large.onnx"
    path.write_bytes(bytes(5 << 20))
    return path


def digest(path: Path, cache_dir: Path) -> str:
    return ArtifactCache(cache_dir).file_digest(path)


def test_a_large_file_is_hashed_once(cache_dir, large_file, monkeypatch):
    first = digest(large_file, cache_dir)
    # Changed a moment ago by its status: not remembered yet.
    assert not (cache_dir / "known").exists()
    all_is_settled(monkeypatch)
    assert digest(large_file, cache_dir) == first
    (memo,) = (cache_dir / "known").iterdir()
    memo.write_text(memo.read_text().replace(first, "from the memo"))
    assert digest(large_file, cache_dir) == "from the memo"
    large_file.write_bytes(bytes(5 << 20))
    assert digest(large_file, cache_dir) == first


def test_a_digest_is_not_believed_of_another_content(cache_dir, large_file, monkeypatch):
    """Two images of a file system without change times may show two files alike."""
    status = os.stat(large_file)
    all_is_settled(monkeypatch)
    monkeypatch.setattr(os, "fstat", lambda _: status)
    first = digest(large_file, cache_dir)
    large_file.write_bytes(b"x" * (5 << 20))
    assert digest(large_file, cache_dir) != first


def test_a_model_given_as_bytes_reads_no_file_beside_it(cache_dir, large_file, monkeypatch):
    """Its name in messages, "bytes", is not a path."""
    all_is_settled(monkeypatch)
    monkeypatch.chdir(large_file.parent)
    for name in ("bytes.data", "bytes_data"):
        large_file.with_name(name).write_bytes(large_file.read_bytes())
    start(ir.to_proto(CASE.model()).SerializeToString())
    assert not (cache_dir / "known").exists(), "the digest of a file that nobody named"


def write(cache: ArtifactCache, key: str, size: int) -> Entry:
    """Publish an entry of one file, of a model of its own."""
    with cache.build(key) as folder:
        (folder / "model.onnx").write_bytes(bytes(size))
        manifest = {"model": key, "made_from": {"digest": key}, "report": {}}
        return cache.publish(key, folder, manifest)


def test_an_entry_rebuilt_meanwhile_is_not_discarded(cache_dir):
    cache, key = ArtifactCache(cache_dir), "0" * 40
    damaged = write(cache, key, 10)
    cache.discard(key, damaged.manifest)  # by another worker, which then rebuilds it
    rebuilt = write(cache, key, 10)
    cache.discard(key, damaged.manifest)
    assert cache.find(key) == rebuilt
    cache.discard(key, rebuilt.manifest)
    assert cache.find(key) is None


def test_a_limit_is_kept_when_an_entry_is_published(cache_dir):
    cache = ArtifactCache(cache_dir, limit=30_000)
    for index in range(3):
        backdate(write(cache, f"{index}" * 40, 9_000).folder, 1000 - index)
    assert len(cache.entries()) == 3
    cache.find("0" * 40)
    write(cache, "3" * 40, 9_000)
    names = {entry.folder.name[0] for entry in cache.entries()}
    assert names == {"0", "2", "3"}, "1 was unused longest"
    # An entry above the limit stays, and so does what may be about to be opened.
    write(cache, "4" * 40, 40_000)
    assert {entry.folder.name[0] for entry in cache.entries()} == {"0", "3", "4"}


def test_the_limit_of_a_session(model_path, cache_dir, monkeypatch):
    old = write(ArtifactCache(cache_dir), "0" * 40, 10_000)
    backdate(old.folder, 1000)
    monkeypatch.setenv("ORTPLUGINS_CACHE_LIMIT", "1GB")
    start(model_path)
    assert old.folder.exists()
    assert source(model_path, cache_limit="1kB") == "cache"
    start(save(OTHER, model_path.with_name("other.onnx")), cache_limit="1kB")
    assert not old.folder.exists()
    assert len(ArtifactCache(cache_dir).entries()) == 2, "used a moment ago"
    with pytest.raises(ortplugins.OptionError, match=r"cache_limit is '1 parsec': a size"):
        start(model_path, cache_limit="1 parsec")
    monkeypatch.setenv("ORTPLUGINS_CACHE_LIMIT", "much")
    with pytest.raises(ortplugins.OptionError, match="ORTPLUGINS_CACHE_LIMIT is 'much'"):
        start(model_path)


def test_a_file_system_without_locks(model_path, cache_dir, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(ortplugins.OrtpluginsWarning, match="has no locks") as caught:
        session = start(model_path)
    assert len(caught) == 1
    assert session.ortplugins_report.source == "built"
    check(session, CASE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert source(model_path) == "cache"
    # What another process builds is not known to be abandoned.
    half = cache_dir / "building" / f"{'0' * 16}.half"
    half.mkdir()
    with pytest.warns(ortplugins.OrtpluginsWarning, match="has no locks"):
        prune(ArtifactCache(cache_dir), max_size=0)
    assert half.exists()


def test_two_that_publish_one_key_without_locks(cache_dir, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    cache, key = ArtifactCache(cache_dir), "0" * 40
    with cache.build(key) as first:
        write(ArtifactCache(cache_dir), "1" * 40, 5)
        other = cache_dir / "building" / f"{key}.other"
        other.mkdir()
        manifest = {"model": "", "made_from": {"digest": ""}}
        cache.publish(key, other, manifest)
        cache.publish(key, first, manifest)
    assert cache.find(key) is not None
    assert list((cache_dir / "building").iterdir()) == []


def test_pruning_forgets_what_belongs_to_no_entry(model_path, cache_dir, monkeypatch):
    monkeypatch.setattr(store, "_MEMO_SIZE", 0)
    all_is_settled(monkeypatch)
    start(model_path)
    cache = ArtifactCache(cache_dir)
    (entry,) = cache.entries()
    for path in cache.own("locks"):
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    prune(cache, older_than=1e9)
    assert cache.own("known") and cache.own("locks")
    cache.discard(entry.folder.name, entry.manifest)
    model_path.unlink()
    model_path.with_name("model.onnx.data").unlink()
    for path in cache.own("locks"):
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    prune(cache, older_than=1e9)
    assert cache.own("known") == cache.own("locks") == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_root(str(tmp_path / "chosen")) == tmp_path / "chosen"
    monkeypatch.setenv("ORTPLUGINS_CACHE_DIR", str(tmp_path / "env"))
    assert cache_root() == tmp_path / "env"
    monkeypatch.delenv("ORTPLUGINS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root().name == "ortplugins"


def test_clean_leaves_what_is_not_the_caches(model_path, cache_dir):
    start(model_path)
    cache = ArtifactCache(cache_dir)
    (entry,) = cache.entries()
    size = sum(file.stat().st_size for file in entry.folder.iterdir())
    assert entry.size == size
    for name in ("entries", "locks", "building"):
        (cache_dir / name / "mine").mkdir()
    (cache_dir / "locks" / "code.py").write_text("mine")
    assert [item.size for item in prune(cache, everything=True).removed] == [size]
    assert cache.entries() == []
    left = sorted(path.name for path in (cache_dir / "locks").iterdir())
    assert left == ["code.py", "mine"]
    assert [path.name for path in (cache_dir / "entries").iterdir()] == ["mine"]
    assert source(model_path) == "built"
