# SPDX-License-Identifier: MIT
"""Builds cache entries ahead of the sessions that will look for them, or says what misses."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from ortplugins.cache.get_or_build import get_or_build
from ortplugins.cache.key import key_content, share_digests
from ortplugins.cache.store import ArtifactCache, Entry, cache_of, disk_size, share
from ortplugins.errors import ModelFileError, OrtpluginsWarning, PassError
from ortplugins.optimization.request import BuildRequest, read_request
from ortplugins.report import Report
from ortplugins.runtime.stock_session import optimization_level_of
from ortplugins.session.opening import build_files
from session_options import DqMatMulNBitsFusion, OptionError, Pass, Plan, PrepackedWeights
from session_options.keys import PREFIX, stored
from session_options.plan import entries_of, read_plan

_PROVIDERS = ("CPUExecutionProvider",)
DEFAULT_PASSES = (DqMatMulNBitsFusion.name, PrepackedWeights.name)


@dataclasses.dataclass(frozen=True)
class WarmResult:
    """What became of one model.

    Attributes:
        model: Its path, as it was given.
        report: As ``InferenceSession.ortplugins_report``; None if it failed.
        size: Bytes of the entry; 0 where the original runs as it is.
        error: Why it failed; empty if it did not.
    """

    model: str
    report: Report | None = None
    size: int = 0
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the cache has for a session."""

    key: str
    is_present: bool
    nearest: Entry | None  # the entry that differs least
    # Part of the key, its value here and there; None where one has no such part.
    differences: tuple[tuple[str, Any, Any], ...]


def warm(
    models: Sequence[str | os.PathLike[str]],
    passes: Sequence[Pass | str] = DEFAULT_PASSES,
    *,
    options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    session_entries: Mapping[str, str] | None = None,
    optimization_level: str = "all",
    disabled_optimizers: Collection[str] = (),
) -> list[WarmResult]:
    """Build the artifacts that sessions on the CPU will look for.

    They are those of ``InferenceSession(model, so, providers=["CPUExecutionProvider"])``, if
    ``so`` has the same passes, entries and level, on a machine with the same processor
    features.

    Args:
        models: Paths of .onnx files.
        passes: Pass objects, or names with their options in ``options``.
        options: ``{"<pass>.<option>": value}`` for passes given by name.
        cache_dir: A cache directory to be read by every user, for an image; by default the
            cache that a session here would use.
        session_entries: Further entries of the sessions' options.
        optimization_level: Of the sessions: ``"disable"``, ``"basic"``, ``"extended"``,
            ``"layout"`` or ``"all"``, which is onnxruntime's default.
        disabled_optimizers: The sessions' argument of that name.

    Returns:
        What became of each model, in order; one that fails does not stop the others.

    Raises:
        OptionError: If a pass, an option or an entry is unknown.
        UsageError: If the level is.
    """
    prepared, plan = _prepare(passes, options, session_entries, optimization_level, cache_dir)
    cache = cache_of(plan)
    results = []
    for model in models:
        request = read_request(model, plan, prepared, _PROVIDERS, disabled_optimizers)
        result = _warm_one(os.fspath(model), request, cache)
        if cache_dir is not None and not result.error:
            content = key_content(request, cache.root, cache.data_locations)
            if content.is_known:
                share_digests(content.states, cache.root)
            share(cache)
        results.append(result)
    return results


def explain_miss(
    model: str | os.PathLike[str],
    passes: Sequence[Pass | str] = DEFAULT_PASSES,
    **start: Any,
) -> Explanation:
    """Find out what of a session's key differs from the nearest entry; arguments as `warm`."""
    prepared, plan = _prepare(passes, **start)
    cache = cache_of(plan)
    request = read_request(model, plan, prepared, _PROVIDERS, ())
    content = key_content(request, cache.root, cache.data_locations)
    if not content.is_known:  # a new model
        locations = list(request.load().data_files)
        content = key_content(request, cache.root, lambda _: locations)
    here = dict(_flatten(json.loads(json.dumps(content.parts))))
    compared = [
        (entry, _differences(here, dict(_flatten(entry.manifest["made_from"]))))
        for entry in cache.entries()
    ]
    digest = content.parts["digest"]
    nearest, differences = min(
        compared,
        # Those of the same model first.
        key=lambda pair: (pair[0].manifest["made_from"]["digest"] != digest, len(pair[1])),
        default=(None, ()),
    )
    # An entry with the key may be damaged.
    is_present = cache.find(content.key) is not None
    return Explanation(content.key, is_present, nearest, tuple(differences))


def _differences(
    here: Mapping[str, Any], there: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    return [
        (name, here.get(name), there.get(name))
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def _flatten(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested JSON; passes go by their names, not by their places."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flatten(value, f"{name}.{key}" if name else key)
    elif isinstance(content, list) and content and isinstance(content[0], Mapping):
        for item in content:
            yield from _flatten(item, f"{name}.{item['pass']}")
    else:
        yield name, content


def _prepare(
    passes: Sequence[Pass | str],
    options: Mapping[str, Any] | None = None,
    session_entries: Mapping[str, str] | None = None,
    optimization_level: str = "all",
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[onnxruntime.SessionOptions, Plan]:
    """Return the options of the sessions to come, and their plan."""
    prepared = onnxruntime.SessionOptions()
    for key, text in {**(session_entries or {}), **entries_of(passes, options or {})}.items():
        try:
            prepared.add_session_config_entry(key, text)
        except RuntimeError as error:
            raise OptionError(f"session entry {key!r} = {text!r}: {error}") from None
    prepared.graph_optimization_level = optimization_level_of(optimization_level)
    if cache_dir is not None:
        prepared.add_session_config_entry(f"{PREFIX}.cache_dir", os.path.abspath(cache_dir))
    plan = read_plan(functools.partial(stored, prepared))
    if not plan:
        raise OptionError("no pass is switched on, so there is nothing to build")
    return prepared, plan


def _warm_one(name: str, request: BuildRequest, cache: ArtifactCache) -> WarmResult:
    try:
        with warnings.catch_warnings():
            # A session would build for itself alone then, which is of no use here.
            without_cache = "ortplugins works without its cache"
            warnings.filterwarnings("error", without_cache, OrtpluginsWarning)
            artifact = get_or_build(request, build_files)
    except (ModelFileError, PassError, OSError) as error:
        return WarmResult(name, error=str(error))
    except OrtpluginsWarning as warning:
        return WarmResult(name, error=f"not kept: {warning.__context__ or warning}")
    if artifact.temporary is not None:
        artifact.temporary.cleanup()
        return WarmResult(name, error=f"not kept: {cache.root} could not be written")
    size = 0 if artifact.model is None else disk_size(Path(artifact.model).parent)
    return WarmResult(name, Report.from_dict(artifact.report), size)
