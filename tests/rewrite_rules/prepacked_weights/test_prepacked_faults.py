# SPDX-License-Identifier: MIT
"""PrepackedWeights where processes die, disks fill and files rot: no output is wrong."""

import contextlib
import dataclasses
import os
import re
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import FEED, digest_of, disk, result_of, spawn
from builders.sessions import CPU, backdate, files, options

import ortplugins
from ortplugins import DqMatMulNBitsFusion, OrtpluginsWarning, PrepackedWeights
from ortplugins.cache import build
from ortplugins.cache.artifact import changed_files
from ortplugins.cache.store import ArtifactCache
from rewrite_rules.prepacked_weights import prepack
from rewrite_rules.prepacked_weights.records import read_records

CASE = DequantizedMatMul(512, 256, 32)
FUSION = DqMatMulNBitsFusion()

Output = npt.NDArray[Any]


@dataclasses.dataclass
class Faults:
    """A model and its cache, for one test; ``output`` is what it computes without blobs."""

    path: Path
    cache: Path
    folder: Path
    output: Output
    patch: pytest.MonkeyPatch

    def start(
        self, cache: Path | None = None, verify: str = "size"
    ) -> tuple[ortplugins.InferenceSession, str]:
        """Open a session; return what it warned of and remarked, too."""
        so = options(
            FUSION, PrepackedWeights(verify=verify), cache_dir=str(cache or self.cache)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session = ortplugins.InferenceSession(self.path, so, providers=CPU)
        reported = [str(item.message) for item in caught if item.category is OrtpluginsWarning]
        return session, "\n".join([*reported, session.ortplugins_report.to_text()])

    def check(self, session: ortplugins.InferenceSession) -> None:
        """The output is that of the fused model, or onnxruntime's own of an untouched one."""
        expected = self.output
        if session.ortplugins_report.source == "untouched":
            so = ort.SessionOptions()
            so.intra_op_num_threads = 1
            (expected,) = ort.InferenceSession(self.path, so, providers=CPU).run(None, FEED)
        np.testing.assert_array_equal(session.run(None, FEED)[0], expected)

    def sabotage(self, module: str, action: str) -> None:
        """Have the process that runs a module do something as soon as it imports numpy."""
        site = self.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_HOOK.format(module=module, action=action))
        # Children get this process's path; here, sitecustomize was looked for long ago.
        self.patch.syspath_prepend(site)
        self.patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)


@pytest.fixture
def faults(
    model_path: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Faults:
    """With an empty cache; built in a child, as programs do."""
    monkeypatch.delenv("ORTPLUGINS_BUILD_IN_PROCESS")
    fused = ortplugins.optimize(onnx.load(model_path), passes=[FUSION]).model
    opened = ort.InferenceSession(fused.SerializeToString(), providers=CPU)
    (output,) = opened.run(None, FEED)
    return Faults(model_path, cache_dir, tmp_path, output, monkeypatch)


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
    "ortplugins.cache.build",
)


_TIDY = re.compile(
    r"entries/[0-9a-f]{40}/(artifact|report\.json|model\.onnx|[\w.]+\.data)"
    r"|index/[0-9a-f]+(\.data)?|locks/[0-9a-f]{16}\.lock"
)


def litter(cache_dir: Path) -> list[str]:
    found = [p.relative_to(cache_dir).as_posix() for p in cache_dir.rglob("*") if p.is_file()]
    return [name for name in found if not _TIDY.fullmatch(name)] + [
        f"building/{path.name}" for path in cache_dir.glob("building/*")
    ]


def assert_whole(cache_dir: Path) -> None:
    """Every published entry is as its builder left it."""
    for entry in ArtifactCache(cache_dir).entries():
        assert not changed_files(entry.artifact, reads_files=True)


def test_eight_processes_on_an_empty_cache(faults: Faults):
    log = faults.folder / "log"
    faults.sabotage(PACKING, f"open({str(log)!r}, 'a').write('x')")
    results = [result_of(each) for each in [spawn(faults.path) for _ in range(8)]]
    assert log.read_text() == "x", "one of them packs"
    assert sorted(result["source"] for result in results) == ["built"] + ["cache"] * 7
    assert {result["digest"] for result in results} == {digest_of(faults.output)}
    assert [blobs_in_use(result["text"]) for result in results] == [1] * 8
    assert [result["warnings"] for result in results] == [[]] * 8
    assert len(list((faults.cache / "entries").iterdir())) == 1
    assert litter(faults.cache) == []


