# SPDX-License-Identifier: MIT
"""Compares two models: outputs, speed and memory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnxruntime

from ortplugins.errors import ModelFileError, UsageError
from ortplugins.measurement.difference import (
    Difference,
    DifferenceSum,
    find_violation,
)
from ortplugins.measurement.measure import Candidate, Cost, Measurement, measure, side_by_side
from ortplugins.measurement.models import (
    GivenModel,
    ModelSource,
    comparison_feeds,
    scratch_folder,
    unfused_in,
)
from ortplugins.model_io.saving import Progress
from ortplugins.report import Report
from ortplugins.runtime.stock_session import NUMPY_TYPES, fetch, open_model, type_of
from ortplugins.samples.made_up import Feed
from session_options import Pass


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two models differ; a is the reference.

    Attributes:
        a: The name of a.
        b: The name of b.
        samples: How many inputs both ran on.
        outputs: The differences of each output, over all samples.
        not_compared: Outputs that could not be compared, and why.
        timings: The measurements of a and b, if runs were requested.
        report: What the passes did, if b is the result of passes on a.
        failures: One text for each bound that b exceeds.
    """

    a: str
    b: str
    samples: int
    outputs: tuple[Difference, ...]
    not_compared: Mapping[str, str]
    timings: tuple[Measurement, Measurement] | None = None
    report: Report | None = None
    failures: tuple[str, ...] = ()

    @property
    def costs(self) -> list[Cost]:
        """Time and memory of both, side by side, and whether they differ."""
        return [] if self.timings is None else side_by_side(*self.timings)

    def __str__(self) -> str:
        """Return one line per output."""
        lines = [f"a: {self.a}, b: {self.b}, samples: {self.samples}"]
        lines += [f"output {d.name!r}: {d}" for d in self.outputs]
        lines += [f"output {k!r} not compared: {why}" for k, why in self.not_compared.items()]
        lines += [f"failed: {failure}" for failure in self.failures]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts, strings and numbers; infinite errors as ``"inf"``."""
        content: dict[str, Any] = dataclasses.asdict(
            dataclasses.replace(self, report=None, not_compared=dict(self.not_compared))
        )
        content["costs"] = [
            dataclasses.asdict(cost) | {"ratio": cost.ratio, "differs": cost.differs}
            for cost in self.costs
        ]
        content["report"] = None if self.report is None else self.report.to_dict()
        result: dict[str, Any] = plain(content)
        return result

    def to_json(self) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def compare(
    a: ModelSource,
    b: ModelSource | None = None,
    *,
    passes: Sequence[Pass | str] = (),
    options: Mapping[str, Any] | None = None,
    inputs: Any = None,
    dims: Mapping[str, int] | None = None,
    samples: int = 1,
    seed: int = 0,
    runs: int = 0,
    rounds: int = 5,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    rtol: float | None = None,
    atol: float | None = None,
    max_unfused: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Run two models on the same inputs and return how far they are apart.

    Outputs are computed without onnxruntime's optimisers (the graphs' own numbers), and runs
    timed with all of them (what sessions do by default).

    Args:
        a: The reference: a path, bytes, an object, a result of :func:`.optimize`, or a
            session, which is run and timed with its own settings.
        b: The other model; None for the result of ``passes`` on a.
        passes: Pass objects or names, if b is None.
        options: ``{"<pass>.<option>": value}`` for passes given by name.
        inputs: A sample (input name -> array), an iterable of them, the path of an .npz file,
            or None for random ones.
        dims: Sizes of symbolic dimensions of random inputs, by name, ``"x[1]"`` for the second
            axis of input x if it has none; others are guessed.
        samples: How many random samples.
        seed: Seed of the random samples.
        runs: Timed runs per process; 0 for no timing.
        rounds: Processes per model; in each round, one process of each model, in turn.
        providers: Execution providers.
        rtol: Bound of the outputs, ``|b - a| <= atol + rtol * |a|``; None for no bound or,
            if ``atol`` is given, for 0.
        atol: See ``rtol``; None for ``rtol`` times the output's greatest magnitude.
        max_unfused: How many nodes of b may keep a dequantised weight; None for no bound.
        progress: Called while models are timed, as by :func:`.measure`.

    Returns:
        The comparison; its ``failures`` are the bounds that b exceeds.

    Raises:
        MissingFileError, ModelFileError: If a model cannot be used, or one fails to run.
        CalibrationError: If a given input does not fit; names it.
        UsageError: If an argument is invalid; names it.
        OptionError, PassError: As :func:`.optimize`.
    """
    if (b is None) != bool(passes):
        raise UsageError("give a second model, or passes that make one: one of the two")
    for name, value in (("runs", runs), ("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:  # NaN as a bound would allow everything
            raise UsageError(f"{name} is {value}; expected 0 or more")
    if rounds < 1:
        raise UsageError(f"rounds is {rounds}; expected 1 or more")
    with scratch_folder() as scratch:
        first, report = GivenModel(a), None
        if b is None:
            from ortplugins.optimization.optimize import optimize

            target = scratch / "optimised.onnx"
            b = optimize(first.file(scratch), target, passes=passes, options=options)
            report = dataclasses.replace(b.report, artifact="")  # gone by the end
        second = GivenModel(b)
        pair = [
            model.session or open_model(model.file(scratch), "disable", providers)
            for model in (first, second)
        ]
        feeds = comparison_feeds(pair[0], inputs=inputs, dims=dims, samples=samples, seed=seed)
        _check_inputs(*pair)
        names, not_compared = _common_outputs(*pair)
        bounds = None if rtol is None and atol is None else (rtol or 0.0, atol)
        outputs, failures = _differences(pair, names, feeds, bounds)
        if bounds is not None:
            failures += [f"output {k!r} not compared: {v}" for k, v in not_compared.items()]
        if max_unfused is not None:
            failures += _too_many_unfused(second, max_unfused)
        del pair  # its sessions hold what the next ones need
        timings = None
        if runs:
            candidates = [
                Candidate(model.file(scratch), settings=model.settings, providers=providers)
                for model in (first, second)
            ]
            timings = _timed(candidates, feeds, rounds, runs, progress)
        return Comparison(
            first.name,
            second.name if report is None else "optimised",
            len(feeds),
            outputs,
            not_compared,
            timings,
            report,
            tuple(failures),
        )


def _too_many_unfused(model: GivenModel, allowed: int) -> Iterator[str]:
    """Yield a failure if more nodes than allowed keep a dequantised weight; names them."""
    unfused = unfused_in(model, final=model.is_final)
    if len(unfused) > allowed:
        named = "".join(f"\n  {node}: {why}" for node, why in unfused.items())
        yield f"nodes with a dequantised weight: {len(unfused)}, allowed {allowed}{named}"


def _timed(
    candidates: Sequence[Candidate],
    feeds: Sequence[Feed],
    rounds: int,
    runs: int,
    progress: Progress | None,
) -> tuple[Measurement, Measurement]:
    """Measure two models on the largest sample.

    Raises:
        ModelFileError: If one fails to run.
    """
    largest = max(feeds, key=lambda feed: sum(array.nbytes for array in feed.values()))
    first, second = measure(
        candidates, largest, rounds=rounds, runs=runs, lockstep=True, progress=progress
    )
    if failed := first.failed or second.failed:
        raise ModelFileError(failed)
    return first, second


def _check_inputs(a: onnxruntime.InferenceSession, b: onnxruntime.InferenceSession) -> None:
    """Raise if b has an input that a lacks; b may have fewer, which nothing reads."""
    known = {
        item.name: item.type for item in (*a.get_inputs(), *a.get_overridable_initializers())
    }
    for item in b.get_inputs():
        if item.name not in known:
            raise ModelFileError(
                f"model b takes input {item.name!r}, which model a does not have: "
                f"it has {', '.join(map(repr, known))}"
            )
        if known[item.name] != item.type:
            raise ModelFileError(
                f"input {item.name!r} is {known[item.name]} in model a, {item.type} in model b"
            )


def _common_outputs(
    a: onnxruntime.InferenceSession, b: onnxruntime.InferenceSession
) -> tuple[list[str], dict[str, str]]:
    """Return the outputs that can be compared, at least one, and why others cannot."""
    both = {which: {x.name: x for x in s.get_outputs()} for which, s in (("a", a), ("b", b))}
    reasons: dict[str, str] = {}
    for name in {**both["a"], **both["b"]}:
        for which, outputs in both.items():
            if name not in outputs:
                reasons[name] = f"model {which} has no such output"
            elif type_of(outputs[name]) not in NUMPY_TYPES:
                kind = outputs[name].type
                reasons.setdefault(name, f"is {kind}, which has no numpy array")
    names = [name for name in both["a"] if name not in reasons]
    if not names:
        listed = "; ".join(f"{name!r}: {why}" for name, why in reasons.items())
        raise ModelFileError(f"no output to compare: {listed}")
    return names, reasons


def _differences(
    pair: Sequence[onnxruntime.InferenceSession],
    names: Sequence[str],
    feeds: Sequence[Feed],
    bounds: tuple[float, float | None] | None,
) -> tuple[tuple[Difference, ...], list[str]]:
    """Return the differences of the outputs, and the worst violation of each."""
    sums = {name: DifferenceSum(name) for name in names}
    worst: dict[str, tuple[int, str]] = {}  # by the number of elements that are too far off
    for sample, feed in enumerate(feeds):
        found = [
            fetch(session, names, feed, f"model {which}, sample {sample}")
            for which, session in zip("ab", pair, strict=True)
        ]
        for name, a, b in zip(names, *found, strict=True):
            sums[name].add(a, b)
            beyond = None if bounds is None else find_violation(name, sample, a, b, *bounds)
            if beyond is not None and beyond > worst.get(name, (0, "")):
                worst[name] = beyond
    failures = [text for _, text in worst.values()]
    return tuple(item.result() for item in sums.values()), failures


def plain(content: Any) -> Any:
    """Return the same for JSON: lists for tuples, texts for numbers that are not finite."""
    if isinstance(content, Mapping):
        return {key: plain(item) for key, item in content.items()}
    if isinstance(content, list | tuple):
        return [plain(item) for item in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
