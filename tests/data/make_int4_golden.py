# SPDX-License-Identifier: MIT
"""What ModelOpt's int4 functions give on arrays that anyone can make again.

    PYTHONPATH=tests python tests/data/make_int4_golden.py

wrote tests/data/int4_golden.npz beside nvidia-modelopt[onnx] 0.47.0 (numpy 2.4.6, x86-64 with
AVX512). Every function takes a module, ModelOpt's or ours, and returns named arrays: equal
ones, bit for bit. No random numbers: numpy's streams may change.
"""

import hashlib
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from builders.text_models import proto_of
from onnx import TensorProto, numpy_helper

GOLDEN = Path(__file__).with_name("int4_golden.npz")
SIGNATURES = GOLDEN.with_name("int4_signatures.txt")

# K, N, block: divisible, odd K with a short block, one block longer than K, one block exactly
SHAPES = ((64, 6, 16), (33, 5, 8), (21, 4, 128), (48, 5, 48))
DTYPES = ("float32", "float16", "float64")


def numbers(seed, *shape, dtype="float32"):
    """Numbers in (-1, 1), signs alternating: of three neighbours none is far from 0 alone."""
    state = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(
        2654435761 + 97 * seed
    )
    state ^= state >> np.uint64(15)
    state *= np.uint64(2246822519)
    state &= np.uint64(0xFFFFFFFF)
    magnitudes = (state ^ (state >> np.uint64(13))).astype(np.float64) / 2**32
    array = magnitudes.reshape(shape)
    return (array * (-1.0) ** np.indices(shape).sum(axis=0)).astype(dtype)


def weight(seed, k, n, dtype="float32"):
    """A column of zeros, one of tiny numbers, an outlier."""
    w = numbers(seed, k, n, dtype=dtype)
    w[:, 1] *= w.dtype.type(1e-5)
    w[:, 2] = 0
    w[0, 0] *= 8
    return w


def primitives(int4):
    """find_scales, rtn, dq_tensor and quant_tensor."""
    found = {}
    for (k, n, size), dtype in itertools.product(SHAPES, DTYPES):
        for axis, zero_point, bits in itertools.product((0, 1), (False, True), (4, 8)):
            if zero_point and bits == 8:
                continue  # ModelOpt's codes wrap around
            alphas = (1.0,) if zero_point or bits == 8 else (1.0, 0.55)
            for alpha in alphas:
                case = f"{k}x{n}/{size} {dtype} axis{axis} zp{zero_point:d} {bits}b a{alpha}"
                w = weight(k, k, n, dtype)
                how = {"quantize_axis": axis, "num_bits": bits}
                codes, scales, zeros = int4.quant_tensor(
                    w, size, alpha=alpha, use_zero_point=zero_point, **how
                )
                found[f"{case} codes"] = codes
                found[f"{case} scales"] = scales
                found[f"{case} dq"] = int4.dq_tensor(
                    codes, scales, size, zp=zeros, quantize_axis=axis
                )
                if zeros is not None:
                    found[f"{case} zeros"] = zeros
    ratios = np.abs(numbers(3, 6 * 4))
    codes, scales, _ = int4.quant_tensor(weight(64, 64, 6), 16, alpha=ratios)
    found |= {"ratio per block codes": codes, "ratio per block scales": scales}
    return found


def statistics(int4):
    """get_act_scale, get_weight_scale of single blocks, get_scale."""
    found = {}
    for dtype in DTYPES:
        x, w = numbers(1, 40, 48, dtype=dtype), weight(2, 48, 5, dtype)
        x_mean, w_mean = int4.get_act_scale(x), int4.get_weight_scale(w, 48)
        found |= {f"{dtype} x": x_mean, f"{dtype} w": w_mean}
        for alpha in (0.0, 0.3, 0.5, 1.0):
            found[f"{dtype} scale {alpha}"] = int4.get_scale(x_mean, w_mean, alpha)
    return found


class Session:
    """Answers with what it is fed."""

    def run(self, names, feed):
        return [feed[name] for name in names]


def packed(name, array, *, transposed=False, activation="x"):
    """One entry of a wa_pack."""
    stored = np.ascontiguousarray(array.T) if transposed else array
    tensor = numpy_helper.from_array(stored, name)
    return (SimpleNamespace(name=activation), tensor, transposed, tensor.data_type, name)


