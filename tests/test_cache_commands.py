# SPDX-License-Identifier: MIT
"""Filling the cache ahead, checking it, and keeping it small, while others use it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul
from test_artifact_cache import check, spawn, start
from test_cli import SCRIPT, snapshot

import ortplugins
from ortplugins.artifacts.manifest import Entry
from ortplugins.artifacts.store import ArtifactCache
from ortplugins.artifacts.warming import WarmResult, warm
from ortplugins.cli import terminal

CASE = DequantizedMatMul(512, 512, 32)
DAY = 86400.0
NOBODY = 65534

# Starts a session with the passes named and prints where its model came from.
SESSION = """
import os, sys, numpy as np, onnxruntime as ort, ortplugins
so = ort.SessionOptions()
for name in ("dq_matmulnbits_fusion", "prepacked_weights"):
    so.add_session_config_entry(f"ortplugins.enable_{name}", "1")
session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
session.run(None, {"x": np.ones((2, 512), np.float32)})
print(session.ortplugins_report.source)
"""

CHECK_AND_PRUNE = """
import sys
from pathlib import Path
from ortplugins.artifacts.maintenance import prune, verify
from ortplugins.artifacts.store import ArtifactCache
cache = ArtifactCache(Path(sys.argv[1]))
print([item.damage for item in verify(cache)])
prune(cache, max_size=0)
"""

# Becomes another user, who may not be let into this one's environment: imports come first.
AS_NOBODY = f"""
import os, sys, filelock, onnxruntime, ortplugins.cli.app, ortplugins.session.inference_session
import ortplugins.optimization.offline_optimizers
import session_options.registry
session_options.registry.pass_names()
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
"""

# Removes all it can, again and again, until its input ends.
COLLECTOR = """
import sys, threading
from pathlib import Path
from ortplugins.artifacts.maintenance import prune
from ortplugins.artifacts.store import ArtifactCache
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
cache, removed = ArtifactCache(Path(sys.argv[1])), 0
print("ready", flush=True)
while not ended.is_set():
    removed += len(prune(cache, max_size=0).removed)
