# SPDX-License-Identifier: MIT
"""What docs/serving.md says of files for servers that take nothing but a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.command_line import ortplugins_command
from builders.dequantized_models import DequantizedMatMul, relative_error, run

CASE = DequantizedMatMul(256, 192, 32)
EXACT = ("--set", "dq_matmulnbits_fusion.accuracy_level=0")


def optimize(model: Path, name: str, *options: str) -> tuple[Path, str]:
    output = model.with_name(name)
    done = ortplugins_command("optimize", model, "-o", output, *options)
    assert done.returncode == 0, done.stderr
    return output, done.stdout


@pytest.mark.parametrize("bake", [False, True])
def test_a_file_runs_in_plain_sessions(model_path: Path, bake: bool):
    passes = ("--pass", "dq_matmulnbits_fusion", "--pass", "prepacked_weights", *EXACT)
    output, told = optimize(model_path, "out.onnx", *passes, *["--bake"] * bake)
    needed = "sessions on this file need graph_optimization_level = ORT_DISABLE_ALL"
    assert (needed in told) == bake
    assert (b"prepacked_" in output.read_bytes()) == bake
    # Without baking there is nothing to pack.
    assert ("refused 1" in told and "--bake" in told) != bake
    feeds = {"x": CASE.feed()}
    (found,) = run(str(output), feeds, optimised=not bake)
    assert relative_error(found, CASE.reference(feeds["x"])) <= 1e-5
