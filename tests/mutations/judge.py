# SPDX-License-Identifier: MIT
"""Makes one mutant, rewrites it without the smoke check, and compares the numbers."""

import itertools
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import onnx
import onnx_ir as ir
from builders.same_numbers import session
from builders.token_batches import Feeds, Run, held, kind_of, token_feeds
from numpy.typing import NDArray

import ortplugins
from ortplugins.optimization import smoke_check

from .forms import FORMS, RUNS, Form
from .mutate import MUTATIONS, Mutant

# Of the greatest number; more where the original moves by as much without optimisers.
_BOUND, _NOISE = 2e-4, 10.0


# A mutation finds nothing to change, or makes what is no model.
_UNMADE = (KeyError, IndexError, ValueError, onnx.shape_inference.InferenceError,
           ir.serde.SerdeError)  # fmt: skip


class Name(NamedTuple):
    """What makes the same mutant again."""

    form: str
    mutation: str  # two are joined by " + "
    seed: int

    def __str__(self) -> str:
        return f"{self.form} / {self.mutation} / {self.seed}"


class Verdict(NamedTuple):
    """``kind``: invalid, refused, right, wrong, raised."""

    kind: str
    detail: str = ""


def mutant_of(name: Name) -> tuple[onnx.ModelProto, ortplugins.Pass] | None:
    """Make a mutant, and choose one of the passes of its form; None if it can't be."""
    rng = np.random.default_rng(
        [zlib.crc32(f"{name.form}/{name.mutation}".encode()), name.seed]
    )
    form = FORMS[name.form]
    model = onnx.ModelProto.FromString(form.make().SerializeToString())
    chosen, numbers = form.passes[rng.integers(len(form.passes))], itertools.count(1)
    for mutation in name.mutation.split(" + "):
        try:
            MUTATIONS[mutation](mutant := Mutant(model, rng, numbers))
            mutant.sort()
        except _UNMADE:
            return None
    return model, chosen


def runs_of(name: Name) -> tuple[onnx.ModelProto, ortplugins.Pass, list["_Run"], Any] | str:
    """Return a mutant, its pass, what it computes and an optimised session; or why not."""
    made = mutant_of(name)
    if made is None:
        return "the mutation does not apply"
    model, chosen = made
    try:
        original, optimised = session(model), session(model, optimised=True)
    except Exception as error:  # onnxruntime's own classes
        return str(error)[:200]
    expected = [*_expected(original, model, FORMS[name.form], name.seed)]
    return (model, chosen, expected, optimised) if expected else "the original runs nothing"


def runs(name: Name) -> bool:
    """Whether a mutant runs at all; the process may die."""
    return not isinstance(runs_of(name), str)


def judge(name: Name) -> Verdict:
    """Say what becomes of a mutant."""
    found = runs_of(name)
    if isinstance(found, str):
        return Verdict("invalid", found)
    model, chosen, expected, optimised = found
    with patch.object(smoke_check, "find_failure", lambda *_: None):
        return _compared(model, chosen, expected, optimised)


class _Run(NamedTuple):
    feeds: Feeds
    outputs: list[NDArray]
    sizes: Run | None
    kept: NDArray | None
    encoded: NDArray | None


def _expected(original: Any, model: onnx.ModelProto, form: Form, seed: int) -> Iterator[_Run]:
    """Run the original on inputs; what it does not take is left out."""
    names = {value.name for value in original.get_inputs()}
    has_past = any((held(model).get(n) or kind_of(n)).endswith("P0") for n in names)
    for index in range(len(RUNS) if form.feeds is None else 3):
        sizes = kept = encoded = None
        try:
            if form.feeds is not None:
                feeds = form.feeds(model, np.random.default_rng([seed, index]), index)
            else:
                sizes = RUNS[(index + seed) % len(RUNS)]
                sizes = sizes if has_past else sizes._replace(past=0)
                feeds, kept, encoded = token_feeds(model, sizes, seed + index)
            feeds = {key: array for key, array in feeds.items() if key in names}
            yield _Run(feeds, original.run(None, feeds), sizes, kept, encoded)
        except Exception:
            continue


