# SPDX-License-Identifier: MIT
"""Attention, rotary embeddings and projections are fused whoever exported the decoder."""

import collections
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime
import pytest
from builders.decoders import changed, genai_decoder, small_decoder
from builders.dequantized_models import assert_same_outputs, run
from builders.exports import (
    DECODERS,
    ENCODERS,
    RUNS,
    decoder_feeds,
    exported,
    fused,
    greatest_difference,
)
from builders.same_numbers import session as opened
from builders.sessions import CPU
from builders.text_models import normal, proto_of
from builders.token_batches import Run
from numpy.typing import NDArray

import ortplugins
from ortplugins.quantization import quantize

LAYERS = 2
# Sizes that the fusing itself never saw, a caller's single row of positions apart.
OTHER_RUNS = (
    Run(1, 1, 21),
    Run(4, 1, 5, "left"),
    Run(2, 17, 0, "left"),
    Run(3, 4, 9, "right"),
    Run(1, 8, 16),
)
# No tokens, no rows, nothing cached.
EMPTY = (Run(2, 0, 0), Run(1, 0, 5), Run(0, 0, 0), Run(0, 3, 0), Run(0, 1, 3), Run(0, 0, 4))
ALL_RUNS = (*RUNS, *OTHER_RUNS, *EMPTY)


def outputs_of_both(
    model: onnx.ModelProto, result: ir.Model, runs: Iterable[Run]
) -> Iterator[tuple[Run, list[NDArray], list[NDArray]]]:
    """Run both models; of empty runs, those that the original takes."""
    before, after = opened(model), opened(result)
    for seed, sizes in enumerate(runs):
        feeds = decoder_feeds(model, sizes, seed)
        try:
            expected = before.run(None, feeds)
        except Exception:  # onnxruntime's own classes
            assert sizes in EMPTY, sizes
            continue
        yield sizes, after.run(None, feeds), expected


def agrees(model: onnx.ModelProto, result: ir.Model, *runs: Run) -> None:
    for sizes, actual, expected in outputs_of_both(model, result, runs or ALL_RUNS):
        assert greatest_difference(sizes, actual, expected) < 1e-5, sizes


def counts(model: ir.Model) -> collections.Counter[str]:
    """Nodes by operator, subgraphs included."""
    return collections.Counter(node.op_type for node in model.graph.all_nodes())


# Soft caps keep their nodes.
UNCAPPED = [name for name in DECODERS if not name.startswith("gemma2")]


@pytest.mark.parametrize("name", UNCAPPED)
def test_exports_are_fused_and_right(name: str):
    model = exported(name)
    result, remarks, _ = fused(model)
    assert not remarks["refused"]
    found = counts(result)
    # Of a prompt without padding the mask is left out; one of each head takes no kernel.
    takes_prompts = not name.startswith("bloom")
    assert found["GroupQueryAttention"] == 2 * LAYERS * takes_prompts
    # A mask is asked twice, for all layers; Gemma 3 has one of a window, too.
    asked = 4 if name.startswith("gemma") else 2 * takes_prompts
    assert found["Trilu"] == asked
    # TorchScript's are of opset 17, and are converted.
    assert found["Attention"] == LAYERS
    assert result.opset_imports[""] == 23
    is_turned = not name.startswith(("bloom", "gpt2"))
    assert found["RotaryEmbedding"] == 2 * LAYERS * is_turned
    assert not found["ReduceMean"]
    # In Gemma, two norms of four stand behind a norm.
    skips = 2 * LAYERS if name.startswith(("gemma", "llama")) else 0
    assert found["SkipSimplifiedLayerNormalization"] == skips
    if name.startswith("llama-dynamo"):  # no size is computed for nodes behind
        kinds = [node.op_type for node in result.graph]
        layer = kinds[kinds.index("If") + 1 : -1 - kinds[::-1].index("If")]
        assert {*layer}.isdisjoint({"Concat", "Gather", "Reshape", "Shape", "Squeeze"})
    # The model's own nodes, behind the kernels, read each head once as well.
    expanded = [node for node in result.graph.all_nodes() if node.op_type == "Expand"]
    readers = {reader.op_type for node in expanded for reader in node.outputs[0].consumers()}
    assert "Reshape" not in readers
    agrees(model, result)
    feeds = decoder_feeds(model, sizes := Run(2, 5, 7), 1)
    if name.startswith("llama"):  # one row of positions serves the batch
        feeds["position_ids"] = feeds["position_ids"][:1]
        actual, expected = run(result, feeds), run(model, feeds)
        assert greatest_difference(sizes, actual, expected) < 1e-5


