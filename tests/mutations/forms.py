# SPDX-License-Identifier: MIT
"""Models that mutants are made of, and inputs for them."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import onnx
from builders import decoders, encoders, exports, layout_matrix, order_graphs
from builders.attention_forms import FORMS as ATTENTION_FORMS
from builders.attention_forms import form, form_feeds
from builders.token_batches import Feeds, Run, fed
from builders.transformer_parts import LAYOUTS, REPEATS, attention, gelu, norm

from ortplugins import (
    DqMatMulNBitsFusion,
    Pass,
    ShapeSizeReorder,
    TransformerFusion,
    TrimPadding,
)

RUNS = (
    Run(1, 7), Run(2, 3, 10), Run(3, 7, 0, "left"), Run(1, 1, 13),
    Run(2, 5, 6, "right"), Run(5, 7, 0, "holes"), Run(2, 1, 6, "left"), Run(1, 37),
    Run(3, 11, 0, "right"), Run(6, 3),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Form:
    """A model, the passes it is for, and its inputs if names do not say what they are."""

    make: Callable[[], onnx.ModelProto]
    passes: tuple[Pass, ...]
    feeds: Callable[[onnx.ModelProto, np.random.Generator, int], Feeds] | None = None
    small: bool = True


def plain_feeds(model: onnx.ModelProto, rng: np.random.Generator, index: int) -> Feeds:
    """Random numbers; a name of a dimension is one size."""
    sizes: dict[str, int] = {}
    feeds = {}
    for value in fed(model):
        tensor = value.type.tensor_type
        shape = [
            dim.dim_value
            or sizes.setdefault(dim.dim_param, (3, 1, 5, 7)[(len(sizes) + index) % 4])
            for dim in tensor.shape.dim
        ]
        array = np.asarray(rng.standard_normal(shape)) * (1 + 3 * index)
        feeds[value.name] = array.astype(
            onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        )
    return feeds


def _order_feeds(model: onnx.ModelProto, rng: np.random.Generator, index: int) -> Feeds:
    feeds = order_graphs.feeds(cond=bool(index % 2))
    return {k: v + np.float32(index) if v.dtype.kind == "f" else v for k, v in feeds.items()}


def _form_feeds(model: onnx.ModelProto, rng: np.random.Generator, index: int) -> Feeds:
    texts, rows, columns = ((2, 7, 11), (3, 11, 7), (1, 1, 13), (5, 6, 6))[index % 4]
    return form_feeds(model, texts, rows, columns, int(rng.integers(99)))


TRANSFORMER = (TransformerFusion(),)
ENCODER = (TrimPadding(), TrimPadding(), TransformerFusion(), ShapeSizeReorder())
EXACT = (DqMatMulNBitsFusion(accuracy_level=0),)


def _exports() -> Iterator[tuple[str, Form]]:
    for names, passes in (
        (exports.DECODERS, (*TRANSFORMER * 4, ShapeSizeReorder())),
        (exports.ENCODERS, ENCODER),
    ):
        for name in names:
            yield name, Form(partial(exports.exported, name), passes, small=False)


def _decoders() -> Iterator[tuple[str, Form]]:
    where = "masked = Where(seen, scaled, lowest)"
    masks = {"ADDED": "", "WHERE": where}
    for rotary, mask in itertools.product(decoders.ROTARIES, masks):
        rotation = decoders.ROTARIES[rotary]
        make = partial(decoders.small_decoder, masks[mask], rotary=rotation)
        yield f"decoder {rotary} {mask}", Form(make, TRANSFORMER)
    infinite = [name for name in decoders.CASES if name.startswith("infinite")]
    for name in ("grouped on an axis", *infinite):
        yield name, Form(partial(decoders.changed, name), TRANSFORMER)


def _small_ones() -> Iterator[tuple[str, Form]]:
    passes = (TrimPadding(), TrimPadding(), TrimPadding(pack=True), TransformerFusion())
    for mask, head in itertools.product(("ADDITIVE", "BOOLEAN"), ("TOKENS", "MEAN", "FIRST")):
        make = partial(encoders.encoder, getattr(encoders, mask), getattr(encoders, head))
        yield f"encoder {mask} {head}", Form(make, passes)
    for repeat, layout in itertools.product(REPEATS, LAYOUTS):
        make = partial(attention, repeat, layout)
        yield f"heads {repeat} {layout}", Form(make, TRANSFORMER, plain_feeds)
    for name in ATTENTION_FORMS:
        yield f"form {name}", Form(partial(form, name), TRANSFORMER, _form_feeds)
    for name, make in {"norm": norm, "gelu": gelu}.items():
        yield name, Form(make, TRANSFORMER, plain_feeds)


def _case_feeds(
    case: layout_matrix.LayoutCase,
    model: onnx.ModelProto,
    rng: np.random.Generator,
    index: int,
) -> Feeds:
    return {
        k: v * np.float32(1 + index) if v.dtype == np.float32 else v
        for k, v in case.feeds.items()
    }


def _weights_and_orders() -> Iterator[tuple[str, Form]]:
    for case in layout_matrix.layout_cases():
        if case.expect and case.dtype == np.float32:
            make = partial(getattr, case, "proto")
            yield f"weight {case.name}", Form(make, EXACT, partial(_case_feeds, case))
    for seed in range(40):
        make = partial(order_graphs.random_model, seed, subgraphs=seed % 3)
        yield f"order {seed}", Form(make, (ShapeSizeReorder(),), _order_feeds)


FORMS: Mapping[str, Form] = dict(
    itertools.chain(_exports(), _decoders(), _small_ones(), _weights_and_orders())
)
# How the names of forms begin, and how often mutants are made of them.
FAMILIES = {
    "decoder export": (22, [*exports.DECODERS]),
    "encoder export": (22, [*exports.ENCODERS]),
    **{
        family: (share, [name for name in FORMS if re.match(starts, name)])
        for family, share, starts in (
            ("decoder", 18, r"decoder |grouped|infinite"),
            ("encoder", 12, "encoder "),
            ("heads, norms", 8, "heads|norm|gelu"),
            ("form", 6, "form "),
            ("weight", 8, "weight"),
            ("order", 6, "order"),
        )
    },
}
