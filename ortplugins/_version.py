# SPDX-License-Identifier: MIT
"""The version of ortplugins, in one place."""

__version__ = "0.1.0"