@pytest.mark.parametrize("name", ["llama-torchscript-eager", "gemma3-dynamo-sdpa"])
def test_quantized_projections_hide_no_types(name: str):
    """Behind MatMulNBits, onnx infers none; files may write none down."""
    model = quantize(exported(name), quant_format="MatMulNBits", block_size=16).model
    del model.graph.value_info[:]
    result, remarks, _ = fused(model)
    assert not remarks["refused"]
    found = counts(result)
    assert found["GroupQueryAttention"] == found["RotaryEmbedding"] == 2 * LAYERS
    assert found["Attention"] == LAYERS
    assert found["SkipSimplifiedLayerNormalization"] == 2 * LAYERS


@pytest.mark.parametrize("sizes", [Run(1, 3, 4), Run(2, 1, 0)])
def test_sizes_may_be_declared(sizes: Run):
    batch, length, past = sizes.batch, sizes.length, sizes.past
    model = small_decoder(
        ("int64[B, S]", f"int64[{batch}, {length}]"),
        ("int64[B, T]", f"int64[{batch}, {length + past}]"),
        ("P, 8]", f"{past}, 8]"),
    )
    result, remarks, _ = fused(model)
    assert not remarks["refused"]
    assert counts(result)["GroupQueryAttention"]
    agrees(model, result, sizes)


def in_branches(model: onnx.ModelProto, first: str, results: list[str]) -> None:
    """Put nodes, from one that makes a value on, into both branches of an If of ``flag``."""
    graph, branches = model.graph, {}
    made = [{*node.output} for node in graph.node]
    begin = next(i for i, names in enumerate(made) if first in names)
    end = max(i for i, names in enumerate(made) if not names.isdisjoint(results)) + 1
    names = set[str]().union(*made[begin:end])
    for branch in ("then_branch", "else_branch"):
        inside = [
            onnx.NodeProto.FromString(n.SerializeToString()) for n in graph.node[begin:end]
        ]
        for each in (each for node in inside for each in (node.input, node.output)):
            each[:] = [branch + name if name in names else name for name in each]
        ends = [onnx.helper.make_tensor_value_info(branch + name, 1, None) for name in results]
        branches[branch] = onnx.helper.make_graph(inside, branch, [], ends)
    del graph.node[begin:end]
    graph.node.insert(begin, onnx.helper.make_node("If", ["flag"], results, **branches))
    graph.input.append(onnx.helper.make_tensor_value_info("flag", 9, [1]))


@pytest.mark.parametrize(
    ("first", "results", "kernels"),
    [("hidden", ["y", "key", "value"], 4), ("k_right", ["y_rows"], 0)],
    ids=["merged by optimum", "a cache outside"],
)
def test_attention_in_branches_is_right(first: str, results: list[str], kernels: int):
    """Each has its own nodes; values of a branch are not outputs of the graph around it."""
    model = small_decoder()
    in_branches(model, first, results)
    result, remarks, _ = fused(model)
    assert len(remarks["fired"]) == 2 and not remarks["refused"]
    assert counts(result)["GroupQueryAttention"] == kernels
    for flag in (True, False):
        for sizes in (Run(2, 5, 7), Run(1, 6, 0), Run(2, 1, 3)):
            feeds = decoder_feeds(small_decoder(), sizes, 1) | {"flag": np.array([flag])}
            assert_same_outputs(result, model, feeds, rtol=1e-5, atol=1e-6)


def test_attention_that_a_builder_fused_is_left():
    result, remarks, _ = fused(genai_decoder())
    assert remarks["note"] == ["attention: GroupQueryAttention already"]
    assert counts(result)["GroupQueryAttention"] == 1


@pytest.mark.parametrize("past", [-1, 0])
def test_sizes_of_minus_1_are_open(past: int):
    model = exported("llama-dynamo-eager")
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                dim.dim_value = past if axis == 2 else -1
    result = ortplugins.optimize(model, passes=[ortplugins.TransformerFusion()])
    reasons = [remark.reason for remark in result.report.fired]
    assert sum(reason.startswith("attention: ") for reason in reasons) == LAYERS


# The kernel wants chunks after a cache one by one.
SINGLE = [one for one in RUNS if one.batch == 1 or one.length == 1 or not one.past]
SHARED = [name for name in UNCAPPED if name.endswith(("dynamo-sdpa", "torchscript-eager"))]


