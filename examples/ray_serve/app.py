# SPDX-License-Identifier: MIT
"""Embeddings by Ray Serve: ``python -m examples.ray_serve.app [PORT]``."""

from __future__ import annotations

import socket
import sys
from typing import Any

from ray import serve
from starlette.requests import Request

from examples.embedder import Embedder


@serve.deployment(num_replicas=3, ray_actor_options={"num_cpus": 0.25})
class Embeddings:
    """Constructed in each replica, a process that Ray starts on any of its machines."""

    def __init__(self) -> None:
        self.embedder = Embedder()

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Answer ``{"texts": [...]}`` with ``{"embeddings": [[...]]}``."""
        body = await request.json()
        return {"embeddings": self.embedder(body["texts"]).tolist()}


if __name__ == "__main__":
    port = int((sys.argv[1:] or ["8000"])[0])
    try:  # Ray takes 90 lines to say that a port is in use
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        sys.exit(f"error: {error.strerror}")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Embeddings.bind(), route_prefix="/embed", blocking=True)
