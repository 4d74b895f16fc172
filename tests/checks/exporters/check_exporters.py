# SPDX-License-Identifier: MIT
"""The newest torch and transformers still export what is fused: ``make test-exporters``.

pytest collects files called ``test_*.py``, so that this one runs only where it is named. It
makes both archives of tests/data again, in .cache/exporters with an environment of its own
(delete it to get newer packages), and holds them to what test_attention_fusion.py says of the
stored ones. Where pip finds only the torch with CUDA,
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu helps.
"""

import os
import subprocess
import sys
from pathlib import Path

from checks.environments import CACHE, python_with

TESTS = Path(__file__).resolve().parents[2]


def test_new_exports_are_fused_as_the_stored_ones_are():
    folder = CACHE / "exporters"
    python = python_with(
        folder / "newest", ("torch",), ("transformers", "onnxscript", "onnx", "numpy")
    )
    for kind in ("encoder", "decoder"):
        script = TESTS / "data" / f"make_{kind}_exports.py"
        subprocess.run([python, script, folder / f"{kind}_exports.zip"], check=True)
    tests = TESTS / "rewrite_rules" / "transformer_fusion" / "test_attention_fusion.py"
    fused = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "fused_and_right", tests],
        env={**os.environ, "ORTPLUGINS_EXPORTS": str(folder)},
        capture_output=True,
        text=True,
    )
    assert fused.returncode == 0, fused.stdout
