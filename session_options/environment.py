# SPDX-License-Identifier: MIT
r"""What the environment switches on: ``ORTPLUGINS`` and the variables beside it.

::

    ORTPLUGINS="dq_matmulnbits_fusion:accuracy_level=0;slow_kernels=keep,prepacked_weights"

Passes stand between commas; the options of one follow its name and a colon, semicolons between
them. In a value, ``\,`` and ``\;`` are a comma and a semicolon, and a backslash at its end is
written twice; a colon needs nothing. A pass of another package is its module and class,
``acme.passes:Fold``.
The general options are ``ORTPLUGINS_CACHE_DIR``,
``ORTPLUGINS_CACHE_LIMIT``, ``ORTPLUGINS_STRICT``, ``ORTPLUGINS_BAKE``.
"""

from __future__ import annotations

import os
import re

from session_options.entries import BUILTIN_PASSES
from session_options.keys import PREFIX, OptionError, enable_key, parse_value
from session_options.plan import GENERAL_OPTIONS, entries_of

VARIABLE = "ORTPLUGINS"
_DEFAULT = enable_key("dq_matmulnbits_fusion")
GENERAL = {spec.name: f"{VARIABLE}_{spec.name.upper()}" for spec in GENERAL_OPTIONS}


def plan_entries(*, has_hint: bool = False) -> dict[str, str]:
    """Return the session entries of the passes in ``ORTPLUGINS``.

    Where it is not set, of the fusion of dequantised weights, unless a hint chooses.
    """
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return {} if has_hint or os.environ.get(GENERAL["hint"]) else {_DEFAULT: "1"}
    try:
        return _read(text)
    except OptionError as error:
        raise OptionError(f"environment variable {VARIABLE}={text!r}: {error}") from None


def general_entries() -> dict[str, str]:
    """Return the session entries of the general options that have a variable.

    ``ORTPLUGINS_CACHE_DIR`` and ``ORTPLUGINS_CACHE_LIMIT`` are not among them: they hold for
    every session that sets none, as they do without this module.
    """
    entries = {}
    for spec in GENERAL_OPTIONS:
        text = os.environ.get(variable := GENERAL[spec.name])
        if text and not spec.name.startswith("cache_"):
            parse_value(f"environment variable {variable}", text, spec)
            entries[f"{PREFIX}.{spec.name}"] = text
    return entries


def _read(text: str) -> dict[str, str]:
    names: list[str] = []
    settings: dict[str, str] = {}
    for item in _split(text, ","):
        name, colon, options = item.partition(":")
        name, (first, more, rest) = name.strip(), options.partition(":")
        # Behind a module, its class.
        if name not in BUILTIN_PASSES and first.strip().isidentifier():
            name, colon, options = f"{name}:{first.strip()}", more, rest
        if not name:
            raise OptionError(f"no pass in front of {item!r}")
        if not colon and ";" in name:
            raise OptionError(
                f"{item!r}: a comma stands between passes, a colon in front of the first "
                "option"
            )
        names.append(name)
        for setting in _split(options, ";") if colon else ():
            option, equals, value = setting.partition("=")
            if not equals:
                raise OptionError(f"{setting!r} of pass {name!r} is not OPTION=VALUE")
            if (key := f"{name}.{option.strip()}") in settings:
                raise OptionError(f"option {key!r} is given twice")
            settings[key] = _unescaped(value.strip())
    return entries_of(names, settings)


def _split(text: str, separator: str) -> list[str]:
    """Split at separators behind an even number of backslashes; others belong to the text."""
    pieces = [""]
    for found in re.finditer(r"(\\*)(.?)", text, re.DOTALL):
        slashes, character = found.groups()
        if character == separator and len(slashes) % 2 == 0:
            pieces[-1] += slashes
            pieces.append("")
        else:
            pieces[-1] += slashes + character
    return pieces


def _unescaped(value: str) -> str:
    """Return a value without the backslashes that stand for what follows them."""
    value = re.sub(r"(\\+)([,;])", lambda m: m[1][: len(m[1]) // 2] + m[2], value)
    slashes = len(value) - len(value.rstrip("\\"))
    return value[: len(value) - slashes // 2] if slashes % 2 == 0 else value
