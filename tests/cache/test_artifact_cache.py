# SPDX-License-Identifier: MIT
"""The cache among processes that race, die, and may not write."""

import dataclasses
import errno
import fcntl
import os
import pwd
import random
import re
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import disk, result_of, spawn
from builders.sessions import (
    CPU,
    EXACT,
    MADE,
    Setting,
    backdate,
    check,
    find,
    options,
    save,
    source,
    start,
)

import ortplugins
from ortplugins.cache import artifact, folder
from ortplugins.cache.artifact import Wanted
from ortplugins.cache.folder import cache_folder
from ortplugins.cache.store import ArtifactCache, Entry, prune
from ortplugins.optimization import build
from session_options.plan import entries_of

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


def test_a_cache_that_cannot_be_written_warns_once_and_another_is_used(
    model_path, tmp_path, monkeypatch
):
    """The model is built in a child all the same."""

    def build(*_: object) -> None:
        raise AssertionError("this process builds")

    monkeypatch.delenv("ORTPLUGINS_BUILD_IN_PROCESS")
    monkeypatch.setattr("ortplugins.optimization.build.build_artifact", build)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for source in ("built", "cache"):
            session = start(model_path, cache_dir=str(blocked / "cache"))
            report = session.ortplugins_report
            assert (report.source, report.artifact.startswith(gettempdir())) == (source, True)
            check(session, CASE)
    (reported,) = (w for w in caught if w.category is ortplugins.OrtpluginsWarning)
    assert re.search("cannot write the cache .*file.* continuing with", str(reported.message))


def test_a_model_replaced_meanwhile_is_built_again(model_path, cache_dir, monkeypatch):
    real = build.build_artifact

    def build_and_replace(*args: object, **kwargs: object) -> object:
        manifest = real(*args, **kwargs)
        other = CASE.model()
        other.doc_string = "another content, the same numbers"
        ir.save(other, model_path, external_data="model.onnx.data")
        return manifest

    monkeypatch.setattr(build, "build_artifact", build_and_replace)
    check(start(model_path), CASE)
    assert source(model_path) == "cache"
    assert len([*cache_dir.glob("entries/*")]) == 1


def all_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "SETTLED_SECONDS", -1)


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large.onnx"
    path.write_bytes(bytes(5 << 20))
    return path


def digest(path: Path, cache_dir: Path) -> str:
    return folder.file_digest(path, str(cache_dir))


def test_a_large_file_is_hashed_once(cache_dir, large_file, monkeypatch):
    first = digest(large_file, cache_dir)
    # Changed a moment ago by its status: not remembered yet.
    assert not (cache_dir / "index").exists()
    all_is_settled(monkeypatch)
    assert digest(large_file, cache_dir) == first
    (memo,) = (cache_dir / "index").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_digest_of_open", lambda _: 1 / 0)
        assert digest(large_file, cache_dir) == first
    memo.write_text(memo.read_text().replace(first, "a damaged memo"))
    assert digest(large_file, cache_dir) == first
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


def write(cache: ArtifactCache, key: str, size: int) -> Entry:
    """Publish an entry of one file, of a model of its own."""
    with cache.build(key) as made:
        (made / "model.onnx").write_bytes(bytes(size))
        return Entry.at(Path(cache.publish(key, made, MADE).folder))


def test_an_entry_rebuilt_meanwhile_is_not_discarded(cache_dir):
    cache, key = ArtifactCache(cache_dir), "0" * 40
    whole = write(cache, key, 10)
    assert whole.artifact is not None and not cache.discard_damaged(whole.artifact)
    flip_a_byte(whole.folder / "model.onnx")
    assert cache.discard_damaged(whole.artifact) == ["model.onnx"]
    write(cache, key, 10)  # by another worker
    assert cache.discard_damaged(whole.artifact) is None
    assert find(cache_dir, key) is not None


def test_an_entry_disappears_at_once(cache_dir, monkeypatch):
    """Before one of its files is deleted: a reader sees all of them, or none."""
    cache, key, deleted = ArtifactCache(cache_dir), "0" * 40, []
    write(cache, key, 10)
    monkeypatch.setattr("ortplugins.cache.store.remove_tree", deleted.append)
    cache.remove(key)
    assert find(cache_dir, key) is None and list(cache_dir.glob("entries/*")) == []
    assert (deleted[0] / "model.onnx").stat().st_size == 10


