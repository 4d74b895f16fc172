# SPDX-License-Identifier: MIT
"""Where the scales of input channels go: into the producer's constants, or one Mul.

At 8 bits a quantised model is all but the float one, whatever the scales are: where they are
taken out of the activation at a wrong place, or twice, or not at all, outputs are off by far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from builders.dequantized_models import relative_error, run
from builders.quantized_files import arrays_of, kinds, read
from test_quantize import model_of, normal

from ortplugins.quantization import quantize
from ortplugins.quantization.weights import group as group_work

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
    """A model around an activation; ``[m]`` and ``[n]`` multiply, others may."""

    body: str
    constants: Mapping[str, Array]
    inputs: str = "float[B, T, 24] x"
    outputs: str = "float[B, T, 10] y"
    opset: int = 21

    def build(self, dtype: npt.DTypeLike = np.float32) -> ir.Model:
        text = f"g ({self.inputs}) => ({self.outputs}) {{ {self.body} }}"
        constants = {name: array.astype(dtype) for name, array in self.constants.items()}
        if dtype == np.float16:
            text = text.replace("float", "float16")
        return model_of(text, constants, opset=self.opset)


def samples(model: ir.Model, count: int = 3) -> list[dict[str, Array]]:
    feeds = []
    for seed in range(count):
        sizes = {"B": 1, "T": T}
        feeds.append(
            {
                value.name: uneven(
                    *(d if isinstance(d, int) else sizes[d.value] for d in value.shape),
                    seed=seed,
                    channels=0,
                ).astype(value.dtype.numpy())
                for value in model.graph.inputs
                if value.name not in model.graph.initializers
            }
        )
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


W = {"W": normal(K, N, seed=1)}
SCALE, SHIFT, GAMMA = uneven(K, seed=3), uneven(K, seed=4), uneven(1, K, seed=5)
SQUARE = normal(K, K, seed=6) * uneven(K, seed=7)
SKIP = "float[B, T, 24] x, float[B, T, 24] s"

# What an activation is made by; the constants that its scales go into.
FOLDS = {
    "LayerNormalization": (
        Model("a = LayerNormalization(x, g, b) [m] y = MatMul(a, W)",
              {"g": SCALE, "b": SHIFT, **W}),
        {"g", "b"},
    ),
    "LayerNormalization without bias": (
        Model("a = LayerNormalization <axis = 2> (x, g) [m] y = MatMul(a, W)",
              {"g": SCALE, **W}),
        {"g"},
    ),
    "RMSNormalization": (
        Model("a = RMSNormalization(x, g) [m] y = MatMul(a, W)", {"g": SCALE, **W}, opset=23),
        {"g"},
    ),
    "SimplifiedLayerNormalization": (
        Model("a = SimplifiedLayerNormalization(x, g) [m] y = MatMul(a, W)",
              {"g": SCALE, **W}),
        {"g"},
    ),
    "SkipLayerNormalization": (
        Model("""a, , , sum = com.microsoft.SkipLayerNormalization(x, s, g, b, c)
                 [m] y = MatMul(a, W) z = Identity(sum)""",
              {"g": SCALE, "b": SHIFT, "c": uneven(K, seed=9), **W}, inputs=SKIP,
              outputs="float[B, T, 10] y, float[B, T, 24] z"),
        {"g", "b"},
    ),
    "SkipSimplifiedLayerNormalization": (
        Model("""a, , , sum = com.microsoft.SkipSimplifiedLayerNormalization(x, s, g, c)
                 [m] y = MatMul(a, W) z = Identity(sum)""",
              {"g": SCALE, "c": SHIFT, **W}, inputs=SKIP,
              outputs="float[B, T, 10] y, float[B, T, 24] z"),
        {"g"},
    ),
    "Mul": (
        Model("s = Sigmoid(x) a = Mul(s, g) [m] y = MatMul(a, W)", {"g": SCALE, **W}), {"g"},
    ),
    "Mul, constant first": (
        Model("s = Sigmoid(x) a = Mul(g, s) [m] y = MatMul(a, W)", {"g": GAMMA, **W}), {"g"},
    ),
    "Gemm": (
        Model("a = Gemm <alpha = 0.5, beta = 2.0> (x, V, c) [m] y = MatMul(a, W)",
              {"V": SQUARE, "c": SHIFT, **W},
              inputs="float[T, 24] x", outputs="float[T, 10] y"),
        {"V", "c"},
    ),
    "Gemm transB": (
        Model("a = Gemm <transB = 1> (x, V, c) [m] y = MatMul(a, W)",
              {"V": SQUARE.T.copy(), "c": GAMMA, **W},
              inputs="float[T, 24] x", outputs="float[T, 10] y"),
        {"V", "c"},
    ),
    "Gemm transA": (
        Model("a = Gemm <transA = 1> (x, V) [m] y = MatMul(a, W)", {"V": SQUARE, **W},
              inputs="float[24, T] x", outputs="float[T, 10] y"),
        {"V"},
    ),
    "Gemm, beta 0": (
        Model("a = Gemm <beta = 0.0> (x, V, c) [m] y = MatMul(a, W)",
              {"V": SQUARE, "c": SHIFT, **W},
              inputs="float[T, 24] x", outputs="float[T, 10] y"),
        {"V"},
    ),
    "MatMul": (
        Model("a = MatMul(x, V) [m] y = MatMul(a, W)", {"V": SQUARE, **W}), {"V"},
    ),
    "MatMul and bias": (
        Model("p = MatMul(x, V) a = Add(p, c) [m] y = MatMul(a, W)",
              {"V": SQUARE, "c": SHIFT, **W}),
        {"V", "c"},
    ),
    "FusedMatMul reads it": (
        Model("a = LayerNormalization(x, g) [m] y = com.microsoft.FusedMatMul(a, W)",
              {"g": SCALE, **W}),
        {"g"},
    ),
    "the weight is on the left": (
        Model("""a = LayerNormalization(x, g)
                 [m] y = com.microsoft.FusedMatMul <transB = 1> (U, a)""",
              {"g": SCALE, "U": W["W"].T.copy()}, outputs="float[B, 10, T] y"),
        {"g"},
    ),
    "SwiGLU": (
        Model("""p = MatMul(x, V) s = Sigmoid(p) h = Mul(p, s) u = MatMul(x, U) a = Mul(h, u)
                 [m] y = MatMul(a, W)""",
              {"V": normal(K, K, seed=8) / 30, "U": SQUARE, **W}),
        {"U"},
    ),
    "SwiGLU, gate second": (
        Model("""p = MatMul(x, V) s = Sigmoid(p) h = Mul(p, s) u = MatMul(x, U) a = Mul(u, h)
                 [m] y = MatMul(a, W)""",
              {"V": normal(K, K, seed=8) / 30, "U": SQUARE, **W}),
        {"U"},
    ),
    "Relu": (
        Model("p = MatMul(x, V) q = Add(p, c) a = Relu(q) [m] y = MatMul(a, W)",
              {"V": SQUARE, "c": SHIFT, **W}),
        {"V", "c"},
    ),
    "LeakyRelu and Identity": (
        Model("""p = MatMul(x, V) i = Identity(p) q = LeakyRelu <alpha = 0.3> (i)
                 a = Identity(q) [m] y = MatMul(a, W)""", {"V": SQUARE, **W}),
        {"V"},
    ),
    "a sum of two": (
        Model("""p = MatMul(x, V) q = LayerNormalization(x, g, b) a = Add(p, q)
                 [m] y = MatMul(a, W)""",
              {"V": SQUARE, "g": SCALE, "b": SHIFT, **W}),
        {"V", "g", "b"},
    ),
    "two weights": (
        Model("""a = LayerNormalization(x, g, b) [m] y = MatMul(a, W)
                 [n] z = com.microsoft.FusedMatMul <transB = 1> (a, U)""",
              {"g": SCALE, "b": SHIFT, "U": SQUARE, **W},
              outputs="float[B, T, 10] y, float[B, T, 24] z"),
        {"g", "b"},
    ),
}  # fmt: skip

# Where nothing of what is there may change.
MULS = {
    "a graph input": Model("[m] y = MatMul(x, W)", W),
    "a graph output": Model(
        "a = LayerNormalization(x, g) [m] y = MatMul(a, W)", {"g": SCALE, **W},
        outputs="float[B, T, 10] y, float[B, T, 24] a",
    ),
    "a graph output on the way": Model(
        "p = MatMul(x, V) a = Relu(p) [m] y = MatMul(a, W)", {"V": SQUARE, **W},
        outputs="float[B, T, 10] y, float[B, T, 24] p",
    ),
    "another reader": Model(
        "a = LayerNormalization(x, g) [m] y = MatMul(a, W) z = Relu(a)", {"g": SCALE, **W},
        outputs="float[B, T, 10] y, float[B, T, 24] z",
    ),
    "another reader on the way": Model(
        "p = MatMul(x, V) a = Relu(p) [m] y = MatMul(a, W) z = Tanh(p)",
        {"V": SQUARE, **W}, outputs="float[B, T, 10] y, float[B, T, 24] z",
    ),
    "another reader in a body": Model(
        """a = LayerNormalization(x, g) [m] y = MatMul(a, W)
           r = ReduceMax <keepdims = 0> (x) c = Equal(r, r)
           z = If (c) <then_branch = t () => (float[B, T, 24] u) { u = Neg(a) },
                       else_branch = e () => (float[B, T, 24] v) { v = Neg(a) }>""",
        {"g": SCALE, **W}, outputs="float[B, T, 10] y, float[B, T, 24] z",
    ),
    "a residual": Model(
        """p = MatMul(x, V) a = Add(p, x) [m] y = MatMul(a, W)""", {"V": SQUARE, **W},
    ),
    "twice in one node": Model(
        "a = LayerNormalization(x, g) [m] y = Gemm(a, S, a)",
        {"g": SCALE, "S": normal(K, K, seed=2)},
        inputs="float[T, 24] x", outputs="float[T, 24] y",
    ),
    "squared": Model(
        "p = MatMul(x, V) a = Mul(p, p) [m] y = MatMul(a, W)",
        {"V": normal(K, K, seed=8) / 30 * SCALE, **W},
    ),
    "added to itself": Model(
        "p = MatMul(x, V) a = Add(p, p) [m] y = MatMul(a, W)", {"V": SQUARE, **W},
    ),
    "a shared norm weight": Model(
        """a = LayerNormalization(x, g) [m] y = MatMul(a, W)
           h = Neg(x) z = LayerNormalization(h, g)""",
        {"g": SCALE, **W}, outputs="float[B, T, 10] y, float[B, T, 24] z",
    ),
    "scale and shift are one": Model(
        "a = LayerNormalization(x, g, g) [m] y = MatMul(a, W)", {"g": SCALE, **W},
    ),
    "a shared factor": Model(
        """s = Sigmoid(x) a = Mul(s, g) [m] y = MatMul(a, W) z = Add(s, g)""",
        {"g": SCALE, **W}, outputs="float[B, T, 10] y, float[B, T, 24] z",
    ),
    "a norm weight that is a graph output": Model(
        "a = LayerNormalization(x, g) [m] y = MatMul(a, W)", {"g": SCALE, **W},
        outputs="float[B, T, 10] y, float[24] g",
    ),
    "a scalar factor": Model(
        "a = Mul(x, g) [m] y = MatMul(a, W)", {"g": np.array(3.0), **W},
    ),
    "a scalar shift": Model(
        "p = MatMul(x, V) a = Add(p, c) [m] y = MatMul(a, W)",
        {"V": SQUARE, "c": np.array([3.0]), **W},
    ),
    "a factor for each token": Model(
        "a = Mul(x, g) [m] y = MatMul(a, W)", {"g": uneven(T, 1), **W},
    ),
    "a matrix of factors": Model(
        "a = Mul(x, g) [m] y = MatMul(a, W)", {"g": uneven(T, K), **W},
    ),
    "as many tokens as channels": Model(
        "a = Mul(x, g) [m] y = MatMul(a, W)", {"g": uneven(K, 1), **W},
        inputs="float[B, 24, 24] x", outputs="float[B, 24, 10] y",
    ),
    "one norm over two axes": Model(
        "a = LayerNormalization <axis = -2> (x, g) [m] y = MatMul(a, W)",
        {"g": uneven(T, K), **W},
    ),
    "broadcast channels": Model(
        "p = MatMul(x, V) a = Mul(p, o) [m] y = MatMul(a, W)",
        {"V": normal(K, 1), "o": np.ones((1, T, K)), **W},
    ),
    "not homogeneous": Model(
        "p = MatMul(x, V) a = Tanh(p) [m] y = MatMul(a, W)", {"V": SQUARE / 1e2, **W},
    ),
    "a gate": Model(
        "p = MatMul(x, V) a = Sigmoid(p) [m] y = MatMul(a, W)", {"V": SQUARE / 1e2, **W},
    ),
    "the second output": Model(
        """h, , , a = com.microsoft.SkipLayerNormalization(x, s, g, b)
           [m] y = MatMul(a, W) z = Identity(h)""",
        {"g": SCALE, "b": SHIFT, **W}, inputs=SKIP,
        outputs="float[B, T, 10] y, float[B, T, 24] z",
    ),
    "a weight that is transposed first": Model(
        "t = Transpose(V) a = MatMul(x, t) [m] y = MatMul(a, W)", {"V": SQUARE, **W},
    ),
    "a weight with another reader": Model(
        "a = MatMul(x, V) [m] y = MatMul(a, W) z = Relu(V)", {"V": SQUARE, **W},
        outputs="float[B, T, 10] y, float[24, 24] z",
    ),
    "the weight is what makes the activation, too": Model(
        "a = MatMul(x, S) [m] y = MatMul(a, S)", {"S": SQUARE / 100},
        outputs="float[B, T, 24] y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", FOLDS)
def test_scales_go_into_constants(name, dtype):
    model, constants = FOLDS[name]
    float_model = model.build(dtype)
    if dtype == np.float16 and "Skip" in name:
        pytest.skip("onnxruntime has no float16 kernel of it on the CPU")
    result, error = scaled(float_model, nodes_to_include=["[mn]"])
    rows = result.report.quantized
    assert [row.folded for row in rows] == ["folded"] * len(rows)
    weights = {row.weight for row in rows}
    assert changed(float_model, result) == constants | weights
    assert "Mul" not in set(kinds(read(result.model))) - set(kinds(read(float_model)))
    assert error < (1e-2 if dtype == np.float32 else 3e-2)


@pytest.mark.parametrize("name", MULS)
def test_what_others_see_is_not_touched(name):
    float_model = MULS[name].build()
    result, error = scaled(float_model, nodes_to_include=["m"])
    (row,) = result.report.quantized
    assert row.folded == "mul"
    assert changed(float_model, result) <= {row.weight}
    assert kinds(read(result.model)).count("Mul") == kinds(read(float_model)).count("Mul") + 1
    assert error < 1e-2


# Whose scales meet a weight that is quantised as well.
INTO_CODES = [name for name, (_, constants) in FOLDS.items() if constants & {"U", "V"}]


@pytest.mark.parametrize(
    ("layout", "is_symmetric"),
    [("QDQ", False), ("QDQ_transposed", True), ("MatMulNBits", False)],
)
@pytest.mark.parametrize("name", INTO_CODES)
def test_scales_of_a_quantised_weight_are_divided(name, layout, is_symmetric):
    model, _ = FOLDS[name]
    result, error = scaled(model.build(), quant_format=layout, is_symmetric=is_symmetric)
    rows = {row.node: row for row in result.report.quantized}
    assert rows["m"].folded == "folded"
    assert len(rows) > 1
    assert error < 2e-2


@pytest.mark.parametrize("method", ["awq_lite", "awq_full", "awq_gptq"])
def test_every_method_that_scales_folds(method):
    model = """
        a = LayerNormalization(x, g, b)
        q = MatMul(a, Q)
        k = MatMul(a, K)
        qk = Mul(q, k)
        [o] r = MatMul(qk, O)
        h = Add(r, x)
        c = LayerNormalization(h, d)
        [up] u = MatMul(c, U)
        e = Relu(u)
        [down] f = MatMul(e, D)
        y = Add(f, h)
    """
    constants = {"g": SCALE, "b": SHIFT, "d": uneven(K, seed=2)}
    constants |= {name: normal(K, K, seed=ord(name)) for name in "QKOUD"}
    built = Model(model, constants, outputs="float[B, T, 24] y").build()
    result, error = scaled(built, method=method)
    assert {row.node: row.folded for row in result.report.quantized} == dict.fromkeys(
        ["q", "k", "o", "up", "down"], "folded"
    )
    assert error < 2e-2


def test_names_that_are_taken_are_not_taken_again():
    model = Model(
        "u = Neg(x) [m] y = MatMul(x, W) z = Identity(u)", W,
        outputs="float[B, T, 10] y, float[B, T, 24] z",
    )  # fmt: skip
    for name in ("x.scaled", "W.channel_scales", "W.int8_block-1"):
        named = model.build()
        named.graph[0].outputs[0].name = name
        _, error = scaled(named)
        assert error < 1e-2


def test_a_second_round_scales_an_activation_again():
    model = Model(
        "[m] y = MatMul(x, W) [n] z = MatMul(x, V)", {"V": SQUARE, **W},
        outputs="float[B, T, 10] y, float[B, T, 24] z",
    ).build()  # fmt: skip
    once, _ = scaled(model, nodes_to_include=["m"])
    twice, error = scaled(once.model)
    assert [row.folded for row in twice.report.quantized] == ["mul"]
    assert error < 1e-2


def test_a_norm_weight_that_may_be_fed_is_not_touched():
    model = Model(
        "a = LayerNormalization(x, g) [m] y = MatMul(a, W)", {"g": SCALE, **W}
    ).build()
    model.graph.inputs.append(model.graph.initializers["g"])
    result, error = scaled(model)
    assert [row.folded for row in result.report.quantized] == ["mul"]
    assert changed(model, result) == {"W"}
    assert error < 1e-2


def test_one_weight_behind_two_activations_scales_both():
    model = Model(
        """a = LayerNormalization(x, g) [m] y = MatMul(a, W)
           h = Neg(x) b = LayerNormalization(h, d) [n] z = MatMul(b, W)""",
        {"g": SCALE, "d": SCALE * 2, **W}, outputs="float[B, T, 10] y, float[B, T, 10] z",
    ).build()  # fmt: skip
    result, error = scaled(model)
    assert [row.folded for row in result.report.quantized] == ["folded"] * 2
    assert changed(model, result) == {"g", "d", "W"}
    assert error < 1e-2


def test_an_activation_that_is_fed_and_one_that_is_made_share_a_weight():
    model = Model(
        "a = LayerNormalization(x, g) [m] y = MatMul(a, W) [n] z = MatMul(x, W)",
        {"g": SCALE, **W}, outputs="float[B, T, 10] y, float[B, T, 10] z",
    ).build()  # fmt: skip
    result, error = scaled(model)
    assert error < 1e-2
    assert changed(model, result) <= {"g", "W"}


def test_a_weight_read_in_a_body_scales_what_the_body_captures():
    model = Model(
        """a = LayerNormalization(x, g) r = ReduceMax <keepdims = 0> (x) c = Equal(r, r)
           y = If (c) <then_branch = t () => (float[B, T, 10] u) { [m] u = MatMul(a, W) },
                       else_branch = e () => (float[B, T, 10] v) { [n] v = MatMul(a, U) }>""",
        {"g": SCALE, "U": normal(K, N, seed=5), **W},
    ).build()  # fmt: skip
    result, error = scaled(model)
    assert {row.folded for row in result.report.quantized} == {"folded"}
    assert error < 1e-2


def test_quantised_and_excluded_readers_of_one_activation():
    model = Model(
        "a = LayerNormalization(x, g) [m] y = MatMul(a, W) [n] z = MatMul(a, V)",
        {"g": SCALE, "V": SQUARE, **W}, outputs="float[B, T, 10] y, float[B, T, 24] z",
    ).build()  # fmt: skip
    result, error = scaled(model, nodes_to_exclude=["n"])
    assert [row.folded for row in result.report.quantized] == ["mul"]
    assert changed(model, result) == {"W"}
    assert error < 1e-2


def have_scales(monkeypatch, magnitudes: float) -> None:
    """Find scales within ``10**-magnitudes`` and ``10**magnitudes``, whatever is searched."""
    search = group_work.search_scales

    def found(*args, **keywords):
        choice = search(*args, **keywords)
        rng = np.random.default_rng(len(choice.scales))
        exponents = rng.uniform(-magnitudes, magnitudes, len(choice.scales))
        return dataclasses.replace(choice, scales=(10**exponents).astype(np.float32))

    monkeypatch.setattr(group_work, "search_scales", found)


# In blocks of one number each is its scale: nothing is lost, whatever it was multiplied by.
EXACT = {"bits": 8, "block_size": 1}


@pytest.mark.parametrize("include", [["[mn]"], None], ids=["two", "all"])
@pytest.mark.parametrize("name", [*FOLDS, *MULS])
def test_any_scales_come_out_again(monkeypatch, name, include):
    have_scales(monkeypatch, 3)
    model = (FOLDS[name][0] if name in FOLDS else MULS[name]).build()
    result, error = scaled(model, nodes_to_include=include, **EXACT)
    assert {row.folded for row in result.report.quantized if row.node == "m"} == {
        "folded" if name in FOLDS else "mul"
    }
    assert error < 1e-5


@pytest.mark.parametrize("name", [*FOLDS, *MULS])
def test_any_scales_come_out_of_float16_again(monkeypatch, name):
    have_scales(monkeypatch, 2)
    if "Skip" in name or name == "the second output":
        pytest.skip("onnxruntime has no float16 kernel of it on the CPU")
    model = (FOLDS[name][0] if name in FOLDS else MULS[name]).build(np.float16)
    _, error = scaled(model, **EXACT)
    assert error < 2e-2


@pytest.mark.parametrize("include", [["m"], None], ids=["constants", "codes"])
def test_float16_constants_keep_their_digits(monkeypatch, include):
    # Below 6e-5 float16 has fewer digits, below 6e-8 none: such numbers are not to be divided.
    have_scales(monkeypatch, 2)
    model = Model(
        "p = MatMul(x, V) a = Mul(p, up) [m] y = MatMul(a, W)",
        {"V": SQUARE / 1e3, "up": np.array(1e2), **W},
    )
    norm = Model("a = LayerNormalization(x, g) [m] y = MatMul(a, W)", {"g": SCALE / 1e4, **W})
    linear = Model(
        "a = MatMul(x, V) [m] h = MatMul(a, W) y = Mul(h, up)",
        {"V": SQUARE / 1e3, "up": np.array(1e2), **W},
    )
    for each in (model, norm, linear):
        _, plain = scaled(
            each.build(np.float16), method="rtn", nodes_to_include=include, **EXACT
        )
        _, error = scaled(each.build(np.float16), nodes_to_include=include, **EXACT)
        assert error < 3 * plain + 5e-3, (plain, error)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_weight_of_few_columns_is_scaled_too(n):
    model = model_of(
        f"g (float[B, T, 24] x) => (float[B, T, {n}] y) {{ [m] y = MatMul(x, W) }}",
        {"W": normal(K, n)},
    )
    for method in ("awq_lite", "awq_full", "awq_gptq"):
        _, error = scaled(model, method=method)
        assert error < 1e-2
