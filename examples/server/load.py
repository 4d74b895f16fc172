# SPDX-License-Identifier: MIT
"""Starts the server in each mode, sends it requests, and prints what it costs, as one table.

python -m examples.server.load [--workers N] [--clients N] [--requests N] [--seconds S] ...

Talks to 127.0.0.1 only; whatever happens, no server is left behind. The artifacts go to a
temporary folder, so that the first start of ortplugins is one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

START_SECONDS = 300  # a first start on a busy machine
HEADINGS = (
    "mode", "start s", "private MB per worker", "sum of PSS", "requests/s", "p50 / p95 ms",
)  # fmt: skip
QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a short greeting to a new colleague.",
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A row of the table; where `warm`, what it needs is built before."""

    name: str
    environment: Mapping[str, str]
    warm: bool = True


OURS = {"ORTPLUGINS_SERVER_MODE": "ortplugins"}
CONFIGURATIONS = (
    Configuration("onnxruntime", {"ORTPLUGINS_SERVER_MODE": "plain"}),
    Configuration("ortplugins, first start", OURS, warm=False),
    Configuration("ortplugins", OURS),
    Configuration("ortplugins, level 4", OURS | {"ORTPLUGINS_SERVER_ACCURACY_LEVEL": "4"}),
)


@dataclasses.dataclass(frozen=True)
class Load:
    """How much to send: `requests` from `clients`, for not longer than `seconds`."""

    clients: int
    requests: int
    seconds: float
    max_tokens: int


class Server:
    """The server as a process of its own, and its port."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Sends JSON over a connection of its own, and returns what comes back.

        A new connection each time, because it is connections that the workers take turns in.

        Raises:
            OSError: If nobody answers.
            RuntimeError: If the answer is an error.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "Connection": "close"}
            text = None if body is None else json.dumps(body)
            try:
                connection.request(method, path, text, headers)
                response = connection.getresponse()
                content = response.read()
            except http.client.HTTPException as error:
                raise OSError(f"{path}: {error!r}") from error
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {content.decode(errors='replace')}")
        return json.loads(content)

    def workers(self, count: int, seconds: float) -> list[dict[str, Any]]:
        """Asks for health until so many workers have answered; returns the last of each.

        Raises:
            RuntimeError: If the server ends, or the time is over.
        """
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(found) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text("utf-8", "replace")[-2000:]
                raise RuntimeError(f"{len(found)} of {count} workers answered:\n{tail}")
            try:
                health = self.request("GET", "/health")
                found[health["pid"]] = health
            except OSError:  # not up yet
                time.sleep(0.05)
            time.sleep(0.005)
        return list(found.values())


@contextlib.contextmanager
def serve(environment: Mapping[str, str], workers: int, folder: Path) -> Iterator[Server]:
    """Starts the server; on the way out it is stopped, workers and all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "server.log"
    module = "examples.server.server"
    command = [sys.executable, "-m", module, f"--port={port}", f"--workers={workers}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, "ORTPLUGINS_CACHE_DIR": str(folder / "cache")},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for us; we stop the group
        )
    try:
        yield Server(process, port, log)
    finally:
        try:
            process.terminate()
            process.wait(20)
        finally:  # also at a second Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def measure(
    chosen: Configuration, workers: int, load: Load, threads: int, folder: Path
) -> list[str]:
    """Returns a row of the table.

    Raises:
        RuntimeError: If the server does not start, or a request fails.
    """
    environment = {**chosen.environment, "ORTPLUGINS_SERVER_THREADS": str(threads)}
    if chosen.warm:
        with serve(environment, 1, folder) as server:
            server.workers(1, START_SECONDS)
    start = time.time()
    with serve(environment, workers, folder) as server:
        ready = max(w["ready_at"] for w in server.workers(workers, START_SECONDS))
        for worker in server.workers(workers, START_SECONDS):
            print(f"  {worker['pid']}: {worker['report']}", file=sys.stderr)
        latencies, seconds = send(server, load)
        after = server.workers(workers, 60)
    private = sorted(worker["private_mb"] or 0 for worker in after)
    cuts = statistics.quantiles(latencies, n=20, method="inclusive")
    return [
        chosen.name,
        f"{ready - start:.1f}",
        " to ".join(dict.fromkeys(f"{mb:.0f}" for mb in (private[0], private[-1]))),
        f"{sum(worker['pss_mb'] or 0 for worker in after):.0f}",
        f"{len(latencies) / seconds:.1f}",
        f"{1e3 * cuts[9]:.0f} / {1e3 * cuts[18]:.0f}",
    ]


def send(server: Server, load: Load) -> tuple[list[float], float]:
    """Sends the load; returns the seconds of each request, and of all of them together.

    Raises:
        RuntimeError: If a request fails, or too few came back in time.
    """
    numbers, stop = iter(range(load.requests)), threading.Event()
    latencies: list[float] = []

    def client() -> None:
        while not stop.is_set() and (number := next(numbers, None)) is not None:
            question = QUESTIONS[number % len(QUESTIONS)]
            body = {"prompt": question, "max_tokens": load.max_tokens}
            begin = time.perf_counter()
            server.request("POST", "/generate", body)
            latencies.append(time.perf_counter() - begin)

    timer = threading.Timer(load.seconds, stop.set)
    start = time.perf_counter()
    with ThreadPoolExecutor(load.clients) as clients:
        timer.start()
        try:
            for done in [clients.submit(client) for _ in range(load.clients)]:
                done.result()
        except OSError as error:
            raise RuntimeError(f"a request failed: {error}") from error
        finally:
            stop.set()
            timer.cancel()
    if len(latencies) < 2:
        raise RuntimeError("too few answers in time; give more --seconds")
    return latencies, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all configurations; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=120, help="for each row")
    parser.add_argument("--seconds", type=float, default=120, help="limit for each row's load")
    parser.add_argument("--max-tokens", type=int, default=16)
    chosen = parser.parse_args(arguments)
    if min(chosen.workers, chosen.clients, chosen.requests) < 1:
        parser.error("--workers, --clients and --requests must be 1 or more")
    load = Load(chosen.clients, chosen.requests, chosen.seconds, chosen.max_tokens)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers stop then, too
    rows = []
    try:
        with tempfile.TemporaryDirectory(prefix="ortplugins-server-") as folder:
            for configuration in CONFIGURATIONS:
                print(f"{configuration.name} ...", file=sys.stderr)
                rows.append(
                    measure(configuration, chosen.workers, load, chosen.threads, Path(folder))
                )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if rows:
            lines = [HEADINGS, ["---"] + ["---:"] * (len(HEADINGS) - 1), *rows]
            print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
