# SPDX-License-Identifier: MIT
"""The passes that ship with ortplugins: their options, and where their rules are."""

from __future__ import annotations

__all__ = [
    "BUILTIN_PASSES",
    "DqMatMulNBitsFusion",
    "MixedPrecisionBoundaries",
    "PrepackedWeights",
    "ShapeSizeReorder",
    "TrimPadding",
    "TransformerFusion",
]

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from session_options.keys import OptionError, option, option_key
from session_options.passes import Pass

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class TrimPadding(Pass):
    """Inputs cut behind the longest row of a batch, outputs padded back: encoders."""

    name: ClassVar[str] = "trim_padding"
    summary: ClassVar[str] = "leave out padding behind the longest row of a batch"
    # The proof reads the operators of exporters, before anything is fused.
    position: ClassVar[int] = 5
    asks_for_trials: ClassVar[bool] = True

    multiple: int = option(
        1, "The length that is computed is a multiple of this, or the length that was given."
    )
    mask: str = option(
        "",
        "Name of the input that says which positions are real, of shape [batch, sequence]; "
        "empty to find it by its use.",
    )
    pack: bool = option(
        False,
        "Run projections, feed-forward layers and norms on the real tokens of a batch only, "
        "gathered from all rows: for rows of mixed lengths.",
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            OptionError: If ``multiple`` is less than 1.
        """
        super().__post_init__()
        if self.multiple < 1:
            key = option_key(self.name, "multiple")
            raise OptionError(f"{key} is {self.multiple}: 1 or more is expected")

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Trim in place; see :mod:`rewrite_rules.trim_padding.trim`."""
        from rewrite_rules.trim_padding.trim import TrimOptions, trim_padding

        trim_padding(model, TrimOptions(self.multiple, self.mask, self.pack), context)


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
        "Types, scales and ranges of single tensors, and who reads them converted, in the "
        "schema of onnxruntime's TensorQuantOverrides: JSON, or @file.json (session entries "
        "end at 8,192 bytes); in Python a dict as well.",
        may_name_file=True,
    )
    promote: str = option(
        "",
        "Tensors, or nodes with what they compute, that get promoted_type: names, separated "
        "by commas.",
    )
    promoted_type: str = option("QUInt16", "Type of promoted tensors: QUInt16 or QInt16.")
    mode: str = option(
        "int16",
        "What becomes of the regions: 'int16' quantises them with 16 bits, for NPUs; 'float' "
        "takes their quantisation out, which on CPUs is faster than 16 bits.",
        choices=("int16", "float"),
    )
    target: str = option(
        "cpu",
        "Whom the result is for: 'qnn' keeps every DQ->Q, which such accelerators run as a "
        "Convert; 'cpu' drops a 16-bit pair that gives back the 8-bit values before it.",
        choices=("cpu", "qnn"),
    )
    close_regions: bool = option(
        True,
        "Promote also what the nodes around a promoted tensor read and write, so that no node "
        "has two types.",
    )
    merge: bool = option(
        False,
        "Where a region's exit leads right into another region, leave the 8 bits between out: "
        "more accurate, and not the same numbers.",
    )
    clip: bool = option(
        True,
        "In mode 'float': values stay in the range that their codes had, which stands for "
        "every Relu and Clip that a quantiser removed; off, greater ones come through.",
    )
    float_limit_mb: int = option(
        1024,
        "In mode 'float': megabytes that weights of float regions may take as float "
        "constants; beyond, they are dequantised at every inference.",
    )

    def __post_init__(self) -> None:
        """Check the options; bring overrides and type into their canonical form.

        Raises:
            OptionError: If the overrides are no such JSON, or the type has not 16 bits.
        """
        if self.overrides and not self.overrides_file:
            from session_options.override_json import canonical_overrides

            with _as_option_error(option_key(self.name, "overrides")):
                text = canonical_overrides(self.overrides)
            object.__setattr__(self, "overrides", text)
        elif isinstance(self.overrides, Mapping):
            object.__setattr__(self, "overrides", "")
        super().__post_init__()
        object.__setattr__(self, "promoted_type", self._promoted_spelling())

    @property
    def overrides_file(self) -> str:
        """The path that ``overrides`` names, empty if it names none."""
        is_named = isinstance(self.overrides, str) and self.overrides.startswith("@")
        return str(self.overrides)[1:] if is_named else ""

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Place boundaries and fold pairs; see :mod:`.place`.

        Raises:
            OptionError: If the overrides' file was not read; ``ortplugins`` does that before
                it runs a plan.
            OverrideError: If an override does not fit the model.
        """
        import onnx_ir as ir

        from rewrite_rules.mixed_precision_boundaries.fold_rules import fold_pairs
        from rewrite_rules.mixed_precision_boundaries.place import (
            BoundaryOptions,
            place_boundaries,
        )
        from session_options.override_json import read_overrides, read_quant_type

        key = option_key(self.name, "overrides")
        if self.overrides_file:
            raise OptionError(f"{key} is {self.overrides!r}, and nobody has read that file")
        options = BoundaryOptions(
            overrides=read_overrides(self.overrides or "{}"),
            promote=frozenset(filter(None, map(str.strip, self.promote.split(",")))),
            promoted_type=ir.DataType[read_quant_type(self.promoted_type, "promoted_type")],
            mode=self.mode,
            target=self.target,
            close_regions=self.close_regions,
            clip=self.clip,
        )
        if not options.overrides and not options.promote:
            context.remarks.note(
                "model", "nothing is to change its precision: give overrides, or promote"
            )
        place_boundaries(model, options, context)
        fold_pairs(model, self.target, context, merge=self.merge)

    def rearrange(self, model: ir.Model, context: PassContext) -> None:
        """Dequantise constants of float regions; see :mod:`.float_region_constants`.

        After all fusions, which may have taken the codes.
        """
        from rewrite_rules.mixed_precision_boundaries.float_region_constants import (
            unpack_constants,
        )

        unpack_constants(model, self.float_limit_mb, context)

    def takes_part_in(self, stage: str) -> bool:
        """Whether there is something to do: other modes have no float regions."""
        return super().takes_part_in(stage) and (stage != "rearrange" or self.mode == "float")

    def _promoted_spelling(self) -> str:
        from session_options.override_json import read_quant_type

        key = option_key(self.name, "promoted_type")
        with _as_option_error(key):
            chosen = read_quant_type(self.promoted_type, "the type")
        if chosen not in _PROMOTED:
            raise OptionError(
                f"{key} is {self.promoted_type!r}: one of {', '.join(_PROMOTED.values())} is "
                "expected"
            )
        return _PROMOTED[chosen]


_PROMOTED = {"UINT16": "QUInt16", "INT16": "QInt16"}


@contextlib.contextmanager
def _as_option_error(key: str) -> Iterator[None]:
    from rewrite_rules.mixed_precision_boundaries.tensor_overrides import OverrideError

    try:
        yield
    except OverrideError as error:
        raise OptionError(f"{key}: {error}") from None


ACCURACY_LEVELS = ("auto", "0", "1", "2", "3", "4")


def level_text(level: str | int) -> str | int:
    """Return an accuracy level as its option has it; what is no int stays to be refused."""
    return str(level) if type(level) is int else level


@dataclasses.dataclass(frozen=True)
class DqMatMulNBitsFusion(Pass):
    """Dequantised weights -> MatMulNBits, GatherBlockQuantized; once, ahead of the session."""

    name: ClassVar[str] = "dq_matmulnbits_fusion"
    summary: ClassVar[str] = "fuse weights into MatMulNBits and GatherBlockQuantized"
    position: ClassVar[int] = 20

    accuracy_level: str | int = option(
        "auto",
        "How MatMulNBits computes: 0 or 1 in float32 (exact), 2 in float16, 3 in bfloat16, 4 "
        "with int8 activations (up to 3 times faster, relative error up to 2e-2 for each "
        "MatMul). 'auto': where onnxruntime itself would fuse the node, as it does "
        "(session.qdq_matmulnbits_accuracy_level, 4 when unset); elsewhere 0.",
        choices=ACCURACY_LEVELS,
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

    def __post_init__(self) -> None:
        """Check the options; an ``accuracy_level`` given as a number becomes its text."""
        object.__setattr__(self, "accuracy_level", level_text(self.accuracy_level))
        super().__post_init__()

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Fuse in place; rules in :mod:`.fuse`."""
        from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse

        level = None if self.accuracy_level == "auto" else int(self.accuracy_level)
        options = FusionOptions(level, self.slow_kernels, self.float_limit_mb)
        fuse(model, options, context)


