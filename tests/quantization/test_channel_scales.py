# SPDX-License-Identifier: MIT
"""Where the scales of input channels go: into the producer's constants, or one Mul.

At 8 bits a quantised model is all but the float one, whatever the scales are: where they are
taken out of the activation at a wrong place, or twice, or not at all, outputs are off by far.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from builders.dequantized_models import relative_error, run
from builders.quantized_files import arrays_of, kinds, read
from builders.text_models import model_of, normal

from ortplugins.quantization import quantize
from ortplugins.quantization.weights import quantize as quantize_module

# Channels of activations; features after a Linear; tokens.
K, N, T = 24, 10, 40

Array = npt.NDArray


def uneven(*shape: int, seed: int = 0, channels: int | None = None) -> Array:
    """Numbers whose magnitudes along the last axis lie within a factor of a thousand."""
    rng = np.random.default_rng(seed if channels is None else channels)
    sizes = 10 ** rng.uniform(-1.5, 1.5, shape[-1])
    return (normal(*shape, seed=seed) * sizes).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model around an activation; ``[m]`` and ``[n]`` multiply, others may.

    Its constants are those of CONSTANTS that it names, and others.
    """

    body: str
    others: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    inputs: str = "float[B, T, 24] x"
    outputs: str = "float[B, T, 10] y"
    opset: int = 21

    def build(self, dtype: npt.DTypeLike = np.float32) -> ir.Model:
        text = f"g ({self.inputs}) => ({self.outputs}) {{ {self.body} }}"
        read = set(re.findall(r"\w+", f"{self.body} {self.outputs}"))
        constants = {name: CONSTANTS[name] for name in sorted(read & CONSTANTS.keys())}
        constants = {n: a.astype(dtype) for n, a in (constants | dict(self.others)).items()}
        if dtype == np.float16:
            text = text.replace("float", "float16")
        return model_of(text, constants, opset=self.opset)


def made(body: str, others: Mapping[str, Array] | None = None, **options: Any) -> Model:
    """A model that multiplies the activation ``a`` by ``W``, at its end."""
    return Model(f"{body} [m] y = MatMul(a, W)", others or {}, **options)


def seen(name: str, size: str = "float[B, T, 24]") -> dict[str, str]:
    """Options that make a value another output."""
    return {"outputs": f"float[B, T, 10] y, {size} {name}"}


def samples(model: ir.Model, count: int = 3) -> list[dict[str, Array]]:
    sizes = {"B": 1, "T": T}
    feeds: list[dict[str, Array]] = [{} for _ in range(count)]
    for value in model.graph.inputs:
        if value.name not in model.graph.initializers:
            shape = [d if isinstance(d, int) else sizes[d.value] for d in value.shape]
            for seed, feed in enumerate(feeds):
                array = uneven(*shape, seed=seed, channels=0)
                feed[value.name] = array.astype(value.dtype.numpy())
    return feeds


def scaled(model: ir.Model, **options):
    """The model at 8 bits with AWQ's scales; its result, and how far outputs are off."""
    feeds = samples(model)
    options = {"method": "awq_lite", "bits": 8, "block_size": -1} | options
    result = quantize(model, calibration_data_reader=feeds, **options)
    fresh = samples(model, 4)[-1]
    pairs = zip(run(result.model, fresh), run(model, fresh), strict=True)
    return result, max(relative_error(*pair) for pair in pairs)


def changed(model: ir.Model, result) -> set[str]:
    """Float constants of a model that are others in its result, or gone."""
    before, after = arrays_of(read(model)), arrays_of(read(result.model))
    return {
        name
        for name, array in before.items()
        if name not in after or not np.array_equal(array, after[name])
    }


SCALE, SHIFT = uneven(K, seed=3), uneven(K, seed=4)
SQUARE = normal(K, K, seed=6) * uneven(K, seed=7)
WEIGHT = normal(K, N, seed=1)
CONSTANTS = {
    "g": SCALE, "b": SHIFT, "c": SHIFT, "V": SQUARE, "W": WEIGHT, "L": WEIGHT.T.copy(),
}  # fmt: skip
SKIP = {"inputs": "float[B, T, 24] x, float[B, T, 24] s", **seen("z")}
MS = "com.microsoft."

# What an activation is made by; the constants that its scales go into.
FOLDS = {
    "LayerNormalization": (made("a = LayerNormalization(x, g, b)"), "gb"),
    "LayerNormalization without bias": (
        made("a = LayerNormalization <axis = 2> (x, g)"), "g",
    ),
    "RMSNormalization": (made("a = RMSNormalization(x, g)", opset=23), "g"),
    "SimplifiedLayerNormalization": (made("a = SimplifiedLayerNormalization(x, g)"), "g"),
    "SkipLayerNormalization": (
        made(f"a, , , sum = {MS}SkipLayerNormalization(x, s, g, b, c) z = Identity(sum)",
             {"c": uneven(K, seed=9)}, **SKIP),
        "gb",
    ),
    "SkipSimplifiedLayerNormalization": (
        made(f"""a, , , sum = {MS}SkipSimplifiedLayerNormalization(x, s, g, c)
                 z = Identity(sum)""", **SKIP),
        "g",
    ),
    "Mul": (made("s = Sigmoid(x) a = Mul(s, g)"), "g"),
    "FusedMatMul reads it": (
        Model(f"a = LayerNormalization(x, g) [m] y = {MS}FusedMatMul(a, W)"), "g",
    ),
    "two weights": (
        made(f"a = LayerNormalization(x, g, b) [n] z = {MS}FusedMatMul <transB = 1> (a, V)",
             **seen("z")),
        "gb",
    ),
}  # fmt: skip


