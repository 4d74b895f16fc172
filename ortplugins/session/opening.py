# SPDX-License-Identifier: MIT
"""Opens a session on the model that the passes of a plan made, whoever's class it is of."""

from __future__ import annotations

__all__ = ["open_session"]

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnxruntime

from ortplugins.artifacts.find_or_build import Artifact, prepare
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.report import Report
from ortplugins.runtime.temporary_settings import lent
from session_options import OptionError, Plan


def open_session(
    session: onnxruntime.InferenceSession,
    construct: Callable[..., None],
    plan: Plan,
    path_or_bytes: str | bytes | os.PathLike[str],
    options: onnxruntime.SessionOptions,
    providers: Sequence[Any] | None,
    provider_options: Sequence[dict[Any, Any]] | None,
    kwargs: Mapping[str, Any],
    caller_knows: bool = True,
) -> Report:
    """Find or build the artifact of a model and construct a session on it.

    onnxruntime's constructor takes a ValueError or RuntimeError for a failing provider, and
    tries again on the CPU. So what is ours happens before it is called, and an artifact is
    opened without its fallback; the untouched model is opened with it.

    Args:
        session: The object that is being constructed.
        construct: The constructor of onnxruntime, bound to it.
        plan: What to do; not empty.
        path_or_bytes: As the caller gave it, like all that follows.
        options: Of the session; come back as they went in.
        providers: Execution providers.
        provider_options: Their options.
        kwargs: Further arguments of the constructor.
        caller_knows: Whether the caller chose this. Else no error of ours may reach it unless
            the plan is strict, and a missing file is for onnxruntime to tell: the caller may
            expect that very error.

    Returns:
        What was done.

    Raises:
        MissingFileError, ModelFileError: If the model or its data can't be used.
        PassError: If a pass fails and the plan is strict.
    """
    try:
        names = _provider_names(providers, options)
        disabled = kwargs.get("disabled_optimizers")
        artifact = prepare(path_or_bytes, plan, options, names, disabled)
    except Exception as error:
        if isinstance(error, MissingFileError) and not caller_knows:
            artifact = Artifact(None, Report(source="untouched", notes=(str(error),)))
        elif plan.strict or (caller_knows and not isinstance(error, PassError)):
            raise
        else:
            artifact = Artifact(None, _untouched(_told(error)))
    if artifact.model is None:
        if artifact.temporary is not None:
            artifact.temporary.cleanup()
        construct(path_or_bytes, options, providers, provider_options, **kwargs)
        return artifact.report
    try:
        with lent(options, _settings(artifact)):
            construct(
                artifact.model,
                options,
                providers,
                provider_options,
                **{**kwargs, "enable_fallback": 0},
            )
    except Exception as error:
        # The entry was removed a moment ago, say. Whoever starts a server wants it up.
        if plan.strict:
            raise
        report = _untouched(f"{artifact.model} cannot be opened: {error}")
        construct(path_or_bytes, options, providers, provider_options, **kwargs)
        return report
    finally:
        if artifact.temporary is not None:
            # POSIX keeps the mapped files until the session closes; Windows refuses to
            # unlink them, so the folder goes with the session.
            with contextlib.suppress(OSError):
                artifact.temporary.cleanup()
            weakref.finalize(session, artifact.temporary.cleanup)
    if int(kwargs.get("enable_fallback", 1)) == 1:
        session.enable_fallback()
    _tell_opened(plan)
    return artifact.report


def _tell_opened(plan: Plan) -> None:
    """Call the passes' last method; the session is there, whatever becomes of it.

    Raises:
        PassError: If one raises and the plan is strict.
    """
    for item in plan.passes:
        try:
            item.opened()
        except Exception as error:
            text = f"pass {item.name!r}: opened: {type(error).__name__}: {error}"
            if plan.strict:
                raise PassError(text) from error
            warnings.warn(text, OrtpluginsWarning, stacklevel=4)


def _untouched(reason: str) -> Report:
    """Warn that the untouched model runs, and return the report that says so."""
    text = f"{reason}; the untouched model runs"
    # The line of the caller's constructor call.
    warnings.warn(text, OrtpluginsWarning, stacklevel=4)
    return Report(source="untouched", notes=(text,))


def _told(error: Exception) -> str:
    """What an error says; a name in front of those that nobody worded for users."""
    worded = isinstance(error, PassError | ModelFileError | OptionError)
    return str(error) if worded else f"{type(error).__name__}: {error}"


def _provider_names(
    providers: Sequence[Any] | None, options: onnxruntime.SessionOptions
) -> tuple[str, ...]:
    """Names of the providers in order, as onnxruntime chooses them when none are given."""
    # Set by device or by policy, which cannot be asked for names; onnxruntime 1.24 or newer.
    if not providers and getattr(options, "has_providers", lambda: False)():
        return ("those of the SessionOptions",)
    chosen = providers or onnxruntime.get_available_providers()
    return tuple(item if isinstance(item, str) else item[0] for item in chosen)


def _settings(artifact: Artifact) -> dict[str, str]:
    """What the artifact needs of its session; it has its own optimisation behind it."""
    level = {"graph_optimization_level": "ORT_DISABLE_ALL"} if artifact.baked else {}
    return {**artifact.settings, **level}
