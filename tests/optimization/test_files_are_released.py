# SPDX-License-Identifier: MIT
"""No pass keeps a view of the model's files: saving could not unmap them."""

import gc

import onnx
import pytest
from builders.encoders import UNMASKED, encoder
from builders.exports import exported
from builders.sessions import options, start

import ortplugins
from session_options.registry import BUILTIN_PASSES, find

MODELS = {
    "refused": lambda: encoder(UNMASKED),
    "deberta": lambda: exported("deberta2-dynamo-eager"),
}


@pytest.fixture
def without_collection():
    """Cycles keep what they hold."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("without_collection")
def test_small_weights_can_be_taken_out_of_their_file(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPLUGINS_BUILD_IN_PROCESS", "1")
    path = tmp_path / "model.onnx"
    onnx.save_model(
        MODELS[name](), path, save_as_external_data=True, location="data", size_threshold=100
    )
    passes = [find(kind)() for kind in BUILTIN_PASSES]
    for some in ([one, ortplugins.PrepackedWeights()] for one in passes[:-1]):
        start(path, options(*some, cache_dir=str(tmp_path / some[0].name), strict=True))
