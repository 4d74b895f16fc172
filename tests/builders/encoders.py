# SPDX-License-Identifier: MIT
"""One-layer encoders of standard operators, spelled out, with a place for anything else."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from .text_models import proto_of

HIDDEN, VOCABULARY = 8, 32

ADDITIVE = """
    real = Cast<to = 1>(attention_mask)
    wide = Unsqueeze(real, middle)
    padded = Sub(one, wide)
    bias = Mul(padded, lowest)
    masked = Add(scores, bias)
"""
BOOLEAN = """
    real = Cast<to = 9>(attention_mask)
    wide = Unsqueeze(real, middle)
    masked = Where(wide, scores, minus_infinity)
"""
UNMASKED = """
    real = Cast<to = 1>(attention_mask)
    masked = Identity(scores)
"""
TOKENS = "y = Identity(hidden)"
MEAN = """
    weight = Cast<to = 1>(attention_mask)
    column = Unsqueeze(weight, last)
    kept = Mul(hidden, column)
    total = ReduceSum<keepdims = 0>(kept, middle)
    count = ReduceSum<keepdims = 0>(column, middle)
    some = Max(count, tiny)
    y = Div(total, some)
"""
FIRST = "y = Gather<axis = 1>(hidden, zero)"


def encoder(
    mask: str = ADDITIVE,
    head: str = TOKENS,
    *,
    shape: str = "batch, sequence",
    mask_type: str = "int64",
    opset: int = 17,
    extra: dict[str, NDArray[Any]] | None = None,
    output: str = "float",
) -> onnx.ModelProto:
    """Return ``embedding -> attention of one head -> head``, with more constants."""
    rng = np.random.default_rng(3)
    constants: dict[str, NDArray[Any]] = {
        "table": rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32),
        "one": np.float32(1),
        "lowest": np.float32(-3.4e38),
        "minus_infinity": np.float32(-np.inf),
        "tiny": np.float32(1e-9),
        "zero": np.int64(0),
        "first": np.array([0]),
        "middle": np.array([1]),
        "last": np.array([2]),
        **{name: _weight(rng) for name in ("query", "key", "value")},
        **(extra or {}),
    }
    text = f"""
        encoder (int64[{shape}] input_ids, {mask_type}[{shape}] attention_mask)
            => ({output}[{"batch, n, m" if "batch" in shape else "a, n, m"}] y) {{
            embedded = Gather(table, input_ids)
            q = MatMul(embedded, query)
            k = MatMul(embedded, key)
            v = MatMul(embedded, value)
            turned = Transpose<perm = [0, 2, 1]>(k)
            scores = MatMul(q, turned)
            {mask}
            weights = Softmax<axis = -1>(masked)
            mixed = MatMul(weights, v)
            hidden = Add(mixed, embedded)
            {head}
        }}
    """
    model = proto_of(text, constants, opset=opset, ir_version=8)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


def _weight(rng: np.random.Generator) -> NDArray[np.float32]:
    return (rng.standard_normal((HIDDEN, HIDDEN)) / HIDDEN**0.5).astype(np.float32)


def batch(*rows: str, length: int = 0, dtype: Any = np.int64) -> dict[str, NDArray[Any]]:
    """Return inputs whose mask is given by rows of digits, padded by 0 up to a length."""
    length = max(length, *map(len, rows)) if rows else length
    mask = np.zeros((len(rows), length), dtype)
    for row, digits in zip(mask, rows, strict=True):
        row[: len(digits)] = [int(digit) for digit in digits]
    ids = np.random.default_rng(5).integers(1, VOCABULARY, mask.shape)
    return {"input_ids": ids, "attention_mask": mask}
