# SPDX-License-Identifier: MIT
"""What the environment variable ``ORTPLUGINS`` switches on, in the words of the command line.

::

    ORTPLUGINS="prepacked_weights dq_matmulnbits_fusion dq_matmulnbits_fusion.accuracy_level=0"

Words are split and quoted as in a shell. One without ``=`` is a pass, as ``--pass`` takes it;
others are options: ``PASS.OPTION=VALUE``, or ``OPTION=VALUE`` for one that belongs to no pass.
"""

from __future__ import annotations

import os
import shlex

from session_options.entries import PREFIX
from session_options.keys import OptionError, parse_pairs
from session_options.plan import Plan, entries_of

VARIABLE = "ORTPLUGINS"
_DEFAULT = "dq_matmulnbits_fusion"


def environment_entries() -> dict[str, str]:
    """Return the session entries that the variable stands for.

    Where it names neither passes nor a hint, the fusion of dequantised weights is on.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        words = shlex.split(text)
        names = [word for word in words if "=" not in word]
        settings = parse_pairs(word for word in words if "=" in word)
        general = {
            f"{PREFIX}.{key}": settings.pop(key) for key in [*settings] if "." not in key
        }
        if not names and not general.get(f"{PREFIX}.hint"):
            names = [_DEFAULT]
        entries = entries_of(names, settings) | general
        Plan.from_entries(entries)
    except ValueError as error:  # of options; of a quotation that does not end
        raise OptionError(f"environment variable {VARIABLE}={text!r}: {error}") from None
    return entries