@pytest.mark.parametrize("name", SHARED)
def test_a_cache_in_buffers_of_the_caller(name: str):
    model = exported(name)
    result, remarks, _ = fused(model, kv_cache="shared")
    assert not remarks["refused"]
    assert counts(result)["GroupQueryAttention"] == LAYERS
    assert not counts(result)["If"]
    # A cache as long as what it holds is taken as before.
    agrees(model, result, *SINGLE)
    for sizes in (Run(0, 1, 3), Run(2, 0, 3)):
        with pytest.raises(Exception, match=r"Gather|GroupQueryAttention|Reshape"):
            run(result, decoder_feeds(model, sizes, 1))
    content = ir.to_proto(result).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=CPU)
    binding, held, buffers = session.io_binding(), {}, []
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            sizes = [3, value.shape[1], 20, value.shape[3]]
            held[value.name] = np.zeros((*sizes[:2], 0, sizes[3]), np.float32)
            # What lies behind the end must not be read.
            buffer = np.full(sizes, np.nan, np.float32)
            buffers.append(onnxruntime.OrtValue.ortvalue_from_numpy(buffer))
            binding.bind_ortvalue_input(value.name, buffers[-1])
            present = value.name.replace("past_key_values", "present")
            binding.bind_ortvalue_output(present, buffers[-1])
    for sizes in (Run(3, 6, 0, "left"), Run(3, 1, 6, "left"), Run(3, 1, 7, "left")):
        feeds = decoder_feeds(model, sizes, sizes.past) | held
        expected = run(model, feeds)
        for value in feeds.keys() - held.keys():
            binding.bind_cpu_input(value, feeds[value])
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        total = sizes.past + sizes.length
        cache = [buffer.numpy()[:, :, :total] for buffer in buffers]
        logits = binding.get_outputs()[-1].numpy()
        # The cache is compared as a whole, the logits of the new tokens.
        assert greatest_difference(sizes, [logits, *cache], expected) < 1e-5
        held = dict(zip(held, expected[1:], strict=True))


SHARING = (
    "hidden by Where, in place of an Add", "hidden by Where, turned round",
    "some earlier tokens", "the result merged by any_rows", "the result merged by any_width",
    "the result merged by sizes of others", "two attentions read one cache",
)  # fmt: skip


@pytest.mark.parametrize("name", SHARING)
def test_forms_with_a_cache_in_buffers(name: str):
    model = changed(name)
    result, remarks, _ = fused(model, kv_cache="shared")
    assert not remarks["refused"] and not counts(result)["If"]
    assert counts(result)["GroupQueryAttention"] == 1 + (name == SHARING[-1])
    agrees(model, result, *SINGLE)


def test_positions_are_no_mask_of_a_shared_cache():
    """Though the mask that is added depends on them as well."""
    model = changed("positions decide")
    result, *_ = fused(model, kv_cache="shared")
    agrees(model, result, *(one for one in SINGLE if one.batch == 1))


_DECOY = """of_others = Cast<to = 1>(%s)
    peak = ReduceMax<keepdims = 0>(of_others)
    y_less = MatMul(y_rows, o_weight)
    y = Mul(y_less, peak)"""


_BOTH = """others = Add(attention_mask, other)
    real = Cast<to = 9>(others)"""


@pytest.mark.parametrize("ids", ["attention_mask", "input_ids"])
@pytest.mark.parametrize("other", ["other_mask", "other_ids"])
def test_names_do_not_say_how_much_a_shared_cache_holds(ids: str, other: str):
    """Tokens may be called mask, and the mask positions; another input is called the same."""
    names = {"input_ids": ids, "attention_mask": "position_ids"}
    model = small_decoder(_DECOY % other, inputs=f"int64[B, M] {other}")
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for value in model.graph.input:
        value.name = names.get(value.name, value.name)
    result, *_ = fused(model, kv_cache="shared")
    for sizes in (Run(2, 6, 0), Run(2, 1, 6), Run(1, 3, 7)):
        given = decoder_feeds(small_decoder(), sizes, 1)
        feeds = {names.get(name, name): array for name, array in given.items()}
        feeds[other] = np.ones((sizes.batch, 5), np.int64)
        for a, b in zip(run(result, feeds), run(model, feeds), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("key = Concat<axis = 2>(k_turned, past_key)",), "reads 'past_key' as well"),
        (("merged = Relu(mixed)",), "goes to Relu"),
        (("peak = ReduceMax<keepdims = 0>(key)\ny = Mul(y_rows, peak)",), "reads 'key'"),
        (("seen = Identity(before)", _DECOY % "attention_mask"), "which inputs are a mask"),
        (
            (_BOTH, ("past_value)", "past_value, int64[B, T] other)")),
            "which inputs are a mask",
        ),
    ],
)
def test_a_cache_that_cannot_be_shared_is_an_error(change, reason: str):
    model = small_decoder(*change)
    with pytest.raises(ValueError, match=f"kv_cache=shared.*{reason}"):
        fused(model, kv_cache="shared")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (small_decoder(size=6), "GroupQueryAttention, which kv_cache=shared"),
        # The smoke check shows that a token sees a later one.
        (small_decoder(("LessOrEqual", "GreaterOrEqual")), "made a wrong result"),
    ],
)
def test_a_cache_is_shared_as_a_whole_or_not_at_all(model: onnx.ModelProto, reason: str):
    with pytest.raises(ortplugins.PassError, match=reason):
        ortplugins.optimize(model, passes=[ortplugins.TransformerFusion(kv_cache="shared")])


