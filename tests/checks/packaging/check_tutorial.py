# SPDX-License-Identifier: MIT
"""From Hugging Face to a server, as docs/start.md has it: ``make test-tutorial``.

It needs a package registry and a few minutes. ``-s`` prints the seconds of each command.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
from builders.doc_blocks import ROOT, blocks_of

from examples.embedder import Embedder

PAGE = ROOT / "docs" / "start.md"
HEADING = "## From Hugging Face to a server"
COMMANDS = 8
TEXT = "Why is the sky blue?"


def test_the_tutorial_as_it_stands(tmp_path: Path, monkeypatch):
    blocks = list(blocks_of(PAGE.read_text("utf-8").split(HEADING)[1], PAGE.name))
    bash = "".join(block.text for block in blocks if block.language == "bash")
    *commands, server, request = bash.splitlines()
    assert len(commands) + 2 <= COMMANDS and TEXT in request
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (by_torch,) = (block.text for block in blocks if block.language == "python")
    (tmp_path / "by_torch.py").write_text(by_torch)
    (tmp_path / ".curlrc").write_text(
        "retry = 99\nretry-connrefused\nretry-delay = 1\nsilent\n"
    )
    script = [
        "set -euo pipefail",
        'seconds() { echo "$SECONDS s: $1" >&2; SECONDS=0; }',
        *(f"{line}\nseconds '{line.split()[0]} {line.split()[1]}'" for line in commands),
        server.replace("8000", port) + " &",
        request.replace("8000", port) + " > answer.json",
        "seconds served",
        f"python {tmp_path / 'by_torch.py'} > by_torch.log",
    ]
    started = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=os.environ
        | {
            "REPOSITORY": str(ROOT),
            "CURL_HOME": str(tmp_path),
            "ORTPLUGINS_CACHE_DIR": str(tmp_path / "cache"),
        },
        start_new_session=True,
    )
    try:
        assert started.wait(1800) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # the server
    folder = tmp_path / "ortplugins"
    answer = json.loads((folder / "answer.json").read_text())["embeddings"]
    monkeypatch.setenv("EMBEDDER_STOCK", "1")
    monkeypatch.setenv("EMBEDDER_FOLDER", str(folder / "minilm"))
    exported = Embedder()
    cosine = exported([TEXT])[0] @ np.asarray(answer[0], np.float32)
    print(f"cosine to the float model: {cosine:.4f}")
    assert cosine > 0.95
    monkeypatch.setenv("EMBEDDER_FOLDER", str(folder / "minilm-torch"))
    assert np.abs(exported([TEXT]) - Embedder()([TEXT])).max() < 1e-5
