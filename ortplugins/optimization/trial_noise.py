# SPDX-License-Identifier: MIT
"""How far a model moves by rounding alone, and whether a result differs by that only.

Numbers that go in are moved by one unit in the last place, and another number of threads adds
them up: what the outputs move by is the noise of the model. A result may differ by a multiple
of it where each rewritten part, run on what the original computes for it, is right by itself:

    original:  x -> [part 1] -> u -> [part 2] -> v -> y
    result:    x -> [part 1'] -> u'      u -> [part 2'] -> v'      v -> y'

Where activations are rounded to codes, a last digit moves a whole code here and there, in how
many places is chance. So parts end at codes, too, which may be one step apart as often as
floats within the bound are, and the outputs may differ by any number below the ceiling, or
by a multiple of the noise where that is more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from ortplugins.model_io.saving import save_with_data
from ortplugins.optimization.offline_optimizers import SLOW_OPTIMIZERS
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Trial

Array = NDArray[Any]
Values = Mapping[str, Array]
Outputs = list[Array]

# Draws of the noise, of which the greatest counts, and how much of it a result may differ by.
_DRAWS = 4
_FACTOR = 8.0
# The most that is allowed, of outputs and of the end of one part.
_CEILING, _PART_CEILING = 1e-2, 1e-3
_CODES_CEILING = 1.0  # of outputs, where activations are rounded to codes
# Constants up to this size are moved: weights of norms, biases, factors.
_MAX_MOVED = 1 << 16
# Operators whose first output is codes of their first input.
_ROUNDING = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
_GIVEN = ".given"


class Noise:
    """The noise of one model on trials, measured where a result asks for it."""

    def __init__(
        self,
        model: ir.Model,
        expected: Mapping[Trial, Outputs | Exception],
        providers: Sequence[str],
        folder: Path,
    ) -> None:
        """``model`` is saved in ``folder`` already; ``expected`` is what it computes."""
        self._model, self._providers, self._folder = model, providers, folder
        self._expected = {
            trial: dict(zip(_names(model), outputs, strict=True))
            for trial, outputs in expected.items()
            if not isinstance(outputs, Exception)
        }
        self._moved: dict[Trial, dict[str, float]] = {}
        # Names of the codes that activations are rounded to.
        self._codes = frozenset(
            str(node.outputs[0].name)
            for node in model.graph
            if node.op_type in _ROUNDING and constant(node.inputs[0]) is None
        )

    def excess(
        self, differences: Mapping[Trial, Mapping[str, Apart]], after: ir.Model
    ) -> tuple[Trial, str] | None:
        """Return the first difference beyond a trial's bound that is more than noise."""
        beyond = {trial: found for trial, found in differences.items() if found}
        if not beyond:
            return None
        # Steps of codes are large, however little moved them.
        least, most = (_CEILING, _CODES_CEILING) if self._codes else (0.0, _CEILING)
        shares = [(t, n, far) for t, found in beyond.items() for n, far in found.items()]
        for trial, name, far in shares:
            if far.share > most:
                return trial, _reason(name, far, most)
        asked = {trial for trial, _, far in shares if far.share > least} - self._moved.keys()
        if asked:
            feeds = {trial: trial.feeds for trial in beyond if trial in asked}
            self._moved |= self._movement(self._model, feeds, self._expected)
        for trial, name, far in shares:
            noise = self._moved.get(trial, {}).get(name, 0.0)
            allowed = max(least, _allowed(trial, noise, most))
            if far.share > allowed:
                return trial, _reason(name, far, allowed)
        return self._part_that_differs(list(beyond), after)

    def _movement(
        self,
        model: ir.Model,
        feeds: Mapping[Trial, Values],
        expected: Mapping[Trial, Values],
    ) -> dict[Trial, dict[str, float]]:
        """Return how far each output of a model moves on some trials, as a share."""
        rng, moved = np.random.default_rng(0), model.clone()
        for value in moved.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.size <= _MAX_MOVED and _is_float(tensor.dtype):
                array = _by_one_place(tensor.numpy(), rng)
                value.const_value = ir.Tensor(array, name=value.name)
        drawn = [
            {name: _by_one_place(array, rng) for name, array in feed.items()}
            for feed in feeds.values()
            for _ in range(_DRAWS)
        ]
        found = iter(self._run(moved, drawn, threads=2))
        return {
            trial: self._greatest(trial, expected[trial], [next(found) for _ in range(_DRAWS)])
            for trial in feeds
        }

    def _part_that_differs(
        self, trials: Sequence[Trial], after: ir.Model
    ) -> tuple[Trial, str] | None:
        """Run each rewritten part on what the original computes for it."""
        ends = _with_ends(self._model, _joints(self._model, after))
        whole = self._run(ends, [trial.feeds for trial in trials])
        if not all(whole):
            return trials[0], "it differs, and what is computed inside can't be fetched"
        outputs = {*_names(ends)} - {*_names(after)}
        joints = {
            name: array
            for name, array in whole[0].items()
            if name in outputs and (array.dtype.kind == "f" or name in self._codes)
        }
        expected = dict(zip(trials, whole, strict=True))
        feeds = {
            trial: {**trial.feeds, **{name + _GIVEN: values[name] for name in joints}}
            for trial, values in expected.items()
        }
        found = self._run(_in_parts(after, joints), list(feeds.values()))
        moved: dict[Trial, dict[str, float]] = {}
        for trial, values in zip(trials, found, strict=True):
            kept = {
                k: v for k, v in expected[trial].items() if k in joints or k not in outputs
            }
            for name, far in self._differences(trial, kept, values):
                if far.share > trial.bound and not moved:
                    moved = self._movement(_in_parts(self._model, joints), feeds, expected)
                noise = moved[trial][name] if moved else 0.0
                allowed = _allowed(trial, noise, _PART_CEILING)
                if far.share > allowed:
                    return trial, _reason(name, far, allowed)
        return None

    def _run(self, model: ir.Model, feeds: Sequence[Values], threads: int = 1) -> list[Values]:
        """Run a model whose weights are saved; what fails computes nothing."""
        copy, path = model.clone(), self._folder / "part.onnx"
        save_with_data(copy, path, keep_in_place=True)
        found = outputs_on(path, self._providers, feeds, threads)[1]
        for file in self._folder.glob(f"{path.name}*"):
            file.unlink()
        names = _names(model)
        return [
            {} if isinstance(outputs, Exception) else dict(zip(names, outputs, strict=True))
            for outputs in found
        ]

    def _differences(self, trial: Trial, a: Values, b: Values) -> Iterator[tuple[str, Apart]]:
        """Yield how far values are apart, where the trial counts; all of those that fail."""
        for name, array in a.items():
            if name not in b:
                yield name, Apart(np.inf, "is not computed")
            else:
                compare = _codes_apart if name in self._codes else apart
                yield name, compare(array, b[name], trial.counted(name, array.shape))

    def _greatest(
        self, trial: Trial, expected: Values, drawn: Sequence[Values]
    ) -> dict[str, float]:
        moved = dict.fromkeys(expected, 0.0)
        for values in drawn:
            for name, far in self._differences(trial, expected, values) if values else ():
                moved[name] = max(moved[name], far.share)
        return moved


