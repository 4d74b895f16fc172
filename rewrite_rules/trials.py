# SPDX-License-Identifier: MIT
"""Made-up inputs on which a rewritten model has to agree with the one before it.

A pass that relies on more than identities puts trials into its context
(``PassContext.trials``). Whoever runs the pass runs both models on them, and drops what the
pass did where they differ. The rules themselves know nothing of onnxruntime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One run of both models.

    Attributes:
        name: What is tried, for messages.
        feeds: The inputs.
        compared: Which elements of an output count, as a bool array that broadcasts to it;
            outputs that are not named are compared whole.
        bound: Greatest difference, as a share of the greatest magnitude of the output.
        optional: Whether the trial is left out where the model before cannot run it, for
            instance because it is longer than the model takes.
        timed: Whether the result is dropped where such runs take more time.
    """

    name: str
    feeds: Mapping[str, NDArray[Any]]
    compared: Mapping[str, NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    bound: float = 1e-6
    optional: bool = False
    timed: bool = False