def test_a_limit_is_kept_when_an_entry_is_published(cache_dir):
    cache = ArtifactCache(cache_dir, limit=30_000)
    for index in range(3):
        backdate(write(cache, f"{index}" * 40, 9_000).folder, 1000 - index)
    assert len(cache.entries()) == 3
    find(cache_dir, "0" * 40)
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
    with pytest.raises(
        ortplugins.OptionError, match=r"cache_limit is '1 parsec'; expected a size"
    ):
        start(model_path, cache_limit="1 parsec")
    monkeypatch.setenv("ORTPLUGINS_CACHE_LIMIT", "much")
    with pytest.raises(ortplugins.OptionError, match="ORTPLUGINS_CACHE_LIMIT is 'much'"):
        start(save(SMALL, model_path.with_name("third.onnx")))


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
        cache.publish(key, other, MADE)
        cache.publish(key, first, MADE)
    assert find(cache_dir, key) is not None
    assert list((cache_dir / "building").iterdir()) == []


def test_pruning_forgets_what_belongs_to_no_entry(model_path, cache_dir, monkeypatch):
    monkeypatch.setattr(folder, "INDEXED_BYTES", 0)
    all_is_settled(monkeypatch)
    start(model_path)
    cache = ArtifactCache(cache_dir)
    (entry,) = cache.entries()
    for path in cache.own("locks"):
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    prune(cache, older_than=1e9)
    assert cache.own("index") and cache.own("locks")
    cache.remove(entry.key)
    model_path.unlink()
    model_path.with_name("model.onnx.data").unlink()
    for path in cache.own("locks"):
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    prune(cache, older_than=1e9)
    assert cache.own("index") == cache.own("locks") == []


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


# What changes under a start, or in the cache.