def _names(model: ir.Model) -> list[str]:
    return [str(value.name) for value in model.graph.outputs]


def _reason(name: str, far: Apart, allowed: float) -> str:
    limit = f", {allowed:.0e} is allowed" if np.isfinite(far.share) else ""
    return f"{name!r} {far.text}{limit}"


def _allowed(trial: Trial, noise: float, ceiling: float) -> float:
    return max(trial.bound, min(_FACTOR * noise, ceiling))


def _is_float(dtype: ir.DataType | None) -> bool:
    return dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def _by_one_place(array: Array, rng: np.random.Generator) -> Array:
    """Move about half of the numbers to their neighbours nearer to 0, but no whole ones."""
    if array.dtype.kind != "f":
        return array
    with np.errstate(invalid="ignore"):
        stays = (array == np.round(array)) | ~np.isfinite(array)
    stays |= rng.integers(0, 2, array.shape, np.bool_)
    return np.where(stays, array, np.nextafter(array, np.zeros_like(array)))


# Models cut where a pass has replaced nodes


def _joints(before: ir.Model, after: ir.Model) -> list[str]:
    """Return names of values that another node computes in the result."""
    made = _made(before)
    return [
        name
        for name, value in _made(after).items()
        if name in made and _read_by(made[name].producer()) != _read_by(value.producer())
    ]


