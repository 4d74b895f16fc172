# SPDX-License-Identifier: MIT
"""``InferenceSession``, and how sessions of any class open on what their passes make."""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.runtime.session_settings import (
    PROVIDERS_OF_OPTIONS,
    added_initializer,
    construct_with,
    options_lock,
    overrides_dimensions,
)
from session_options.caller_warnings import warn_caller
from session_options.keys import OptionError, stored
from session_options.passes import NOTHING_TO_DO
from session_options.plan import Plan, read_plan

if TYPE_CHECKING:
    from ortplugins.cache.find_or_build import Artifact
    from ortplugins.optimization.request import BuildRequest
    from ortplugins.report import Report
    from session_options.keys import Lookup

# What ``Report.to_dict`` returns: nobody may ask for the report of a session, and making the
# object would take a start longer than reading the entry.
ReportDict = Mapping[str, Any]
STOCK: ReportDict = {"source": "stock", "passes": (), "notes": (), "artifact": ""}


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """``onnxruntime.InferenceSession`` on the model that the passes made.

    Options without an ortplugins entry give the stock session: nothing is imported, nothing is
    written. Else the model is optimised at the first start and comes from the cache
    afterwards. The ``SessionOptions`` come back as they went in.
    """

    @property
    def ortplugins_report(self) -> Report:
        """What was done to the model, and what not and why."""
        from ortplugins.report import Report

        return Report.from_dict(self._ortplugins_report)

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the session; arguments as for ``onnxruntime.InferenceSession``.

        Raises:
            OptionError: If an ortplugins entry has a value that it can't have.
            MissingFileError, ModelFileError: If the model or its data can't be used.
            PassError: If a pass fails and ``ortplugins.strict`` is ``"1"``; else that is a
                warning and the untouched model runs.
        """
        self._ortplugins_report: ReportDict = STOCK
        self._ortplugins_source = path_or_bytes
        self._ortplugins_kwargs = kwargs
        if sess_options is None:
            start = time.perf_counter()
            super().__init__(path_or_bytes, None, providers, provider_options, **kwargs)
            _log_start(path_or_bytes, time.perf_counter() - start, STOCK)
            return
        self._ortplugins_report = open_session(
            self,
            super().__init__,
            read_plan,
            path_or_bytes,
            sess_options,
            providers,
            provider_options,
            kwargs,
        )

    def set_providers(
        self,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Register providers and start again, from the model that was given.

        An optimised model is for the providers it was made for.
        """
        if self._ortplugins_report["source"] == "stock":
            super().set_providers(providers, provider_options)
            return
        self.__init__(  # type: ignore[misc]
            self._ortplugins_source,
            self._sess_options_initial,
            providers,
            provider_options,
            **self._ortplugins_kwargs,
        )


