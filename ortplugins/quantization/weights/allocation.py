# SPDX-License-Identifier: MIT
"""Which weights deserve more bits: those that lose least error for each byte left as it is.

With a budget of bytes, weights are taken in the order of

    (error of their outputs at few bits) / (number of elements)

error = tr(D^T H D), D = dequantised - W, H = X^T X / count: the square of what is added to
the outputs for each token. Absolute, since layers add to one residual stream: on SmolLM2-135M
it is the late down_proj that come first.
"""

from __future__ import annotations

__all__ = ["worth_more_bits"]

from collections.abc import Sequence

import numpy as np


def worth_more_bits(
    errors: Sequence[float], sizes: Sequence[int], share: float = 0.03
) -> list[int]:
    """Choose weights for more bits.

    Args:
        errors: Square of what the codes of each weight add to its outputs, for each token,
            summed over the columns.
        sizes: Their numbers of elements.
        share: Of all elements, how many may be in the chosen ones.

    Returns:
        Indices, the most worthwhile first. A weight that no longer fits is passed over for
        smaller ones; one without error is never chosen.

    Raises:
        ValueError: If there are not as many errors as sizes, a size is below 1, an error is
            not finite or the share is not within 0 to 1.
    """
    if len(errors) != len(sizes):
        raise ValueError(f"{len(errors)} errors for {len(sizes)} sizes: as many are expected")
    if any(size < 1 for size in sizes) or not np.isfinite(errors).all():
        raise ValueError("sizes of 1 or more and finite errors are expected")
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}: 0 to 1 is expected")
    left = share * sum(sizes)
    chosen = []
    for i in sorted(range(len(sizes)), key=lambda i: -errors[i] / sizes[i]):
        if errors[i] > 0 and sizes[i] <= left:
            chosen.append(i)
            left -= sizes[i]
    return chosen
