# SPDX-License-Identifier: MIT
"""``InferenceSession`` with the passes that its ``SessionOptions`` switch on."""

from __future__ import annotations

__all__ = ["InferenceSession"]

import contextlib
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime

import session_options
from ortplugins.artifacts import Artifact, prepare
from ortplugins.errors import OrtpluginsWarning, PassError
from ortplugins.lent_options import lent
from ortplugins.option_files import read_option_files
from ortplugins.report import Report


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """``onnxruntime.InferenceSession`` on the model that the passes made.

    Options without an entry of ours give the stock session: nothing is imported, nothing is
    written. Else the model is optimised at the first start and comes from the cache
    afterwards. The ``SessionOptions`` come back as they went in.

    Attributes:
        ortplugins_report: What was done to the model, and what not and why.
    """

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
            OptionError: If an entry of ours has a value that it can't have.
            MissingFileError, ModelFileError: If the model or its data can't be used.
            PassError: If a pass fails and ``ortplugins.strict`` is ``"1"``; else that is a
                warning and the untouched model runs.
        """
        plan = read_option_files(session_options.read(sess_options))
        self.ortplugins_report = Report()
        self._ortplugins_source = path_or_bytes
        self._ortplugins_kwargs = kwargs
        if not plan:
            super().__init__(
                path_or_bytes, sess_options, providers, provider_options, **kwargs
            )
            return
        artifact = self._prepare(path_or_bytes, plan, sess_options, providers, kwargs)
        self.ortplugins_report = artifact.report
        if artifact.model is None:
            if artifact.temporary is not None:
                artifact.temporary.cleanup()
            super().__init__(
                path_or_bytes, sess_options, providers, provider_options, **kwargs
            )
            return
        try:
            with lent(sess_options, _settings(artifact)):
                super().__init__(
                    artifact.model, sess_options, providers, provider_options, **kwargs
                )
        except Exception as error:
            # The entry was removed a moment ago, say. Whoever starts a server wants it up.
            if plan.strict:
                raise
            self.ortplugins_report = _untouched(f"{artifact.model} cannot be opened: {error}")
            super().__init__(
                path_or_bytes, sess_options, providers, provider_options, **kwargs
            )
        else:
            for item in plan.passes:
                item.opened()
        finally:
            if artifact.temporary is not None:
                # POSIX keeps the mapped files until the session closes; Windows refuses to
                # unlink them, so the folder goes with the session.
                with contextlib.suppress(OSError):
                    artifact.temporary.cleanup()
                weakref.finalize(self, artifact.temporary.cleanup)

    def set_providers(
        self,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Register providers and start again, from the model that was given.

        An optimised model is for the providers it was made for.
        """
        if self.ortplugins_report.source == "stock":
            super().set_providers(providers, provider_options)
            return
        self.__init__(  # type: ignore[misc]
            self._ortplugins_source,
            self._sess_options_initial,
            providers,
            provider_options,
            **self._ortplugins_kwargs,
        )

    def _prepare(
        self,
        source: str | bytes | os.PathLike[str],
        plan: session_options.Plan,
        options: onnxruntime.SessionOptions,
        providers: Sequence[Any] | None,
        kwargs: Mapping[str, Any],
    ) -> Artifact:
        names = _provider_names(providers)
        try:
            return prepare(source, plan, options, names, kwargs.get("disabled_optimizers"))
        except PassError as error:
            if plan.strict:
                raise
            return Artifact(None, _untouched(str(error)))


def _untouched(reason: str) -> Report:
    """Warn that the untouched model runs, and return the report that says so.

    Never raised inside onnxruntime's own constructor, which would take it for a failing
    provider.
    """
    text = f"{reason}; the untouched model runs"
    warnings.warn(text, OrtpluginsWarning, stacklevel=4)
    return Report(source="untouched", notes=(text,))


def _provider_names(providers: Sequence[Any] | None) -> tuple[str, ...]:
    """Names of the providers in order, as onnxruntime chooses them when none are given."""
    chosen = providers or onnxruntime.get_available_providers()
    return tuple(item if isinstance(item, str) else item[0] for item in chosen)


def _settings(artifact: Artifact) -> dict[str, str]:
    """What the artifact needs of its session; it has its own optimisation behind it."""
    level = {"graph_optimization_level": "ORT_DISABLE_ALL"} if artifact.baked else {}
    return {**artifact.settings, **level}
