# SPDX-License-Identifier: MIT
"""Programs of check_packages.py, one for a package: ``programs.py NAME [FOLDER] OUT.npz``.

They know nothing of ortplugins, and import their package only.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

TEXTS = ["One line adopts it.", "The model runs as before, and faster.", "A third sentence"]
PADDED = {"padding": "max_length", "max_length": 128, "truncation": True}
PROMPT = [[1, 5, 9, 23]]


def one_thread():
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def embed_with_chromadb(folder, output):
    from chromadb.utils.embedding_functions.onnx_mini_lm_l6_v2 import ONNXMiniLM_L6_V2

    # The layout of its cache folder; files that are there are not fetched.
    files = "config.json", "special_tokens_map.json", "tokenizer_config.json", "tokenizer.json"
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name) / ONNXMiniLM_L6_V2.EXTRACTED_FOLDER_NAME
        cache.mkdir()
        for file in (*files, "vocab.txt", "onnx/model.onnx"):
            (cache / Path(file).name).symlink_to(Path(folder) / file)
        ONNXMiniLM_L6_V2.DOWNLOAD_PATH = Path(name)
        np.savez(output, embeddings=np.stack(ONNXMiniLM_L6_V2()(TEXTS)))


def embed_with_fastembed(folder, output):
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="tests/minilm",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="tests/minilm"),
        dim=384,
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding("tests/minilm", specific_model_path=folder, threads=1)
    np.savez(output, embeddings=np.stack(list(model.embed(TEXTS))))


def embed_with_optimum(folder, output):
    """Hidden states of real tokens only."""
    from optimum.onnxruntime import ORTModelForFeatureExtraction, pipeline
    from transformers import AutoTokenizer

    model = ORTModelForFeatureExtraction.from_pretrained(
        folder, subfolder="onnx", file_name="model.onnx", session_options=one_thread()
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    embed = pipeline(
        "feature-extraction", model=model, tokenizer=tokenizer, tokenize_kwargs=PADDED
    )
    real = [len(ids) for ids in tokenizer(TEXTS)["input_ids"]]
    states = zip(embed(TEXTS), real, strict=True)
    assert np.shape(embed(TEXTS[0]))[1] == 128
    rows = np.concatenate([np.array(state)[0, :length] for state, length in states])
    np.savez(output, embeddings=rows / np.linalg.norm(rows, axis=1, keepdims=True))


def embed_with_sentence_transformers(folder, output):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        folder,
        backend="onnx",
        model_kwargs={
            "file_name": "onnx/model.onnx",
            "provider": "CPUExecutionProvider",
            "session_options": one_thread(),
        },
    )
    padded = model.encode(TEXTS, processing_kwargs={"text": PADDED})
    np.savez(output, embeddings=model.encode(TEXTS), padded=padded)


def generate_with_genai(folder, output):
    import onnxruntime_genai as genai

    model = genai.Model(folder)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=20)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(PROMPT[0])
    while not generator.is_done():
        generator.generate_next_token()
    np.savez(output, tokens=generator.get_sequence(0))


def generate_with_optimum(folder, output):
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    model = ORTModelForCausalLM.from_pretrained(folder, use_cache=True)
    tokens = model.generate(torch.tensor(PROMPT), do_sample=False, max_length=20)
    np.savez(output, tokens=tokens[0].numpy())


def listen_with_silero_vad(output):
    import torch
    from silero_vad import load_silero_vad

    model = load_silero_vad(onnx=True)
    random = np.random.default_rng(0)
    seconds = np.arange(3 * 16000) / 16000
    tone = sum(np.sin(2 * np.pi * 120 * k * seconds) / k for k in range(1, 20))
    voiced = tone * (np.sin(2 * np.pi * 3 * seconds) > 0) * 0.2
    noise = 0.01 * random.normal(size=seconds.size)
    audio = torch.tensor(voiced + noise, dtype=torch.float32)
    results = {}
    for rate, window in ((16000, 512), (8000, 256)):  # a branch of the model's If each
        model.reset_states()
        parts = [part for part in audio.split(window) if len(part) == window]
        steps = [model(part, rate).numpy() for part in parts]
        results[f"probabilities_{rate}"] = np.stack(steps)
    np.savez(output, **results)


def read_with_rapidocr(output):
    import cv2
    from rapidocr_onnxruntime import RapidOCR

    picture = np.full((160, 480, 3), 255, np.uint8)
    for line, text in enumerate(("Hello onnxruntime", "2026 passes")):
        where = (20, 60 + 60 * line)
        cv2.putText(picture, text, where, cv2.FONT_HERSHEY_SIMPLEX, 1.2, (0, 0, 0), 2)
    found, _ = RapidOCR(intra_op_num_threads=1)(picture)
    boxes, texts, scores = (np.array(column) for column in zip(*found, strict=True))
    assert "Hello" in texts[0], texts
    np.savez(output, boxes=boxes, texts=texts, scores=scores.astype(float))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