@pytest.mark.parametrize("moment", ["built", "hashed"])
def test_a_folder_switched_behind_a_link_is_noticed(tmp_path, monkeypatch, moment):
    """As Kubernetes does it to volumes, and deployments to what they call current."""
    all_is_settled(monkeypatch)
    cases = [dataclasses.replace(CASE, seed=seed) for seed in (1, 2)]
    for case in cases:
        save(case, tmp_path / f"v{case.seed}" / "model.onnx")
    link, switched = tmp_path / "current", []
    link.symlink_to("v1")

    def then_switch(real: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if not switched:
                switched.append(True)
                (tmp_path / "new").symlink_to("v2")
                (tmp_path / "new").replace(link)
            return result

        return function

    owner, name = {
        "built": (ArtifactCache, "publish"),
        "hashed": (artifact, "file_digest"),
    }[moment]
    monkeypatch.setattr(owner, name, then_switch(getattr(owner, name)))
    with warnings.catch_warnings():  # the data of one under the graph of the other
        warnings.simplefilter("ignore")
        start(link / "model.onnx")
    assert switched
    for _ in range(2):
        check(start(link / "model.onnx"), cases[1])


def test_a_link_to_a_file_that_two_releases_share(tmp_path, monkeypatch):
    """As rsync --link-dest makes them: one .onnx under two names, other data beside each."""
    all_is_settled(monkeypatch)
    cases = [dataclasses.replace(CASE, seed=seed) for seed in (1, 2)]
    paths = [save(case, tmp_path / f"v{case.seed}" / "model.onnx") for case in cases]
    paths[1].unlink()
    paths[1].hardlink_to(paths[0])
    link = tmp_path / "model.onnx"
    for case, path in zip(cases, paths, strict=True):
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        for _ in range(2):
            check(start(link), case)


def test_a_file_replaced_while_it_is_hashed_is_not_remembered(
    cache_dir, large_file, monkeypatch
):
    all_is_settled(monkeypatch)
    real = folder._digest_of_open

    def hash_and_replace(file: int) -> str:
        large_file.write_bytes(b"x" * (5 << 20))
        return real(file)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_digest_of_open", hash_and_replace)
        with pytest.raises(OSError, match="changed while it was read"):
            digest(large_file, cache_dir)
    assert digest(large_file, cache_dir) == folder.digest_of(b"x" * (5 << 20))


SMALL = DequantizedMatMul(128, 64, 32)


def test_damage_anywhere_is_a_miss(tmp_path, cache_dir, monkeypatch):
    """In entries and in the index: never an error, never another result."""
    all_is_settled(monkeypatch)
    monkeypatch.setattr(folder, "INDEXED_BYTES", 0)
    path, draw = save(SMALL, tmp_path / "model.onnx"), random.Random(0)
    start(path)
    start(path)
    names = [x.relative_to(cache_dir) for x in cache_dir.rglob("*") if x.is_file()]
    names = [name for name in names if name.parts[0] != "locks"]
    assert {name.parts[0] for name in names} == {"entries", "index"}
    files = {name.name for name in names if name.parts[0] == "entries"}
    assert files == {"artifact", "model.onnx", "model.onnx.data", "report.json"}
    whole = {name: (cache_dir / name).read_bytes() for name in names}
    for name, content in whole.items():
        damages = [None, b"", content[:-5], content + b"x"]
        for place in draw.sample(range(len(content)), min(12, len(content))):
            damages.append(bytearray(content))
            damages[-1][place] ^= 1 << draw.randrange(8)
        for spoilt in damages:
            if spoilt is None:
                (cache_dir / name).unlink()
            else:
                (cache_dir / name).write_bytes(spoilt)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*changed on disk")
                session = start(path)
            assert len(session.ortplugins_report.fired) == 1
            check(session, SMALL)


def test_an_entry_copied_without_its_times_is_read_and_believed(model_path, cache_dir):
    assert source(model_path) == "built"
    for path in cache_dir.glob("entries/*/model.onnx*"):
        os.utime(path, (1, 1))
    assert source(model_path) == "cache"


@pytest.mark.parametrize(("verify", "expected"), [("size", "cache"), ("digest", "built")])
@pytest.mark.filterwarnings("ignore:.*changed on disk")
def test_a_digest_tells_what_size_and_time_do_not(model_path, cache_dir, verify, expected):
    so = options(EXACT, ortplugins.PrepackedWeights(verify=verify))
    assert [source(model_path, so) for _ in range(2)] == ["built", "cache"]
    (data,) = cache_dir.glob("entries/*/model.onnx.data")
    before = data.stat()
    flip_a_byte(data)
    os.utime(data, (int(before.st_mtime),) * 2)  # whole seconds, as of an image layer
    assert source(model_path, so) == expected


def test_a_full_disk_leaves_nothing_behind(model_path, cache_dir, monkeypatch):
    all_is_settled(monkeypatch)
    start(model_path)
    for path in (digests := [x for x in (cache_dir / "index").iterdir() if not x.suffix]):
        path.unlink()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert source(model_path) == "cache"
    assert digests and [x.suffix for x in (cache_dir / "index").iterdir()] == [".data"]


@pytest.mark.parametrize("place", ["", "index", "entries", "entry"])
def test_what_others_can_write_to_is_not_believed(model_path, cache_dir, monkeypatch, place):
    all_is_settled(monkeypatch)
    start(model_path)
    folders = [cache_dir, *(path for path in cache_dir.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    (entry,) = (cache_dir / "entries").iterdir()
    (entry if place == "entry" else cache_dir / place).chmod(0o777)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = start(model_path)
    told = ["others may write" in str(one.message) for one in caught]
    assert told == ([] if place == "entry" else [True])
    assert session.ortplugins_report.source == "built"
    check(session, CASE)


def test_on_windows_only_the_users_profile_is_private(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "geteuid")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for name in ("me/cache", "other"):
        (tmp_path / name).mkdir(parents=True)
    assert folder.is_private(tmp_path / "me" / "cache")
    assert not folder.is_private(tmp_path / "other")
    assert not folder.is_private(tmp_path / "me" / "missing")


def test_where_the_cache_is(tmp_path, monkeypatch):
    """For a user without a home, in a folder for temporary files."""
    assert cache_folder(str(tmp_path / "chosen")) == str(tmp_path / "chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == os.environ["ORTPLUGINS_CACHE_DIR"]
    monkeypatch.delenv("ORTPLUGINS_CACHE_DIR")
    assert cache_folder() == str(tmp_path / "ortplugins")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
    monkeypatch.chdir(tmp_path)
    own = os.path.join(tempfile.gettempdir(), f"ortplugins-{os.geteuid()}")
    assert cache_folder() == cache_folder("~/cache") == own
    monkeypatch.delattr(os, "geteuid")  # as on Windows
    assert cache_folder("~/cache") == os.path.join(tempfile.gettempdir(), "ortplugins-user")


def test_entries_that_a_pass_sets_change_no_key(model_path):
    so = options(Setting())
    assert [source(model_path, so) for _ in range(3)] == ["built", "cache", "cache"]
    so.add_session_config_entry("session.disable_double_qdq_remover", "1")
    assert source(model_path, so) == "built"


def test_entries_of_onnxruntime_reach_the_build(model_path):
    so = options(ortplugins.DqMatMulNBitsFusion())
    so.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    (node,) = ir.load(start(model_path, so).ortplugins_report.artifact).graph
    assert node.attributes["accuracy_level"].as_int() == 1


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


ORDER = ortplugins.ShapeSizeReorder()
FUSION = dataclasses.replace(EXACT, slow_kernels="keep")
# What changes the key, each beside the options of ``plain`` below.
PARTS: dict[str, dict[str, Any]] = {
    "passes": {"entries": entries_of([EXACT])},
    "option": {
        "entries": entries_of([dataclasses.replace(EXACT, slow_kernels="keep"), ORDER])
    },
    "bake": {"entries": entries_of([EXACT, ORDER], bake=False)},
    "an entry that onnxruntime's optimisers look at": {
        "entries": {**entries_of([EXACT, ORDER]), "session.qdq_matmulnbits_block_size": "32"}
    },
    "providers": {"providers": ("Other", *CPU)},
    "level": {"level": "ORT_ENABLE_BASIC"},
    "disabled optimisers": {"disabled": ["ConstantFolding"]},
    "arena": {"cpu_arena": False},
}
NO_PARTS: dict[str, dict[str, Any]] = {
    "what the result does not depend on": {
        "entries": entries_of([EXACT, ORDER], cache_limit="1GB", strict=True, bake=True)
    },
    "a name twice": {"providers": (*CPU, *CPU)},
    "defaults": {"entries": {
        "ortplugins.enable_shape_size_reorder": "1",
        "ortplugins.enable_dq_matmulnbits_fusion": "1",
        "ortplugins.dq_matmulnbits_fusion.accuracy_level": "0",
        "ortplugins.bake": "1",
    }},
}  # fmt: skip


def test_what_the_key_depends_on(model_path, monkeypatch):
    plain = {"entries": entries_of([EXACT, ORDER])}

    def key(model: Path = model_path, **changed: Any) -> str:
        wanted = Wanted(str(model), **{**plain, **changed})
        return wanted.key(wanted.model_digest(), [f"{model.name}.data"])

    first = key()
    for name, changed in NO_PARTS.items():
        assert key(**changed) == first, name
    keys = [first, *(key(**changed) for changed in PARTS.values())]
    assert key(disabled=["ConstantFolding"] * 2) in keys
    with monkeypatch.context() as patch:
        patch.setattr(artifact, "processor", lambda: "another")
        keys.append(key())
        patch.setattr(onnxruntime, "__version__", "1.99")
        keys.append(key())
    keys.append(key(save(OTHER, model_path.with_name("other.onnx"))))
    flip_a_byte(model_path.with_name("model.onnx.data"))
    keys.append(key())
    assert len({*keys}) == len(PARTS) + 5


# An image that serves: a cache that was warmed, and only what sessions need is installed.

SERVING = """
import sys
for name in ("onnx", "onnx_ir", "onnxscript", "ml_dtypes", "filelock", "platformdirs"):
    sys.modules[name] = None
"""


def test_a_serving_image_hits_without_what_builds(model_path, cache_dir, tmp_path):
    """The files of the model are read once on a machine, and again when they change."""
    case = DequantizedMatMul(512, 1024, 32)
    save(case, model_path)
    data = model_path.with_name("model.onnx.data")
    (warmed,) = ortplugins.warm([model_path], ["dq_matmulnbits_fusion"], cache_dir=cache_dir)
    assert not warmed.error
    original = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-built"))
    place = tmp_path.with_name(f"{tmp_path.name}-cache")
    own = original / "own"
    variables = {"ORTPLUGINS_CACHE_DIR": str(place / "cache"), "XDG_CACHE_HOME": str(own)}

    def opened(name: str = "dq_matmulnbits_fusion") -> tuple[str, bool]:
        found = result_of(spawn(model_path, name, prelude=SERVING, variables=variables))
        asked = any("pip install onnx onnx_ir onnxscript" in x for x in found["warnings"])
        assert asked or not found["warnings"]
        return found["source"], asked

    with disk(tmp_path, 8 << 20), disk(place, 8 << 20):
        # As layers of images have them: other inodes, and times in whole seconds.
        for built, copy in ((original, tmp_path), (cache_dir, place / "cache")):
            shutil.copytree(built, copy, dirs_exist_ok=True)
            for path in copy.rglob("*"):
                os.utime(path, (int(path.stat().st_mtime),) * 2)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        time.sleep(folder.SETTLED_SECONDS)
        assert opened("trim_padding") == ("untouched", True)
        assert opened() == ("cache", False)
        lines = {path: path.stat().st_mtime_ns for path in own.rglob("index/*")}
        assert any(str(data) in path.read_text() for path in lines)
        assert opened() == ("cache", False)
        assert lines == {path: path.stat().st_mtime_ns for path in own.rglob("index/*")}
        # Another content of the same size and date, outside of the pages that are looked at.
        status, content = data.stat(), bytearray(data.read_bytes())
        content[5000] ^= 1
        data.write_bytes(content)
        os.utime(data, (status.st_atime, status.st_mtime))
        assert opened() == ("untouched", True)
