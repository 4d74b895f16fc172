# SPDX-License-Identifier: MIT
"""``InferenceSession``, and how sessions of any class open on what their passes make."""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins.known_starts import Artifact, Record, find, record_of, root_of, text_of_start

if TYPE_CHECKING:
    from pathlib import Path

    from ortplugins.errors import ModelFileError
    from ortplugins.model_io.loading import LoadedModel
    from ortplugins.optimization.request import BuildRequest
    from ortplugins.report import Report
    from ortplugins.runtime.copied_options import CopiedOptions
    from session_options.plan import Plan

# What ``Report.to_dict`` returns: nobody may ask for the report of a session, and making the
# object would take a start longer than reading the entry.
ReportDict = Mapping[str, Any]
_WRITTEN_DATA_KEY = "session.optimized_model_external_initializers_file_name"
STOCK: ReportDict = {"source": "stock", "passes": (), "notes": (), "artifact": ""}


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """``onnxruntime.InferenceSession`` on the model that the passes made.

    Options without an ortplugins entry give the stock session: nothing is imported, nothing is
    written. Else the model is optimised at the first start and comes from the cache
    afterwards. The ``SessionOptions`` are not changed.
    """

    _enable_fallback: bool
    _ortplugins_report: ReportDict = STOCK

    @property
    def ortplugins_report(self) -> Report:
        """What was done to the model, and what not and why."""
        from ortplugins.report import Report

        return Report.from_dict(whole_report(self._ortplugins_report))

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
            MissingFileError, ModelFileError: If neither ortplugins nor onnxruntime can use the
                model or its data; it is an instance of onnxruntime's own error as well.
            PassError: If a pass fails and ``ortplugins.strict`` is ``"1"``; else that is a
                warning and the untouched model runs.
        """
        given = path_or_bytes, sess_options, providers, provider_options
        self._ortplugins_report = Start(self, super().__init__, given, kwargs).open()

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
        model = self._model_path or self._model_bytes
        given = model, self._sess_options_initial, providers, provider_options
        reads_config, falls_back = int(self._read_config_from_model), self._enable_fallback
        kwargs = {"enable_fallback": 0, "read_config_from_model": reads_config}
        try:
            self._ortplugins_report = Start(self, super().__init__, given, kwargs).open()
        finally:
            self._enable_fallback = falls_back


class Start:
    """What a session was asked for, and the ways to construct it.

    onnxruntime's constructor takes a ValueError or RuntimeError for a failing provider, and
    tries again on the CPU. So what is ours happens before it is called, and an artifact is
    opened without its fallback; the untouched model is opened with it.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        construct: Callable[..., None],
        given: tuple[Any, Any, Any, Any],
        kwargs: Mapping[str, Any],
        switched: Mapping[str, str] | None = None,
    ) -> None:
        """Take onnxruntime's constructor and its arguments, which may be anything.

        Where entries were ``switched`` on for sessions of others, no error of ours reaches
        their callers, unless the plan is strict.
        """
        self._session, self._construct = session, construct
        (self._model, self._options), self._providers = given[:2], given[2:]
        self._kwargs, self._switched = kwargs, switched
        self._text: str | None = None  # of a start that may be known, or is kept

    def open(self) -> ReportDict:
        """Construct the session, and log it; return the report."""
        started = time.perf_counter()
        report = self._open()
        seconds = time.perf_counter() - started
        if "ORTPLUGINS_RUN_LOG" in os.environ and report is not STOCK:  # ``ortplugins run``
            from ortplugins.session.run_log import record

            record(whole_report(report), seconds)
        _log_start(self._model, seconds, report)
        return report

    def _open(self) -> ReportDict:
        """Construct the session, on its artifact where it has one."""
        are_usable = isinstance(self._model, str | bytes | os.PathLike) and isinstance(
            self._options, onnxruntime.SessionOptions
        )
        if not are_usable:
            return self._open_given(STOCK)
        if (record := record_of(self._options)) is not None:
            ours = any(key.startswith("ortplugins.") for key in record.entries)
            if not self._switched and not ours:
                return self._open_given(STOCK)
            if (report := self._open_known(record)) is not None:
                return report
        try:
            plan = self._plan()
        except ValueError as error:  # an entry of another's session; a file that is gone
            if self._switched is None or self._switched.get("ortplugins.strict") == "1":
                raise
            self._open_given()
            return _warned(str(error))
        if not plan:
            return self._open_given(STOCK)
        if _is_ort_format(self._model):
            return self._open_given(_untouched("a model in ORT format was optimised already"))
        try:
            from ortplugins.runtime.copied_options import CopiedOptions

            given = CopiedOptions(self._options)
            providers = _providers_by_name(*self._providers)
        except Exception as error:  # most likely no session can be made of them
            note = f"SessionOptions or providers cannot be read: {error}"
            return self._open_given(_untouched(note))
        if given.have_external_weights():
            note = "external initializers were added to the SessionOptions"
            return self._open_given(_untouched(note))
        return self._open_planned(plan, given, providers)

    def _open_known(self, record: Record) -> ReportDict | None:
        """Construct the session as an earlier start did; None where none is known."""
        if record.others:
            return None
        entries = record.entries
        disabled = self._kwargs.get("disabled_optimizers")
        try:
            self._text = text_of_start(
                self._model, entries, self._switched, self._options, *self._providers, disabled
            )
            root = root_of(entries, self._switched)
        except OSError:  # of a relative path, where the working directory is gone
            return None
        artifact = None if self._text is None else find(root, self._text)
        if artifact is None:
            return None
        try:
            if artifact.report["source"] == "untouched":
                return self._open_given(artifact.report)
            from ortplugins.runtime.copied_options import CopiedOptions

            given = CopiedOptions(self._options)
            report = self._open_artifact(artifact, given)
            self._present(given)
            return report
        except Exception:  # whatever it is, who looks closer says it
            return None

    def _plan(self) -> Plan:
        """Read the plan; one that names a pass or a hint itself gets what it names."""
        from session_options.keys import enable_key
        from session_options.plan import HINT_KEY, read_plan
        from session_options.registry import pass_names

        own, switched = self._entry, self._switched
        if switched is None or own(HINT_KEY):
            return read_plan(own)
        if any(own(enable_key(name)) is not None for name in pass_names()):
            return read_plan(own)
        return read_plan(lambda key: switched.get(key) if own(key) is None else own(key))

    def _entry(self, key: str) -> str | None:
        """Return an entry of the options, or None when it was never set."""
        if (record := record_of(self._options)) is not None:
            return record.entries.get(key)
        from session_options.keys import stored

        return stored(self._options, key)

    def _open_planned(
        self, plan: Plan, given: CopiedOptions, providers: Mapping[str, dict[str, str]]
    ) -> ReportDict:
        """Construct the session on what a plan makes of the model, or as it was asked for."""
        from ortplugins.errors import OrtpluginsWarning
        from ortplugins.optimization.request import read_request
        from session_options.keys import OptionError

        if not isinstance(disabled := self._kwargs.get("disabled_optimizers"), Collection):
            # An iterator would be empty when onnxruntime reads it.
            disabled = None if disabled is None else set(disabled)
            self._kwargs = {**self._kwargs, "disabled_optimizers": disabled}
        try:
            request = read_request(
                self._model if isinstance(self._model, bytes) else _name_of(self._model),
                plan,
                given.copy(),
                self._provider_names(providers),
                disabled,
                {name: options for name, options in providers.items() if options},
            )
            report = self._find_and_open(request, given)
            if report["source"] == "untouched":
                self._open_model_of(request)
                return report
        except Exception as error:
            is_theirs = isinstance(error, OptionError) and self._switched is None
            if plan.strict or is_theirs or isinstance(error, OrtpluginsWarning):
                raise
            return self._open_untouched(error)
        self._present(given)
        return report

    def _open_model_of(self, request: BuildRequest) -> None:
        try:
            self._open_given()
        except Exception:
            request.load()  # which says what is wrong with it
            raise

    def _provider_names(self, given: Mapping[str, Any]) -> Sequence[str]:
        """Names of the providers in order, as onnxruntime chooses them when none are given."""
        if not given and _has_providers(self._options):  # which cannot be asked for names
            from ortplugins.runtime.session_settings import PROVIDERS_OF_OPTIONS

            return (PROVIDERS_OF_OPTIONS,)
        names: Sequence[str] = tuple(given) or onnxruntime.get_available_providers()
        return names

    def _find_and_open(
        self, request: BuildRequest, given: CopiedOptions, *, again: bool = False
    ) -> ReportDict:
        """Return the report; no session is open on a model that is untouched.

        An artifact that was damaged in the cache is built again, once.
        """
        from ortplugins.cache.get_or_build import discard_if_damaged, get_or_build

        artifact = get_or_build(request, build_files, self._text)
        try:
            return self._open_artifact(artifact, given)
        except NotCopiedError:
            raise
        except Exception as error:
            if not again and discard_if_damaged(request, artifact):
                return self._find_and_open(request, given, again=True)
            if request.plan.strict:
                raise
            from ortplugins.errors import PassError

            name = artifact.model or request.name
            raise PassError(f"{name} cannot be opened: {error}") from error
        finally:
            _remove_temporary(artifact, self._session)

    def _open_artifact(self, artifact: Artifact, given: CopiedOptions) -> ReportDict:
        """Open an artifact, and give way to options that it was made without."""
        report = artifact.report
        if artifact.model is None:
            if artifact.settings:
                self._open_with(self._model, given, artifact.settings)
            return report
        known = not artifact.source  # what follows was not set then
        added = None if known else given.added_initializer(artifact.source["initializers"])
        if added is not None:
            way = _untouched(f"initializer {added!r} was added to the SessionOptions")
            notes = [*report["notes"], *way["notes"]]
            return {**report, "source": "untouched", "notes": notes, "artifact": ""}
        model: str | bytes = artifact.model
        if "in_place" in artifact.flags:
            with open(model, "rb") as file:
                model = file.read()
        written = self._settings_of_written_model(artifact)
        baked = "baked" in artifact.flags
        level = {"graph_optimization_level": "ORT_DISABLE_ALL"} if baked else {}
        self._open_with(model, given, artifact.settings, {**written, **level})
        if baked and not known:
            from ortplugins.runtime.session_settings import overrides_dimensions

            if overrides_dimensions(self._session, artifact.source):
                if self._options.enable_profiling:
                    os.unlink(self._session.end_profiling())
                self._open_with(model, given, artifact.settings, written)
                note = "free dimensions are overridden, so onnxruntime optimises at this start"
                report = {**report, "notes": [*report["notes"], note]}
        return report

    def _settings_of_written_model(self, artifact: Artifact) -> dict[str, str]:
        """Return what makes ``optimized_model_filepath`` a model with data of its own.

        Else it would name the artifact's data, which lies in another folder.
        """
        path = self._options.optimized_model_filepath
        has_data = "in_place" in artifact.flags or os.path.exists(f"{artifact.model}.data")
        if not path or not has_data or self._entry(_WRITTEN_DATA_KEY):
            return {}
        return {_WRITTEN_DATA_KEY: f"{os.path.basename(path)}.data"}

    def _open_given(self, report: ReportDict = STOCK) -> ReportDict:
        """Construct the session that was asked for; return what is reported of it."""
        self._construct(self._model, self._options, *self._providers, **self._kwargs)
        return report

    def _open_with(
        self,
        model: str | bytes,
        given: CopiedOptions,
        settings: Mapping[str, str],
        faster: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Construct the session with settings that it needs, and some that it can do without.

        Copies lack operators of libraries and added devices, which the user's options have.
        """
        copied = given.copy({**settings, **faster})
        lacks_devices = _has_providers(self._options) and not _has_providers(copied)
        if lacks_devices and settings:
            raise NotCopiedError("devices")
        try:
            self._open_alone(model, self._options if lacks_devices else copied)
        except Exception:
            if not settings:
                self._open_alone(model, self._options)
                return
            if self._needs_given_options(given):
                raise NotCopiedError("libraries of custom operators") from None
            raise

    def _needs_given_options(self, given: CopiedOptions) -> bool:
        """Whether the user's model opens only on the options that were given."""
        for options in (given.copy(), self._options):
            try:
                self._open_alone(self._model, options)
                return options is self._options
            except Exception:  # onnxruntime's own classes, none of which is documented
                continue
        return False

    def _open_alone(self, model: str | bytes, options: onnxruntime.SessionOptions) -> None:
        """Construct a session on a model, and on no other where that fails."""
        kwargs = {**self._kwargs, "enable_fallback": 0}
        self._construct(model, options, *self._providers, **kwargs)

    def _open_untouched(self, error: Exception) -> ReportDict:
        """Construct the session that was asked for, as no better one can be had; say so."""
        from ortplugins.errors import MissingFileError, ModelFileError, PassError
        from session_options.keys import OptionError

        try:
            self._open_given()
        except Exception as refused:
            # Of a text that is not UTF-8 Python's own, which is of no other class, too.
            is_other = self._switched is not None or isinstance(refused, UnicodeError)
            if isinstance(error, ModelFileError) and not is_other:
                raise _as_both(error, refused) from refused
            raise  # the caller may expect this very error
        # Its data may come from elsewhere.
        if isinstance(error, MissingFileError | NotCopiedError):
            return _untouched(str(error))
        is_worded = isinstance(error, ModelFileError | PassError | OptionError)
        text = str(error) if is_worded else f"{type(error).__name__}: {error}"
        return _warned(text)

    def _present(self, given: CopiedOptions) -> None:
        """Have the session name what its caller gave, and fall back as it would.

        Packages look for files beside the model; stock ``set_providers`` opens it again.
        """
        if int(self._kwargs.get("enable_fallback", 1)) == 1:
            self._session.enable_fallback()
        is_bytes = isinstance(self._model, bytes)
        self._session._model_path = None if is_bytes else os.fspath(self._model)
        self._session._model_bytes = self._model if is_bytes else None
        self._session._sess_options_initial = self._options
        self._session._sess_options = given.copy()


def build_files(request: BuildRequest, loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """Make the files of an entry in a folder; return its manifest."""
    from ortplugins.optimization.build import build_artifact

    return build_artifact(request, loaded, folder)


class NotCopiedError(RuntimeError):
    """Copies of ``SessionOptions`` lack something that sessions on them need."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} of SessionOptions cannot be copied")


def _as_both(error: ModelFileError, refused: Exception) -> ModelFileError:
    """Return an error that is caught as ours, and as the one of onnxruntime."""
    original = type(error)
    # Where it goes to another process, ours alone can be found again.
    reduced = {"__reduce__": lambda self: (original, self.args)}
    content = {**reduced, "__module__": original.__module__}
    both: type[ModelFileError] = type(original.__name__, (original, type(refused)), content)
    return both(*error.args)


def _remove_temporary(artifact: Artifact, session: onnxruntime.InferenceSession) -> None:
    """Remove the folder of an artifact that is in no cache.

    POSIX keeps the mapped files until the session closes; Windows refuses to unlink them, so
    the folder goes with onnxruntime's own session, which holds them.
    """
    if artifact.temporary is not None:
        try:
            artifact.temporary.cleanup()
        except OSError:
            import shutil

            remove = functools.partial(shutil.rmtree, ignore_errors=True)
            weakref.finalize(session._sess, remove, artifact.temporary.name)


def _is_ort_format(path_or_bytes: str | bytes | os.PathLike[str]) -> bool:
    """Whether onnxruntime takes a model for one in its own format."""
    if isinstance(path_or_bytes, bytes):
        return path_or_bytes[4:8] == b"ORTM"
    return os.fsdecode(path_or_bytes).lower().endswith(".ort")


def _name_of(path_or_bytes: str | bytes | os.PathLike[str]) -> str:
    if isinstance(path_or_bytes, bytes):
        return "bytes"
    return os.path.abspath(os.fsdecode(path_or_bytes))


def _log_start(
    path_or_bytes: str | bytes | os.PathLike[str], seconds: float, report: ReportDict
) -> None:
    # Importing it takes milliseconds; where nobody has, nobody has asked for messages either.
    logging = sys.modules.get("logging")
    if logging is None or not (logger := logging.getLogger("ortplugins")).isEnabledFor(20):
        return
    from ortplugins.report import Report

    name = _name_of(path_or_bytes)
    logger.info("%s in %.3f s: %s", name, seconds, Report.from_dict(whole_report(report)))


def _warned(reason: str) -> ReportDict:
    """Warn that the untouched model runs, and return the report that says so."""
    from ortplugins.errors import OrtpluginsWarning
    from session_options.caller_warnings import warn_caller

    report = _untouched(reason)
    warn_caller(report["notes"][0], OrtpluginsWarning)
    return report


def whole_report(report: ReportDict) -> ReportDict:
    """Return a report with the part of it that a start which was known leaves as JSON."""
    if (stored := report.get("stored")) is None:
        return report
    import json

    whole = json.loads(stored)
    changed = {name: report[name] for name in ("source", "artifact")}
    return {**whole, **changed, "notes": [*whole["notes"], *report["notes"]]}


def _untouched(reason: str) -> ReportDict:
    notes = [f"{reason}; the untouched model runs"]
    return {**STOCK, "source": "untouched", "notes": notes}


def _has_providers(options: onnxruntime.SessionOptions) -> bool:
    """Whether providers were set by device or by policy; onnxruntime 1.24 or newer."""
    return bool(getattr(options, "has_providers", lambda: False)())


def _providers_by_name(
    providers: Sequence[Any] | None, provider_options: Sequence[dict[Any, Any]] | None
) -> dict[str, dict[str, str]]:
    """Return the options of each provider, in order; raise for what onnxruntime refuses.

    Addresses, of a stream or an allocator, mean nothing in another process.
    """
    if providers is None:
        return {}
    pairs = [(item, {}) if isinstance(item, str) else item for item in providers]
    if provider_options is not None:
        pairs = list(zip(providers, provider_options, strict=True))
    sequences = (providers, () if provider_options is None else provider_options)
    are_sequences = all(isinstance(item, Sequence) for item in sequences)
    if not are_sequences or not all(isinstance(item, tuple) for item in pairs):
        raise ValueError("they are no sequence of names, or of pairs")
    found: dict[str, dict[str, str]] = {}
    for name, given in pairs:
        kept = {
            str(key): str(value)
            for key, value in given.items()
            if not str(key).endswith("user_compute_stream")
            and not str(key).startswith("gpu_external_")
        }
        found.setdefault(str(name), kept)  # onnxruntime ignores duplicates
    return found
