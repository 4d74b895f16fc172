# SPDX-License-Identifier: MIT
"""What each onnxruntime lacks, in the words of the report.

That the words are true is measured by ``make test-versions``.
"""

import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import printed
from builders.dequantized_models import Quantized
from builders.layout_matrix import MATMUL, LayoutCase

import ortplugins
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.onnxruntime_version import parse_version
from rewrite_rules.remarks import PassContext, Remarks

VERSIONS = ("1.24", "1.27", "1.29")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.0", (2, 0)),
        ("1.32.0.dev20261101+cpu", (1, 32)),
        ("1.31.0rc1", (1, 31)),
        ("1.31+cu130", (1, 31)),
        ("1.31-local", (1, 31)),
    ],
)
def test_version(text, version):
    assert parse_version(text) == version


@pytest.mark.parametrize(
    "text", ["", "1", "1.", "v1.31", "1.x", "1.31rc", "newest", "1,31", ".31", " 1.31"]
)
def test_no_version(text):
    with pytest.raises(ValueError, match=r"is not a version of onnxruntime: 1\.31 or"):
        parse_version(text)


def matmul(storage: str, dtype: type = np.float32, zero_points: str = "none") -> LayoutCase:
    w = Quantized((64, 8), storage, zero_points=zero_points, scale_dtype=dtype)
    return LayoutCase("matmul", MATMUL, w, (3, 64), dtype=dtype)


def matmul_in_body(storage: str, zero_points: str, place: str = "graph") -> LayoutCase:
    """``x @ W`` in both branches of an If, W's constants outside or in them."""
    text = """y = If (condition) <
        then_branch = then () => (a) { V = $v  a = MatMul (x, V) },
        else_branch = other () => (b) { W = $w  b = MatMul (x, W) }>"""
    weights = dict.fromkeys("vw", Quantized((64, 8), storage, zero_points=zero_points))
    inputs = {"condition": np.array(True)}
    return LayoutCase("body", text, weights, (3, 64), inputs=inputs, place=place)


def gather(storage: str, zero_points: str = "random", block: int = 32) -> LayoutCase:
    """Rows of a table that is stored the other way round: uint8 is the form that fits."""
    table = Quantized((64, 8), storage, 0, block, zero_points)
    text = "V = $w  W = Transpose <perm = [1, 0]> (V)  y = Gather (W, ids)"
    return LayoutCase("gather", text, table, None, inputs={"ids": np.int64([0, 7, 3])})


OUTSIDE = "outside the subgraph of If, Loop or Scan"
ZERO_POINTS_OUTSIDE = (
    "onnxruntime {version} computes wrong numbers at accuracy_level 4 from zero points "
    f"{OUTSIDE}: 1.29 is right, and so is accuracy_level 0"
)
ODD_BLOCKS = (
    "onnxruntime 1.24 computes wrong numbers at Gather from tables of 4-bit codes with "
    "zero points for an odd number of blocks: 1.27 is right"
)


def until_1_27(words: str) -> dict[str, str]:
    return dict.fromkeys(("1.24", "1.27"), words)


# Model, accuracy level, and what the versions say that refuse it.
REFUSALS = {
    "int4-outside": (matmul_in_body("int4", "random"), 4, until_1_27(ZERO_POINTS_OUTSIDE)),
    # Unsigned codes without zero points get zeros beside them: captured too.
    "uint4-outside": (matmul_in_body("uint4", "none"), 4, until_1_27(ZERO_POINTS_OUTSIDE)),
    "int4-outside-without": (matmul_in_body("int4", "none"), 4, {}),
    "int4-outside-level0": (matmul_in_body("int4", "random"), 0, {}),
    "int4-inside": (matmul_in_body("int4", "random", "body"), 4, {}),
    "int4": (matmul("int4", np.float16, "random"), 0, {}),
    "table4": (gather("int4"), 0, {}),
    "table4-odd_blocks": (gather("uint4", block=64), 0, {"1.24": ODD_BLOCKS}),
    "table4-no_zero_points": (gather("int4", "none", block=64), 0, {}),
    "table4-those_of_the_kernel": (gather("int4", "default", block=64), 0, {}),
    "int4-outside-those_of_the_kernel": (matmul_in_body("int4", "default"), 4, {}),
}


@pytest.mark.parametrize(("case", "level", "words"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("version", VERSIONS)
def test_refusal(case, level, words, version):
    fusion = ortplugins.DqMatMulNBitsFusion(level, slow_kernels="fuse")
    model = case.build()
    report = ortplugins.optimize(model, passes=[fusion], onnxruntime_version=version).report
    reasons = [remark.reason for remark in report.refused]
    assert bool(reasons) == (version in words) != bool(report.fired)
    assert all(words[version].format(version=version) in reason for reason in reasons)


def test_the_command_takes_a_version(tmp_path):
    ir.save(gather("uint4", block=64).build(), tmp_path / "m.onnx")
    arguments = ["--onnxruntime", "1.24", "--set", "dq_matmulnbits_fusion.slow_kernels=fuse"]
    assert ODD_BLOCKS in printed("inspect", tmp_path / "m.onnx", *arguments)


@pytest.mark.parametrize("version", ["newest", "1.10", "1.23.2"])
def test_versions_that_no_result_is_for(version):
    with pytest.raises(ortplugins.OptionError, match=f"{version}.*(1.31|1.24)"):
        ortplugins.optimize(matmul("int8").build(), onnxruntime_version=version)


@pytest.mark.parametrize(
    ("version", "storage", "expected"),
    [
        ((1, 24), "int8", ["MatMulNBits", "Add"]),  # what CPUs lack then says nothing
        ((1, 27), "uint4", ["MatMulNBits", "Add"]),
        ((1, 28), "uint4", ["MatMulNBits"]),
        (None, "uint4", ["MatMulNBits"]),
    ],
)
def test_what_cuda_kernels_take(version, storage, expected):
    text = "W = $w  p = MatMul (x, W)  y = Add (p, b)"
    w = Quantized((64, 8), storage, zero_points="none")
    model = LayoutCase("cuda", text, w, (3, 64), constants={"b": (8,)}).build()
    context = PassContext(Remarks("test"), ("CUDAExecutionProvider",), version)
    fuse(model, FusionOptions(0, "float"), context)
    assert [node.op_type for node in model.graph] == expected
