# SPDX-License-Identifier: MIT
"""AWQ draft."""

from __future__ import annotations

__all__ = ["ScaleChoice", "search_scales"]

import dataclasses
from collections.abc import Sequence

import numpy as np

from ortplugins.quantization.block_format import BlockFormat
from ortplugins.quantization.round_to_nearest import (
    Floats,
    dequantize_blocks,
    in_blocks,
    quantize_blocks,
)


@dataclasses.dataclass(frozen=True)
class ScaleChoice:
    scales: Floats
    alpha: float | None
    loss: float
    loss_of_nearest: float


def search_scales(
    weights: Sequence[Floats],
    mean_abs: Floats,
    tokens: Floats | None,
    gram: Floats | None,
    form: BlockFormat | None = None,
    *,
    alphas: Sequence[float] = tuple(np.linspace(0, 1, 21)),
    fraction: float = 1 / 8,
    relative_damping: float = 0.0,
    max_tokens: int = 128,
    wpow: float | None = None,
) -> ScaleChoice:
    form = form or BlockFormat()
    k = len(mean_abs)
    size = form.size_along(k)
    # statistic of all columns
    total = np.zeros(k)
    count = 0
    for w in weights:
        a = np.abs(in_blocks(w, size))
        a /= a.max(axis=1, keepdims=True) + 1e-30
        total += a.reshape(-1, w.shape[1])[:k].sum(1, dtype=np.float64)
        count += w.shape[1]
    w_mean = total / count
    step = round(1 / fraction)
    sub = np.concatenate([w[:, step // 2 :: step] for w in weights], 1)
    x = mean_abs.astype(np.float64)
    if gram is None or (tokens is not None and min(len(tokens), max_tokens) < k):
        t = tokens[:: max(1, len(tokens) // max_tokens)][:max_tokens]
        g = None
    else:
        t, g = None, gram
    energy = (t * t).mean(0) if g is None else np.diag(g)

    def loss(s):
        scaled = sub * s[:, None]
        d = dequantize_blocks(*quantize_blocks(scaled, form), form)
        d /= s[:, None]
        d -= sub
        if t is not None:
            y = t @ d
            r = float(np.vdot(y, y)) / len(t)
        else:
            r = float(np.vdot(d, g @ d))
        if relative_damping:
            r += relative_damping * float(energy @ np.einsum("kn,kn->k", d, d))
        return r

    best = (loss(np.ones(k, np.float32)), None, np.ones(k, np.float32))
    nearest = best[0]
    for a in alphas:
        s = np.maximum(x, 1e-30) ** a / np.maximum(w_mean, 1e-6) ** (
            1 - a if wpow is None else wpow
        )
        ok = x > 0
        s = np.where(ok, s, np.nan)
        s = s / np.sqrt(np.nanmax(s) * np.nanmin(s))
        s = np.where(np.isfinite(s), np.clip(s, 1e-4, 1e4), 1).astype(np.float32)
        v = loss(s)
        if v < best[0]:
            best = (v, a, s)
    return ScaleChoice(best[2], best[1], best[0], nearest)
