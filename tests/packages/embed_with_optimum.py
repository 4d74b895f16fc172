# SPDX-License-Identifier: MIT
"""Hidden states by a pipeline of optimum, real tokens only: ``MODEL_FOLDER OUTPUT.npz``.

Knows nothing of ortplugins.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
from optimum.onnxruntime import ORTModelForFeatureExtraction, pipeline
from transformers import AutoTokenizer

folder, output = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
model = ORTModelForFeatureExtraction.from_pretrained(
    folder, subfolder="onnx", file_name="model.onnx", session_options=options
)
tokenizer = AutoTokenizer.from_pretrained(folder)
padded = {"padding": "max_length", "max_length": 128, "truncation": True}
embed = pipeline(
    "feature-extraction", model=model, tokenizer=tokenizer, tokenize_kwargs=padded
)
texts = ["One line adopts it.", "The model runs as before, and faster.", "A third sentence"]
real = [len(ids) for ids in tokenizer(texts)["input_ids"]]
states = [
    np.array(state)[0, :length] for state, length in zip(embed(texts), real, strict=True)
]
assert np.shape(embed(texts[0]))[1] == 128
rows = np.concatenate(states)
np.savez(output, embeddings=rows / np.linalg.norm(rows, axis=1, keepdims=True))
