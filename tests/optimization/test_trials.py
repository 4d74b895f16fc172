# SPDX-License-Identifier: MIT
"""Trials: noise is no difference, no wrong number hides in it, and only what fails goes."""

import collections
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest
from builders.decoders import SIGNED, small_decoder
from builders.exports import decoder_feeds, exported, fused, greatest_difference
from builders.processes import keep_mapped_files
from builders.same_numbers import session as opened
from builders.sessions import CPU
from builders.text_models import model_of
from builders.transformer_parts import norm

import ortplugins
from ortplugins.optimization.trial_noise import apart
from ortplugins.optimization.trials import OriginalOnTrials, find_failure
from ortplugins.optimization.trials import trials_of as beside_original
from rewrite_rules.facts.made_up_batches import DecoderInputs, Run, trials_of
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.remarks import Trial
from rewrite_rules.transformer_fusion.norms_and_activations import RmsNorm


def shaken(end: str, factor: float) -> onnx.ModelProto:
    """A decoder whose last step makes rounding ``factor`` times as large."""
    model = small_decoder(("y = MatMul(y_rows, o_weight)", end), rotary=SIGNED)
    for name, number in (("factor", factor), ("little", 1 / 128)):
        tensor = onnx.numpy_helper.from_array(np.float32(number), name)
        model.graph.initializer.append(tensor)
    return model


# What attention makes, and beside it something of the original, are ill-conditioned.
OF_ATTENTION = """exact = MatMul(y_rows, o_weight)
    angles = Mul(exact, factor)
    y = Sin(angles)"""
BESIDE_ATTENTION = """exact = MatMul(y_rows, o_weight)
    part = Mul(exact, little)
    angles = Mul(q_rows, factor)
    noise = Sin(angles)
    y = Add(noise, part)"""


# The same behind codes, of which the error moves some by a step.
BEHIND_CODES = """codes = QuantizeLinear(y_rows, little)
    rounded = DequantizeLinear(codes, little)
    exact = MatMul(rounded, o_weight)
    part = Mul(exact, little)
    y = Add(q_rows, part)"""
# Its result is rounded to codes, of which whole steps change where a last digit does.
TO_CODES = """exact = MatMul(y_rows, o_weight)
    angles = Mul(exact, factor)
    waves = Sin(angles)
    codes = QuantizeLinear(waves, little)
    y = DequantizeLinear(codes, little)"""


def greatest(model: onnx.ModelProto, result: ir.Model, trials: list[Trial]) -> float:
    """How far the first output is apart on trials without padding."""
    far = 0.0
    for feeds in (
        dict(trial.feeds)
        for trial in trials
        if not trial.compared and trial.feeds["input_ids"].size
    ):
        expected, found = (opened(each).run(["y"], feeds)[0] for each in (model, result))
        far = max(far, float(np.abs(expected - found).max() / np.abs(expected).max()))
    return far


@pytest.mark.parametrize(
    ("a", "b", "share"),
    [
        ([1, np.nan, np.inf], [1, np.nan, np.inf], 0),
        ([1, 2], [1, np.nan], np.inf),
        ([1, np.nan], [1, 2], np.inf),
        ([1, 2], [1, np.inf], np.inf),
        ([0, 0], [0, 1e-30], np.inf),
        ([1, -4], [2, -4], 0.25),
        ([1, 2], [[1, 2]], np.inf),
    ],
)
def test_how_far_outputs_are_apart(a, b, share):
    assert apart(np.float32(a), np.float32(b)).share == share


@pytest.mark.parametrize("factor", [200, 1000, 3000])
def test_a_result_is_not_withdrawn_for_the_noise_of_the_model(factor: float):
    model = shaken(OF_ATTENTION, factor)
    result, _, context = fused(model)
    assert greatest(model, result, context.trials) > context.trials[0].bound
    assert find_failure(ir.from_proto(model), result, context.trials, CPU) is None


@pytest.mark.parametrize(("factor", "least"), [(150, 1e-3), (400, 1e-3), (30_000, 2e-2)])
def test_a_result_is_not_withdrawn_for_whole_steps_of_codes(factor: float, least: float):
    model = shaken(TO_CODES, factor)
    result, _, context = fused(model)
    assert greatest(model, result, context.trials) > least
    assert find_failure(ir.from_proto(model), result, context.trials, CPU) is None