def open_session(
    session: onnxruntime.InferenceSession,
    construct: Callable[..., None],
    read_plan: Callable[[Lookup], Plan],
    path_or_bytes: str | bytes | os.PathLike[str],
    options: onnxruntime.SessionOptions,
    providers: Sequence[Any] | None,
    provider_options: Sequence[dict[Any, Any]] | None,
    kwargs: Mapping[str, Any],
    *,
    opted_in: bool = True,
) -> ReportDict:
    """Read the options, find or build the artifact, and construct the session on it.

    onnxruntime's constructor takes a ValueError or RuntimeError for a failing provider, and
    tries again on the CPU. So what is ours happens before it is called, and an artifact is
    opened without its fallback; the untouched model is opened with it.

    No error of ours reaches a caller that has not ``opted_in``, unless the plan is strict; a
    missing file is left to onnxruntime: the caller may expect its very error.
    """
    start = time.perf_counter()

    def construct_on(
        model: Any, settings: Mapping[str, str] = MappingProxyType({}), **others: Any
    ) -> None:
        arguments = (model, options, providers, provider_options)
        construct_with(settings, construct, *arguments, **{**kwargs, **others})

    with options_lock(options):
        plan = read_plan(functools.partial(stored, options))
    if not plan:
        construct_on(path_or_bytes)
        _log_start(path_or_bytes, time.perf_counter() - start, STOCK)
        return STOCK
    report = _nothing_to_do(path_or_bytes, plan)
    if report is not None:
        try:
            construct_on(path_or_bytes)
        except Exception:
            report = None  # loading the model says what is wrong with it
    if report is None:
        from ortplugins.optimization.request import read_request

        with options_lock(options):
            request = read_request(
                path_or_bytes,
                plan,
                options,
                _provider_names(providers, options),
                kwargs.get("disabled_optimizers"),
                _provider_options(providers, provider_options),
            )
        artifact, report = _find_and_open(session, request, opted_in, construct_on)
        if not report["artifact"]:
            construct_on(path_or_bytes, artifact.settings if artifact.model is None else {})
        else:
            if int(kwargs.get("enable_fallback", 1)) == 1:
                session.enable_fallback()
            _call_opened(plan)
    seconds = time.perf_counter() - start
    if "ORTPLUGINS_RUN_LOG" in os.environ:  # below ``ortplugins run``
        from ortplugins.session.run_log import record

        record(report, seconds)
    _log_start(path_or_bytes, seconds, report)
    return report


def _find_and_open(
    session: onnxruntime.InferenceSession,
    request: BuildRequest,
    opted_in: bool,
    construct_on: Callable[..., None],
    *,
    again: bool = False,
) -> tuple[Artifact, ReportDict]:
    """Open the artifact of a request; one that was damaged in the cache is built again, once.

    The report's source is "untouched" where the user's model has to run.
    """
    from ortplugins.cache.find_or_build import discard_if_damaged

    artifact = _find_or_build(request, opted_in)
    try:
        return artifact, _open_artifact(session, artifact, construct_on)
    except Exception as error:
        if not again and discard_if_damaged(request, artifact):
            return _find_and_open(session, request, opted_in, construct_on, again=True)
        if request.plan.strict:
            raise
        # Whoever starts a server wants it up.
        return artifact, untouched_report(f"{artifact.model} cannot be opened: {error}")
    finally:
        _remove_temporary(artifact, session)


def _open_artifact(
    session: onnxruntime.InferenceSession,
    artifact: Artifact,
    construct_on: Callable[..., None],
) -> ReportDict:
    """Open an artifact, and give way to options that it was made without."""
    report = artifact.report
    if artifact.model is None:
        return report
    level = {"graph_optimization_level": "ORT_DISABLE_ALL"} if artifact.baked else {}
    model: str | bytes = artifact.model
    if artifact.as_bytes:
        with open(model, "rb") as file:
            model = file.read()
    construct_on(model, {**artifact.settings, **level}, enable_fallback=0)
    if (name := added_initializer(session, artifact.source)) is not None:
        note = (
            f"initializer {name!r} was added to the SessionOptions; the untouched model runs"
        )
        notes = [*report["notes"], note]
        return {**report, "source": "untouched", "notes": notes, "artifact": ""}
    if artifact.baked and overrides_dimensions(session, artifact.source):
        construct_on(model, artifact.settings, enable_fallback=0)
        note = "free dimensions are overridden, so onnxruntime optimises at this start"
        return {**report, "notes": [*report["notes"], note]}
    return report


def _remove_temporary(artifact: Artifact, session: onnxruntime.InferenceSession) -> None:
    """Remove the folder of an artifact that is in no cache.

    POSIX keeps the mapped files until the session closes; Windows refuses to unlink them, so
    the folder goes with the session.
    """
    if artifact.temporary is not None:
        try:
            artifact.temporary.cleanup()
        except OSError:
            weakref.finalize(session, artifact.temporary.cleanup)