def test_a_mask_that_shows_the_next_token_stops_a_run():
    model = small_decoder("at = Add(positions, one)\nrows = Unsqueeze(at, one_axis)")
    result, *_ = fused(model, kv_cache="shared")
    with pytest.raises(Exception, match="mask_hides_later_tokens"):
        run(result, decoder_feeds(model, Run(1, 3, 2), 1))


# Heads and spellings of those make the same attention as others.
SPELT = [name for name in ENCODERS if not name.startswith(("bert-", "roberta", "xlmr"))]
SPELT += [name for name in ENCODERS if name.startswith(("bert-dynamo", "bert-torch"))]
PADDED = (Run(1, 1, 0), Run(2, 9, 0), Run(3, 7, 0, "left"), Run(4, 13, 0, "right"))
PADDED += tuple(sizes for sizes in EMPTY if not sizes.past)


@pytest.mark.parametrize("name", SPELT)
def test_encoders_are_fused_and_right(name: str):
    model = exported(name)
    result, *_ = fused(model)
    assert counts(result)["Attention"] == LAYERS
    # Behind the kernel stand nodes, for texts in which a token sees nothing.
    assert "Softmax" not in {node.op_type for node in result.graph}
    for sizes, *outputs in outputs_of_both(model, result, PADDED):
        kept = sizes.kept()
        for actual, expected in zip(*outputs, strict=True):
            assert actual.shape == expected.shape
            if actual.ndim == 3:
                actual, expected = actual[kept], expected[kept]
            elif sizes.padding:
                continue  # CLIP may pool padding
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_sizes_that_only_agree_by_name_are_checked():
    """Rows of another input that heads are split by: an error, never other heads."""
    model = exported("bert-dynamo-eager")
    feeds = {name: np.ones((2, 6), np.int64) for name in ("input_ids", "attention_mask")}
    result, *_ = fused(model)
    with pytest.raises(Exception, match=r"[Rr]eshape|broadcast"):
        run(result, feeds | {"token_type_ids": np.zeros((2, 3), np.int64)})


def projections(levels: tuple[int, int] = (4, 4)) -> onnx.ModelProto:
    """Two MatMulNBits of one input, 32 -> 16 and 32 -> 8."""
    rng, lines, weights = np.random.default_rng(2), [], {}
    for name, n, level in (("a", 16, levels[0]), ("b", 8, levels[1])):
        weights[f"{name}_codes"] = rng.integers(0, 256, (n, 1, 16)).astype(np.uint8)
        weights[f"{name}_scales"] = rng.standard_normal(n).astype(np.float32)
        form = f"<K = 32, N = {n}, bits = 4, block_size = 32, accuracy_level = {level}>"
        call = f"com.microsoft.MatMulNBits {form} (x, {name}_codes, {name}_scales)"
        lines.append(f"{name}_product = {call}  {name} = Neg ({name}_product)")
    text = f"projections (float[B, S, 32] x) => (float[] a, float[] b) {{ {' '.join(lines)} }}"
    return proto_of(text, weights)


X = {"x": normal(2, 3, 32, seed=1)}


@pytest.mark.parametrize(("levels", "left"), [((4, 4), 3), ((0, 4), 4)])
def test_projections_of_one_input_and_level_are_one(levels: tuple[int, int], left: int):
    """Weights may be tied: these multiply another input as well, and make outputs."""
    model = projections(levels)
    model.graph.node.append(onnx.helper.make_node("Neg", ["x"], ["other"]))
    for name, node in zip("cd", [model.graph.node[0], model.graph.node[2]], strict=True):
        model.graph.node.add().CopyFrom(node)
        model.graph.node[-1].input[0], model.graph.node[-1].output[0] = "other", name
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, None))
    result, remarks, _ = fused(model)
    assert counts(result)["MatMulNBits"] == left
    assert len(remarks["fired"]) == counts(result)["Split"]
    assert_same_outputs(result, model, X)