def _read_by(node: ir.Node | None) -> object:
    """What a node reads, by name; a value that was replaced has another."""
    return node and (
        node.op_type,
        node.domain,
        [value and value.name for value in node.inputs],
    )


def _made(model: ir.Model) -> dict[str, ir.Value]:
    return {str(value.name): value for node in model.graph for value in node.outputs}


def _with_ends(model: ir.Model, joints: Iterable[str]) -> ir.Model:
    """Return a copy with the joints as outputs, too."""
    copy = model.clone()
    made = _made(copy)
    copy.graph.outputs.extend(
        v for v in map(made.get, joints) if v and not v.is_graph_output()
    )
    return copy


def _in_parts(model: ir.Model, joints: Values) -> ir.Model:
    """Return the same, where what reads a joint reads an input like an array instead."""
    copy = _with_ends(model, joints)
    made = _made(copy)
    for name, array in joints.items():
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        given = ir.Value(name=f"{name}{_GIVEN}", type=kind)
        for node, index in made[name].uses():
            node.replace_input_with(index, given)
        copy.graph.inputs.append(given)
    return copy


# Sessions, and how far apart two of their outputs are.


class Apart(NamedTuple):
    """How far two arrays are apart: a share of the greatest number, infinite if unlike."""

    share: float
    text: str


def outputs_on(
    path: Path,
    providers: Sequence[str],
    feeds: Iterable[Mapping[str, Array]],
    threads: int = 1,
) -> tuple[Any, list[Outputs | Exception]]:
    """Run a model on feeds; return its session, and outputs or what failed."""
    feeds, results = list(feeds), list[Outputs | Exception]()
    try:
        session = _open(path, providers, threads)
    except Exception as error:  # onnxruntime's own classes, none of which is documented
        return None, [error] * len(feeds)
    for feed in feeds:
        try:
            results.append(session.run(None, dict(feed)))
        except Exception as error:
            results.append(error)
    return session, results


def _open(path: Path, providers: Sequence[str], threads: int) -> Any:
    """Open a session that rounds no activations of its own and logs nothing."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is reported by the caller
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return onnxruntime.InferenceSession(
        str(path),
        options,
        providers=list(providers),
        enable_fallback=0,
        disabled_optimizers=[*SLOW_OPTIMIZERS],
    )


def _codes_apart(a: Array, b: Array, counted: NDArray[np.bool_] | None) -> Apart:
    """Compare codes, as a share of how many there are: the mean where no step is above 1.

    Numbers that are apart by a share of their range have codes that are as far apart in the
    mean. A single step says nothing.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype.kind not in "iu":
        return apart(a, b, counted)
    steps = np.abs(a.astype(np.int64) - b)
    if counted is not None:
        steps = steps[np.broadcast_to(counted, a.shape)]
    greatest = steps.max(initial=0)
    far = (steps.mean() if steps.sum() > 1 else 0) if greatest <= 1 else greatest
    share = float(far) / (1 << 8 * a.itemsize)
    return Apart(share, f"has codes that differ by {share:.1e} of their range")


def apart(a: Array, b: Array, counted: NDArray[np.bool_] | None = None) -> Apart:
    """Compare the elements that count, all if None; the greatest number is one of ``a``."""
    if a.shape != b.shape:
        return Apart(np.inf, f"has shape {list(b.shape)} instead of {list(a.shape)}")
    if counted is not None:
        counted = np.broadcast_to(counted, a.shape)
        a, b = a[counted], b[counted]
    same = (a == b) | ((a != a) & (b != b))
    if same.all():
        return Apart(0.0, "")
    if a.dtype.kind not in "fc":
        return Apart(np.inf, f"differs in {int((~same).sum())} elements")
    wide, other = a.astype(np.float64), b.astype(np.float64)
    far = np.abs(wide[~same] - other[~same]).max()
    greatest = np.abs(wide[np.isfinite(wide)]).max(initial=0.0)
    share = float(far / greatest) if greatest and np.isfinite(far) else np.inf
    return Apart(share, f"differs by {share:.1e} of its greatest")
