# SPDX-License-Identifier: MIT
"""An inference server: N workers on one model, plain onnxruntime or ortplugins.

python -m examples.server.server [--workers N] [--port N]

The workers are processes that know nothing of each other, so their settings come from the
environment; README.md lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from examples.smollm2.generate import Decoder, chat_prompt

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / ".cache" / "demo" / "int4-block32-axis0" / "model.onnx"
MODES = ("ortplugins", "plain")

_PREFIX = "ORTPLUGINS_SERVER_"
_DTYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(string)": np.object_,
    "tensor(bool)": np.bool_,
    **{
        f"tensor({name}{n})": f"{name}{n}" for name in ("int", "uint") for n in (8, 16, 32, 64)
    },
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a worker runs.

    Attributes:
        model: Path of the .onnx file.
        mode: "ortplugins", or "plain" for onnxruntime alone.
        threads: Of onnxruntime, for each worker.
        accuracy_level: Of ortplugins' fusion: 0 is exact, 4 rounds activations to int8.
    """

    model: Path
    mode: str = MODES[0]
    threads: int = 1
    accuracy_level: int = 0

    @classmethod
    def from_environment(cls) -> Settings:
        """Reads ORTPLUGINS_SERVER_{MODEL,MODE,THREADS,ACCURACY_LEVEL}.

        Raises:
            FileNotFoundError: If there is no such model.
            ValueError: If a setting has a value that it can't have.
        """
        chosen = os.environ.get(_PREFIX + "MODEL")
        model = Path(chosen or DEMO_MODEL).expanduser()
        if not model.is_file():
            remedy = f"check {_PREFIX}MODEL" if chosen else "`make demo` makes it"
            raise FileNotFoundError(f"{model}: there is no such model; {remedy}")
        mode = os.environ.get(_PREFIX + "MODE", MODES[0])
        if mode not in MODES:
            raise ValueError(
                f"{_PREFIX}MODE is {mode!r}: one of {', '.join(MODES)} is expected"
            )
        return cls(model, mode, _count("THREADS", 1, 1), _count("ACCURACY_LEVEL", 0, 0))

    def tokenizer(self) -> Tokenizer | None:
        """Returns tokenizer.json from the model's folder or the one above, if it is there."""
        for folder in (self.model.parent, self.model.parent.parent):
            if (path := folder / "tokenizer.json").is_file():
                return Tokenizer.from_file(str(path))
        return None

    def open_session(self) -> onnxruntime.InferenceSession:
        """Opens the model, in the same way for both modes but for ortplugins' two passes."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        # Threads that spin while they wait would take the cores from the other workers.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        library: Any = onnxruntime
        if self.mode == "ortplugins":
            import ortplugins  # not at the top: plain onnxruntime shall not pay for it

            library = ortplugins
            fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=self.accuracy_level)
            ortplugins.configure(options, fusion, ortplugins.PrepackedWeights())
        return library.InferenceSession(
            str(self.model), options, providers=["CPUExecutionProvider"]
        )


class Worker:
    """One session, what it has done so far, and one run at a time.

    Requests that come meanwhile wait: more runs at once would share the same cores, and each
    would take memory of its own.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # First: what parsing it leaves on the heap, ortplugins trims with its own.
        self.tokenizer = settings.tokenizer()
        start = time.perf_counter()
        self.session = settings.open_session()
        self.session_seconds = time.perf_counter() - start
        self.decoder: Decoder | None = None
        with contextlib.suppress(ValueError):  # no decoder: it has POST /run
            self.decoder = Decoder(self.session)
        self.ready_at = time.time()
        self.counts = {"requests": 0, "tokens": 0, "seconds": 0.0}
        self._lock = threading.Lock()

    def generate(self, prompt: str, max_tokens: int) -> tuple[str, int]:
        """Answers a prompt; returns the text and the number of its tokens.

        Raises:
            TypeError: If the model does not generate text.
        """
        if self.decoder is None or self.tokenizer is None:
            raise TypeError(
                "text needs a decoder, with tokenizer.json in its folder or the one above; "
                "use /run for this model"
            )
        ids = self.tokenizer.encode(chat_prompt(prompt)).ids
        with self._counted():
            tokens = self.decoder.greedy(ids, max_tokens).tokens
            self.decoder.reset()  # the cache of keys and values is memory
            self.counts["tokens"] += len(tokens)
        return self.tokenizer.decode(tokens).strip(), len(tokens)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Runs the model on nested lists of numbers; returns all outputs by name.

        Raises:
            ValueError: If an input is not a tensor of the model's type.
        """
        types = {value.name: value.type for value in self.session.get_inputs()}
        feed = {}
        for name, value in inputs.items():
            if name not in types:
                raise ValueError(f"no input {name!r}; the model has {', '.join(types)}")
            try:
                feed[name] = np.asarray(value, _DTYPES[types[name]])
            except (KeyError, ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"input {name!r} is not a {types[name]}: {error}") from error
        names = [value.name for value in self.session.get_outputs()]
        with self._counted():
            return dict(zip(names, self.session.run(names, feed), strict=True))

    def health(self) -> dict[str, Any]:
        """Describes the worker: its model, what ortplugins did to it, and its memory."""
        report = getattr(self.session, "ortplugins_report", None)
        return {
            "pid": os.getpid(),
            "model": str(self.settings.model),
            "mode": self.settings.mode,
            "source": report.source if report else "stock",
            "report": str(report) if report else "plain onnxruntime",
            "session_seconds": round(self.session_seconds, 3),
            "ready_at": self.ready_at,
            **memory(),
        }

    @contextlib.contextmanager
    def _counted(self) -> Any:
        with self._lock:
            start = time.perf_counter()
            try:
                yield
            finally:
                self.counts["requests"] += 1
                self.counts["seconds"] += time.perf_counter() - start


def memory() -> dict[str, float | None]:
    """Returns this process's memory in MB, None for what the system does not tell.

    `private_mb` (RssAnon) has no file behind it, so each worker has its own. `pss_mb` counts
    all of it, pages shared by n processes as 1/n.
    """
    sizes: dict[str, float | None] = {"private_mb": None, "pss_mb": None}
    wanted = {"status": ("RssAnon:", "private_mb"), "smaps_rollup": ("Pss:", "pss_mb")}
    for file, (field, name) in wanted.items():
        with contextlib.suppress(OSError):
            for line in Path("/proc/self", file).read_text("utf-8", "replace").splitlines():
                if line.startswith(field):
                    sizes[name] = round(int(line.split()[1]) * 1024 / 1e6, 1)
    return sizes


class Prompt(BaseModel):
    """Body of POST /generate."""

    prompt: str = Field(min_length=1, max_length=8000)
    max_tokens: int = Field(32, ge=1, le=512)


class Tensors(BaseModel):
    """Body of POST /run: nested lists by the model's input names."""

    inputs: dict[str, Any]


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Opens the session before the worker takes its first request."""
    app.state.worker = worker = Worker(Settings.from_environment())
    health = worker.health()
    logging.getLogger("uvicorn.error").info(
        "worker %(pid)d: session in %(session_seconds).2f s, %(report)s", health
    )
    yield


# The pages at /docs would load scripts from elsewhere.
app = FastAPI(title="ortplugins example", lifespan=lifespan, docs_url=None, redoc_url=None)


@app.post("/generate")
def generate(body: Prompt, request: Request) -> dict[str, Any]:
    """Answers a prompt with a text."""
    try:
        text, tokens = request.app.state.worker.generate(body.prompt, body.max_tokens)
    except TypeError as error:
        raise HTTPException(409, str(error)) from error
    return {"text": text, "tokens": tokens, "pid": os.getpid()}


@app.post("/run")
def run(body: Tensors, request: Request) -> dict[str, Any]:
    """Runs the model on the tensors of the body."""
    try:
        outputs = request.app.state.worker.run(body.inputs)
    except Exception as error:  # onnxruntime has a class for each kind, and no common one
        raise HTTPException(400, str(error)) from error
    return {"outputs": {name: array.tolist() for name, array in outputs.items()}}


@app.get("/health")
def health(request: Request) -> dict[str, Any]:
    """Describes the worker that happens to answer; `pid` tells which."""
    described: dict[str, Any] = request.app.state.worker.health()
    return described


@app.get("/metrics")
def metrics(request: Request) -> dict[str, Any]:
    """Counts what the worker that happens to answer has done; `seconds` of running."""
    return {"pid": os.getpid(), **request.app.state.worker.counts, **memory()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the workers until a signal; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--port", type=int, default=8000, help="on 127.0.0.1")
    chosen = parser.parse_args(arguments)
    try:
        Settings.from_environment()  # here: one sentence instead of a traceback per worker
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    uvicorn.run(
        "examples.server.server:app",
        app_dir=str(ROOT),
        host="127.0.0.1",
        port=chosen.port,
        workers=chosen.workers,
        access_log=False,
        # A worker that is busy in native code for so long is not a dead one.
        timeout_worker_healthcheck=60,
    )
    return 0


def _count(name: str, default: int, least: int) -> int:
    text = os.environ.get(_PREFIX + name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{_PREFIX}{name} is {text!r}: a number from {least} is expected")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