def left_behind(cache_dir: Path) -> list[int]:
    """Processes that work on this cache."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(cache_dir) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("module", [PACKING, BUILDING])
def test_a_process_that_is_killed_while_its_child_works(faults: Faults, module: str):
    faults.sabotage(module, "os.kill(os.getppid(), 9)")
    victim = spawn(faults.path)
    victim.communicate()
    (faults.folder / "site" / "sitecustomize.py").unlink()
    # The builder is the packing child's parent: the session goes on without its blobs.
    assert victim.returncode == (0 if module == PACKING else -9)
    deadline = time.monotonic() + 60
    while left_behind(faults.cache):
        assert time.monotonic() < deadline, "its children outlive it"
        time.sleep(0.05)
    assert_whole(faults.cache)
    shutil.rmtree(faults.cache / "entries", ignore_errors=True)
    session, reported = faults.start()
    faults.check(session)
    assert blobs_in_use(reported) == 1
    assert litter(faults.cache) == []


def test_a_full_disk(faults: Faults):
    with disk(faults.folder / "disk", 1 << 20) as root:
        for room in (560, 240, 8):  # a build of CASE takes about 600 KB at its peak
            cache = root / f"cache{room}"
            filler = root / "filler"
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            filler.write_bytes(bytes(max(free - (room << 10), 0)))
            session, reported = faults.start(cache)
            faults.check(session)
            assert (
                blobs_in_use(reported)
                or "space left" in reported
                or "packing process" in reported
            )
            filler.unlink()
            if cache.exists():
                assert_whole(cache)
            # With room again; test_a_child_that_fails is about the blobs.
            session, _ = faults.start(cache)
            faults.check(session)
            assert litter(cache) == []
            del session
            shutil.rmtree(cache)


def flip_blob(cache_dir: Path) -> None:
    """Flip a bit in the first blob, which gives wrong numbers without any complaint."""
    (data,) = cache_dir.glob("entries/*/model.onnx.data")
    model = onnx.load(data.with_name("model.onnx"), load_external_data=False)
    ((record, *_), *_) = read_records(model).values()
    offset, length, _ = record.blobs[0]
    content = bytearray(data.read_bytes())
    content[offset + length // 2] ^= 0x40
    data.write_bytes(content)


@pytest.mark.parametrize("verify", ["size", "digest"])
def test_a_flipped_bit_is_found(faults: Faults, verify: str):
    faults.start()
    flip_blob(faults.cache)
    for source in ("built", "cache"):
        session, reported = faults.start(verify=verify)
        assert session.ortplugins_report.source == source
        assert ("model.onnx.data changed on disk" in reported) == (source == "built")
        faults.check(session)
    assert litter(faults.cache) == []


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
def test_a_cache_of_another_user_is_refused(faults: Faults):
    faults.start()
    flip_blob(faults.cache)  # as an attacker would; the sizes are right
    for path in (faults.cache, *faults.cache.rglob("*")):
        os.chown(path, 12345, 12345)
    before = files(faults.cache)
    session, reported = faults.start()
    assert "belongs to another user" in reported
    assert session.ortplugins_report.source == "built"
    faults.check(session)
    assert files(faults.cache) == before


@pytest.mark.parametrize(
    ("module", "action", "reported"),
    [
        (PACKING, "os.kill(os.getpid(), 11)", "ended with -11"),
        (PACKING, "time.sleep(600)", "took more than"),
        (PACKING, "print('nonsense'); os._exit(0)", "no result"),
        (BUILDING, "os.kill(os.getpid(), 11)", "ended with -11"),
        (BUILDING, "time.sleep(600)", "took more than 4 s"),
        (BUILDING, "os.write(2, bytes(range(256))); os._exit(3)", "ended with 3"),
    ],
)
def test_a_child_that_fails(faults: Faults, module: str, action: str, reported: str):
    faults.sabotage(module, action)
    if "sleep" in action:
        faults.patch.setattr(build, "_SECONDS", 4)
        faults.patch.setattr(prepack, "_SECONDS", 2)
        if module == PACKING:  # whose limit is the building process's
            faults.patch.setenv("ORTPLUGINS_BUILD_IN_PROCESS", "1")
    session, text = faults.start()
    faults.check(session)
    assert not blobs_in_use(text)
    assert reported in text
    assert_whole(faults.cache)
    # What a killed builder leaves is removed by the next one.
    assert [name for name in litter(faults.cache) if not name.startswith("building/")] == []
    assert left_behind(faults.cache) == []
    # What failed once is tried again.
    (faults.folder / "site" / "sitecustomize.py").unlink()
    for folder in faults.cache.glob("entries/*"):
        backdate(folder, 100_000)
    for changed in (build, prepack):
        faults.patch.setattr(changed, "_SECONDS", 60)
    session, text = faults.start()
    faults.check(session)
    assert blobs_in_use(text) == 1
    assert litter(faults.cache) == []


def test_without_an_interpreter(faults: Faults):
    faults.patch.setattr(sys, "executable", "")
    faults.patch.setattr("multiprocessing.spawn._python_exe", None)
    session, text = faults.start()
    faults.check(session)
    assert "no Python interpreter" in text
