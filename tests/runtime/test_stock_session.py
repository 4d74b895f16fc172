# SPDX-License-Identifier: MIT
"""Plain sessions open on what was asked for, or say why not."""

import numpy as np
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import check
from builders.text_models import proto_of

from ortplugins import MissingFileError, ModelFileError
from ortplugins.errors import UsageError
from ortplugins.runtime.stock_session import open_model, quiet_runner
from session_options.entries import DATA_FOLDER_KEY

CASE = DequantizedMatMul(128, 64, 32)


def test_data_is_read_from_the_folder_that_is_given(model_path):
    settings = {DATA_FOLDER_KEY: str(model_path.parent)}
    for model in (model_path, model_path.read_bytes()):
        check(open_model(model, "disable", settings=settings), CASE)


@pytest.mark.parametrize(("outputs", "names"), [("ab", "a"), ("b", "")])
def test_a_runner_returns_what_numpy_can_hold(outputs, names):
    kinds = {"a": "float[2] a", "b": "bfloat16[2] b"}
    listed = ", ".join(kinds[name] for name in outputs)
    model = proto_of(f"g (float[2] x) => ({listed}) {{ a = Neg(x) b = Cast <to = 16> (x) }}")
    run = quiet_runner(open_model(model.SerializeToString(), "all"))
    assert "".join(run({"x": np.ones(2, np.float32)})) == names


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"level": "most"}, UsageError, "'most'; expected one of disable, basic, extended"),
        ({"model": "gone.onnx"}, MissingFileError, "gone.onnx: no such model file"),
        ({"model": b"no model"}, ModelFileError, "the model: onnxruntime refuses it: "),
        # No fallback to another provider.
        ({"providers": [3]}, ModelFileError, "model.onnx: onnxruntime refuses it: "),
    ],
)
def test_what_cannot_be_opened(change, error, words, model_path):
    with pytest.raises(error, match=words):
        open_model(**{"model": model_path, "level": "all", **change})
