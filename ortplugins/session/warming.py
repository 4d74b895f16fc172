# SPDX-License-Identifier: MIT
"""Builds cache entries ahead of the sessions that will look for them."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from ortplugins.cache.artifact import REPORT, Wanted
from ortplugins.cache.build import get_or_build
from ortplugins.cache.store import cache_of, disk_size, share
from ortplugins.errors import ModelFileError, OrtpluginsWarning, PassError
from ortplugins.report import Report
from ortplugins.runtime.stock_session import optimization_level_of
from ortplugins.session.opening import Start
from session_options import DqMatMulNBitsFusion, OptionError, Pass, PrepackedWeights
from session_options.entries import CACHE_DIR_KEY, given_entries, stored
from session_options.plan import Plan, entries_of, write_entries
from session_options.registry import option_keys

_PROVIDERS = ("CPUExecutionProvider",)
DEFAULT_PASSES = (DqMatMulNBitsFusion.name, PrepackedWeights.name)


@dataclasses.dataclass(frozen=True)
class WarmResult:
    """The result for one model.

    Attributes:
        model: Its path, as given.
        report: As ``InferenceSession.ortplugins_report``; None if it failed.
        size: Bytes of the entry; 0 if the original runs unchanged.
        error: Why it failed; empty if it did not.
    """

    model: str
    report: Report | None = None
    size: int = 0
    error: str = ""


def warm(
    models: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    passes: Sequence[Pass | str] = DEFAULT_PASSES,
    *,
    options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    session_entries: Mapping[str, str] | None = None,
    optimization_level: str = "all",
    disabled_optimizers: Collection[str] = (),
    arena: bool = True,
) -> list[WarmResult]:
    """Build the artifacts that sessions on the CPU will look for.

    They are those of ``InferenceSession(model, so, providers=["CPUExecutionProvider"])``, if
    ``so`` has the same passes, entries, level and arena, on a machine with the same processor
    features.

    Args:
        models: Paths of .onnx files, or one path.
        passes: Pass objects, or names (also a single one) with their options in ``options``.
        options: ``{"<pass>.<option>": value}`` for passes given by name.
        cache_dir: A cache directory that every user may read, for an image; by default the
            cache that a session here would use.
        session_entries: Further entries of the sessions' options.
        optimization_level: The sessions' level: ``"disable"``, ``"basic"``, ``"extended"``,
            ``"layout"`` or ``"all"``, which is onnxruntime's default.
        disabled_optimizers: The sessions' argument of that name.
        arena: The sessions' ``enable_cpu_mem_arena``.

    Returns:
        A result for each model, in order; one that fails does not stop the others.

    Raises:
        OptionError: If a pass, an option or an entry is unknown.
        UsageError: If the level is.
    """
    prepared = _prepare(passes, options, session_entries, optimization_level, cache_dir)
    if isinstance(models, str | os.PathLike):
        models = [models]
    prepared.enable_cpu_mem_arena = arena
    entries = given_entries(functools.partial(stored, prepared), option_keys)
    if not entries:
        raise OptionError("no pass is switched on, so there is nothing to build")
    results = []
    for model in models:
        given = model, prepared, _PROVIDERS, None
        session = Start(None, _not_opened, given, {"disabled_optimizers": disabled_optimizers})
        wanted = session.wanted(entries, _PROVIDERS)
        results.append(_warm_one(os.fsdecode(model), wanted))
    if cache_dir is not None and not all(item.error for item in results):
        share(cache_of(entries))
    return results


def _not_opened(*_: Any, **__: Any) -> None:
    """Stand for onnxruntime's constructor: no session is opened."""


def _prepare(
    passes: Sequence[Pass | str],
    options: Mapping[str, Any] | None = None,
    session_entries: Mapping[str, str] | None = None,
    optimization_level: str = "all",
    cache_dir: str | os.PathLike[str] | None = None,
) -> onnxruntime.SessionOptions:
    """Return the options of the sessions to come."""
    prepared = onnxruntime.SessionOptions()
    entries = {**(session_entries or {}), **entries_of(passes, options or {})}
    Plan.from_entries(entries)  # errors are raised now
    write_entries(prepared, entries)
    prepared.graph_optimization_level = optimization_level_of(optimization_level)
    if cache_dir is not None:
        prepared.add_session_config_entry(CACHE_DIR_KEY, os.path.abspath(cache_dir))
    return prepared


def _warm_one(name: str, wanted: Wanted) -> WarmResult:
    try:
        with warnings.catch_warnings():
            # A session would build for itself alone then, which is of no use here.
            warnings.filterwarnings("error", "cannot write the cache", OrtpluginsWarning)
            artifact, source = get_or_build(wanted)
    except (ModelFileError, PassError, OSError) as error:
        return WarmResult(name, error=str(error))
    except OrtpluginsWarning as warning:
        return WarmResult(name, error=f"not kept: {warning.__context__ or warning}")
    stored = Path(artifact.folder, REPORT).read_bytes()
    source = source if artifact.model or artifact.settings else "untouched"
    report = Report.of_session(stored, source, artifact.model or "", ())
    size = 0 if artifact.model is None else disk_size(Path(artifact.folder))
    return WarmResult(name, report, size)
