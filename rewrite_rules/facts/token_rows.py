# SPDX-License-Identifier: MIT
"""Which rows of an activation are tokens, and which are padding, by the masks of a model.

A mask belongs to the activations that have its axis (:mod:`.axis_roles`), whichever place it
has there:

    [batch, sequence, K]    [sequence, batch, K]    [batch sequence, K]

Where the graph does not say whose axis it is, it is that of inputs that declare it under the
same name, or of the only token ids. That is enough to leave padding out of statistics; no
rewrite rests on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.facts.axis_roles import AxisRoles
from rewrite_rules.facts.input_roles import Kind, role_of, tables_below
from rewrite_rules.graph.parameters import constant
from rewrite_rules.shapes.dimensions import Dim

_MAX_FOLLOWED = 64


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask, and the sizes that its rows have and the tokens that it is about."""

    value: ir.Value
    rows: Dim
    tokens: Dim


class TokenRows:
    """The tokens of a model's activations."""

    def __init__(self, model: ir.Model) -> None:
        fed = [value for value in model.graph.inputs if not value.is_initializer()]
        masks = [value for value in fed if _is_mask(value)]
        self._roles = AxisRoles(model, masks)
        self._masks = [self._of(mask, fed) for mask in masks]
        self._values = ir.convenience.create_value_mapping(
            model.graph, include_subgraphs=False
        )

    def real(
        self, name: str, shape: tuple[int, ...], feed: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.bool_] | None:
        """Return which rows, ``shape[:-1]``, are tokens; None where all may be."""
        value = self._values[name]
        dims = self._roles.dims(value)
        if dims is None or len(dims) != len(shape):
            return None
        found = None
        for mask, kept in self._fed(feed):
            rows = self._placed(value, dims[:-1], mask, kept, shape[:-1])
            if rows is not None and not rows.all():
                found = rows if found is None else found & rows
        return found

    def _fed(
        self, feed: Mapping[str, NDArray[Any]]
    ) -> Iterator[tuple[_Mask, NDArray[np.bool_]]]:
        """Yield masks, and where they are of tokens: 0 where they are added to scores."""
        for mask in self._masks:
            array = feed.get(str(mask.value.name))
            if array is not None and array.ndim == 2 and array.size:
                # A float mask of zeros is added to scores, and of nothing but tokens.
                is_added = (array < 0).any() or (array.dtype.kind == "f" and not array.any())
                yield mask, array >= 0 if is_added else array != 0

    def _of(self, mask: ir.Value, fed: list[ir.Value]) -> _Mask:
        rows, tokens = self._roles.dims(mask) or ()
        others = [value for value in fed if value is not mask]
        if any(tokens in (self._roles.dims(value) or ()) for value in others):
            return _Mask(mask, rows, tokens)
        new = self._roles.last_part(tokens)
        if new is not None:
            return _Mask(mask, rows, new)
        ids = [value for value in others if any(tables_below(value))]
        named = [value for value in others if _declares(value, mask)]
        for value in (*named, *ids[: len(ids) == 1]):
            dims = self._roles.dims(value)
            if dims is not None and len(dims) >= 2:
                return _Mask(mask, dims[0], dims[1])
        return _Mask(mask, rows, tokens)

    def _placed(
        self,
        value: ir.Value,
        dims: tuple[Dim, ...],
        mask: _Mask,
        kept: NDArray[np.bool_],
        shape: tuple[int, ...],
    ) -> NDArray[np.bool_] | None:
        """Return the mask in the axes of an activation; None where it is another's."""
        if mask.tokens in dims:
            place = dims.index(mask.tokens)
            kept = kept[:, max(0, kept.shape[1] - shape[place]) :]
            at = dims.index(mask.rows) if mask.rows in dims else None
            if at is None and len(kept) > 1:
                return None
            ordered = kept if at is None or at < place else kept.T
            others = [axis for axis in range(len(shape)) if axis not in (place, at)]
            if at is None:
                ordered = kept[0]
            wide = np.expand_dims(ordered, others)
            return np.broadcast_to(wide, shape) if _fits(wide, shape) else None
        both = tuple(sorted((*mask.rows[1], *mask.tokens[1])))
        if dims != ((1, both),):
            return None
        length = shape[0] // max(1, len(kept))
        kept = kept[:, max(0, kept.shape[1] - length) :]
        first = self._rows_first(value, mask)
        if first is None or kept.size != shape[0]:
            return None
        return (kept if first else kept.T).reshape(-1)

    def _rows_first(self, value: ir.Value, mask: _Mask) -> bool | None:
        """Whether rows come before tokens where both were joined."""
        for _ in range(_MAX_FOLLOWED):
            dims = self._roles.dims(value) or ()
            if mask.rows in dims and mask.tokens in dims:
                return dims.index(mask.rows) < dims.index(mask.tokens)
            node = value.producer()
            read = [] if node is None else [v for v in node.inputs if v and not constant(v)]
            if not read:
                return None
            value = read[0]
        return None


def _is_mask(value: ir.Value) -> bool:
    shape = value.shape
    return role_of(value).kind is Kind.MASK and shape is not None and len(shape) == 2


def _declares(value: ir.Value, mask: ir.Value) -> bool:
    """Whether an input's first axes are declared as those of a mask."""
    if value.shape is None or len(value.shape) < 2 or mask.shape is None:
        return False
    return value.shape[1] == mask.shape[1] and value.shape[1] is not None


def _fits(array: NDArray[np.bool_], shape: tuple[int, ...]) -> bool:
    pairs = zip(array.shape, shape, strict=True)
    return all(size in (1, whole) for size, whole in pairs)
