# SPDX-License-Identifier: MIT
"""Options whose text lies in a file: ``@file.json`` is replaced by what the file holds.

Done once, where a plan enters this package. Everything after it, the key of the cache entry
above all, sees the content and not the name, so a file that changes is noticed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from session_options.keys import OptionError, option_key, options_of
from session_options.passes import Pass
from session_options.plan import Plan, read

if TYPE_CHECKING:
    from session_options.keys import SessionConfig

# An override takes about 200 bytes, and the largest models have some 10,000 activations.
_LARGEST = 16 << 20


def read_plan(options: SessionConfig | None) -> Plan:
    """Read the plan that entries of ``SessionOptions`` describe, and the files they name."""
    return read_option_files(read(options))


def read_option_files(plan: Plan) -> Plan:
    """Replace the options that name a file by the file's text.

    Relative paths are relative to the working directory.
    """
    return plan._replace(passes=tuple(map(_with_files_read, plan.passes)))


def _with_files_read(item: Pass) -> Pass:
    for spec in options_of(type(item)):
        value = getattr(item, spec.name)
        if not spec.may_name_file or not value.startswith("@"):
            continue
        text = file_text(value[1:], f"{option_key(item.name, spec.name)} is {value!r}")
        import dataclasses

        try:
            item = dataclasses.replace(item, **{spec.name: text})  # type: ignore[type-var]
        except OptionError as error:
            raise OptionError(f"file {value[1:]!r}: {error}") from None
    return item


def file_text(name: str, what: str) -> str:
    """Return the text of an option that lies in a file; ``what`` is the option in messages."""
    try:
        with open(os.path.expanduser(name), "rb") as file:
            content = file.read(_LARGEST + 1)
    except (OSError, RuntimeError, ValueError) as error:  # no home folder; a NUL
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{what}: the file can't be read: {reason}") from None
    if len(content) > _LARGEST:
        raise OptionError(f"{what}: the file has more than {_LARGEST >> 20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"{what}: the file is not UTF-8 text: {error.reason}") from None
    if text.startswith("@") or not text.strip():
        held = "names another one" if text.strip() else "is empty"
        raise OptionError(f"{what}: the file {held}; it has to hold the option's text")
    return text
