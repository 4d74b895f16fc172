# SPDX-License-Identifier: MIT
"""What a damaged constant says of shapes (see test_shape_fuzz)."""

import onnx
import onnx_ir as ir
import pytest
from builders.text_models import text_model

from rewrite_rules.shapes.proved_shapes import ProvedShapes


@pytest.mark.parametrize("held", [0, 15, 17])
def test_a_damaged_constant_proves_nothing(held):
    data = onnx.TensorProto(
        name="back", data_type=onnx.TensorProto.INT64, dims=[2], raw_data=bytes(held)
    )
    model = ir.from_proto(text_model("y = Reshape (x, back)", [data], {"x": (1, ["a", 4])}))
    facts = ProvedShapes(model)
    assert facts.integers(model.graph.initializers["back"]) is None
    assert all(dim[1] for dim in facts.shape(model.graph.outputs[0]))  # of unknown sizes