def rescale(result: ir.Model, error: float) -> None:
    for node in result.graph.all_nodes():
        if node.op_type in ("Attention", "GroupQueryAttention"):
            node.attributes["scale"] = ir.AttrFloat32("scale", 0.3 * (1 + error))


@pytest.mark.parametrize(
    ("factor", "text"), [(150, "'y' differs"), (1_000_000, "'exact' differs")]
)
def test_wrong_numbers_do_not_hide_in_steps_of_codes(factor: float, text: str):
    """Beyond a multiple of what the model itself moves by, and below it."""
    model = shaken(TO_CODES, factor)
    result, _, context = fused(model)
    rescale(result, 0.05)
    assert text in str(find_failure(ir.from_proto(model), result, context.trials, CPU))


@pytest.mark.parametrize(("error", "found"), [(0.0, False), (0.05, True)])
@pytest.mark.parametrize(
    ("end", "part"), [(BESIDE_ATTENTION, "'exact' differs"), (BEHIND_CODES, "'codes' has")]
)
def test_wrong_numbers_do_not_hide_in_noise(end: str, part: str, error: float, found: bool):
    """The end differs by no more than by noise; only the part by itself shows it."""
    model = shaken(end, 3000)
    result, _, context = fused(model)
    rescale(result, error)
    failure = find_failure(ir.from_proto(model), result, context.trials, CPU)
    assert greatest(model, result, context.trials) < 2e-3
    assert bool(failure) == found
    assert failure is None or part in failure