def searches(int4):
    """The AWQ searches: exponents and scales per node and per activation, ratios per block."""
    gains = np.linspace(0.02, 3, 48, dtype=np.float32) ** 2
    inputs = [{"x": numbers(seed, 1, 12, 48) * gains} for seed in (1, 2, 3)]
    pack = [packed("a", weight(4, 48, 20)), packed("b", weight(5, 48, 12), transposed=True)]
    places = [None, None]
    helpers, _ = int4.run_awq_scale_search_per_node(
        pack, "model.onnx", 48, False, Session(), places, inputs, "", False, False, [], {}
    )
    found = {}
    for name, helper in zip("ab", helpers, strict=True):
        found[f"node {name} alpha"] = np.array(helper.best_alpha)
        found[f"node {name} scale"] = helper.best_scale
    pack[1] = packed("b", weight(5, 48, 12))
    maps = int4.get_act_to_weight_map_and_act_to_wa_pack_map(pack)
    helpers = int4.run_awq_scale_search_per_subgraph(
        pack, *maps, "model.onnx", 48, False, Session(), [None, None], inputs, ""
    )
    found["subgraph alpha"] = np.array(helpers[1].best_alpha)
    found["subgraph scale"] = helpers[1].best_scale
    clip = int4.AWQClipHelper(weight(4, 48, 20), 16)
    search = getattr(int4, "clip_search", None) or int4._clip_search
    search(np.concatenate([feed["x"][0] for feed in inputs]), weight(4, 48, 20), clip)
    found["clip amax"] = clip.w_amax
    found["clip ratio"] = clip.best_alpha
    return found


MODEL = """g (int64[b, s] ids) => (float[b, s, 8] y) {
    ["/embed/Gather"] x = Gather (table, ids)
    ["/n/LayerNormalization"] n = LayerNormalization (x, norm)
    ["/model/layers.0/attn/q_proj/MatMul"] q = MatMul (n, wq)
    ["/model/layers.0/attn/v_proj/MatMul"] v = MatMul (n, wv)
    ["/a/Add"] a = Add (q, v)
    ["/flat/Reshape"] flat = Reshape (a, two)
    ["/model/layers.0/mlp/Gemm"] g = Gemm (flat, wg, bg)
    ["/r/Relu"] r = Relu (g)
    ["/h/Reshape"] h = Reshape (r, three)
    ["/lm_head/MatMul"] y = MatMul (h, head)
}"""


def model(k=33):
    """Gather, two MatMuls of an activation, a Gemm, an excluded head."""
    shapes = {"wq": (k, 16), "wv": (k, 16), "wg": (16, 12), "bg": (12,), "head": (12, 8)}
    tensors = {name: numbers(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    tensors |= {"table": numbers(9, 20, k), "norm": np.ones(k, np.float32)}
    tensors |= {"two": np.array([-1, 16]), "three": np.array([1, -1, 12])}
    return proto_of(MODEL, tensors, ir_version=9)


def rounded_models(int4):
    """Names, codes and scales of whole models."""
    found = {}
    for label, options in {
        "block8": {"block_size": 8},
        "block128": {},
        "column": {"block_size": -1},
        "8bit": {"block_size": 8, "layers_8bit": "v_proj"},
        "gather": {"block_size": 8, "gather_quantize_axis": 1, "gather_block_size": 16},
        "column-major": {"block_size": 8, "use_column_major": True},
    }.items():
        result = int4.quantize(model(), "rtn_dq", log_level="ERROR", **options)
        for name, array in quantized(result).items():
            found[f"{label} {name}"] = array
    return found


def quantized(proto):
    """Codes, scales and zero points by ModelOpt's names: W_i4, W_scale, W_zp."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    found = {}
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear":
            weight = re.split(r"_i4$|\.u?int[48]_block", node.input[0])[0]
            for name, suffix in zip(node.input, ("_i4", "_scale", "_zp"), strict=False):
                kind = tensors[name].data_type == TensorProto.FLOAT
                array = numpy_helper.to_array(tensors[name])
                found[weight + suffix] = array.astype(np.float32 if kind else np.int8)
    return found


# Sums and powers of floats depend on the processor in their last digit, so that these are kept
# whole; the others by their digests.
KEPT = (statistics, searches)
DIGESTED = (primitives, rounded_models)


def everything(int4, makers=(*KEPT, *DIGESTED)):
    """What some of the functions above give, by function and name."""
    return {
        f"{make.__name__}: {name}": np.asarray(array)
        for make in makers
        for name, array in make(int4).items()
    }


def digest(array):
    text = f"{array.dtype.name}{list(array.shape)}".encode()
    return hashlib.sha256(text + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def main():
    from modelopt.onnx.quantization import int4

    digests = {name: digest(array) for name, array in everything(int4, DIGESTED).items()}
    lines = "\n".join(f"{value} {name}" for name, value in digests.items())
    kept = everything(int4, KEPT)
    np.savez_compressed(
        GOLDEN,
        digests=np.frombuffer(lines.encode(), np.uint8),
        names=np.array(list(kept)),
        **{f"kept{index}": array for index, array in enumerate(kept.values())},
    )
    print(f"{len(digests)} digests, {len(kept)} arrays, {GOLDEN.stat().st_size} bytes")


def load():
    """Return the digests by name, and the arrays that were kept."""
    with np.load(GOLDEN) as file:
        lines = file["digests"].tobytes().decode().splitlines()
        kept = {str(name): file[f"kept{index}"] for index, name in enumerate(file["names"])}
    return {name: value for value, _, name in (line.partition(" ") for line in lines)}, kept


if __name__ == "__main__":
    main()
