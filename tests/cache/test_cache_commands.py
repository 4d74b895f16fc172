# SPDX-License-Identifier: MIT
"""Filling the cache ahead, checking it, and keeping it small, while others use it."""

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import filelock
import onnxruntime as ort
import pytest
from builders.command_line import ortplugins_command
from builders.dequantized_models import DequantizedMatMul
from builders.processes import python, result_of, spawn
from builders.sessions import (
    CPU,
    DAY,
    backdate,
    check,
    entries,
    files,
    options,
    save,
    source,
    start,
)

import ortplugins
from ortplugins.cache.store import Entry
from ortplugins.cli.cache import age
from ortplugins.cli.options import size
from ortplugins.session.warming import warm

CASE = DequantizedMatMul(512, 512, 32)
NOBODY = 65534


CHECK_AND_PRUNE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from ortplugins.cache.artifact import changed_files
from ortplugins.cache.store import ArtifactCache, prune
cache = ArtifactCache(Path(sys.argv[1]))
print([changed_files(x.artifact, reads_files=True) for x in cache.entries()])
prune(cache, max_size=0)
"""

# Becomes another user, who may not be let into this one's environment: imports come first.
AS_NOBODY = f"""
import os, sys, filelock, onnxruntime, ortplugins.cli, ortplugins.session.opening
import ortplugins.optimization.offline_optimizers
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
"""


def lines(*arguments: object, code: int = 0) -> list[str]:
    """What a command prints; it ends with this code, and tells no error."""
    done = ortplugins_command("cache", *arguments)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout.splitlines()


def fill(folder: Path, number: int = 3) -> None:
    """Entries of models named 0.onnx and on; each was used a day before the next."""
    for index in range(number):
        case = DequantizedMatMul(64, 32 * (index + 1), 32)
        path = save(case, folder / f"{index}.onnx", external=False)
        report = start(path).ortplugins_report
        backdate(Path(report.artifact).parent, (number - index) * DAY)


def names(cache_dir: Path) -> list[str]:
    return [Path(entry.model).name for entry in entries(cache_dir)]


# The last use.


@pytest.fixture
def aged(model_path: Path, cache_dir: Path) -> Entry:
    """The only entry of the cache, made and used a day ago."""
    start(model_path)
    (entry,) = entries(cache_dir)
    backdate(entry.folder, DAY)
    return entry


def test_a_hit_is_written_down_at_most_once_a_minute_where_it_can_be(
    aged, model_path, cache_dir, monkeypatch
):
    for _ in range(2):
        (entry,) = entries(cache_dir)
        assert time.time() - entry.last_used > 0.9 * DAY, "looking is no use"

    assert source(model_path) == "cache"
    (entry,) = entries(cache_dir)
    assert time.time() - entry.last_used < 60
    assert time.time() - entry.created > 0.9 * DAY
    first = (entry.folder / "artifact").stat().st_mtime_ns
    assert source(model_path) == "cache"
    assert (entry.folder / "artifact").stat().st_mtime_ns == first

    def refuse(*arguments: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert source(model_path) == "cache"


def test_list_and_show(aged, model_path):
    backdate(aged.folder, 3 * DAY)
    heading, row, total = lines("list")
    assert heading == "Key\tModel\tSize\tAge\tLast use\tFired/refused"
    key, path, _, *times, fate = row.split("\t")
    assert aged.folder.name.startswith(key)
    assert (path, times, fate) == (str(model_path), ["3 d", "3 d ago"], "1/0")
    assert total.startswith("1 in all, ")
    (entry,) = json.loads("\n".join(lines("list", "--format", "json")))
    assert (entry["model"], entry["fired"], entry["refused"]) == (str(model_path), 1, 0)
    assert entry["size"] > 0
    assert Path(entry["folder"], "report.json").exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "60 min"), (3600, "1 h")),
        *((86399, "24 h"), (86400, "1 d"), (200_000, "2 d")),
    ],
)
def test_times_are_in_the_largest_unit_that_fits(aged, monkeypatch, seconds, text):
    monkeypatch.setattr(time, "time", lambda: 2e9)
    backdate(aged.folder, seconds)
    assert lines("list")[1].split("\t")[3:5] == [text, f"{text} ago"]


def test_a_clock_that_was_set_back(aged, model_path):
    backdate(aged.folder, -30 * DAY)
    _, row, _ = lines("list")
    assert row.split("\t")[3:5] == ["0 s", "0 s ago"]
    assert lines("prune", "--older-than", "0s")[-1].startswith("removed 0, ")
    before = files(aged.folder)
    assert source(model_path) == "cache"
    assert files(aged.folder) == before, "the later time stays"
    removed, total = lines("clean")
    assert removed.endswith(", last used 0 s ago") and "; 0 remain, 0 bytes, in " in total


# prune


def test_prune_removes_the_least_recently_used_first(tmp_path, cache_dir):
    fill(tmp_path)
    # The oldest is used again, so the second is now the one to go.
    assert source(tmp_path / "0.onnx") == "cache"
    assert names(cache_dir) == ["1.onnx", "2.onnx", "0.onnx"]
    one, total = lines("prune", "--max-size", _disk(cache_dir) - 1)
    assert one.startswith("removed: ")
    assert f" {tmp_path / '1.onnx'}, " in one
    assert one.endswith(", last used 2 d ago")
    assert total.startswith("removed 1, ")
    assert "; 2 remain, " in total
    assert total.endswith(f", in {cache_dir}")
    assert names(cache_dir) == ["2.onnx", "0.onnx"]
    assert list((cache_dir / "building").iterdir()) == []
    assert source(tmp_path / "1.onnx") == "built"


def test_prune_removes_what_was_not_used_for_long(tmp_path, cache_dir):
    fill(tmp_path, 4)
    assert lines("prune", "--older-than", "2w")[-1].startswith("removed 0, 0 bytes; 4 ")
    sizes = [_disk(entry.folder) for entry in entries(cache_dir)]
    lines("prune", "--older-than", "84h", "--max-size", sum(sizes[2:]))
    assert names(cache_dir) == ["2.onnx", "3.onnx"]
    removed = lines("prune", "--older-than", "36h")[:-1]
    assert [line.partition(", ")[0][-6:] for line in removed] == ["2.onnx"]
    assert names(cache_dir) == ["3.onnx"]


@pytest.mark.skipif(sys.platform == "win32", reason="keeps files that are open")
def test_a_session_keeps_what_prune_removes(aged, model_path):
    session = start(model_path)
    left, total = lines("prune", "--max-size", "0", "--older-than", "0s")
    assert left.startswith("left: ")
    assert left.endswith(": used a moment ago")
    assert total.startswith("removed 0, 0 bytes; 1 remain, ")
    backdate(aged.folder, DAY)
    lines("prune", "--max-size", "0")
    assert not aged.folder.exists()
    check(session, CASE)


def test_prune_leaves_what_is_being_built(aged, model_path, cache_dir):
    model = aged.folder.name[-16:]
    lock = cache_dir / "locks" / f"{model}.lock"
    half = cache_dir / "building" / f"{model}.half"
    half.mkdir()
    (half / "model.onnx").write_bytes(bytes(1000))
    with filelock.FileLock(lock):
        left, _ = lines("prune", "--max-size", "0")
        assert left.endswith(": being built, or removed, by another process")
        assert half.exists()
    assert aged.folder.exists()
    # The builder is gone, and did not finish.
    removed, abandoned, _ = lines("prune", "--max-size", "0")
    assert str(model_path) in removed
    assert abandoned == "removed: leftovers of builds that were killed, 1.0 kB"
    assert not half.exists()


@pytest.mark.parametrize("content", [None, "{"], ids=["none", "cut"])
def test_prune_takes_what_no_session_would(aged, cache_dir, content):
    artifact, abandoned = aged.folder / "artifact", cache_dir / "index" / f"{'0' * 40}.12.34"
    artifact.unlink()
    if content is not None:
        artifact.write_text(content)
    abandoned.parent.mkdir(exist_ok=True)
    abandoned.touch()
    for path in (abandoned, aged.folder, *aged.folder.iterdir()):
        os.utime(path, (time.time() - DAY, time.time() - DAY))
    removed, _ = lines("prune", "--max-size", "1GB")
    assert removed.startswith(f"removed: {aged.folder.name[:12]}, ")
    assert not aged.folder.exists() and not abandoned.exists()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("4096", 4096), ("500MB", 500_000_000), ("1GiB", 1 << 30)),
        *(("1.5 kb", 1500), ("2TiB", 2 << 40), ("45min", 2700), ("12h", 43200)),
        *(("30d", 2592000), ("2w", 1209600)),
    ],
)
def test_sizes_and_ages(text, number):
    is_age = text[-1] in "nhdw"
    convert = age if is_age else size
    assert convert(float, [SimpleNamespace(value=text)]) == number


def test_commands_on_a_cache_that_is_not_there_make_none(cache_dir, tmp_path):
    (line,) = lines("prune", "--max-size", "0")
    assert line == f"removed 0, 0 bytes; 0 remain, 0 bytes, in {cache_dir}"
    _, line = lines("list")
    assert line == f"0 in all, 0 bytes, in {cache_dir}"
    assert lines("list", "--cache-dir", tmp_path / "x")[-1].endswith(str(tmp_path / "x"))
    assert not cache_dir.exists() and not (tmp_path / "x").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such modes")
@pytest.mark.parametrize("command", [["list"], ["prune", "--max-size", "0"]], ids="".join)
def test_a_directory_that_others_may_write_to(cache_dir, command):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    done = ortplugins_command("cache", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{cache_dir}: belongs to another user or others may write" in done.stderr


# warm


def test_a_session_finds_what_was_warmed(model_path, cache_dir):
    (line,) = lines("warm", model_path)
    assert line.startswith(f"{model_path}: built: fired 2, refused 0; ")
    assert line.endswith(" kB on disk")
    reported = result_of(spawn(model_path))
    assert (reported["source"], reported["warnings"]) == ("cache", [])
    (line,) = lines("warm", model_path)
    assert line.startswith(f"{model_path}: cache: fired 2, refused 0; ")
    assert len(entries(cache_dir)) == 1


@pytest.fixture
def image() -> Iterator[Path]:
    """A folder whose parents every user may enter; a test's own is private."""
    folder = Path(tempfile.mkdtemp(prefix="image-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o700)
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such modes")
def test_an_image_is_read_by_another_user_and_written_by_none(image):
    model, output = save(CASE, image / "model.onnx"), image / "cache"
    lines("warm", model, "--cache-dir", output)
    (entry,) = entries(output)
    backdate(entry.folder, DAY)
    for path in (output, *output.rglob("*")):
        assert not path.stat().st_mode & 0o022, path
        path.chmod(path.stat().st_mode & ~0o222)
    for path in (entry.folder, *entry.folder.iterdir()):
        assert path.stat().st_mode & 0o044 == 0o044, path

    before = files(output)
    prelude = "" if os.geteuid() else AS_NOBODY
    variables = {"ORTPLUGINS_CACHE_DIR": str(output)}
    reported = result_of(spawn(model, prelude=prelude, variables=variables))
    assert (reported["source"], reported["warnings"]) == ("cache", [])
    done = python("-c", prelude + CHECK_AND_PRUNE, output)
    assert done.stdout == "[[]]\n"
    assert f"PermissionError: {output}: cannot be written" in done.stderr
    assert files(output) == before


def test_warm_takes_what_else_the_key_depends_on(model_path, cache_dir):
    key = "session.qdq_matmulnbits_accuracy_level"
    lines(
        *("warm", model_path, "--pass", "dq_matmulnbits_fusion"),
        *("--set", "dq_matmulnbits_fusion.slow_kernels=keep"),
        *("--session-entry", f"{key}=4", "--optimization-level", "basic", "--no-arena"),
    )

    so = options(ortplugins.DqMatMulNBitsFusion(slow_kernels="keep"))
    so.add_session_config_entry(key, "4")
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    so.enable_cpu_mem_arena = False
    assert source(model_path, so) == "cache"


def test_warm_takes_a_hint(model_path):
    lines("warm", model_path, "--session-entry", "ortplugins.hint=memory")
    so = ort.SessionOptions()
    ortplugins.configure(so, hint="memory")
    assert source(model_path, so) == "cache"


def test_warm_goes_on_after_a_model_that_fails(model_path, tmp_path, cache_dir):
    missing, empty = model_path.with_name("gone.onnx"), model_path.with_name("empty.onnx")
    empty.touch()
    warm_all = "cache", "warm", missing, model_path, empty, "--pass", "dq_matmulnbits_fusion"
    done = ortplugins_command(*warm_all)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{model_path}: built: fired 1, refused 0; ")
    first, second = done.stderr.splitlines()
    assert first == f"error: {missing}: no such model file"
    assert second.startswith(f"error: {empty}: ")
    assert names(cache_dir) == ["model.onnx"]
    # Where nothing can be kept, it fails.
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = ortplugins_command("cache", "warm", model_path, "--cache-dir", blocked / "cache")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {model_path}: not kept: ")
    assert str(blocked) in line


def test_warm_from_python(model_path, tmp_path, cache_dir):
    fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=4)
    settings = {"disabled_optimizers": ["ConstantFolding"]}
    (result,) = warm([model_path], [fusion], cache_dir=tmp_path / "out", **settings)
    assert result.report is not None
    assert (result.model, result.report.source, result.error) == (str(model_path), "built", "")
    folder = Path(result.report.artifact).parent
    assert folder.parent == tmp_path / "out" / "entries"
    assert result.size == _disk(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert not cache_dir.exists()

    so = options(fusion, cache_dir=str(tmp_path / "out"))
    made = ortplugins.InferenceSession(model_path, so, providers=CPU, **settings)
    assert made.ortplugins_report.source == "cache"


def _disk(folder: Path) -> int:
    """Bytes of an entry, or of all entries of a cache."""
    top = folder / "entries" if (folder / "entries").exists() else folder
    return sum(path.stat().st_size for path in top.rglob("*") if path.is_file())