def wrong_norms(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Have the fusion get some norms wrong, by their order."""
    rewrite, seen = RmsNorm.rewrite, dict[str, int]()

    def wrong(self: RmsNorm, op: Any, out: ir.Value, **values: Any) -> Any:
        made = rewrite(self, op, out=out, **values)
        number = seen.setdefault(label(producer(out)), len(seen))
        return op.Mul(made, op.Constant(value_float=1.5)) if number in numbers else made

    monkeypatch.setattr(RmsNorm, "rewrite", wrong)


@pytest.mark.parametrize("numbers", [(3,), (0, 4), (0, 1, 2, 3, 4)])
def test_only_what_fails_is_withdrawn(monkeypatch: pytest.MonkeyPatch, numbers):
    model = exported("llama-dynamo-eager")
    wrong_norms(monkeypatch, *numbers)
    result = ortplugins.optimize(model, passes=[ortplugins.TransformerFusion()])
    (report,) = result.report.passes
    refused = [each for each in report.remarks if each.outcome.value == "refused"]
    assert len(refused) == len(numbers)
    for remark in refused:
        assert remark.reason.startswith("withdrawn after a trial on 1 x 9 tokens, 0 cached: ")
        assert remark.reason.endswith(" (SimplifiedLayerNormalization)")
    fired = collections.Counter(
        remark.reason.partition(":")[0] for remark in result.report.fired
    )
    assert fired["attention"] == 2
    assert fired["RotaryEmbedding"] == 4
    assert fired["SimplifiedLayerNormalization"] == 5 - len(numbers)
    sizes = Run(2, 5, 3)
    feeds = decoder_feeds(model, sizes, 7)
    found, expected = (opened(each).run(None, feeds) for each in (result.model, model))
    assert greatest_difference(sizes, found, expected) < 1e-5


def test_a_part_that_is_slower_is_withdrawn(monkeypatch: pytest.MonkeyPatch):
    """Results with rotary embeddings count as slower."""

    def slower(self: OriginalOnTrials, after: ir.Model, names: object) -> str | None:
        kinds = {node.op_type for node in after.graph.all_nodes()}
        return "withdrawn after a trial on x: slow" if "RotaryEmbedding" in kinds else None

    monkeypatch.setattr(OriginalOnTrials, "failure", slower)
    result = ortplugins.optimize(
        exported("llama-dynamo-eager"), passes=[ortplugins.TransformerFusion()]
    )
    (report,) = result.report.passes
    refused = {each.reason for each in report.remarks if each.outcome.value == "refused"}
    assert refused == {"withdrawn after a trial on x: slow (RotaryEmbedding)"}
    assert any(each.reason.startswith("attention") for each in result.report.fired)


def test_files_that_a_session_maps_are_left_while_it_does(monkeypatch: pytest.MonkeyPatch):
    """As Windows has it. Both sessions of a timed trial live; each has weights of its own."""
    keep_mapped_files(monkeypatch)
    text = "g (float[n, 64] x) => (float[n, 64] y) {{ y = Add(x, {0}) }}"
    weight = np.ones((64, 64), np.float32)
    before, after = (model_of(text.format(name), {name: weight}) for name in ("u", "v"))
    trial = Trial("64 rows", {"x": weight}, timed=True)
    with beside_original(before, [trial], CPU) as original:
        found = [original.failure(after, {trial.name}) for _ in range(2)]
    assert all(each is None or "times as long" in each for each in found)


@pytest.mark.parametrize("passing", [0, 1])
def test_a_model_that_fails_anyway_is_left(monkeypatch: pytest.MonkeyPatch, passing: int):
    """With all candidates, without any, and with each group of them."""
    calls = []

    def fails(self: OriginalOnTrials, after: ir.Model, names: object) -> str | None:
        calls.append(after)
        passes = passing and len(calls) == 2
        return None if passes else "withdrawn after a trial on x: wrong"

    monkeypatch.setattr(OriginalOnTrials, "failure", fails)
    model = exported("llama-dynamo-eager")
    result = ortplugins.optimize(model, passes=[ortplugins.TransformerFusion()])
    assert len(calls) == (9 if passing else 4)
    # What else may be done where attention stays.
    assert all("query heads share" in remark.reason for remark in result.report.fired)
    if not passing:
        assert not result.report.fired
        kinds, left = ([node.op_type for node in m.graph.node] for m in (model, result.model))
        assert sorted(kinds) == sorted(left)


COMPARED = """g (int64[B, S] input_ids, int64[B, S] attention_mask) => (float[B, S, 8] y)
    <int64 end = {39}, int64 most = {300}, float none = {0}, int64[1] middle = {1},
     int64[1] last = {2}> {
        wide = Unsqueeze(input_ids, last)
        hits = Equal(wide, end)
        length = Shape<start = 1, end = 2>(input_ids)
        short = Min(length, most)
        hidden = Gather(table, input_ids)
        kept = Where(hits, none, hidden)
        zero = Sub(short, short)
        part = Slice(kept, zero, short, middle)
        square = Mul(part, part)
        y = Sqrt(square)
    }"""


def test_trials_hold_what_inputs_are_compared_with_and_longer_lengths():
    model = model_of(COMPARED, {"table": np.ones((48, 8), np.float32)})
    trials = trials_of(model, 1e-4)
    ids = [trial.feeds["input_ids"] for trial in trials]
    assert all((each == 39).any() for each in ids if each.size > 1)
    assert {each.shape[0] for each in ids} == {0, 1, 2, 3}
    assert max(each.shape[1] for each in ids) > 300
    drawn = DecoderInputs(model).feeds(Run(3, 6, 0, "right"))
    matched = {value.name: array for value, array in drawn.items()}["input_ids"]
    assert not any(np.array_equal(each, matched) for each in ids)


@pytest.mark.parametrize("sizes", ["a, b, c, d, e", "batch, 3, 40"])
def test_inputs_of_unknown_role_are_tried_in_guessed_sizes(sizes: str):
    model = model_of(f"g (int64[{sizes}] x) => (y) {{ y = Neg(x) }}")
    found = trials_of(model, 1e-4)
    assert all(trial.guessed for trial in found)
    assert len({trial.feeds["x"].shape for trial in found}) > 1


def test_norms_alone_are_tried(monkeypatch: pytest.MonkeyPatch):
    model = norm(("", ""))
    wrong_norms(monkeypatch, 0)
    result = ortplugins.optimize(model, passes=[ortplugins.TransformerFusion()])
    assert not result.report.fired
    (remark,) = {each.reason for each in result.report.passes[0].remarks}
    assert remark.startswith("withdrawn after a trial on 1 x 9 tokens, 0 cached: 'y' differs")
