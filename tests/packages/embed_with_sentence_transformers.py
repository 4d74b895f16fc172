# SPDX-License-Identifier: MIT
"""Sentence embeddings by sentence-transformers and optimum: ``MODEL_FOLDER OUTPUT.npz``.

Knows nothing of ortplugins.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
from sentence_transformers import SentenceTransformer

folder, output = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
model = SentenceTransformer(
    folder,
    backend="onnx",
    model_kwargs={
        "file_name": "onnx/model.onnx",
        "provider": "CPUExecutionProvider",
        "session_options": options,
    },
)
texts = ["One line adopts it.", "The model runs as before, and faster.", "A third sentence"]
padded = {"text": {"padding": "max_length", "max_length": 128, "truncation": True}}
np.savez(
    output,
    embeddings=model.encode(texts),
    padded=model.encode(texts, processing_kwargs=padded),
)
