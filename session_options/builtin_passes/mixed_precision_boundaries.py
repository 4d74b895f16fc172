# SPDX-License-Identifier: MIT
"""Options of MixedPrecisionBoundaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from session_options.entries import option_key
from session_options.keys import OptionError, option
from session_options.passes import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class MixedPrecisionBoundaries(Pass):
    """DQ -> Q where regions of 8-bit and of 16-bit (or float) activations meet.

    Changes a model that is quantised already; it keeps what it computes outside of the
    regions, and refines the grids inside.
    """

    name: ClassVar[str] = "mixed_precision_boundaries"
    summary: ClassVar[str] = (
        "give chosen activations of a QDQ model 16 bits, or leave them float"
    )
    # Before the fusions, which take away the DQ nodes of weights.
    position: ClassVar[int] = 10

    # Kept as canonical JSON, whatever was given.
    overrides: str | Mapping[str, Any] = option(
        "",
        "Types and conversions of single tensors, in the schema of onnxruntime's "
        "TensorQuantOverrides: JSON; in Python a dict as well.",
    )
    promote: str = option(
        "",
        "Names of tensors to promote, or of nodes, for all their inputs and outputs; "
        "separated by commas.",
    )
    mode: str = option(
        "int16",
        "What promoted regions become: 'int16' gives them 16 bits, for NPUs; 'float' leaves "
        "them in float, which is faster on CPUs.",
        choices=("int16", "float"),
    )
    float_limit_mb: int = option(
        1024,
        "In mode 'float': megabytes that weights of float regions may take as float "
        "constants; weights beyond it are dequantised in every run.",
        least=0,
    )

    def __post_init__(self) -> None:
        """Check the options; bring overrides into their canonical form."""
        if self.overrides:
            from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
                OverrideError,
                format_overrides,
            )

            try:
                text = format_overrides(self.overrides)
            except OverrideError as error:
                key = option_key(self.name, "overrides")
                raise OptionError(f"{key}: {error}") from None
            object.__setattr__(self, "overrides", text)
        elif isinstance(self.overrides, Mapping):
            object.__setattr__(self, "overrides", "")
        super().__post_init__()

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Place boundaries and fold pairs; see :mod:`.place`."""
        from rewrite_rules.mixed_precision_boundaries.fold_rules import fold_pairs
        from rewrite_rules.mixed_precision_boundaries.place import place_boundaries
        from rewrite_rules.mixed_precision_boundaries.tensor_overrides import read_overrides

        overrides = read_overrides(self.overrides or "{}")
        promote = list(filter(None, map(str.strip, self.promote.split(","))))
        if not overrides and not promote:
            context.remarks.note(
                "model", "no precision is to change: give overrides, or promote"
            )
        in_float = self.mode == "float"
        place_boundaries(
            model, context, promote=promote, overrides=overrides, in_float=in_float
        )
        fold_pairs(model, context)

    def rearrange(self, model: ir.Model, context: PassContext) -> None:
        """Dequantise constants of float regions; see :mod:`.float_region_constants`.

        After all fusions, which may have taken the codes.
        """
        from rewrite_rules.mixed_precision_boundaries.float_region_constants import (
            unpack_constants,
        )

        if self.mode == "float":  # other modes have no float regions
            unpack_constants(model, self.float_limit_mb, context)
