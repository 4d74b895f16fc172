# SPDX-License-Identifier: MIT
"""What is fed to a transformer, by the names of its inputs: tokens, mask, positions, cache.

A mutation that renames an input, or adds one, says in the model's metadata what it holds:
``holds.NAME = KIND AXES``.
"""

import re
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

Feeds = dict[str, NDArray]

# Tokens of an encoder, and numbers below which ids and positions stay.
_ENCODED, _IDS, _PLACES = 6, 30, 38
# Of an axis that no name tells.
_OTHER = 5
# Kinds that are whole numbers, where the type is.
_WHOLE = ("ids", "flags", "unknown")
# What an input holds: a name that says it, and its sizes; digits are those declared.
_KINDS = (
    (r"encoder.*mask", "mask", "BE"),
    (r"encoder", "numbers", "BE0"),
    (r"mask", "mask", "BT"),
    (r"position", "positions", "BS"),
    (r"type_ids", "flags", "BS"),
    (r"ids", "ids", "BS"),
    (r"past", "numbers", "B0P0"),
)


class Run(NamedTuple):
    """Sizes of one run; ``padding`` is "left", "right", "holes" or none."""

    batch: int
    length: int
    past: int = 0
    padding: str = ""

    def kept(self, rng: np.random.Generator | None = None) -> NDArray[np.bool_]:
        """Return which positions hold tokens, ``[batch, past + length]``."""
        total = self.past + self.length
        place, rows = np.arange(total)[None], np.arange(self.batch)[:, None]
        if self.padding == "holes":
            assert rng is not None
            kept = rng.random((self.batch, total)) < 0.7
            kept[:, self.past] = True
            return kept
        # A token is left, behind a cache at the right.
        most = max(total - 1 - self.past * (self.padding == "right"), 0)
        padded = np.minimum(1 + 2 * rows, most) * bool(self.padding)
        return place < total - padded if self.padding == "right" else place >= padded


def held(model: onnx.ModelProto) -> dict[str, str]:
    """Return what mutations say of inputs: by name, ``KIND AXES``."""
    entries = {entry.key: entry.value for entry in model.metadata_props}
    return {k.removeprefix("holds."): v for k, v in entries.items() if k.startswith("holds.")}


def fed(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    given = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in given]


def kind_of(name: str) -> str:
    """Return what an input of some name holds, ``KIND AXES``; empty if that is not known."""
    found = (f"{kind} {axes}" for text, kind, axes in _KINDS if re.search(text, name))
    return next(found, "")


def token_feeds(
    model: onnx.ModelProto, sizes: Run, seed: int
) -> tuple[Feeds, NDArray, NDArray]:
    """Make inputs up; also return which of the positions, and of the encoded ones, count."""
    rng = np.random.default_rng([seed, 77])
    kept, said = sizes.kept(rng), held(model)
    encoded = rng.random((sizes.batch, _ENCODED)) < 0.8
    encoded[:, 2] = True
    numbers = {"B": sizes.batch, "S": sizes.length, "P": sizes.past, "E": _ENCODED, "1": 1}
    numbers["T"] = numbers["columns"] = sizes.past + sizes.length
    numbers |= {"texts": sizes.batch, "rows": sizes.length}
    feeds = {}
    for value in fed(model):
        tensor = value.type.tensor_type
        dims = tensor.shape.dim
        kind, _, axes = (said.get(value.name) or kind_of(value.name)).partition(" ")
        if len(axes) != len(dims):  # nothing says what it holds: its dimensions may
            kind, axes = "unknown", [dim.dim_param for dim in dims]
        shape = [
            dim.dim_value or numbers.get(axis, _OTHER)
            for axis, dim in zip(axes, dims, strict=True)
        ]
        array: NDArray
        if kind == "mask":
            array = encoded if axes == "BE" else kept
        elif kind == "positions":
            array = np.maximum(kept.cumsum(axis=1) - 1, 0)[:, sizes.past :]
            if seed % 3 == 2:  # those of a tree, or of several texts in one row
                array = rng.integers(0, min(array.max(initial=0) + 2, _PLACES), array.shape)
        elif kind in _WHOLE and tensor.elem_type != onnx.TensorProto.FLOAT:
            array = np.asarray(rng.integers(0, _IDS if kind == "ids" else 2, shape))
        elif kind == "bools":
            array = rng.random(shape) < 0.7
        else:
            array = np.asarray(rng.standard_normal(shape))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        feeds[value.name] = np.ascontiguousarray(array.astype(dtype))
    return feeds, kept, encoded
