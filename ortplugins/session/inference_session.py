# SPDX-License-Identifier: MIT
"""``InferenceSession`` with the passes that its ``SessionOptions`` switch on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins.session.opening import STOCK, ReportDict, open_session
from session_options.plan import read_plan

if TYPE_CHECKING:
    from ortplugins.report import Report


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
            super().__init__(path_or_bytes, None, providers, provider_options, **kwargs)
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
