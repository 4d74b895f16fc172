# SPDX-License-Identifier: MIT
"""What a hint measures with: the user's samples, or runs that are typical of the model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ortplugins.samples.made_up import MadeUpInputs, Run, without_initializers
from ortplugins.samples.sources import Feed, checked_feeds
from rewrite_rules.facts.input_roles import Kind, role_of

# Tokens of a prompt or a text; and those that a later step of a decoder looks back at.
_TOKENS, _LATER_TOKENS = 64, 256
# A text is padded to _TOKENS from this.
_SHORT = 16
_MAX_SAMPLES = 4


class Workload(NamedTuple):
    """Inputs to measure with, and their name in tables."""

    name: str
    feed: Feed
    has_padding: bool = False  # so that outputs there mean nothing


def workloads(
    model: ir.Model, run: Run, *, dims: Mapping[str, int], samples: str = ""
) -> list[Workload]:
    """Return the workloads of a model, or the ``samples`` of an .npz file.

    Of a decoder with a cache: a prompt, and the next token after a short and a longer past. Of
    an encoder with a mask: a whole text, and a short one that is padded. Else one run.
    """
    if samples:
        feeds = itertools.islice(checked_feeds(samples, model), _MAX_SAMPLES)
        return [Workload(f"sample {index}", feed) for index, feed in enumerate(feeds)]
    inputs = without_initializers(model.graph.inputs)
    found = list(MadeUpInputs(inputs, dims, length=_TOKENS).fitted_feeds(run))
    if len(found) == 1:
        (feed,), result = found, [Workload("run", found[0])]
        masks = [value.name or "" for value in inputs if role_of(value).kind is Kind.MASK]
        if len(masks) == 1 and feed[masks[0]].ndim == 2 and feed[masks[0]].shape[1] > _SHORT:
            mask = feed[masks[0]].copy()
            mask[:, _SHORT:] = np.zeros((), mask.dtype)
            padded = {**feed, masks[0]: mask}
            result.append(Workload("padded run", padded, has_padding=True))
        return result
    names = ("prompt", "next token")
    result = [Workload(name, feed) for name, feed in zip(names, found, strict=True)]
    if not dims:
        try:
            made = MadeUpInputs(inputs, dims, length=_LATER_TOKENS)
            later = list(made.fitted_feeds(run))[1:]
        except Exception:  # onnxruntime's own classes: the model takes no text as long
            later = []
        result += [Workload(f"next token after {_LATER_TOKENS}", feed) for feed in later]
    return result