@dataclasses.dataclass(frozen=True)
class TransformerFusion(Pass):
    """Attention's repeated heads and norms, whoever exported the model."""

    name: ClassVar[str] = "transformer_fusion"
    summary: ClassVar[str] = "read shared key and value heads once; fuse norms with residuals"
    # After the weights are those of MatMulNBits.
    position: ClassVar[int] = 60

    grouped_queries: bool = option(
        True,
        "One MatMul for all query heads that share a key or value head, instead of repeated "
        "heads; standard operators, for every provider.",
    )
    norms: bool = option(
        True,
        "Root-mean-square norms as one node, and each norm with the residual sum before it "
        "(CPU sessions: the operators are onnxruntime's own).",
    )

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite in place; see :mod:`.fuse`."""
        from rewrite_rules.transformer_fusion.fuse import TransformerOptions, fuse_transformer

        fuse_transformer(model, TransformerOptions(self.norms, self.grouped_queries), context)


@dataclasses.dataclass(frozen=True)
class ShapeSizeReorder(Pass):
    """Shape and Size read early and small; nodes run in an order of low peak memory."""

    name: ClassVar[str] = "shape_size_reorder"
    summary: ClassVar[str] = "free tensors that only their shapes keep, order nodes for memory"
    depends_on_arena: ClassVar[bool] = True
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

    lean_session: bool = option(
        True,
        "Also set sessions to hold less: no memory pattern beside an arena, which holds the "
        "peak twice from the second run on; without an arena no reuse of buffers, where "
        "that holds more in between.",
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            OptionError: If ``dims`` is no list of names and sizes.
        """
        super().__post_init__()
        _ = self.sizes

    def rearrange(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite and reorder in place; see :mod:`.reorder`.

        After onnxruntime's own fusions: they give new nodes another place, and which of them
        fire depends on where shapes are read.
        """
        from rewrite_rules.shape_size_reorder.reorder import ReorderOptions, reorder

        options = ReorderOptions(self.sizes, self.for_default_order, self.lean_session)
        reorder(model, options, context)

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
        """Pack in place; see :mod:`.prepack`."""
        from rewrite_rules.prepacked_weights.prepack import PrepackOptions, prepack

        prepack(model_path, PrepackOptions(self.limit_mb, self.timeout), context)

    def session_settings(self) -> Mapping[str, str]:
        """Packing in parallel, where it is asked for."""
        return {"session.prepack.enable_parallel": "1"} if self.parallel else {}

    def opened(self) -> None:
        """Give back what packing left on the heap."""
        if self.trim:
            from rewrite_rules.prepacked_weights.trim_heap import trim_heap

            trim_heap()

    def child_seconds(self) -> int:
        """The time for packing, and as much for what comes before, ten minutes at least."""
        return self.timeout + max(600, self.timeout)

    def checks_digests(self) -> bool:
        """Whether a start has to read the files whole."""
        return self.verify == "digest"


BUILTIN_PASSES: tuple[type[Pass], ...] = (
    TrimPadding,
    MixedPrecisionBoundaries,
    DqMatMulNBitsFusion,
    TransformerFusion,
    ShapeSizeReorder,
    PrepackedWeights,
)
