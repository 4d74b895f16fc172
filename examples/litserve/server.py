# SPDX-License-Identifier: MIT
"""Embeddings by LitServe: ``python -m examples.litserve.server [PORT]``."""

from __future__ import annotations

import sys
from typing import Any

from litserve import LitAPI, LitServer

from examples.embedder import Embedder


class Embeddings(LitAPI):
    """Runs in worker processes of LitServe, each of which calls ``setup`` at its start."""

    def setup(self, device: str) -> None:
        """Open the session."""
        self.embedder = Embedder()

    def predict(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer ``{"texts": [...]}`` with ``{"embeddings": [[...]]}``."""
        return {"embeddings": self.embedder(body["texts"]).tolist()}


if __name__ == "__main__":
    server = LitServer(
        Embeddings(api_path="/embed"),
        accelerator="cpu",
        workers_per_device=3,
        restart_workers=True,
    )
    port = int((sys.argv[1:] or ["8000"])[0])
    server.run(host="127.0.0.1", port=port, generate_client_file=False)
