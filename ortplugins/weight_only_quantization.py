# SPDX-License-Identifier: MIT
"""The pass that makes a float model int4 at its first start; it is in the cache afterwards.

It lives here and not with the other passes: quantisers work on files, which rules must not.
"""

from __future__ import annotations

__all__ = ["WeightOnlyQuantization"]

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options import Pass, option
from session_options.builtin_passes.dq_matmulnbits_fusion import ACCURACY_LEVELS, level_text

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext

_SCRATCH = "ortplugins.weight_only_quantization.scratch"


@dataclasses.dataclass(frozen=True)
class WeightOnlyQuantization(Pass):
    """Float weights of MatMul and Gemm -> codes of 4 or 8 bits, rounded to nearest."""

    name: ClassVar[str] = "weight_only_quantization"
    summary: ClassVar[str] = "quantise float weights to int4 or int8, rounded to nearest"
    # Before the fusion, which then finds nothing left to do in these.
    position: ClassVar[int] = 10

    bits: int = option(
        4,
        "Bits of a code: 4, or 8. This changes the numbers: on SmolLM2-135M, 4 bits in blocks "
        "of 32 raise the perplexity from 23.9 to 28.1; calibrated methods of `ortplugins "
        "quantize` lose less.",
        choices=(4, 8),
    )
    block_size: int = option(
        32,
        "Elements along K that share a scale; smaller is more accurate and larger on disk.",
        choices=(16, 32, 64, 128, 256),
    )
    is_symmetric: bool = option(True, "Codes without zero points.")
    nodes_to_exclude: str = option(
        "",
        "Nodes that keep their float weight: names, globs and regular expressions "
        "(re:...), separated by commas; for instance *lm_head*.",
    )
    accuracy_level: str | int = option(
        "auto",
        "How MatMulNBits computes on them, as in dq_matmulnbits_fusion; 'auto' is 0, since "
        "onnxruntime itself leaves float weights as they are.",
        choices=ACCURACY_LEVELS,
        onnxruntime_key="session.qdq_matmulnbits_accuracy_level",
    )

    def __post_init__(self) -> None:
        """Check the options; an ``accuracy_level`` given as a number becomes its text."""
        object.__setattr__(self, "accuracy_level", level_text(self.accuracy_level))
        super().__post_init__()

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Quantise in place, with :mod:`.quantization`."""
        import tempfile
        from pathlib import Path

        from ortplugins.quantization.weights.change import describe_change
        from ortplugins.quantization.weights.plan import plan_weights
        from ortplugins.quantization.weights.recipe import Recipe, Rule
        from ortplugins.quantization.weights.run import quantize_graph
        from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
        from rewrite_rules.remarks import Remarks

        patterns = [part.strip() for part in self.nodes_to_exclude.split(",")]
        recipe = Recipe(
            bits=self.bits,
            block_size=self.block_size,
            is_symmetric=self.is_symmetric,
            quant_format="QDQ_transposed",
            # One list may be for several models.
            rules=[Rule(p, keep_float=True, optional=True) for p in patterns if p],
        )
        before = model.clone()
        plan = plan_weights(model, recipe)
        # The codes lie in files until the model is saved; they go when the model does.
        scratch = tempfile.TemporaryDirectory(prefix="ortplugins-")
        model.meta[_SCRATCH] = scratch
        report = quantize_graph(plan, recipe, Path(scratch.name))
        for node in report.nodes:
            if node.quantized:
                what = f"{node.weight!r} -> {node.bits} bits, block_size {node.block_size}"
                error = f"relative error of the weight {node.weight_error:.2g}"
                context.remarks.fired(node.node, f"{what}, {error}")
            else:
                context.remarks.refused(node.node, node.reason)
        for note in (*report.notes, str(report.coverage)):
            context.remarks.note("model", note)
        # Codes without a kernel would be unpacked at every run.
        quiet = dataclasses.replace(context, remarks=Remarks(self.name))
        level = 0 if self.accuracy_level == "auto" else int(self.accuracy_level)
        fuse(model, FusionOptions(level, "fuse"), quiet)
        if any(node.quantized for node in report.nodes):
            change = describe_change(before, model.clone(), context.providers)
            context.remarks.note("model", change)
