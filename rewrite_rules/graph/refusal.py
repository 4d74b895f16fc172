# SPDX-License-Identifier: MIT
"""Why a candidate cannot be rewritten."""

from __future__ import annotations


class Refusal(Exception):
    """A candidate cannot be rewritten; the text is the reason a user reads."""
