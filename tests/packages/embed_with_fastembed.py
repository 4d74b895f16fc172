# SPDX-License-Identifier: MIT
"""Embeddings by fastembed: ``MODEL_FOLDER OUTPUT.npz``. Knows nothing of ortplugins."""

from __future__ import annotations

import sys

import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

folder, output = sys.argv[1:]
TextEmbedding.add_custom_model(
    model="tests/minilm",
    pooling=PoolingType.MEAN,
    normalization=True,
    sources=ModelSource(hf="tests/minilm"),
    dim=384,
    model_file="onnx/model.onnx",
)
model = TextEmbedding("tests/minilm", specific_model_path=folder, threads=1)
texts = ["One line adopts it.", "The model runs as before, and faster.", "A third sentence"]
np.savez(output, embeddings=np.stack(list(model.embed(texts))))
