# SPDX-License-Identifier: MIT
"""The servers of examples/, each with its real package: ``make test-servers``.

Each serves all-MiniLM-L6-v2 in int4, by onnxruntime alone and by ortplugins, and gets
``REQUESTS`` requests. Virtual environments are made once, in .cache/servers; a server whose
package cannot be installed is skipped. ``-s`` prints a row of docs/serving.md for each.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from builders.processes import call
from checks.environments import CACHE, python_with

from examples.embedder import make_model

ROOT = Path(__file__).resolve().parents[3]
REQUESTS, CLIENTS, WORKERS = 1000, 4, 3
START_SECONDS = 180
TEXTS = (
    "What is the capital of France?",
    "Name three animals that live in the sea, and one that does not.",
    "Why is the sky blue? Answer in one sentence.",
    "A short greeting to a new colleague.",
)
WORKER = re.compile(r"worker (\d+): (\w+)")


@dataclasses.dataclass(frozen=True)
class Server:
    name: str
    folder: str
    packages: tuple[str, ...]
    command: tuple[str, ...]  # in the environment; {port} and {folder} are filled in
    path: str = "/embed"
    body: Callable[[Sequence[str]], Any] = lambda texts: {"texts": texts}
    answer: Callable[[Any], Any] = lambda found: found["embeddings"]
    load: str = ""  # path that brings a killed worker back, where nothing else does


def triton_body(texts: Sequence[str]) -> Any:
    tensor = {"name": "texts", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    return {"inputs": [tensor]}


def triton_answer(found: Any) -> Any:
    (tensor,) = found["outputs"]
    return np.reshape(tensor["data"], tensor["shape"])


FASTAPI = ("fastapi==0.165.0", "uvicorn==0.54.0", "gunicorn==27.0.1", "uvicorn-worker==0.4.0")
GUNICORN = (
    *("gunicorn", "examples.fastapi.app:app", "-k", "uvicorn_worker.UvicornWorker"),
    *(f"-w{WORKERS}", "-b127.0.0.1:{port}"),
)
SERVERS = (
    Server(
        "FastAPI, uvicorn",
        "fastapi",
        FASTAPI,
        ("uvicorn", "examples.fastapi.app:app", f"--workers={WORKERS}", "--port={port}"),
    ),
    Server("FastAPI, gunicorn", "fastapi", FASTAPI, GUNICORN),
    Server("FastAPI, gunicorn --preload", "fastapi", FASTAPI, (*GUNICORN, "--preload")),
    Server(
        "uWSGI",
        "uwsgi",
        ("uwsgi==2.0.31",),
        ("uwsgi", "--ini=examples/uwsgi/uwsgi.ini", "--http-socket=127.0.0.1:{port}"),
    ),
    Server(
        "LitServe",
        "litserve",
        ("litserve==0.2.19",),
        ("python", "-m", "examples.litserve.server", "{port}"),
    ),
    Server(
        "BentoML",
        "bentoml",
        ("bentoml==1.4.39",),
        ("bentoml", "serve", "examples.bentoml.service:Embeddings", "--port={port}"),
    ),
    Server(
        "Ray Serve",
        "ray_serve",
        ("ray[serve]==2.60.0",),
        ("python", "-m", "examples.ray_serve.app", "{port}"),
    ),
    Server(
        "Triton",
        "triton",
        (),
        ("python", "tests/checks/servers/start_triton.py", "{folder}", "{port}"),
        "/v2/models/embedder/infer",
        triton_body,
        triton_answer,
        "/v2/repository/models/embedder/load",
    ),
)


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder with the model of the examples."""
    folder = CACHE / "embedder"
    if not (folder / "tokenizer.json").exists():
        try:
            make_model(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"all-MiniLM-L6-v2 cannot be fetched: {error}")
    return folder


@dataclasses.dataclass
class Running:
    """A server as a process of its own."""

    server: Server
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        body = json.dumps(self.server.body(texts))
        answer = self.post(self.server.path, body)
        return np.asarray(self.server.answer(json.loads(answer)), np.float32)

    def post(self, path: str, body: str) -> bytes:
        """Ask over a connection of its own: it is connections that workers take turns in."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            content = response.read()
        if response.status != 200:
            raise OSError(f"{response.status} {content[:200]!r}")
        return content

    def workers(self) -> dict[int, str]:
        """Return the workers that live, and where the model of each came from."""
        found = {int(pid): source for pid, source in WORKER.findall(self.log.read_text())}
        return {pid: source for pid, source in found.items() if is_alive(pid)}

    def wait_for_workers(self, count: int, *, more: bool = False) -> dict[int, str]:
        """Return the workers once there are so many, or more, and the server answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.embed(TEXTS[:1])
                found = self.workers()
                if len(found) == count or (more and len(found) > count):
                    return found
            tail = self.log.read_text()[-3000:]
            assert self.process.poll() is None, tail
            assert time.monotonic() < deadline, tail
            time.sleep(0.2)


