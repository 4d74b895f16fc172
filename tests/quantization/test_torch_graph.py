# SPDX-License-Identifier: MIT
"""An ONNX graph in torch gives the numbers of onnxruntime."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.exports import DECODERS, ENCODERS, decoder_feeds, exported
from builders.made_up_batches import Run
from builders.sessions import CPU

from ortplugins.model_io.loading import load_model
from ortplugins.runtime.stock_session import quiet_runner
from ortplugins.samples.made_up import MadeUpInputs

torch = pytest.importorskip("torch", reason="the extra distill is not installed")
from ortplugins.quantization.torch_graph import TorchGraph  # noqa: E402


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_what_torch_and_transformers_export(name):
    proto = exported(name)
    model = load_model(proto).model
    session = ort.InferenceSession(proto.SerializeToString(), providers=CPU)
    if name in DECODERS:
        feed = decoder_feeds(proto, Run(2, 5, 7), 0)
    else:
        feed = next(MadeUpInputs(model.graph.inputs).fitted_feeds(quiet_runner(session)))
    names = [x.name for x in model.graph.outputs if x.dtype == ir.DataType.FLOAT]
    with torch.no_grad():
        found = TorchGraph(model, names).run(feed)
    for output, expected in zip(names, session.run(names, feed), strict=True):
        np.testing.assert_allclose(found[output].numpy(), expected, rtol=1e-3, atol=1e-4)