print(removed)
"""


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    ir.save(CASE.model(), path, external_data="model.onnx.data")
    return path


def ortp(*arguments: object) -> subprocess.CompletedProcess[str]:
    return execute(*SCRIPT, *arguments)


def execute(
    *command: object, cache_dir: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {} if cache_dir is None else {"ORTPLUGINS_CACHE_DIR": str(cache_dir)}
    return subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def lines(*arguments: object, code: int = 0) -> list[str]:
    done = ortp(*arguments)
    # What packing may take of the disk is told before it is taken.
    errors = [line for line in done.stderr.splitlines() if " may take " not in line]
    assert (done.returncode, errors) == (code, [])
    return done.stdout.splitlines()


def entries(cache_dir: Path) -> list[Entry]:
    """All of the cache, the one that was used longest ago first."""
    return sorted(ArtifactCache(cache_dir).entries(), key=lambda entry: entry.last_used)


def fill(folder: Path, number: int = 3) -> None:
    """Entries of models named 0.onnx and on; each was used a day before the next."""
    for index in range(number):
        path = folder / f"{index}.onnx"
        ir.save(DequantizedMatMul(64, 32 * (index + 1), 32).model(), path)
        report = start(path).ortplugins_report
        backdate(Path(report.artifact).parent, (number - index) * DAY)


def backdate(folder: Path, seconds: float) -> None:
    """Have an entry published, and used, that long ago."""
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    content["created"] = time.time() - seconds
    new = manifest.with_suffix(".new")
    new.write_text(json.dumps(content))
    os.utime(new, (content["created"], content["created"]))
    os.replace(new, manifest)


def names(cache_dir: Path) -> list[str]:
    return [Path(entry.manifest["model"]).name for entry in entries(cache_dir)]


# The last use.


def test_a_hit_is_written_down_at_most_once_a_minute(model_path: Path, cache_dir: Path):
    start(model_path)
    (entry,) = entries(cache_dir)
    backdate(entry.folder, 30 * DAY)
    for _ in range(2):
        (entry,) = entries(cache_dir)
        assert time.time() - entry.last_used > 29 * DAY, "looking is no use"

    assert start(model_path).ortplugins_report.source == "cache"
    assert time.time() - entry.last_used < 60
    assert time.time() - entry.created > 29 * DAY
    first = (entry.folder / "manifest.json").stat().st_mtime_ns
    assert start(model_path).ortplugins_report.source == "cache"
    assert (entry.folder / "manifest.json").stat().st_mtime_ns == first


def test_a_use_that_cannot_be_written_down_is_a_hit_all_the_same(
    model_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    start(model_path)
    (entry,) = entries(cache_dir)
    backdate(entry.folder, DAY)

    def refuse(*arguments: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert start(model_path).ortplugins_report.source == "cache"


def test_list_shows_the_last_use(model_path: Path, cache_dir: Path):
    start(model_path)
    (entry,) = entries(cache_dir)
    backdate(entry.folder, 3 * DAY)
    heading, row, _ = lines("cache", "list")
    assert heading == "Key\tModel\tSize\tLinked\tAge\tLast use\tFired/refused"
    assert row.split("\t")[1:] == [
        str(model_path),
        *row.split("\t")[2:4],
        "3 d",
        "3 d ago",
        "1/0",
    ]
    start(model_path)
    _, row, _ = lines("cache", "list")
    age, used = row.split("\t")[4:6]
    assert age == "3 d"
    assert used.endswith((" s ago", "1 min ago"))


def test_a_clock_that_was_set_back(model_path: Path, cache_dir: Path):
    start(model_path)
    (entry,) = entries(cache_dir)
    backdate(entry.folder, -30 * DAY)
    _, row, _ = lines("cache", "list")
    assert row.split("\t")[4:6] == ["0 s", "0 s ago"]
    assert lines("cache", "prune", "--older-than", "0s")[-1].startswith("removed 0, ")
    before = snapshot(entry.folder)
    assert start(model_path).ortplugins_report.source == "cache"
    assert snapshot(entry.folder) == before, "the later time stays"
    (removed, _) = lines("cache", "prune", "--max-size", "0")
    assert removed.endswith(", last used 0 s ago")


def test_list_and_show_as_json(model_path: Path, cache_dir: Path):
    start(model_path)
    (entry,) = json.loads("\n".join(lines("cache", "list", "--format", "json")))
    assert (entry["model"], entry["fired"], entry["refused"]) == (str(model_path), 1, 0)
    assert entry["size"] > 0
    shown = json.loads("\n".join(lines("cache", "show", entry["key"][:8])))
    assert shown.items() >= entry.items()
    assert set(shown["manifest"]["files"]) >= {"model.onnx"}
    done = ortp("cache", "show", "x")
    assert (done.returncode, "no entry" in done.stderr) == (2, True)


def test_explain_says_which_part_of_the_key_differs(model_path: Path, cache_dir: Path):
    level = "dq_matmulnbits_fusion.accuracy_level"
    explain = ("cache", "explain", model_path, "--pass", "dq_matmulnbits_fusion")
    exact = (*explain, "--set", f"{level}=0")
    assert lines(*explain, code=1)[1:] == ["the cache is empty"]
    start(model_path)
    (line,) = lines(*exact)
    assert line.startswith(f"{model_path}: found as ")
    _, nearest, *differences = lines(
        *(*explain, "--set", f"{level}=4", "--optimization-level", "basic"), code=1
    )
    assert nearest.endswith(f", made from {model_path}")
    assert sorted(differences) == [
        "  native_accuracy_level: null here, 4 there",  # onnxruntime fuses from level extended
        '  optimizers.level: "ORT_ENABLE_BASIC" here, "ORT_ENABLE_ALL" there',
        '  passes.dq_matmulnbits_fusion.options.accuracy_level: "4" here, "0" there',
    ]
    # Another content of the data file.
    data = model_path.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    _, _, difference = lines(*exact, code=1)
    assert difference.startswith("  data.model.onnx.data: ")


# prune


def test_prune_removes_the_least_recently_used_first(tmp_path: Path, cache_dir: Path):
    fill(tmp_path)
    # The oldest is used again, so the second is now the one to go.
    assert start(tmp_path / "0.onnx").ortplugins_report.source == "cache"
    assert names(cache_dir) == ["1.onnx", "2.onnx", "0.onnx"]
    one, total = lines("cache", "prune", "--max-size", _disk(cache_dir) - 1)
    assert one.startswith("removed: ")
    assert f" {tmp_path / '1.onnx'}, " in one
    assert one.endswith(", last used 2 d ago")
    assert total.startswith("removed 1, ")
    assert "; 2 remain, " in total
    assert total.endswith(f", in {cache_dir}")
    assert names(cache_dir) == ["2.onnx", "0.onnx"]
    assert list((cache_dir / "building").iterdir()) == []
    assert start(tmp_path / "1.onnx").ortplugins_report.source == "built"


def test_prune_removes_what_was_not_used_for_long(tmp_path: Path, cache_dir: Path):
    fill(tmp_path, 4)
    assert lines("cache", "prune", "--older-than", "2w")[-1].startswith(
        "removed 0, 0 bytes; 4 "
    )
    removed = lines("cache", "prune", "--older-than", "36h")[:-1]
    assert [line.partition(", ")[0][-6:] for line in removed] == ["0.onnx", "1.onnx", "2.onnx"]
    assert names(cache_dir) == ["3.onnx"]


def test_prune_takes_both_limits(tmp_path: Path, cache_dir: Path):
    fill(tmp_path, 4)
    sizes = [_disk(entry.folder) for entry in entries(cache_dir)]
    lines("cache", "prune", "--older-than", "84h", "--max-size", sum(sizes[2:]))
    assert names(cache_dir) == ["2.onnx", "3.onnx"]


def test_a_dry_run_removes_nothing(tmp_path: Path, cache_dir: Path):
    fill(tmp_path)
    before = snapshot(cache_dir)
    would = lines("cache", "prune", "--max-size", "0", "--dry-run")
    assert snapshot(cache_dir) == before
    did = lines("cache", "prune", "--max-size", "0")
    assert [
        line.replace("would remove", "removed").replace("would ", "") for line in would
    ] == did
    assert did[-1].startswith("removed 3, ")
    assert "; 0 remain, 0 bytes, in " in did[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="keeps files that are open")
def test_a_session_keeps_what_prune_removes(model_path: Path, cache_dir: Path):
    session = start(model_path)
    (entry,) = entries(cache_dir)
    backdate(entry.folder, DAY)
    lines("cache", "prune", "--max-size", "0")
    assert not entry.folder.exists()
    check(session)


def test_prune_leaves_what_was_used_a_moment_ago(model_path: Path, cache_dir: Path):
    start(model_path)
    left, total = lines("cache", "prune", "--max-size", "0", "--older-than", "0s")
    assert left.startswith("left: ")
    assert left.endswith(": used a moment ago")
    assert total.startswith("removed 0, 0 bytes; 1 remain, ")
    assert start(model_path).ortplugins_report.source == "cache"


def test_prune_leaves_what_is_being_built(model_path: Path, cache_dir: Path):
    start(model_path)
    (entry,) = entries(cache_dir)
    backdate(entry.folder, DAY)
    lock = cache_dir / "locks" / f"{entry.folder.name}.lock"
    half = cache_dir / "building" / f"{entry.folder.name}.half"
    half.mkdir()
    (half / "model.onnx").write_bytes(bytes(1000))
    with filelock.FileLock(lock):
        left, _ = lines("cache", "prune", "--max-size", "0")
        assert left.endswith(": being built, or removed, by another process")
        assert half.exists()
    assert entry.folder.exists()
    # The builder is gone, and did not finish.
    removed, abandoned, _ = lines("cache", "prune", "--max-size", "0")
    assert str(model_path) in removed
    assert abandoned == "removed: what builders left that were killed, 1.0 kB"
    assert not half.exists()


@pytest.mark.parametrize("content", [None, "{"], ids=["none", "cut"])
def test_prune_takes_entries_without_a_manifest(
    model_path: Path, cache_dir: Path, content: str | None
):
    start(model_path)
    (entry,) = entries(cache_dir)
    manifest = entry.folder / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_text(content)
    for path in (entry.folder, *entry.folder.iterdir()):
        os.utime(path, (time.time() - DAY, time.time() - DAY))
    removed, _ = lines("cache", "prune", "--older-than", "12h")
    assert removed.startswith(f"removed: {entry.folder.name[:12]}, ")
    assert not entry.folder.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--max-size", "--older-than"]),
        (["--max-size", "10 parsecs"], ["10 parsecs", "500MB"]),
        (["--max-size", "-1"], ["500MB"]),
        (["--older-than", "30"], ["'30'", "30d"]),
        (["--older-than", "2m"], ["'2m'", "45min"]),
    ],
)
def test_prune_with_limits_that_say_nothing(arguments: list[str], words: list[str]):
    done = ortp("cache", "prune", *arguments)
    assert done.returncode == 2
    assert [word for word in words if word not in done.stderr] == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("500MB", 500_000_000),
        ("10GB", 10_000_000_000),
        ("1GiB", 1 << 30),
        ("1.5 kb", 1500),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, size: int):
    assert terminal.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "age"), [("45min", 2700), ("12h", 43200), ("30d", 2592000), ("2w", 1209600)]
)
def test_ages(text: str, age: float):
    assert terminal.parse_age(text) == age


@pytest.fixture
def collectors(cache_dir: Path) -> Iterator[Callable[[], int]]:
    """Two processes that collect until they are told to stop; returns what they removed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTOR, str(cache_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    def stop() -> int:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        return sum(int(output) for output in outputs)

    yield stop
    for process in processes:
        process.kill()
        process.wait()


def test_what_is_found_while_two_collect_stays_whole(
    cache_dir: Path, collectors: Callable[[], int]
):
    cache, key = ArtifactCache(cache_dir), "0" * 40
    built = found = 0
    for _ in range(200):
        with cache.build(key) as result:
            if isinstance(result, Path):
                built += 1
                for index in range(20):
                    (result / f"{index}.data").write_bytes(bytes([index]) * 100)
                cache.publish(
                    key, result, {"model": "bytes", "made_from": {"digest": ""}, "report": {}}
                )
        try:
            backdate(cache_dir / "entries" / key, DAY)
        except FileNotFoundError:
            continue
        if (entry := cache.find(key)) is not None:
            found += 1
            assert entry.damage() == {}
    assert collectors() > 0
    assert built > 1
    assert found > 0
    assert list((cache_dir / "building").iterdir()) == []


def test_sessions_that_build_and_hit_while_two_collect(
    model_path: Path, cache_dir: Path, collectors: Callable[[], int]
):
    outputs = []
    for _ in range(3):
        processes = [spawn(model_path) for _ in range(3)]  # any warning is an error there
        outputs += [process.communicate(timeout=120)[0].split() for process in processes]
        assert [process.returncode for process in processes] == [0] * 3
        for entry in entries(cache_dir):
            backdate(entry.folder, DAY)
    collectors()
    assert {source for source, _ in outputs} == {"built", "cache"}
    assert len({digest for _, digest in outputs}) == 1


# verify


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "file", "what"),
    [
        (_flip, "model.onnx.data", "model.onnx.data: other digest"),
        (_flip, "probe.onnx", "probe.onnx: other digest"),
        (_truncate, "model.onnx", "model.onnx: other size: {} bytes, published with {}"),
        (lambda path: os.truncate(path, 0), "model.onnx", "model.onnx: other size: 0 bytes"),
        (Path.unlink, "model.onnx.data", "model.onnx.data: missing"),
        (Path.unlink, "manifest.json", "manifest.json: missing"),
        (_truncate, "manifest.json", "manifest.json: cannot be used"),
    ],
    ids=[
        "bit",
        "bit of the probe",
        "cut",
        "emptied",
        "deleted",
        "no manifest",
        "cut manifest",
    ],
)
def test_verify_names_what_is_damaged(
    tmp_path: Path, cache_dir: Path, damage: Callable[[Path], None], file: str, what: str
):
    for index in range(2):
        model = tmp_path / f"{index}.onnx"
        ir.save(DequantizedMatMul(512, 512, 32).model(), model, external_data=f"{index}.data")
        victim = Path(start(model).ortplugins_report.artifact).parent
    assert lines("cache", "verify") == [f"2 checked, 0 damaged, in {cache_dir}"]

    size = (victim / file).stat().st_size
    damage(victim / file)
    line, total = lines("cache", "verify", code=1)
    assert line.startswith(f"damaged: {victim.name[:12]}")
    assert f": {what.format(size - 1, size)}" in line
    assert (file == "manifest.json") != (f" {model}: " in line)
    assert total == f"2 checked, 1 damaged, in {cache_dir}"
    assert victim.exists()

    lines("cache", "verify", "--cache-dir", cache_dir, "--remove", code=1)
    assert not victim.exists()
    assert lines("cache", "verify") == [f"1 checked, 0 damaged, in {cache_dir}"]
    assert start(model).ortplugins_report.source == "built"


