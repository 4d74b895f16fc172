# SPDX-License-Identifier: MIT
"""A folder stands for its one model, and for the tokenizer beside it."""

import pytest

from ortplugins import ModelFileError
from ortplugins.model_io.model_folder import model_in, tokenizer_beside

FIVE = "0.onnx 1.onnx 2.onnx 3.onnx 4.onnx"
LISTED = FIVE.replace(" ", ", ")
# Files, and what is found: a model or the words of an error, and a tokenizer.
FOLDERS = [
    ("m.onnx a/n.onnx tokenizer.json a/tokenizer.json", "m.onnx", "tokenizer.json"),
    ("a/m.onnx b/tokenizer.json", "a/m.onnx", "b/tokenizer.json"),
    ("a/m.onnx a/tokenizer.json b/tokenizer.json", "a/m.onnx", None),
    ("notes.txt", "no .onnx file in this folder", None),
    ("a/0.onnx a/1.onnx", "holds 2 models, a/0.onnx, a/1.onnx: give the path of one", None),
    (FIVE, f"holds 5 models, {LISTED}: give", None),
    (f"{FIVE} 5.onnx", f"holds 6 models, {LISTED} and 1 more: give", None),
]


@pytest.mark.parametrize(("names", "model", "tokenizer"), FOLDERS)
def test_what_a_folder_stands_for(names, model, tokenizer, tmp_path):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert tokenizer_beside(tmp_path) == (tokenizer and tmp_path / tokenizer)
    if " " in model:
        with pytest.raises(ModelFileError, match=model):
            model_in(tmp_path)
        return
    found = tmp_path / model
    assert model_in(tmp_path) == model_in(found) == found
    beside = found.with_name("tokenizer.json")
    assert tokenizer_beside(found) == (beside if beside.exists() else None)
