# SPDX-License-Identifier: MIT
"""Embeddings by FastAPI, under uvicorn or gunicorn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from pydantic import BaseModel

from examples.embedder import Embedder


class Texts(BaseModel):
    """Body of a request."""

    texts: list[str]


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the session in each worker, before its first request and after every fork."""
    app.state.embedder = Embedder()
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/embed")
def embed(body: Texts, request: Request) -> dict[str, list[list[float]]]:
    """Return a vector for each text."""
    return {"embeddings": request.app.state.embedder(body.texts).tolist()}
