# SPDX-License-Identifier: MIT
"""Embeddings by a WSGI application, under uWSGI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from uwsgidecorators import postfork

from examples.embedder import Embedder

embedder: Embedder


@postfork
def open_session() -> None:
    """Open the session in each worker: uWSGI forks after it has loaded this module."""
    global embedder
    embedder = Embedder()


def application(
    environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    """Answer ``{"texts": [...]}`` with ``{"embeddings": [[...]]}``."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    texts = json.loads(environ["wsgi.input"].read(length))["texts"]
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"embeddings": embedder(texts).tolist()}).encode()]
