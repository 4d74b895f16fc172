# SPDX-License-Identifier: MIT
"""Checkpoints of GPTQ, AWQ, AutoRound and compressed-tensors, packed from known codes."""

import json
from typing import Any

import checkpoint_files as cf
import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command, printed
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, arrays_of, dequantised, read
from builders.text_models import model_of, normal

from ortplugins.errors import ModelFileError
from ortplugins.quantization import quantize

pytest.importorskip("safetensors")

LEFT = normal(cf.K, cf.K)  # the head that no checkpoint has
CASES = [
    *((kind, {}) for kind in cf.KINDS if kind != "int-quantized"),
    *((kind, {"middle": True}) for kind in ("gptq", "gptq_v2", "awq", "pack-quantized")),
    ("gptq", {"bits": 2}),
    ("gptq", {"bits": 2, "n": 40}),  # whose zero points do not fill their words
    ("gptq", {"bits": 8}),
    ("gptq", {"act_order": True}),
    ("pack-quantized", {"n": 36}),
    ("pack-quantized", {"bits": 8, "blocks_of": "channel", "middle": True}),
    ("pack-quantized", {"bits": 8, "blocks_of": "channel"}),
    ("pack-quantized", {"blocks_of": "tensor", "middle": True}),
    ("pack-quantized", {"blocks_of": "tensor"}),
    ("pack-quantized", {"bits": 2, "middle": True, "scale_type": ml_dtypes.bfloat16}),
    ("pack-quantized", {"act_order": True, "middle": True}),
    ("pack-quantized", {"act_order": True, "scale_type": np.float32}),
    ("pack-quantized", {"k": 92, "blocks_of": 32, "act_order": True, "middle": True}),
    ("int-quantized", {"bits": 8, "blocks_of": "channel", "middle": True}),
    ("int-quantized", {"bits": 8}),
]


def outputs_are(model: Any, weights: Any, norm: Any = 9, head: Any = LEFT) -> None:
    """Whether a model computes with these weights; a norm by its seed."""
    up, down = weights.values()
    x = normal(5, len(up), seed=3)
    expected = (x * normal(len(up), seed=norm).astype(float)) @ up @ down
    head = normal(len(up), len(up)) if head is LEFT else head
    assert relative_error(run(model, {"x": x})[0], expected @ head) < 1e-5


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(("kind", "given"), CASES, ids=str)
def test_codes_scales_and_norms_are_those_of_the_checkpoint(tmp_path, kind, given, layout):
    weights = cf.write_folder(tmp_path / "c", kind, **given)
    result = quantize(cf.mlp(weights), checkpoint=tmp_path / "c", quant_format=layout)
    outputs_are(result.model, weights)
    (left,) = result.report.refused
    assert (left.node, left.reason) == (cf.HEAD_NODE, "not in the checkpoint")
    first, _ = result.report.quantized
    method = next((m for m in ("awq", "gptq") if m in kind), "compressed-tensors")
    assert (first.method, first.bits) == (method, given.get("bits", 4))
    assert 0.01 < first.weight_error < 0.06
    if not given.get("act_order"):
        matrices = dequantised(read(result.model))
        for node, weight in zip(("up", cf.DOWN_NODE), weights.values(), strict=True):
            np.testing.assert_allclose(matrices[node], weight, rtol=1e-6)


@pytest.mark.parametrize("kind", ["gptq", "auto_gptq"])
def test_layers_may_have_bits_of_their_own(tmp_path, kind):
    parts, weight = cf.layer(kind, 8, seed=5)
    weights = cf.write_folder(tmp_path / "c", kind, parts=parts) | {cf.UP: weight}
    result = quantize(cf.mlp(weights), checkpoint=tmp_path / "c")
    assert [row.bits for row in result.report.quantized] == [8, 4]
    outputs_are(result.model, weights)


