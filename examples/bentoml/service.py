# SPDX-License-Identifier: MIT
"""Embeddings by BentoML."""

from __future__ import annotations

import bentoml

from examples.embedder import Embedder


@bentoml.service(workers=3)
class Embeddings:
    """Constructed in each worker when it starts."""

    def __init__(self) -> None:
        self.embedder = Embedder()

    @bentoml.api
    def embed(self, texts: list[str]) -> dict[str, list[list[float]]]:
        """Return a vector for each text."""
        return {"embeddings": self.embedder(texts).tolist()}
