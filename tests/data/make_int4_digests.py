# SPDX-License-Identifier: MIT
"""What ModelOpt's int4 functions give on arrays that anyone can make again.

    PYTHONPATH=tests python tests/data/make_int4_digests.py

wrote tests/data/int4_digests.txt beside nvidia-modelopt[onnx] 0.47.0 (numpy 2.4.6, x86-64 with
AVX512). Every function takes a module, ModelOpt's or ours, and returns named arrays: equal
ones, bit for bit. No random numbers: numpy's streams may change.
"""

import hashlib
import itertools
from pathlib import Path

import numpy as np
from builders.text_models import proto_of
from onnx import TensorProto, numpy_helper

GOLDEN = Path(__file__).with_name("int4_digests.txt")

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
                codes, scales, zeros = int4.quant_tensor(
                    w, size, axis, alpha, zero_point, bits
                )
                found[f"{case} codes"] = codes
                found[f"{case} scales"] = scales
                found[f"{case} dq"] = int4.dq_tensor(codes, scales, size, axis, zeros)
                if zeros is not None:
                    found[f"{case} zeros"] = zeros
    ratios = np.abs(numbers(3, 6 * 4))
    codes, scales, _ = int4.quant_tensor(weight(64, 64, 6), 16, alpha=ratios)
    found |= {"ratio per block codes": codes, "ratio per block scales": scales}
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
        "mixed": {"block_size": 8, "enable_mixed_quant": True},
        "gather": {"block_size": 8, "gather_quantize_axis": 1, "gather_block_size": 16},
        "column-major": {"block_size": 8, "use_column_major": True},
    }.items():
        result = int4.quantize(model(), "rtn_dq", log_level="ERROR", **options)
        for name, array in quantized(result).items():
            found[f"{label} {name}"] = array
    return found


def quantized(proto):
    read = {
        name
        for node in proto.graph.node
        if node.op_type == "DequantizeLinear"
        for name in node.input
    }
    return {
        tensor.name: numpy_helper.to_array(tensor).astype(
            np.float32 if tensor.data_type == TensorProto.FLOAT else np.int8
        )
        for tensor in proto.graph.initializer
        if tensor.name in read
    }


MAKERS = (primitives, rounded_models)


def everything(int4, makers=MAKERS):
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

    lines = (f"{digest(array)} {name}\n" for name, array in everything(int4).items())
    GOLDEN.write_text("".join(lines), encoding="utf-8")


def load():
    """Return the digests by name."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    return {name: value for value, _, name in (line.partition(" ") for line in lines)}


if __name__ == "__main__":
    main()