def test_nodes_that_share_a_float_weight_have_layers_of_their_own(tmp_path):
    parts, weight = cf.layer("gptq")
    doubled = parts | {"scales": 2 * parts["scales"]}
    layers = [{f"{i}.q.{part}": a for part, a in tensors.items()}
              for i, tensors in enumerate((parts, doubled))]  # fmt: skip
    cf.save_folder(tmp_path / "c", "gptq", layers)
    text = """g (float[T, 96] x) => (float[T, 48] y, float[T, 48] z) {
        ["/0/q/MatMul"] y = MatMul(x, W) ["/1/q/MatMul"] z = MatMul(x, W) }"""
    model = model_of(text, {"W": cf.near(weight)})
    y, z = run(quantize(model, checkpoint=tmp_path / "c").model, {"x": normal(5, cf.K)})
    assert relative_error(z, 2 * y) < 1e-6


@pytest.mark.parametrize("factor", [1, 2])
def test_nodes_that_share_a_weight_get_one_float_matrix(tmp_path, factor):
    parts, weight = cf.layer("gptq")
    matrices = {"0.q.weight": weight.T.copy(), "1.q.weight": factor * weight.T.copy()}
    cf.save_folder(
        tmp_path / "c", "gptq", [{f"up.{k}": v for k, v in parts.items()}, matrices]
    )
    text = """g (float[T, 96] x) => (float[T, 48] u, float[T, 48] y, float[T, 48] z) {
        [up] u = MatMul(x, V) ["/0/q/MatMul"] y = MatMul(x, W)
        ["/1/q/MatMul"] z = MatMul(x, W) }"""
    model = model_of(text, {"V": cf.near(weight), "W": cf.near(weight)})
    if factor == 1:
        u, y, z = run(quantize(model, checkpoint=tmp_path / "c").model, {"x": normal(5, cf.K)})
        assert relative_error(y, u) < 1e-6 and (y == z).all()
    else:
        with pytest.raises(
            ModelFileError, match=r"'0\.q' and '1\.q' [^']*differ.* weight 'W'"
        ):
            quantize(model, checkpoint=tmp_path / "c")


def test_float_matrices_come_along_in_their_orientation(tmp_path):
    head = cf.near(LEFT)  # square: both orientations fit
    weights = cf.write_folder(
        tmp_path / "c", "gptq", tensors={f"{cf.HEAD}.weight": head.T.copy()}
    )
    result = quantize(cf.mlp(weights), checkpoint=tmp_path / "c")
    outputs_are(result.model, weights, head=head)
    (left,) = result.report.refused
    assert left.reason == "float in the checkpoint, too"


def test_an_index_says_which_files_count(tmp_path):
    index = {"weight_map": {f"{cf.UP}.weight_packed": "model-1.safetensors"}}
    weights = cf.write_folder(tmp_path / "c", "pack-quantized", index=index)
    result = quantize(cf.mlp(weights), checkpoint=tmp_path / "c")
    assert [row.node for row in result.report.quantized] == ["up"]
    index["weight_map"][cf.NORM] = "model-2.safetensors"
    (tmp_path / "c" / cf.INDEX).write_text(json.dumps(index))
    outputs_are(quantize(cf.mlp(weights), checkpoint=tmp_path / "c").model, weights)


@pytest.mark.parametrize("targets", [["re:.*v_proj"], ["Conv2d"]])
def test_activations_of_other_layers_do_not_matter(tmp_path, targets):
    groups = {"group_0": {"targets": targets, "input_activations": {"num_bits": 8}}}
    weights = cf.write_folder(
        tmp_path / "c", "pack-quantized", config={"config_groups": groups}
    )
    outputs_are(quantize(cf.mlp(weights), checkpoint=tmp_path / "c").model, weights)


def test_the_command_writes_the_same(tmp_path):
    weights = cf.write_folder(tmp_path / "c", "pack-quantized", act_order=True)
    source, out = tmp_path / "float.onnx", tmp_path / "out.onnx"
    ir.save(cf.mlp(weights), source)
    arguments = ["quantize", source, "--checkpoint", tmp_path / "c", "-o", out]
    done = ortplugins_command(*arguments, "--block-size", "32")
    assert done.returncode == 2
    assert "has no effect with --checkpoint" in " ".join(done.stderr.split())
    printed(*arguments)
    expected = read(quantize(cf.mlp(weights), checkpoint=tmp_path / "c").model)
    for name, array in arrays_of(expected).items():
        np.testing.assert_array_equal(arrays_of(read(out))[name], array)