def _compared(
    model: onnx.ModelProto, chosen: ortplugins.Pass, runs: list[_Run], optimised: Any
) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = ortplugins.optimize(model, passes=[chosen])
        except Exception as error:
            return Verdict("raised", f"{chosen.name}: {type(error).__name__}: {error}"[:400])
    if not result.report.fired:
        reports = [r for each in result.report.passes for r in each.remarks]
        failed = [r.reason for r in reports if "failed" in r.reason]
        return Verdict("raised", failed[0][:400]) if failed else Verdict("refused")
    try:
        rewritten = session(result.model, settings=result.session_settings)
    except Exception as error:
        return Verdict("wrong", f"{chosen.name}: it does not open: {error}"[:400])
    for run in runs:
        where = f"{chosen.name}: {run.sizes or ''} "
        try:
            found = rewritten.run(None, run.feeds)
        except Exception as error:
            return Verdict("wrong", f"{where}it does not run: {error}"[:400])
        names = [value.name for value in rewritten.get_outputs()]
        for at, (name, a, b) in enumerate(zip(names, run.outputs, found, strict=True)):
            far = _apart(a, b, run)
            if far <= _BOUND or _is_noise(far, at, run, model, optimised):
                continue
            if not _reads_unwritten(model, run, at):
                return Verdict("wrong", f"{where}{name!r} differs by {far:.1e}")
    return Verdict("right")


def _reads_unwritten(model: onnx.ModelProto, run: _Run, at: int) -> bool:
    """Whether the original differs from itself: it reads memory that nothing has written.

    As onnxruntime's Concat does where one of its inputs is empty and fits none of the others.
    What that memory holds depends on which buffers are reused.
    """
    settings = ({}, {"enable_mem_reuse": "0"})
    found = (session(model, settings=each).run(None, run.feeds)[at] for each in settings)
    return any(_apart(run.outputs[at], again, run) > _BOUND for again in found)


def _is_noise(far: float, at: int, run: _Run, model: onnx.ModelProto, optimised: Any) -> bool:
    """Whether the original moves by as much when its own optimisers or one ulp change sums."""

    def moves(opened: Any, feeds: Feeds) -> bool:
        return far <= _NOISE * _apart(run.outputs[at], opened.run(None, feeds)[at], run)

    if not np.isfinite(far):
        return False
    if moves(optimised, run.feeds):
        return True
    # Which sums an ulp changes much is chance where almost equal numbers are subtracted.
    for seed in range(4):
        rng = np.random.default_rng(seed)
        feeds = {key: _moved(array, rng) for key, array in run.feeds.items()}
        again = onnx.ModelProto.FromString(model.SerializeToString())
        for weight in again.graph.initializer:
            if len(weight.dims) > 1:
                array = _moved(onnx.numpy_helper.to_array(weight), rng)
                weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
        if moves(session(again), feeds):
            return True
    return False


def _moved(array: NDArray, rng: np.random.Generator) -> NDArray:
    """Return a neighbour of each number, nearer to zero or further away; zeros stay."""
    if array.dtype.kind != "f":
        return array
    away = np.where(rng.random(array.shape) < 0.5, np.copysign(np.inf, array), 0)
    return np.nextafter(array, np.where(array == 0, array, away).astype(array.dtype))


def _apart(a: NDArray, b: NDArray, run: _Run) -> float:
    """The greatest difference of what counts, as a share of the greatest number."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    counted = _counted(a, run)
    a, b = a[counted], b[counted]
    if not a.size or a.dtype.kind not in "fc":
        return 0.0 if np.array_equal(a, b) else np.inf
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if same.all():
            return 0.0
        far = np.abs(a.astype(np.float64) - b)[~same].max()
        greatest = np.abs(a[np.isfinite(a)].astype(np.float64)).max(initial=0.0)
    return float(far / greatest) if np.isfinite(far) and greatest else np.inf


def _counted(array: NDArray, run: _Run) -> NDArray:
    """Real positions, along axes as long as the tokens are; pools of padded rows count not."""
    counted = np.ones(array.shape, bool)
    if run.kept is None or run.sizes is None or not run.sizes.padding:
        return counted
    new = run.kept[:, run.sizes.past :]
    found = False
    for axis in range(1, array.ndim):
        rows = {run.kept.shape[1]: run.kept, new.shape[1]: new}.get(array.shape[axis])
        if rows is not None and array.shape[0] == run.sizes.batch:
            others = [i for i in range(1, array.ndim) if i != axis]
            counted &= np.expand_dims(rows, others)
            found = True
    every = run.kept.all(axis=0)
    if not found and array.shape[:1] == every.shape != (run.sizes.batch,):
        # The positions of one row: which, is not known.
        return counted & np.expand_dims(every, list(range(1, array.ndim)))
    return counted if found else counted & bool(array.ndim == 2)


def text_of(name: Name) -> str:
    return re.sub(r"\W+", "_", str(name))
