# SPDX-License-Identifier: MIT
"""Embeddings by chromadb: ``MODEL_FOLDER OUTPUT.npz``. Knows nothing of ortplugins."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from chromadb.utils.embedding_functions.onnx_mini_lm_l6_v2 import ONNXMiniLM_L6_V2

folder, output = sys.argv[1:]
# The layout of its cache folder; files that are there are not fetched.
FILES = ("config.json", "special_tokens_map.json", "tokenizer_config.json", "tokenizer.json")
texts = ["One line adopts it.", "The model runs as before, and faster.", "A third sentence"]
with tempfile.TemporaryDirectory() as name:
    cache = Path(name) / ONNXMiniLM_L6_V2.EXTRACTED_FOLDER_NAME
    cache.mkdir()
    for file in (*FILES, "vocab.txt", "onnx/model.onnx"):
        (cache / Path(file).name).symlink_to(Path(folder) / file)
    ONNXMiniLM_L6_V2.DOWNLOAD_PATH = Path(name)
    np.savez(output, embeddings=np.stack(ONNXMiniLM_L6_V2()(texts)))
