# SPDX-License-Identifier: MIT
r"""What the environment switches on: ``ORTPLUGINS`` and the variables beside it.

::

    ORTPLUGINS="dq_matmulnbits_fusion:accuracy_level=0;slow_kernels=keep,prepacked_weights"

Passes stand between commas; the options of one follow its name and a colon, semicolons between
them. In a value, ``\,`` and ``\;`` are a comma and a semicolon; a colon needs nothing.
The general options are ``ORTPLUGINS_CACHE_DIR``,
``ORTPLUGINS_CACHE_LIMIT``, ``ORTPLUGINS_STRICT``, ``ORTPLUGINS_BAKE``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from session_options.keys import PREFIX, OptionError, enable_key, option_key, parse_value
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


def plan_text(entries: Mapping[str, str]) -> str:
    """Return entries as ``ORTPLUGINS`` has them; the inverse of reading."""
    passes = []
    for key in entries:
        name = key.removeprefix(f"{PREFIX}.enable_")
        if name == key:
            continue
        start = option_key(name, "")
        options = [
            f"{other.removeprefix(start)}={_escape(value)}"
            for other, value in entries.items()
            if other.startswith(start)
        ]
        passes.append(f"{name}:{';'.join(options)}" if options else name)
    return ",".join(passes)


def _read(text: str) -> dict[str, str]:
    names: list[str] = []
    settings: dict[str, str] = {}
    for item in _split(text, ","):
        name, colon, options = item.partition(":")
        name = name.strip()
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
            settings[key] = re.sub(r"\\([,;])", r"\1", value.strip())
    return entries_of(names, settings)


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator; escaped ones belong to the text."""
    return re.split(rf"(?<!\\){separator}", text)


def _escape(value: str) -> str:
    return re.sub("[,;]", r"\\\g<0>", value)
