# SPDX-License-Identifier: MIT
"""The passes that ship with ortplugins: their options, and where their rules are."""

from __future__ import annotations

__all__ = [
    "BUILTIN_PASSES",
    "DqMatMulNBitsFusion",
    "PrepackedWeights",
    "ShapeSizeReorder",
]

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from session_options.keys import OptionError, option, option_key
from session_options.passes import Pass

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class DqMatMulNBitsFusion(Pass):
    """Dequantised weights -> MatMulNBits, GatherBlockQuantized; once, ahead of the session."""

    name: ClassVar[str] = "dq_matmulnbits_fusion"
    summary: ClassVar[str] = "fuse weights into MatMulNBits and GatherBlockQuantized"
    position: ClassVar[int] = 20

    accuracy_level: int = option(
        0,
        "How MatMulNBits computes: 0 or 1 in float32 (exact), 2 in float16, 3 in bfloat16, 4 "
        "with int8 activations (onnxruntime's own default; up to 3 times faster, relative "
        "error up to 2e-2 for each MatMul).",
        choices=(0, 1, 2, 3, 4),
        onnxruntime_key="session.qdq_matmulnbits_accuracy_level",
    )
    slow_kernels: str = option(
        "float",
        "Weights whose CPU kernel would unpack them at every call (8-bit below accuracy_level "
        "4, 2-bit mostly), or that no kernel takes: 'float' makes them float constants, "
        "'fuse' fuses those that it can all the same, 'keep' leaves them.",
        choices=("float", "fuse", "keep"),
    )
    float_limit_mb: int = option(
        1024,
        "Megabytes that such float constants may take in one model; weights beyond are left, "
        "each with a remark.",
    )

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Fuse in place; rules in :mod:`rewrite_rules.dq_matmulnbits`."""
        from rewrite_rules.dq_matmulnbits import FusionOptions, fuse

        options = FusionOptions(self.accuracy_level, self.slow_kernels, self.float_limit_mb)
        fuse(model, options, context)


@dataclasses.dataclass(frozen=True)
class ShapeSizeReorder(Pass):
    """Shape and Size read early and small; nodes run in an order of low peak memory."""

    name: ClassVar[str] = "shape_size_reorder"
    summary: ClassVar[str] = "free tensors that only their shapes keep, order nodes for memory"
    # Last of those that change the graph.
    position: ClassVar[int] = 80

    dims: str = option(
        "",
        "Numbers that symbolic dimensions count as where memory is reckoned: "
        "batch=1,seq=512. Others count as 128. Results are right for any sizes.",
    )
    for_default_order: bool = option(
        False,
        "Write a file whose default order is good, for sessions that can't be told to run in "
        "file order (Triton, C++); else sessions are set to ExecutionOrder.PRIORITY_BASED.",
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            OptionError: If ``dims`` is no list of names and sizes.
        """
        super().__post_init__()
        _ = self.sizes

    def rearrange(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite and reorder in place; see :mod:`rewrite_rules.shape_size_reorder`.

        After onnxruntime's own fusions: they give new nodes another place, and which of them
        fire depends on where shapes are read.
        """
        from rewrite_rules.shape_size_reorder import reorder

        reorder(model, self.sizes, self.for_default_order, context)

    @property
    def sizes(self) -> dict[str, int]:
        """The option ``dims``, read."""
        sizes = {}
        for part in filter(None, (part.strip() for part in self.dims.split(","))):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not (name and equals and size.isdecimal()):
                raise OptionError(
                    f"{option_key(self.name, 'dims')} is {self.dims!r}: {part!r} is no "
                    "NAME=SIZE, as in batch=1,seq=512"
                )
            sizes[name] = int(size)
        return sizes


@dataclasses.dataclass(frozen=True)
class PrepackedWeights(Pass):
    """Kernels' packed weights in the file, mapped and shared by all processes."""

    name: ClassVar[str] = "prepacked_weights"
    summary: ClassVar[str] = "keep packed weights in the file, shared instead of on the heap"
    position: ClassVar[int] = 90

    verify: str = option(
        "size",
        "What a start checks of the files: 'size', or 'digest', which reads them whole. "
        "onnxruntime computes wrong numbers, silently, from packed weights that were damaged.",
        choices=("size", "digest"),
        shapes_result=False,
    )
    limit_mb: int = option(
        0,
        "Megabytes of disk that a model may take, 0 for any number; above, nothing is packed.",
    )
    parallel: bool = option(
        False,
        "Pack on all threads at the start (session.prepack.enable_parallel): a quicker start "
        "on many cores, for a higher peak of memory.",
    )
    trim: bool = option(
        True,
        "Give freed memory back to the system after the start (glibc's malloc_trim).",
        shapes_result=False,
    )
    timeout: int = option(
        1800, "Seconds that packing may take before it is given up.", shapes_result=False
    )

    def finish(self, model_path: Path, context: PassContext) -> None:
        """Pack in place; see :mod:`rewrite_rules.prepacked_weights`."""
        from rewrite_rules.prepacked_weights import PrepackOptions, prepack

        prepack(model_path, PrepackOptions(self.limit_mb, self.timeout), context)

    def session_settings(self) -> Mapping[str, str]:
        """Packing in parallel, where it is asked for."""
        return {"session.prepack.enable_parallel": "1"} if self.parallel else {}

    def opened(self) -> None:
        """Give back what packing left on the heap."""
        if self.trim:
            from rewrite_rules.resident_memory import trim_heap

            trim_heap()

    def child_seconds(self) -> int:
        """The time for packing, and as much for what comes before, ten minutes at least."""
        return self.timeout + max(600, self.timeout)

    def checks_digests(self) -> bool:
        """Whether a start has to read the files whole."""
        return self.verify == "digest"


BUILTIN_PASSES: tuple[type[Pass], ...] = (
    DqMatMulNBitsFusion,
    ShapeSizeReorder,
    PrepackedWeights,
)
