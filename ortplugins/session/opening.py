# SPDX-License-Identifier: MIT
"""``InferenceSession``, and how sessions of any class open on what their passes make.

A start: the entries as given -> a key -> the entry's folder, or build it there -> open.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins.cache.artifact import REPORT, Artifact, Wanted, find_entry
from ortplugins.cache.folder import absolute
from ortplugins.runtime.copied_options import CopiedOptions
from session_options.entries import (
    DATA_FOLDER_KEY,
    HINT_KEY,
    entries_of_onnxruntime,
    given_entries,
    stored,
)

if TYPE_CHECKING:
    from ortplugins.report import Report

_WRITTEN_DATA_KEY = "session.optimized_model_external_initializers_file_name"
# Stands for providers that were set by device or by policy: they cannot be asked for names.
PROVIDERS_OF_OPTIONS = "those of the SessionOptions"


class Opened:
    """What a session was opened on; the report is parsed only when somebody asks for it."""

    __slots__ = ("artifact", "notes", "report", "source")

    def __init__(
        self, source: str, artifact: str = "", report: bytes = b"", notes: Sequence[str] = ()
    ) -> None:
        """Take the fields of a :class:`.Report`; ``report`` is the JSON of the entry."""
        self.source, self.artifact, self.report = source, artifact, report
        self.notes = tuple(notes)

    def to_report(self) -> Report:
        """Return the whole report."""
        from ortplugins.report import Report

        return Report.of_session(self.report, self.source, self.artifact, self.notes)


_STOCK = Opened("stock")


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """``onnxruntime.InferenceSession`` on the model that the passes made.

    Options without an ortplugins entry give the stock session: nothing is imported or written.
    Otherwise the model is optimised at the first start and comes from the cache afterwards.
    The ``SessionOptions`` are not changed.
    """

    _enable_fallback: bool
    _ortplugins: Opened = _STOCK

    @property
    def ortplugins_report(self) -> Report:
        """What was done to the model, and what not and why."""
        return self._ortplugins.to_report()

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
            OptionError: If the value of an ortplugins entry is invalid.
            Exception: onnxruntime's own error if it cannot use the model or its data either;
                a note says what is wrong with them.
            PassError: If a pass fails and ``ortplugins.strict`` is ``"1"``. Otherwise there
                is a warning, and the untouched model runs.
        """
        given = path_or_bytes, sess_options, providers, provider_options
        self._ortplugins = Start(self, super().__init__, given, kwargs).open()

    def set_providers(
        self,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Register providers and start again from the original model.

        An optimised model fits only the providers that it was made for.
        """
        if self._ortplugins.source == "stock":
            super().set_providers(providers, provider_options)
            return
        model = self._model_path or self._model_bytes
        given = model, self._sess_options_initial, providers, provider_options
        reads_config, falls_back = int(self._read_config_from_model), self._enable_fallback
        kwargs = {"enable_fallback": 0, "read_config_from_model": reads_config}
        try:
            self._ortplugins = Start(self, super().__init__, given, kwargs).open()
        finally:
            self._enable_fallback = falls_back


class Start:
    """The arguments of a session, and the ways to construct it.

    onnxruntime's constructor treats a ValueError or RuntimeError as a failing provider and
    tries again on the CPU. So our own work is done before it is called, and an artifact is
    opened without this fallback; the untouched model is opened with it.
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

        If entries were ``switched`` on for sessions of other packages, our errors do not
        reach the callers unless the plan is strict.
        """
        self._session, self._construct = session, construct
        (self._model, self._options), self._providers = given[:2], given[2:]
        self._kwargs, self._switched = kwargs, switched
        self._entry = partial(stored, self._options)  # which is checked before it is used
        self._settings: Mapping[str, str] = {}  # what a hint sets for the session

    def open(self) -> Opened:
        """Construct the session, and log it; return what it was opened on."""
        started = time.perf_counter()
        opened = self._open()
        _log_start(self._model, time.perf_counter() - started, opened)
        return opened

    def _open(self) -> Opened:
        """Construct the session, on its artifact where it has one."""
        are_usable = isinstance(self._model, str | bytes | os.PathLike) and isinstance(
            self._options, onnxruntime.SessionOptions
        )
        entries: Mapping[str, str] = {}
        if are_usable:
            entries = given_entries(self._entry, _keys_of_others, self._switched)
        if not entries:
            return self._open_given(_STOCK)
        if _is_ort_format(self._model):
            return self._open_given(_untouched("a model in ORT format was optimised already"))
        if self._entry("session.node_partition_config_file"):
            return self._open_given(_untouched("a file assigns the nodes of the original"))
        try:
            given = CopiedOptions(self._options)
            providers = self._provider_names()
        except Exception as error:  # most likely no session accepts them
            note = f"SessionOptions or providers cannot be read: {error}"
            return self._open_given(_untouched(note))
        if given.have_external_weights():
            note = "external initializers were added to the SessionOptions"
            return self._open_given(_untouched(note, "ORP906"))
        try:
            wanted = self.wanted(entries, providers)
        except OSError as error:  # a relative path, and the working directory is gone
            self._open_given(_STOCK)
            return _warned(f"the working directory cannot be read: {error}")
        return self._open_wanted(wanted, given)

    def wanted(self, entries: Mapping[str, str], providers: Sequence[str]) -> Wanted:
        """Return everything that the cache entry depends on."""
        if hint := entries.get(HINT_KEY):
            from session_options.presets import settings_of

            self._settings = settings_of(hint, self._entry)
        disabled = self._kwargs.get("disabled_optimizers") or ()
        if not isinstance(disabled, Collection):
            # An iterator would be empty when onnxruntime reads it.
            disabled = set(disabled)
            self._kwargs = {**self._kwargs, "disabled_optimizers": disabled}
        return Wanted(
            self._model if isinstance(self._model, bytes) else _name_of(self._model),
            {**entries, **entries_of_onnxruntime(self._entry)},
            providers,
            self._options.graph_optimization_level.name,
            disabled,
            self._options.enable_cpu_mem_arena
            and self._settings.get("enable_cpu_mem_arena", "1") == "1",
        )

    def _open_wanted(self, wanted: Wanted, given: CopiedOptions) -> Opened:
        """Construct the session on its cache entry or, failing that, on the original model."""
        try:
            opened = self._find_and_open(wanted, given)
            if opened.source == "untouched":
                self._open_model_of(wanted)
                return opened
        except Exception as error:
            from ortplugins.errors import OrtpluginsWarning
            from session_options.keys import OptionError

            is_theirs = isinstance(error, OptionError) and self._switched is None
            if wanted.is_strict or is_theirs or isinstance(error, OrtpluginsWarning):
                raise
            return self._open_untouched(error)
        self._present(given)
        return opened

    def _open_model_of(self, wanted: Wanted) -> None:
        try:
            self._open_given(_STOCK)
        except Exception:
            from ortplugins.model_io.loading import load_model

            load_model(wanted.model, wanted.data_folder)  # which says what is wrong with it
            raise

    def _provider_names(self) -> Sequence[str]:
        """Return the names of the providers that the session will have, in order.

        onnxruntime takes all providers of its wheel if none are given, leaves out those that
        the wheel lacks, and falls back to the CPU if none is left.
        """
        given = _names_of_providers(*self._providers)
        if not given and _has_providers(self._options):
            return (PROVIDERS_OF_OPTIONS,)
        available: list[str] = onnxruntime.get_available_providers()
        if not given:
            return available
        absent = {*onnxruntime.get_all_providers()} - {*available}
        return [name for name in given if name not in absent] or ("CPUExecutionProvider",)

    def _find_and_open(
        self, wanted: Wanted, given: CopiedOptions, *, is_second: bool = False
    ) -> Opened:
        """Open the entry and describe it; for an untouched model, leave that to the caller.

        An entry that was damaged in the cache is rebuilt once.
        """
        if wanted.is_in_memory:
            from ortplugins.cache.build import make_in_memory

            in_memory, made = make_in_memory(wanted)
            return self._open_artifact(in_memory, wanted, given, "built", made)
        artifact, source = find_entry(wanted), "cache"
        if artifact is None:
            from ortplugins.cache.build import get_or_build

            artifact, source = get_or_build(wanted)
        try:
            return self._open_artifact(artifact, wanted, given, source)
        except NotCopiedError:
            raise
        except Exception as error:
            from ortplugins.cache.build import discard_if_damaged
            from ortplugins.errors import PassError

            if not is_second and discard_if_damaged(artifact, wanted):
                return self._find_and_open(wanted, given, is_second=True)
            if wanted.is_strict:
                raise
            name = artifact.model or wanted.name
            raise PassError(f"{name} cannot be opened: {error}") from error

    def _open_artifact(
        self,
        artifact: Artifact,
        wanted: Wanted,
        given: CopiedOptions,
        source: str,
        made: tuple[bytes, bytes | None] | None = None,
    ) -> Opened:
        """Open an artifact, unless the options hold something that it was built without.

        ``made`` are its report and its model where they are in no file.
        """
        model: str | bytes | None
        if made is None:
            with open(os.path.join(artifact.folder, REPORT), "rb") as file:
                report, model = file.read(), artifact.model
        else:
            report, model = made
        settings = {**self._settings, **artifact.settings}
        if model is None:
            if not settings:
                return Opened("untouched", "", report)
            self._open_with(self._model, given, settings)
            return Opened(source, "", report)
        if (added := given.added_initializer(artifact.initializers)) is not None:
            note = f"initializer {added!r} was added to the SessionOptions"
            return Opened("untouched", "", report, _untouched(note, "ORP906").notes)
        if artifact.data:
            from ortplugins.model_io.data_in_place import folder_of

            settings[DATA_FOLDER_KEY] = folder_of(
                artifact.data, wanted.name, wanted.data_folder
            )
        elif wanted.data_folder is not None and made is None:
            # onnxruntime would look for our data in the user's folder, too.
            settings[DATA_FOLDER_KEY] = artifact.folder
        if settings and artifact.has_custom_operators:
            raise NotCopiedError("libraries of custom operators")
        if artifact.data:
            with open(model, "rb") as file:
                model = file.read()
        written = self._settings_of_written_model(artifact)
        level = {"graph_optimization_level": "ORT_DISABLE_ALL"} if artifact.baked else {}
        self._open_with(model, given, settings, {**written, **level})
        notes = []
        if artifact.baked and self._overrides_dimensions(artifact):
            if self._options.enable_profiling:
                os.unlink(self._session.end_profiling())
            self._open_with(model, given, settings, written)
            note = "free dimensions are overridden, so onnxruntime optimises at this start"
            notes = [f"{note} [ORP907]"]
        return Opened(source, artifact.model or "", report, notes)

    def _overrides_dimensions(self, artifact: Artifact) -> bool:
        """Whether the session overrides a free dimension of the model's inputs."""
        return any(
            isinstance(size, int) and was_free == "1"
            for meta in self._session.get_inputs()
            for size, was_free in zip(
                meta.shape, artifact.free.get(meta.name, ""), strict=False
            )
        )

    def _settings_of_written_model(self, artifact: Artifact) -> dict[str, str]:
        """Return what makes ``optimized_model_filepath`` a model with its own data file.

        Otherwise it would refer to the artifact's data, which lies in another folder.
        """
        path = self._options.optimized_model_filepath
        has_data = bool(artifact.data) or os.path.exists(f"{artifact.model}.data")
        if not path or not has_data or self._entry(_WRITTEN_DATA_KEY):
            return {}
        return {_WRITTEN_DATA_KEY: f"{os.path.basename(path)}.data"}

    def _open_given(self, opened: Opened) -> Opened:
        """Construct the session exactly as requested; return ``opened``."""
        self._construct(self._model, self._options, *self._providers, **self._kwargs)
        return opened

    def _open_with(
        self,
        model: str | bytes,
        given: CopiedOptions,
        settings: Mapping[str, str],
        faster: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Construct the session with required ``settings`` and optional, ``faster`` ones.

        Copied options lack custom operator libraries and added devices.
        """
        copied = given.copy({**settings, **faster})
        lacks_devices = _has_providers(self._options) and not _has_providers(copied)
        if lacks_devices and settings:
            raise NotCopiedError("devices")
        is_as_given = lacks_devices or not (settings or faster)
        try:
            self._open_alone(model, self._options if is_as_given else copied)
        except Exception:
            if settings or is_as_given:
                raise
            self._open_alone(model, self._options)

    def _open_alone(self, model: str | bytes, options: onnxruntime.SessionOptions) -> None:
        """Construct a session on this model, without onnxruntime's fallback."""
        kwargs = {**self._kwargs, "enable_fallback": 0}
        self._construct(model, options, *self._providers, **kwargs)

    def _open_untouched(self, error: Exception) -> Opened:
        """Construct the session as requested because optimising failed; report why."""
        from ortplugins.errors import MissingFileError, ModelFileError, PassError
        from session_options.keys import OptionError

        try:
            self._open_given(_STOCK)
        except Exception as refused:  # the caller may expect exactly this error
            if isinstance(error, ModelFileError):
                refused.add_note(str(error))
            raise
        # The data may come from elsewhere.
        if isinstance(error, MissingFileError | NotCopiedError):
            return _untouched(str(error))
        is_worded = isinstance(error, ModelFileError | PassError | OptionError)
        text = str(error) if is_worded else f"{type(error).__name__}: {error}"
        return _warned(text)

    def _present(self, given: CopiedOptions) -> None:
        """Make the session report what its caller passed, with the usual fallback.

        Packages look for files next to the model; stock ``set_providers`` opens it again.
        """
        if int(self._kwargs.get("enable_fallback", 1)) == 1:
            self._session.enable_fallback()
        is_bytes = isinstance(self._model, bytes)
        self._session._model_path = None if is_bytes else os.fspath(self._model)
        self._session._model_bytes = self._model if is_bytes else None
        self._session._sess_options_initial = self._options
        self._session._sess_options = given.copy()


class NotCopiedError(RuntimeError):
    """Copies of ``SessionOptions`` lack something that sessions on them need."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} of SessionOptions cannot be copied")


def _keys_of_others(places: str) -> Iterator[str]:
    from session_options.registry import option_keys

    return option_keys(places)


def _is_ort_format(path_or_bytes: str | bytes | os.PathLike[str]) -> bool:
    """Whether onnxruntime would read a model as one in its own format."""
    if isinstance(path_or_bytes, bytes):
        return path_or_bytes[4:8] == b"ORTM"
    return os.fsdecode(path_or_bytes).lower().endswith(".ort")


def _name_of(path_or_bytes: str | bytes | os.PathLike[str]) -> str:
    if isinstance(path_or_bytes, bytes):
        return "bytes"
    return absolute(os.fsdecode(path_or_bytes))


def _log_start(
    path_or_bytes: str | bytes | os.PathLike[str], seconds: float, opened: Opened
) -> None:
    # Importing logging takes milliseconds; if nobody has done so, nobody wants messages.
    if (logging := sys.modules.get("logging")) is None:
        return
    logger = logging.getLogger("ortplugins")
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s in %.3f s: %s", _name_of(path_or_bytes), seconds, opened.to_report())


def _warned(reason: str) -> Opened:
    """Warn that the untouched model runs; return a description that says so."""
    from ortplugins.errors import OrtpluginsWarning
    from session_options.caller_warnings import warn_caller

    opened = _untouched(reason)
    warn_caller(opened.notes[0], OrtpluginsWarning)
    return opened


def _untouched(reason: str, code: str = "ORP902") -> Opened:
    return Opened("untouched", notes=[f"{reason}; the untouched model runs [{code}]"])


def _has_providers(options: onnxruntime.SessionOptions) -> bool:
    """Whether providers were set by device or by policy; onnxruntime 1.24 or newer."""
    return bool(getattr(options, "has_providers", lambda: False)())


def _names_of_providers(
    providers: Sequence[Any] | None, provider_options: Sequence[dict[Any, Any]] | None
) -> list[str]:
    """Return the names of providers, in order; raise for what onnxruntime refuses."""
    if providers is None:
        return []
    pairs = [(item, {}) if isinstance(item, str) else item for item in providers]
    if provider_options is not None:
        pairs = list(zip(providers, provider_options, strict=True))
    sequences = (providers, () if provider_options is None else provider_options)
    are_sequences = all(isinstance(item, Sequence) for item in sequences)
    if not are_sequences or not all(isinstance(item, tuple) for item in pairs):
        raise ValueError("expected a sequence of names, or of (name, options) pairs")
    if not all(isinstance(options, dict) for _, options in pairs):
        raise ValueError("expected their options as dicts")
    return [str(name) for name, _ in pairs]
