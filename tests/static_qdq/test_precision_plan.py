# SPDX-License-Identifier: MIT
"""Which activations deserve 16 bits, and which weights 8."""

import itertools
from collections.abc import Collection

import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import run as run_model
from builders.text_models import model_of, normal

from ortplugins.errors import QuantizationError
from ortplugins.static_qdq.plan import PrecisionPlan
from ortplugins.static_qdq.quantize_static import quantize_static_mixed
from rewrite_rules.mixed_precision_boundaries.place import place_boundaries
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedGraph
from rewrite_rules.remarks import PassContext, Remarks

# h2 is a hundred times coarser than it need be, h5 ten times; everything else is fine.
_SCALES = {"x": 0.03, "h0": 0.03, "h1": 0.03, "h2": 3.0, "h3": 0.03, "h4": 0.03, "h5": 0.3}


def chain(scales: dict[str, float] = _SCALES, *, reshape: str = "") -> ir.Model:
    """A chain of MatMuls, the input and each result through a grid of 8 bits."""
    rng, dtype = np.random.default_rng(0), np.float32
    nodes, constants, names = [], {}, list(scales)

    def pair(name: str) -> None:
        constants.update({f"{name}_s": dtype(scales[name]), f"{name}_z": np.uint8(128)})
        nodes.append(f"{name}_q = QuantizeLinear({name}, {name}_s, {name}_z)")
        nodes.append(f"{name}_d = DequantizeLinear({name}_q, {name}_s, {name}_z)")

    pair(names[0])
    for before, name in itertools.pairwise(names):
        if name == reshape:
            nodes.append(f"{name} = Transpose<perm = [1, 0]>({before}_d)")
        else:
            weight = rng.standard_normal((8, 8)) * 0.35
            constants[f"{name}_w"] = weight.astype(dtype)
            nodes.append(f"{name} = MatMul({before}_d, {name}_w)")
        pair(name)
    text = f"g (float[8, 8] x) => (float[8, 8] {names[-1]}_d) {{ {' '.join(nodes)} }}"
    return model_of(text, constants)


def planned(model: ir.Model, data: object, **options: object) -> PrecisionPlan:
    plan = quantize_static_mixed(model, None, data, **options).plan
    assert plan is not None
    return plan


def feeds(count: int = 3) -> list[dict[str, np.ndarray]]:
    return [{"x": normal(8, 8, seed=seed)} for seed in range(count)]


def run(model: ir.Model, samples: list[dict[str, np.ndarray]]) -> np.ndarray:
    return np.stack([run_model(model, feed)[0] for feed in samples])


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.square(found - wanted).sum() / np.square(wanted).sum())


def rewritten(model: ir.Model, names: Collection[str], *, in_float: bool = False) -> ir.Model:
    copy = model.clone()
    context = PassContext(Remarks("test"))
    place_boundaries(copy, context, promote=names, in_float=in_float)
    return copy


def test_the_coarsest_grids_come_first_and_are_enough():
    model = chain()
    text = ir.Value(name="t", type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape([1]))
    model.graph.inputs.append(text)  # which samples hold as they are
    samples = [{**feed, "t": np.array(["a"])} for feed in feeds()]
    plan = planned(model, samples, max_16bit=2 / 7)
    assert [effect.names for effect in plan.ranking[:2]] == [("h2",), ("h5",)]
    assert plan.ranking[0].operator == "MatMul"
    assert plan.promoted == ("h2", "h5")
    assert plan.after.error < plan.before.error / 100
    assert plan.activations == 7


@pytest.mark.parametrize("mode", ["int16", "float"])
def test_the_errors_are_those_of_the_rewritten_model(mode):
    model = chain()
    plan = planned(model, feeds(), max_16bit=1 / 7)
    everything = frozenset(tensor.name for tensor in QuantizedGraph(model).tensors)
    reference = run(rewritten(model, everything, in_float=True), feeds())
    assert plan.before.error == pytest.approx(error(run(model, feeds()), reference), rel=1e-4)
    promoted = run(rewritten(model, plan.promoted, in_float=mode == "float"), feeds())
    assert plan.after.error == pytest.approx(error(promoted, reference), rel=1e-4)


def test_a_budget_takes_as_few_as_it_needs():
    one = planned(chain(), feeds(), max_16bit=1 / 7)
    plan = planned(chain(), feeds(), budget=one.after.cosine - 1e-3)
    assert plan.promoted == one.promoted == ("h2",)
    finer = planned(chain(), feeds(), budget=(one.after.cosine + 1) / 2)
    assert len(finer.promoted) > 1 and finer.after.cosine >= (one.after.cosine + 1) / 2


def test_tensors_of_one_grid_are_promoted_and_counted_together():
    scales = {**_SCALES, "h3": 3.0}
    model = chain(scales, reshape="h3")
    plan = planned(model, feeds(), max_16bit=2 / 7)
    assert plan.ranking[0].names == ("h2", "h3")
    assert set(plan.promoted) == {"h2", "h3"}
    assert planned(model, feeds(), max_16bit=1 / 7).promoted == ("h5",)


CODES = model_of(
    """g (float[8, 8] x) => (uint8[8, 8] q, float[8, 8] y)
        { q = QuantizeLinear(x, s, z) y = Neg(x) }""",
    {"s": np.float32(0.1), "z": np.uint8(0)},
)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (CODES, {}, "no 8-bit activation between"),
        (chain(), {"budget": 0.9999999}, "is not reached: .* with 1 of 7 activations"),
    ],
    ids=["no grids", "a budget out of reach"],
)
def test_what_cannot_be_planned_is_reported(model, options, message):
    with pytest.raises(QuantizationError, match=message):
        planned(model, feeds(), max_16bit=1 / 7, **options)