NORM = "a = LayerNormalization(x, g)"
# Where nothing of what is there may change.
MULS = {
    "a product": made("p = MatMul(x, V) a = Add(p, c)"),
    "a graph input": Model("[m] y = MatMul(x, W)"),
    "a graph output": made(NORM, **seen("a")),
    "another reader": made(f"{NORM} z = Relu(a)", **seen("z")),
    "a shared norm weight": made(
        f"{NORM} h = Neg(x) z = LayerNormalization(h, g)", **seen("z")
    ),
    "scale and shift are one": made("a = LayerNormalization(x, g, g)"),
    "a norm weight that is a graph output": made(NORM, **seen("g", "float[24]")),
    "a scalar factor": made("a = Mul(x, g)", {"g": np.array(3.0)}),
    "a factor for each token": made("a = Mul(x, g)", {"g": uneven(T, 1)}),
    "one norm over two axes": made(
        "a = LayerNormalization <axis = -2> (x, g)", {"g": uneven(T, K)}
    ),
    "the second output": made(
        f"h, , , a = {MS}SkipLayerNormalization(x, s, g, b) z = Identity(h)", **SKIP
    ),
}  # fmt: skip


# Several readers: options, where the scales go, and the constants that change.
READERS = {
    "one weight behind two activations": (
        made(f"{NORM} h = Neg(x) e = LayerNormalization(h, d) [n] z = MatMul(e, W)",
             {"d": SCALE * 2}, **seen("z", "float[B, T, 10]")),
        {}, {""}, "W",
    ),
    "a weight in a subgraph": (
        Model(f"""{NORM} r = ReduceMax <keepdims = 0> (x) k = Equal(r, r)
                  y = If (k) <
                      then_branch = t () => (float[B, T, 10] u) {{ [m] u = MatMul(a, W) }},
                      else_branch = e () => (float[B, T, 10] v) {{ [n] v = MatMul(a, U) }}>""",
              {"U": normal(K, N, seed=5)}),
        {}, {"folded"}, "gWU",
    ),
    "quantised and excluded ones": (
        made(f"{NORM} [n] z = MatMul(a, V)", **seen("z")),
        {"rules": {"n": "float"}}, {"mul"}, "W",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_several_readers(name):
    model, options, folded, constants = READERS[name]
    float_model = model.build()
    result, error = scaled(float_model, **options)
    assert {row.folded for row in result.report.quantized} <= folded
    assert changed(float_model, result) <= set(constants)
    assert error < 1e-2


def have_scales(monkeypatch, magnitudes: float) -> None:
    """Find scales within ``10**-magnitudes`` and ``10**magnitudes``, whatever is searched."""
    search = quantize_module.search_scales

    def found(*args, **keywords):
        scales, _, losses = search(*args, **keywords)
        rng = np.random.default_rng(len(scales))
        exponents = rng.uniform(-magnitudes, magnitudes, len(scales))
        return (10**exponents).astype(np.float32), 0.5, losses

    monkeypatch.setattr(quantize_module, "search_scales", found)


# In blocks of one number each is its scale: nothing is lost, whatever it was multiplied by.
EXACT = {"bits": 8, "block_size": 1}


def only(pattern: str) -> dict[str, Any]:
    """Rules by which nothing else is quantised, if there is a pattern."""
    return {"*": "float", pattern: {"keep_float": False}} if pattern else {}


@pytest.mark.parametrize("include", ["[mn]", ""], ids=["two", "all"])
@pytest.mark.parametrize("name", [*FOLDS, *MULS])
def test_any_scales_come_out_again_where_nothing_else_reads_them(monkeypatch, name, include):
    have_scales(monkeypatch, 3)
    model, constants = FOLDS.get(name) or (MULS[name], "")
    floats, options = model.build(), {"rules": only(include), **EXACT}
    result, error = scaled(floats, **options)
    assert error < 1e-5
    rows = [row for row in result.report.quantized if row.node in "mn"]
    folded = "folded" if name in FOLDS else "mul"
    assert {row.folded for row in rows if include or row.node == "m"} == {folded}
    if include:
        weights = {row.weight for row in rows}
        assert {*constants} <= changed(floats, result) <= {*constants, *weights}
        more = kinds(read(result.model)).count("Mul") - kinds(read(floats)).count("Mul")
        assert more == (name in MULS)
    # onnxruntime has no float16 kernels of these on the CPU.
    if "Skip" not in name and name != "the second output":
        have_scales(monkeypatch, 2)
        assert scaled(model.build(np.float16), **options)[1] < 2e-2


def test_float16_constants_keep_their_digits(monkeypatch):
    # Below 6e-5 float16 has fewer digits, below 6e-8 none: such numbers are not to be divided.
    have_scales(monkeypatch, 2)
    body = "a = LayerNormalization(x, g) [m] y = MatMul(a, W)"
    model = Model(body, {"g": SCALE / 1e4}).build(np.float16)
    _, plain = scaled(model, method="rtn", **EXACT)
    _, error = scaled(model, **EXACT)
    assert error < 3 * plain + 5e-3, (plain, error)
