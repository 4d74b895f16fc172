# SPDX-License-Identifier: MIT
"""Forms of attention without a cache, as text; beside each, what looks like it."""

import re
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from .text_cases import text_cases
from .text_models import normal, proto_of

_CONSTANTS = {
    **{
        name: normal(32, 32, seed=seed) / 6
        for seed, name in enumerate(("wq", "wk", "wv", "uq", "uk", "uv"))
    },
    "split": np.array([0, 0, 4, 8]),
    "flat": np.array([0, 0, 32]),
    "flat8": np.array([0, 0, 8]),
    "of_pairs": np.array([2, 2, 1, -1]),
    "columns_of_texts": np.array([-1, 1, 0]),
    "minus_one": np.array([-1]),
    "rest": np.array([-1, 8]),
    "of_pairs_width": np.array([16]),
    "of_two_heads": np.array([0, 0, 2, 8]),
    "twice": np.array([1, 1, 2, 1, 1]),
    "q_four": np.array([0, 4, -1, 8]),
    "of_three": np.array([0, 0, 3, 4, 8]),
    "two_axis": np.array([2]),
    "three": np.array([3]),
    "four": np.array([4]),
    "eight": np.array([8]),
    "width": np.array([32]),
    "begin": np.array([0]),
    "one": np.array([1]),
    "scale": np.float32(0.3),
    "two": np.float32(2),
    "ten": np.float32(10),
    "low": np.float32(-1e8),
    "minus_two": np.float32(-2),
    "zero": np.float32(0),
    "infinity": np.float32(np.inf),
    "lowest": np.float32(np.finfo(np.float32).min),
}
FORMS = text_cases(Path(__file__).with_suffix(".txt"))


def form(name: str) -> onnx.ModelProto:
    """Return the model of one of :data:`FORMS`."""
    nodes, inputs = FORMS[name].nodes, FORMS[name].settings.get("inputs")
    more = f", {inputs}" if inputs else ""
    text = f"""g (float[batch, rows, 32] x, float[batch, columns, 32] t{more})
        => (float[a, b, c] y) {{ {nodes} }}"""
    used = {k: v for k, v in _CONSTANTS.items() if re.search(rf"\b{k}\b", nodes)}
    return proto_of(text, used)


def form_feeds(
    model: onnx.ModelProto, texts: int, rows: int, columns: int, seed: int
) -> dict[str, NDArray]:
    """Draw inputs; what a mask has for itself is 1 or of the scores, and it may hide some."""
    rng = np.random.default_rng(seed)
    known = dict.fromkeys(("batch", "texts", "texts_of_m", "n"), texts)
    known |= {"rows": rows, "rows_of_m": rows, "heads_of_m": 4 if seed in (1, 2) else 1}
    known |= dict.fromkeys(("columns", "columns_of_m", "any"), columns)
    if seed % 2:
        known |= dict.fromkeys(("texts_of_m", "rows_of_m", "n", "any"), 1)
    found = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or known[dim.dim_param] for dim in tensor.shape.dim]
        array = rng.standard_normal(shape).astype(np.float32)
        if tensor.elem_type == onnx.TensorProto.BOOL:
            array = array > -0.5
            array[:1] &= seed % 3 != 1  # a text that sees nothing
        elif value.name == "m" and seed % 3:
            array[array < -0.5] = -np.inf if seed % 3 == 1 else np.finfo(np.float32).min
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        found[value.name] = array.astype(dtype)
    return found