@contextlib.contextmanager
def serve(server: Server, home: Path, folder: Path, **environment: str) -> Iterator[Running]:
    """Start a server on a free port; on the way out it and its workers end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "server.log"
    program, *arguments = [part.format(port=port, folder=folder) for part in server.command]
    variables = {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ORTPLUGINS_CACHE_DIR": str(folder / "cache"),
        # Ray leaves out lines that differ in numbers only, such as ours of the workers.
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [home / "bin" / program, *arguments],
            cwd=ROOT,
            env=os.environ | variables | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Running(server, process, port, log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that its parent has not waited for yet does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return what processes have used; other load changes it less than the wall time."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def pss_mb(pids: Sequence[int]) -> float:
    """Return the memory of processes, pages that n of them share counted as 1/n each."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) for text in texts) / 1e3


class Measured(NamedTuple):
    """What a server did: answers to TEXTS, and figures."""

    answers: npt.NDArray[np.float32]
    wall_ms: float
    cpu_ms: float
    pss_mb: float


def measure(running: Running) -> Measured:
    """Send REQUESTS requests by CLIENTS; one that fails fails the test."""
    workers = list(running.wait_for_workers(WORKERS))
    texts = [TEXTS[i % len(TEXTS)] for i in range(REQUESTS)]
    before, begin = cpu_seconds(workers), time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda text: running.embed([text])[0], texts))
    wall = time.perf_counter() - begin
    spent = cpu_seconds(workers) - before
    for i, answer in enumerate(answers):
        assert np.array_equal(answer, answers[i % len(TEXTS)])
    return Measured(
        np.stack(answers[: len(TEXTS)]),
        1e3 * wall / REQUESTS,
        1e3 * spent / REQUESTS,
        pss_mb(workers),
    )


@pytest.fixture(params=SERVERS, ids=lambda server: server.name)
def server(request: pytest.FixtureRequest) -> Server:
    return request.param


def home_of(server: Server) -> Path:
    """Return the virtual environment of a server; without one the test is skipped."""
    ours = ("--editable", f"{ROOT}[cpu,cli]", "tokenizers")
    calls = [(*ours, *server.packages)]
    if server.name == "Triton":
        # PyTriton's Triton is 24.10, the last one before numpy 2; it needs none of the rest.
        calls.append(("--no-deps", "nvidia-pytriton==0.7.0", "numpy==1.26.4"))
    return python_with(CACHE / "servers" / server.folder, *calls).parents[1]


@pytest.fixture
def home(server: Server) -> Path:
    return home_of(server)


def test_a_server_gives_what_stock_gives_for_less(
    server: Server, home: Path, model: Path, tmp_path: Path
):
    files = sorted(os.listdir(model))
    with serve(server, home, tmp_path, EMBEDDER_STOCK="1") as running:
        assert set(running.wait_for_workers(WORKERS).values()) == {"stock"}
        stock = measure(running)
    warm = call(
        *(home / "bin" / "ortplugins", "cache", "warm", model / "model.onnx"),
        *("--set", "dq_matmulnbits_fusion.accuracy_level=0"),
        *("--cache-dir", tmp_path / "cache"),
    )
    assert warm.returncode == 0, warm.stderr
    with serve(server, home, tmp_path) as running:
        ours = measure(running)
        assert set(running.workers().values()) == {"cache"}
        killed = min(running.workers())
        os.kill(killed, signal.SIGKILL)
        while killed in running.workers():
            time.sleep(0.1)
        if server.load:
            running.post(server.load, "")
        # Triton ends the siblings of a killed instance late.
        assert running.wait_for_workers(WORKERS, more=True)
        for text in TEXTS * 5:
            assert running.embed([text]).shape == (1, 384)
    assert sorted(os.listdir(model)) == files
    figures = zip(stock[1:], ours[1:], strict=True)
    cells = " | ".join(f"{before:.1f} -> {after:.1f}" for before, after in figures)
    print(f"\n| {server.name} | {cells} |")
    difference = np.abs(stock.answers - ours.answers).max() / np.abs(stock.answers).max()
    assert difference <= 1e-6
    assert ours.cpu_ms <= 0.6 * stock.cpu_ms
    assert ours.pss_mb <= 0.7 * stock.pss_mb


def test_an_empty_cache_is_filled_once(
    server: Server, home: Path, model: Path, tmp_path: Path
):
    with serve(server, home, tmp_path) as running:
        sources = list(running.wait_for_workers(WORKERS).values())
    assert set(sources) <= {"built", "cache"}
    assert len(list((tmp_path / "cache" / "entries").iterdir())) == 1


def test_replicas_of_ray_come_and_go(model: Path, tmp_path: Path):
    (server,) = [server for server in SERVERS if server.name == "Ray Serve"]
    home = home_of(server)
    scale = [home / "bin" / "python", "-m", "examples.ray_serve.scale"]
    with serve(server, home, tmp_path) as running:
        running.wait_for_workers(WORKERS)
        for count in (WORKERS + 1, 1):
            done = call(*scale, count, cwd=ROOT, RAY_ADDRESS="auto")
            assert done.returncode == 0, done.stderr
            found = running.wait_for_workers(count)
            assert running.embed(TEXTS).shape == (len(TEXTS), 384)
    assert set(found.values()) <= {"built", "cache"}
