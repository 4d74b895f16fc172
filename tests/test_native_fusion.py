# SPDX-License-Identifier: MIT
"""Accuracy level ``auto``: onnxruntime's own where it fuses a node itself, 0 elsewhere."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.coverage import EXHAUSTIVE
from builders.dequantized_models import DequantizedMatMul, relative_error
from builders.layout_matrix import layout_cases
from builders.quantized_files import nodes_of
from builders.same_numbers import session

import ortplugins

# Every layout where asked for (make test-exhaustive), else each 7th, which meets every row.
STEP = 1 if EXHAUSTIVE else 7
CASES = [case for case in layout_cases() if case.runs or case.expect][::STEP]
NATIVE_FUSION = "QDQSelectorActionTransformer"
LEVEL = "session.qdq_matmulnbits_accuracy_level"


def fused_nodes(path: Path) -> list[onnx.NodeProto]:
    nodes = nodes_of(onnx.load(path, load_external_data=False))
    return [node for node in nodes if node.op_type == "MatMulNBits"]


def level_of(node: onnx.NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "accuracy_level"), 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_onnxruntime_decides(case, tmp_path):
    """The same nodes at level 4, and errors no larger than onnxruntime's."""
    try:
        stock = session(case.build(), optimised=True, final=tmp_path / "stock.onnx")
    except Exception:  # onnxruntime breaks on some layouts: there is nothing to compare
        return
    theirs = stock.run(None, case.feeds)
    ortplugins.optimize(case.build(), tmp_path / "ours.onnx")
    ours = session(str(tmp_path / "ours.onnx"), optimised=True).run(None, case.feeds)
    for actual, stocks, expected in zip(ours, theirs, case.reference, strict=True):
        bound = max(relative_error(stocks, expected), case.tolerance) + 1e-5
        assert relative_error(actual, expected) <= bound or not np.isfinite(bound)
    level_4 = [node for node in fused_nodes(tmp_path / "ours.onnx") if level_of(node) == 4]
    native = fused_nodes(tmp_path / "stock.onnx")
    assert len(level_4) <= len(native)
    # Of 2-bit weights, onnxruntime's numbers are wrong or its kernels slow for some: these
    # become float constants.
    assert bits_of(level_4) == bits_of(native)


def bits_of(nodes: list[onnx.NodeProto]) -> list[int]:
    found = (a.i for node in nodes for a in node.attribute if a.name == "bits")
    return sorted(bits for bits in found if bits != 2)


def session_level(
    folder: Path, attributes: dict[str, str], entries: dict[str, str], **arguments: object
) -> int:
    """The level of the one MatMulNBits node in a session through ortplugins."""
    path = folder / "model.onnx"
    ir.save(DequantizedMatMul(64, 16, 32, "uint4").model(), path)
    options = ort.SessionOptions()
    for name, value in attributes.items():
        setattr(options, name, getattr(ort.GraphOptimizationLevel, value))
    ortplugins.configure(options, cache_dir=str(folder / "cache"), bake=False)
    options.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")
    for key, text in entries.items():
        options.add_session_config_entry(key, text)
    made = ortplugins.InferenceSession(path, options, **arguments)
    (node,) = fused_nodes(Path(made.ortplugins_report.artifact))
    return level_of(node)


@pytest.mark.parametrize(
    ("level", "entries", "expected"),
    [
        ("ORT_ENABLE_ALL", {}, 4),
        ("ORT_ENABLE_EXTENDED", {}, 4),
        ("ORT_ENABLE_BASIC", {}, 0),
        ("ORT_DISABLE_ALL", {}, 0),
        ("ORT_ENABLE_ALL", {LEVEL: "0"}, 0),
        ("ORT_ENABLE_ALL", {LEVEL: "1"}, 1),
        ("ORT_ENABLE_ALL", {"session.disable_quant_qdq": "1"}, 0),
        ("ORT_ENABLE_ALL", {"optimization.disable_specified_optimizers": NATIVE_FUSION}, 0),
    ],
)
def test_options_of_the_session(level, entries, expected, tmp_path):
    attributes = {"graph_optimization_level": level}
    assert session_level(tmp_path, attributes, entries) == expected


def test_the_argument_disabled_optimizers(tmp_path):
    assert session_level(tmp_path, {}, {}, disabled_optimizers=[NATIVE_FUSION]) == 0


@pytest.mark.parametrize("level", ["0", "4"])
def test_an_explicit_level_holds_everywhere(level, tmp_path):
    key = {"ortplugins.dq_matmulnbits_fusion.accuracy_level": level}
    assert session_level(tmp_path, {}, key) == int(level)
    assert session_level(tmp_path, {}, {**key, LEVEL: "2"}) == int(level)


NATIVE = "plain onnxruntime fuses the same nodes at every start"
OTHERS = "onnxruntime would fuse 1 of the nodes itself, at accuracy_level 4 and not 0"


@pytest.mark.parametrize(
    ("layout", "level", "reason", "noted"),
    [
        ("axis0", "auto", "accuracy_level 4 (auto: as onnxruntime fuses it)", NATIVE),
        ("axis0", "4", "accuracy_level 4", NATIVE),
        ("axis0", "0", "accuracy_level 0", OTHERS),
        (
            "transposed",
            "auto",
            "accuracy_level 0 (auto: onnxruntime would not fuse it, it reads no such layout)",
            "",
        ),
        ("transposed", "4", "accuracy_level 4", ""),
    ],
)
def test_remarks_name_the_level_and_what_stock_would_do(layout, level, reason, noted):
    model = DequantizedMatMul(64, 16, 32, "uint4", layout).model()
    fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=level)
    report = ortplugins.optimize(model, passes=[fusion]).report
    assert reason in report.fired[0].reason
    assert [item.reason[: len(noted)] for item in report.on_model] == [noted] * bool(noted)
    assert noted in str(report)


def one_scale_model(k: int) -> ir.Model:
    model = DequantizedMatMul(k, 8, k, "int8").model()
    dequantize = model.graph.node(0)
    tensor = ir.tensor(np.float32(0.1), name="one_scale")
    scale = ir.Value(name=tensor.name, const_value=tensor, shape=tensor.shape)
    scale.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.register_initializer(scale)
    dequantize.replace_input_with(1, scale)
    dequantize.attributes.clear()
    return model


@pytest.mark.parametrize("text", ["0", "16", "128", "-1"])
@pytest.mark.parametrize("k", [256, 200, 24])
def test_the_block_size_of_the_session(text, k, tmp_path):
    path = tmp_path / "model.onnx"
    ir.save(one_scale_model(k), path)
    sizes = []
    for kind in (ort, ortplugins):
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{kind.__name__}.onnx")
        options.add_session_config_entry("session.qdq_matmulnbits_block_size", text)
        if kind is ortplugins:
            ortplugins.configure(options, cache_dir=str(tmp_path / "cache"), strict=True)
            options.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")
        kind.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (node,) = fused_nodes(Path(options.optimized_model_filepath))
        sizes.append(next(a.i for a in node.attribute if a.name == "block_size"))
    assert sizes[0] == sizes[1]
