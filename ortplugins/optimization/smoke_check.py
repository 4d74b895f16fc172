# SPDX-License-Identifier: MIT
"""Compares a result with its original on made-up batches: a guard against our own bugs.

That a rewrite is right is proved from the graph or checked by it at run time; a failure here
is a bug of a pass. If the original runs none of the batches, nothing is concluded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import ModelFileError, UsageError
from ortplugins.model_io.loading import is_path
from ortplugins.model_io.saving import save_with_data
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.stock_session import open_model, quiet_runner
from ortplugins.samples.made_up import Feed, MadeUpInputs, Outputs, Run
from rewrite_rules.facts.input_roles import Kind, role_of
from rewrite_rules.graph.nodes import all_nodes
from rewrite_rules.graph.parameters import constant
from session_options.entries import DATA_FOLDER_KEY

# Tokens of a text, and how many of them are padding in one batch. An unusual number, so an
# axis of this length counts tokens.
_LENGTH, _PADDING = 19, 6
_ATTEMPTS = 8  # at sizes that the original runs with
# Tolerance: a share of an output's greatest number, and an absolute one; rounding stays far
# below both.
_MOST, _ZERO = 0.1, 1e-5
_TO_CODES = ("DynamicQuantizeLinear", "QuantizeLinear")
_RANDOM = ("Random", "Bernoulli", "Multinomial")
_CPU = ("CPUExecutionProvider",)
_INT8_LEVEL = 4  # the accuracy level of MatMulNBits that rounds activations to codes

Settings = Mapping[str, str]
# Inputs, the original's outputs, and sizes of the axes that end in padding.
Batch = tuple[Feed, Outputs, set[int]]


def find_failure(
    request: BuildRequest, after: ir.Model, path: Any, needs: Settings, scratch: Path | None
) -> str | None:
    """Return what is wrong with the result ``after``, saved as ``path``; None if nothing is.

    Without ``scratch`` nothing is written, and ``path`` is the content of the file.
    """
    before, failure = request.load().model, None
    counts = not any(map(_differs_by_chance, (*all_nodes(before), *all_nodes(after))))
    folder = {} if request.data_folder is None else {DATA_FOLDER_KEY: request.data_folder}
    source: Any = request.source
    if not isinstance(source, bytes) and not is_path(source) and scratch is not None:
        source = scratch / "before.onnx"
        save_with_data(before, source)
    # onnxruntime's optimisers have bugs, too: agreement with fewer of them is enough.
    for level in dict.fromkeys((request.level, "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")):
        try:
            run = _open(request, source, {"graph_optimization_level": level, **folder})
            batches = list(_batches(before, run))
        except Exception:  # onnxruntime's own classes, none of which is documented
            if failure is None:
                return None
            continue
        del run  # two sessions hold the weights twice
        try:
            run = _open(request, path, {"graph_optimization_level": request.level, **needs})
            failure = _first_difference(run, batches, counts)
        except Exception as error:
            failure = f"it does not run: {' '.join(str(error).split())[:200]}"
        if failure is None:
            return None
    return failure


def _first_difference(run: Run, batches: Iterable[Batch], counts: bool) -> str | None:
    for feed, expected, padded in batches:
        found = run(feed)
        for name, array in expected.items():
            if failure := _difference(array, found.get(name), padded, counts):
                return f"output {name!r} {failure}"
    return None


def _open(request: BuildRequest, source: Any, settings: Settings) -> Run:
    """Open a model as the user's session does, except for settings that only affect speed."""
    there = [x for x in request.providers if x in onnxruntime.get_available_providers()]
    plain: dict[str, str | int | bool] = {
        "log_severity_level": 4,  # the caller reports failures
        "enable_cpu_mem_arena": request.cpu_arena,
        "session.intra_op.allow_spinning": "0",
        **dict(request.entries),
        **settings,
    }
    session = open_model(source, "all", there or _CPU, plain, disabled=request.disabled)
    return quiet_runner(session)


def _batches(model: ir.Model, run: Run) -> Iterator[Batch]:
    """Run a text, the next token if there is a cache, and two texts with padding."""
    one = MadeUpInputs(model.graph, length=_LENGTH)
    yield *one.fit(run, _ATTEMPTS), set()
    for feed in [*one.feeds(steps=True)][1:]:
        yield feed, run(feed), set()
    masks = [str(x.name) for x in model.graph.inputs if role_of(x).kind is Kind.MASK]
    padded = set[int]()

    def run_padded(feed: Feed) -> Outputs:
        for mask in (feed[name] for name in masks if name in feed):
            if mask.ndim == 2 and mask.shape[1] > _PADDING:
                mask[:, -_PADDING:] = 0
                padded.add(mask.shape[1])
        return run(feed)

    with contextlib.suppress(UsageError, ModelFileError):  # the model takes only one text
        two = MadeUpInputs(model.graph, {"batch": 2}, length=_LENGTH)
        yield *two.fit(run_padded, _ATTEMPTS), padded


def _differs_by_chance(node: ir.Node) -> bool:
    """Whether a node turns rounding into whole steps, or its results are random."""
    if node.op_type in _TO_CODES:
        return constant(node.inputs[0]) is None
    if node.op_type == "MatMulNBits":
        return node.attributes.get_int("accuracy_level", 0) == _INT8_LEVEL
    return node.op_type.startswith(_RANDOM)


def _difference(a: Any, b: Any | None, padded: set[int], counts: bool) -> str | None:
    """Return how an output is wrong; its numbers are compared only if they count."""
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        found = "missing" if b is None else f"{b.dtype} {list(b.shape)}"
        return f"is {found} instead of {a.dtype} {list(a.shape)}"
    if a.dtype.kind not in "fc":
        return None
    kept = tuple(slice(-_PADDING if size in padded else None) for size in a.shape)
    a, b = a[kept], b[kept]
    finite = np.isfinite(a)
    if not np.isfinite(b[finite]).all():
        return "is not finite where the original is"
    far = np.abs(b[finite] - a[finite]).max(initial=0)
    greatest = np.abs(a[finite]).max(initial=0)
    if counts and far > _MOST * greatest + _ZERO:
        return f"differs by {far:.1e}, its greatest number is {greatest:.1e}"
    return None