def test_commands_on_a_cache_that_is_not_there_make_none(cache_dir: Path):
    assert lines("cache", "verify") == [f"0 checked, 0 damaged, in {cache_dir}"]
    (line,) = lines("cache", "prune", "--max-size", "0")
    assert line == f"removed 0, 0 bytes; 0 remain, 0 bytes, in {cache_dir}"
    assert not cache_dir.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such modes")
@pytest.mark.parametrize("command", [["verify"], ["prune", "--max-size", "0"]], ids="".join)
def test_a_directory_that_others_may_write_to(cache_dir: Path, command: list[str]):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    done = ortp("cache", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{cache_dir}: belongs to another user or others may write" in done.stderr


# warm


def session(path: Path, cache_dir: Path, prelude: str = "") -> str:
    code = (sys.executable, "-W", "error", "-c", prelude + SESSION)
    done = execute(*code, path, cache_dir=cache_dir)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_session_finds_what_was_warmed(model_path: Path, cache_dir: Path):
    (line,) = lines("cache", "warm", model_path)
    assert line.startswith(f"{model_path}: built: fired 2, refused 0; ")
    assert line.endswith(" kB on disk")
    assert session(model_path, cache_dir) == "cache"
    (line,) = lines("cache", "warm", model_path)
    assert line.startswith(f"{model_path}: cache: fired 2, refused 0; ")
    assert len(entries(cache_dir)) == 1


@pytest.fixture
def image() -> Iterator[Path]:
    """A folder whose parents every user may enter; a test's own is private."""
    folder = Path(tempfile.mkdtemp(prefix="image-"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o700)
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such modes")
def test_an_image_is_read_by_another_user_and_written_by_none(image: Path):
    model, output = image / "model.onnx", image / "cache"
    ir.save(CASE.model(), model, external_data="model.onnx.data")
    lines("cache", "warm", model, "--cache-dir", output)
    (entry,) = entries(output)
    backdate(entry.folder, DAY)
    for path in (output, *output.rglob("*")):
        assert not path.stat().st_mode & 0o022, path
        path.chmod(path.stat().st_mode & ~0o222)
    for path in (entry.folder, *entry.folder.iterdir()):
        assert path.stat().st_mode & 0o044 == 0o044, path

    before = snapshot(output)
    prelude = "" if os.geteuid() else AS_NOBODY

    assert session(model, output, prelude) == "cache"
    done = execute(sys.executable, "-c", prelude + CHECK_AND_PRUNE, output)
    assert done.stdout == "[{}]\n"
    assert f"PermissionError: {output}: cannot be written" in done.stderr
    assert snapshot(output) == before


def test_warm_takes_what_else_the_key_depends_on(model_path: Path, cache_dir: Path):
    key = "session.qdq_matmulnbits_accuracy_level"
    lines(
        *("cache", "warm", model_path, "--pass", "dq_matmulnbits_fusion"),
        *("--set", "dq_matmulnbits_fusion.slow_kernels=keep"),
        *("--session-entry", f"{key}=4", "--optimization-level", "basic"),
    )

    def source(**settings: str) -> str:
        so = ort.SessionOptions()
        so.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")
        so.add_session_config_entry("ortplugins.dq_matmulnbits_fusion.slow_kernels", "keep")
        so.add_session_config_entry(key, settings.get("accuracy", "4"))
        so.graph_optimization_level = getattr(
            ort.GraphOptimizationLevel, settings.get("level", "ORT_ENABLE_BASIC")
        )
        made = ortplugins.InferenceSession(model_path, so, providers=["CPUExecutionProvider"])
        return made.ortplugins_report.source

    assert source() == "cache"
    assert source(accuracy="1") == "built"
    assert source(level="ORT_ENABLE_ALL") == "built"
    assert len(entries(cache_dir)) == 3


def test_warm_goes_on_after_a_model_that_fails(model_path: Path, cache_dir: Path):
    missing, empty = model_path.with_name("gone.onnx"), model_path.with_name("empty.onnx")
    empty.touch()
    done = ortp("cache", "warm", missing, model_path, empty, "--pass", "dq_matmulnbits_fusion")
    assert done.returncode == 1
    assert done.stdout.startswith(f"{model_path}: built: fired 1, refused 0; ")
    first, second = done.stderr.splitlines()
    assert first == f"error: {missing}: there is no such model file"
    assert second.startswith(f"error: {empty}: ")
    assert names(cache_dir) == ["model.onnx"]


def test_warm_fails_where_nothing_can_be_kept(model_path: Path, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = ortp("cache", "warm", model_path, "--cache-dir", blocked / "cache")
    assert (done.returncode, done.stdout) == (1, "")
    told, line = done.stderr.splitlines()
    assert told.startswith(f"{model_path}: may take ")
    assert line.startswith(f"error: {model_path}: not kept: ")
    assert str(blocked) in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pass", "prepacked_weigths"], ["did you mean 'prepacked_weights'?"]),
        (["--set", "prepacked_weights.verif=size"], ["did you mean 'verify'?"]),
        (["--optimization-level", "most"], ["'most'", "disable, basic, extended"]),
        (["--session-entry", "=1"], ["session entry ''"]),
        (
            ["--session-entry", "session.x"],
            ["'session.x' is not KEY=VALUE", "--session-entry"],
        ),
    ],
)
def test_warm_with_options_that_nobody_knows(
    model_path: Path, cache_dir: Path, arguments: list[str], words: list[str]
):
    done = ortp("cache", "warm", model_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert [word for word in words if word not in done.stderr] == []
    assert not cache_dir.exists()


def test_warm_from_python(model_path: Path, tmp_path: Path, cache_dir: Path):
    seen: list[WarmResult] = []
    (result,) = warm(
        [model_path],
        [ortplugins.DqMatMulNBitsFusion(accuracy_level=4)],
        cache_dir=tmp_path / "out",
        disabled_optimizers=["ConstantFolding"],
        done=seen.append,
    )
    assert seen == [result]
    assert result.report is not None
    assert (result.model, result.report.source, result.error) == (str(model_path), "built", "")
    folder = Path(result.report.artifact).parent
    assert folder.parent == tmp_path / "out" / "entries"
    assert result.size == _disk(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert not cache_dir.exists()

    so = ort.SessionOptions()
    ortplugins.configure(
        so, ortplugins.DqMatMulNBitsFusion(accuracy_level=4), cache_dir=str(tmp_path / "out")
    )
    made = ortplugins.InferenceSession(
        model_path,
        so,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["ConstantFolding"],
    )
    assert made.ortplugins_report.source == "cache"


def _disk(folder: Path) -> int:
    """Bytes of an entry, or of all entries of a cache."""
    top = folder / "entries" if (folder / "entries").exists() else folder
    return sum(
        path.stat().st_size
        for path in top.rglob("*")
        if path.is_file() and path.stat().st_nlink == 1
    )
