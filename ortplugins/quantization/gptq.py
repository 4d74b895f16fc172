# SPDX-License-Identifier: MIT
"""GPTQ draft."""

from __future__ import annotations

__all__ = ["gptq"]

from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.quantization.block_format import BlockFormat
from ortplugins.quantization.round_to_nearest import Codes, Floats, ZeroPoints, block_grid

RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8)


def gptq(
    weight: npt.NDArray[Any],
    gram: npt.NDArray[Any],
    form: BlockFormat | None = None,
    *,
    order: str = "energy",
    damping: float = 0.01,
    relative_damping: float = 1.0,
    ratios: tuple[float, ...] = RATIOS,
    sequential: bool = True,
) -> tuple[Codes, Floats, ZeroPoints | None]:
    form = form or BlockFormat()
    k, n = weight.shape
    size = form.size_along(k)
    h = gram.astype(np.float64)
    energy = np.diag(h).copy()
    spans = [np.arange(s, min(s + size, k)) for s in range(0, k, size)]
    seq = list(range(len(spans)))
    if order == "energy":
        seq.sort(key=lambda b: -energy[spans[b]].mean())
    perm = np.concatenate([spans[b] for b in seq])
    mean = energy.mean()
    h[np.diag_indices(k)] += relative_damping * energy + damping * mean
    h = h[perm][:, perm]
    upper = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    diag = np.diag(upper).copy()
    feed = (upper / diag).astype(np.float32).T.copy()  # row i: what errors j < i add to row i
    cost = (diag**2).astype(np.float32)
    w = np.asarray(weight, np.float32)
    error = np.empty((k, n), np.float32)
    codes = np.empty((k, n), form.code_dtype)
    scales = np.empty((len(spans), n), np.float32)
    zero_points = None if form.is_symmetric else np.empty((len(spans), n), np.uint8)
    start = 0
    for b in seq:
        rows = spans[b]
        stop = start + len(rows)
        original = w[rows]
        target = original - feed[start:stop, :start] @ error[:start]
        inner = feed[start:stop, start:stop].copy()
        c = cost[start:stop]
        grids = [
            block_grid(
                target,
                BlockFormat(form.bits, -1, form.is_symmetric, form.grid, form.scale_type),
                np.full((1, n), r, np.float32),
            )
            for r in ratios
        ]
        if len(ratios) > 1:
            losses = []
            if sequential:
                s = np.stack([g[0][0] for g in grids])
                z = (
                    None
                    if zero_points is None
                    else np.stack([g[1][0] for g in grids]).astype(np.float32)
                )
                e = np.empty((stop - start, s.shape[0], n), np.float32)
                _run(target, original, inner, s, z, form, e, None)
                loss = np.zeros(s.shape, np.float32)
                # e is error against the original: residual of row i = e + feed @ e - ...
                flat = e.reshape(stop - start, -1)
                res = flat + np.tril(inner, -1) @ flat
                res = res.reshape(e.shape) - (target - original)[:, None]
                loss = np.einsum("i,irn->rn", c, res * res)
            else:
                for s1, z1 in grids:
                    q = np.rint(target / s1)
                    if z1 is not None:
                        q += z1
                    q = q.clip(form.lowest_code, form.highest_code)
                    if z1 is not None:
                        q -= z1
                    q = q * s1 - target
                    losses.append(c @ (q * q))
                loss = np.stack(losses)
            best = loss.argmin(0)
            scale = np.take_along_axis(np.stack([g[0][0] for g in grids]), best[None], 0)
            zero = (
                None
                if zero_points is None
                else np.take_along_axis(np.stack([g[1][0] for g in grids]), best[None], 0)
            )
        else:
            scale, zero = grids[0]
        q = np.empty((stop - start, 1, n), np.float32)
        e = error[start:stop][:, None]
        _run(
            target,
            original,
            inner,
            scale,
            None if zero is None else zero.astype(np.float32),
            form,
            e,
            q,
        )
        codes[rows] = q[:, 0]
        scales[b] = scale[0]
        if zero_points is not None:
            zero_points[b] = zero[0]
        start = stop
    return codes, scales, zero_points


def _run(target, original, inner, scale, zero, form, error, codes):
    count, r, n = error.shape
    flat = error.reshape(count, -1)
    for i in range(count):
        t = target[i] if i == 0 else target[i] - (inner[i, :i] @ flat[:i]).reshape(r, n)
        q = t / scale
        np.rint(q, out=q)
        if zero is not None:
            q += zero
        np.clip(q, form.lowest_code, form.highest_code, out=q)
        if codes is not None:
            codes[i] = q
        if zero is not None:
            q -= zero
        q *= scale
        np.subtract(q, original[i], out=error[i])