def _nothing_to_do(
    path_or_bytes: str | bytes | os.PathLike[str], plan: Plan
) -> ReportDict | None:
    """Return the report of a start that needs no artifact; None where one has to be found."""
    from ortplugins.cache.find_or_build import lacks_operators

    if isinstance(path_or_bytes, bytes) or not lacks_operators(_name_of(path_or_bytes), plan):
        return None
    # A Report would take milliseconds to import, and nobody may ask for it.
    remark = {"node": "model", "outcome": "note", "reason": NOTHING_TO_DO}
    passes = [{"name": item.name, "seconds": 0.0, "remarks": [remark]} for item in plan.passes]
    return {**STOCK, "source": "untouched", "passes": passes}


def _name_of(path_or_bytes: str | bytes | os.PathLike[str]) -> str:
    return "bytes" if isinstance(path_or_bytes, bytes) else os.path.abspath(path_or_bytes)


def _log_start(
    path_or_bytes: str | bytes | os.PathLike[str], seconds: float, report: ReportDict
) -> None:
    # Importing it takes milliseconds; where nobody has, nobody has asked for messages either.
    logging = sys.modules.get("logging")
    if logging is None or not (logger := logging.getLogger("ortplugins")).isEnabledFor(20):
        return
    from ortplugins.report import Report

    name = _name_of(path_or_bytes)
    logger.info("%s in %.3f s: %s", name, seconds, Report.from_dict(report))


def _find_or_build(request: BuildRequest, opted_in: bool) -> Artifact:
    """Return the artifact; the untouched model's where it cannot be made, and may be run."""
    from ortplugins.cache.find_or_build import Artifact, find_or_build

    try:
        return find_or_build(request)
    except Exception as error:
        if isinstance(error, MissingFileError) and not opted_in:
            return Artifact({**STOCK, "source": "untouched", "notes": [str(error)]})
        if request.plan.strict or (opted_in and not isinstance(error, PassError)):
            raise
        worded = isinstance(error, PassError | ModelFileError | OptionError)
        message = str(error) if worded else f"{type(error).__name__}: {error}"
        return Artifact(untouched_report(message))


def _call_opened(plan: Plan) -> None:
    """Call the passes' last method; the session is there, whatever becomes of it."""
    for item in plan.passes:
        try:
            item.opened()
        except Exception as error:
            text = f"pass {item.name!r}: opened: {type(error).__name__}: {error}"
            if plan.strict:
                raise PassError(text) from error
            warn_caller(text, OrtpluginsWarning)


def untouched_report(reason: str) -> ReportDict:
    """Warn that the untouched model runs, and return the report that says so."""
    text = f"{reason}; the untouched model runs"
    warn_caller(text, OrtpluginsWarning)
    return {**STOCK, "source": "untouched", "notes": [text]}


def _provider_names(
    providers: Sequence[Any] | None, options: onnxruntime.SessionOptions
) -> tuple[str, ...]:
    """Names of the providers in order, as onnxruntime chooses them when none are given."""
    # Set by device or by policy, which cannot be asked for names; onnxruntime 1.24 or newer.
    if not providers and getattr(options, "has_providers", lambda: False)():
        return (PROVIDERS_OF_OPTIONS,)
    chosen = providers or onnxruntime.get_available_providers()
    return tuple(item if isinstance(item, str) else item[0] for item in chosen)


def _provider_options(
    providers: Sequence[Any] | None, provider_options: Sequence[dict[Any, Any]] | None
) -> dict[str, dict[str, str]]:
    """Options of the providers that have any, by their name.

    Addresses, of a stream or an allocator, mean nothing in another process.
    """
    pairs = [item for item in providers or () if not isinstance(item, str)]
    if providers and provider_options:
        pairs = list(zip(providers, provider_options, strict=False))
    return {
        name: {
            str(key): str(value)
            for key, value in given.items()
            if not str(key).endswith("user_compute_stream")
            and not str(key).startswith("gpu_external_")
        }
        for name, given in pairs
        if given
    }
