# SPDX-License-Identifier: MIT
"""Embeddings by Triton's Python backend, which runs each instance in a process of its own."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as triton
from embedder import Embedder


class TritonPythonModel:
    """texts, BYTES [n] -> embeddings, FP32 [n, 384]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the session, when the instance starts."""
        self.embedder = Embedder()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = triton.get_input_tensor_by_name(request, "texts").as_numpy()
        embeddings = self.embedder([text.decode() for text in texts])
        return triton.InferenceResponse([triton.Tensor("embeddings", embeddings)])
