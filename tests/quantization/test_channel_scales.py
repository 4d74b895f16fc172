# SPDX-License-Identifier: MIT
"""Where the scales of input channels go: channel_scales.txt.

In blocks of one number nothing is lost, whatever it was multiplied by: where scales are taken
out of the activation at a wrong place, or twice, or not at all, outputs are off by far.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import yaml
from builders.dequantized_models import relative_error, run
from builders.quantized_files import arrays_of, read
from builders.text_cases import TextCase, text_cases
from builders.text_models import Array, T, normal, text_model

from ortplugins.quantization import quantize
from ortplugins.quantization.weights import quantize as quantize_module

CASES = text_cases(Path(__file__).with_name("channel_scales.txt"))
EXACT = {"method": "awq_lite", "bits": 8, "block_size": 1}


def uneven(*shape: int, seed: int = 0, channels: int = 3) -> Array:
    """Numbers whose magnitudes along the last axis lie within a factor of a thousand."""
    sizes = 10 ** np.random.default_rng(channels).uniform(-1.5, 1.5, shape[-1])
    return (normal(*shape, seed=seed) * sizes).astype(np.float32)


CONSTANTS = {
    "g": uneven(24, seed=3), "b": uneven(24, seed=4), "c": uneven(24, seed=4),
    "V": normal(24, 24, seed=6), "W": normal(24, 10, seed=1), "three": np.array(3.0),
}  # fmt: skip


def model_of(case: TextCase, dtype: npt.DTypeLike = np.float32, g: float = 1) -> Any:
    nodes = case.nodes if "[m]" in case.nodes else f"{case.nodes} [m] y = MatMul(a, W)"
    words = set(re.findall(r"\w+", nodes))
    own = {
        name: uneven(*map(int, text.split()), seed=9)
        for name, text in case.settings.items()
        if name in words
    }
    constants = {name: array for name, array in CONSTANTS.items() if name in words} | own
    kind = T.FLOAT if dtype == np.float32 else T.FLOAT16
    return text_model(
        nodes if kind == T.FLOAT else nodes.replace("float[", "float16["),
        {n: (a * (g if n == "g" else 1)).astype(dtype) for n, a in constants.items()},
        {name: (kind, ["B", "T", 24]) for name in "xs" if name in words},
        case.settings.get("outputs", "y").split(),
        opset=int(case.settings.get("opset", 21)),
        output_type=kind,
    )


def scaled(model: onnx.ModelProto, **options: Any) -> tuple[Any, float]:
    """The result, and how far its outputs are off."""
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    *samples, fresh = (
        {
            name: uneven(1, 40, 24, seed=seed, channels=0).astype(
                onnx.helper.tensor_dtype_to_np_dtype(kind)
            )
            for name, kind in kinds.items()
        }
        for seed in range(4)
    )
    result = quantize(model, calibration_data_reader=samples, **EXACT | options)
    pairs = zip(run(result.model, fresh), run(model, fresh), strict=True)
    return result, max(relative_error(*pair) for pair in pairs)


def have_scales(monkeypatch, magnitudes: float) -> None:
    """Find scales within ``10**-magnitudes`` and ``10**magnitudes``, whatever is searched."""
    search = quantize_module.search_scales

    def found(*args, **keywords):
        scales, _, losses = search(*args, **keywords)
        rng = np.random.default_rng(len(scales))
        exponents = rng.uniform(-magnitudes, magnitudes, len(scales))
        return (10**exponents).astype(np.float32), 0.5, losses

    monkeypatch.setattr(quantize_module, "search_scales", found)


@pytest.mark.parametrize("name", CASES)
def test_any_scales_come_out_again_where_nothing_else_reads_them(monkeypatch, name):
    case = CASES[name]
    given = case.settings.get("rules", '{"*": float, "[mn]": {keep_float: false}}')
    rules = yaml.safe_load(given)
    have_scales(monkeypatch, 3)
    model = model_of(case)
    result, error = scaled(model, rules=rules)
    assert error < 1e-5
    before, after = arrays_of(model), arrays_of(read(result.model))
    changed = [n for n, a in before.items() if not np.array_equal(a, after.get(n))]
    rows = [f"{row.node}: {row.folded}" for row in result.report.quantized]
    case.expect("\n".join([*rows, f"changed: {' '.join(sorted(changed))}"]))
    assert scaled(model)[1] < 1e-5  # with all of its products
    # onnxruntime has no float16 kernels of these on the CPU.
    if "half" not in case.settings:
        have_scales(monkeypatch, 2)
        assert scaled(model_of(case, np.float16), rules=rules)[1] < 2e-2


def test_float16_constants_keep_their_digits(monkeypatch):
    # Below 6e-5 float16 has fewer digits, below 6e-8 none: such numbers are not to be divided.
    have_scales(monkeypatch, 2)
    model = model_of(CASES["LayerNormalization without bias"], np.float16, 1e-4)
    _, plain = scaled(model, method="rtn")
    _, error = scaled(model)
    assert error < 3 * plain + 5e-3, (plain, error)
