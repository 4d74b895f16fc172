# SPDX-License-Identifier: MIT
"""Our passes, in the order in which they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from session_options.keys import OptionError, option, option_key, parse_dims
from session_options.passes import Pass

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


ACCURACY_LEVELS = ("auto", "0", "1", "2", "3", "4")


def level_text(level: str | int) -> str | int:
    """Return an accuracy level as its option has it; other types are left."""
    return str(level) if type(level) is int else level


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
        """Check the options."""
        super().__post_init__()
        if self.multiple < 1:
            key = option_key(self.name, "multiple")
            raise OptionError(f"{key} is {self.multiple}: 1 or more is expected")

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Trim in place; see :mod:`rewrite_rules.trim_padding.trim`."""
        from rewrite_rules.trim_padding.trim import trim_padding

        trim_padding(model, context, multiple=self.multiple, mask=self.mask, pack=self.pack)


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
        "Tensors, or nodes with what they compute, that get 16 bits: names, separated by "
        "commas.",
    )
    mode: str = option(
        "int16",
        "What becomes of the regions: 'int16' quantises them with 16 bits, for NPUs; 'float' "
        "takes their quantisation out, which on CPUs is faster than 16 bits.",
        choices=("int16", "float"),
    )
    target: str = option(
        "cpu",
        "What the result runs on: 'qnn' keeps every DQ->Q, which such accelerators run as a "
        "Convert; 'cpu' drops a 16-bit pair that gives back the 8-bit values before it.",
        choices=("cpu", "qnn"),
    )
    merge: bool = option(
        False,
        "Where one region leads straight into another, drop the 8-bit pair between them: more "
        "accurate, but the numbers change.",
    )
    float_limit_mb: int = option(
        1024,
        "In mode 'float': megabytes that weights of float regions may take as float "
        "constants; beyond, they are dequantised at every inference.",
    )

    def __post_init__(self) -> None:
        """Check the options; bring overrides into their canonical form."""
        if self.overrides and not self.overrides_file:
            from rewrite_rules.mixed_precision_boundaries.tensor_overrides import OverrideError
            from session_options.override_json import format_overrides

            try:
                text = format_overrides(self.overrides)
            except OverrideError as error:
                key = option_key(self.name, "overrides")
                raise OptionError(f"{key}: {error}") from None
            object.__setattr__(self, "overrides", text)
        elif isinstance(self.overrides, Mapping):
            object.__setattr__(self, "overrides", "")
        super().__post_init__()

    @property
    def overrides_file(self) -> str:
        """The path that ``overrides`` names, empty if it names none."""
        is_named = isinstance(self.overrides, str) and self.overrides.startswith("@")
        return str(self.overrides)[1:] if is_named else ""

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Place boundaries and fold pairs; see :mod:`.place`."""
        from rewrite_rules.mixed_precision_boundaries.fold_rules import fold_pairs
        from rewrite_rules.mixed_precision_boundaries.place import (
            BoundaryOptions,
            place_boundaries,
        )
        from session_options.override_json import read_overrides

        key = option_key(self.name, "overrides")
        if self.overrides_file:
            raise OptionError(f"{key} is {self.overrides!r}, and nobody has read that file")
        options = BoundaryOptions(
            overrides=read_overrides(self.overrides or "{}"),
            promote=frozenset(filter(None, map(str.strip, self.promote.split(",")))),
            mode=self.mode,
            target=self.target,
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


@dataclasses.dataclass(frozen=True)
class DqMatMulNBitsFusion(Pass):
    """Dequantised weights -> MatMulNBits, GatherBlockQuantized; once, ahead of the session."""

    name: ClassVar[str] = "dq_matmulnbits_fusion"
    summary: ClassVar[str] = "fuse weights into MatMulNBits and GatherBlockQuantized"
    position: ClassVar[int] = 20
    needs_operator: ClassVar[str] = "DequantizeLinear"

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
        "4, 2-bit mostly, small tables below 8 bits), or that no kernel takes: 'float' makes "
        "them float constants, 'fuse' fuses those that it can all the same, 'keep' leaves "
        "them.",
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
    """Attention, rotary embeddings, projections and norms, whoever exported the model."""

    name: ClassVar[str] = "transformer_fusion"
    summary: ClassVar[str] = "fuse attention, rotary embeddings, and norms with residuals"
    # After the weights are those of MatMulNBits.
    position: ClassVar[int] = 60
    asks_for_trials: ClassVar[bool] = True

    rotary: bool = option(
        True, "Rotary embeddings, found by what they compute, as one node (CPU sessions)."
    )
    attention: bool = option(
        True,
        "Attention with a cache in the fastest form for one token and for a prompt, chosen at "
        "each run (CPU sessions).",
    )
    projections: bool = option(
        True, "One MatMulNBits for Q, K, V and one for gate, up (CPU sessions)."
    )

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
    activations: bool = option(True, "Gelu by tanh as one FastGelu (CPU sessions).")

    kv_cache: str = option(
        "exported",
        "'shared': past inputs may be buffers longer than the cache, bound as present outputs "
        "too (IOBinding); new keys and values are appended in place, and the attention mask "
        "says how much they hold. An error where GroupQueryAttention does not fit.",
        choices=("exported", "shared"),
    )

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite in place; see :mod:`.fuse`."""
        from rewrite_rules.transformer_fusion.fuse import TransformerOptions, fuse_transformer

        fuse_transformer(model, TransformerOptions(**dataclasses.asdict(self)), context)


@dataclasses.dataclass(frozen=True)
class ConvFusion(Pass):
    """Scales, offsets, norms and hard swishes around convolutions, whoever exported them."""

    name: ClassVar[str] = "conv_fusion"
    summary: ClassVar[str] = "fold scales, offsets and norms into convolutions"
    # After attention is fused, whose projections have scales as well.
    position: ClassVar[int] = 65

    slow_kernels: str = option(
        "keep",
        "ConvInteger with a filter for each channel, slower than Conv in float: 'keep' leaves "
        "it; 'float' computes with the dequantised weight, and with activations as they are "
        "before quantisation. Numbers change, towards the float model's.",
        choices=("keep", "float"),
    )

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite in place; see :mod:`rewrite_rules.conv_fusion.fuse`."""
        from rewrite_rules.conv_fusion.fuse import fuse_convolutions

        fuse_convolutions(model, context, slow_kernels=self.slow_kernels)


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
        "Sizes of symbolic dimensions for estimates of memory: batch=1,seq=512. Others count "
        "as 128. Results are right for any sizes.",
    )
    for_default_order: bool = option(
        False,
        "Write a file whose default order is good, for sessions that cannot be set to run in "
        "file order (Triton, C++); else sessions are set to ExecutionOrder.PRIORITY_BASED.",
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _ = self.sizes

    def rearrange(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite and reorder in place; see :mod:`.reorder`.

        After onnxruntime's own fusions: they give new nodes another place, and which of them
        fire depends on where shapes are read.
        """
        from rewrite_rules.shape_size_reorder.reorder import reorder

        reorder(model, context, dims=self.sizes, for_default_order=self.for_default_order)

    @property
    def sizes(self) -> dict[str, int]:
        """The option ``dims``, read."""
        return parse_dims(option_key(self.name, "dims"), self.dims)


@dataclasses.dataclass(frozen=True)
class PrepackedWeights(Pass):
    """Kernels' packed weights in the file, mapped and shared by all processes."""

    name: ClassVar[str] = "prepacked_weights"
    summary: ClassVar[str] = "keep packed weights in the file, shared instead of on the heap"
    position: ClassVar[int] = 90

    verify: str = option(
        "size",
        "What a start checks of the files: 'size', or 'digest', which reads them whole. "
        "onnxruntime before 1.32 computes wrong numbers, silently, from packed weights that "
        "were damaged.",
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
        from rewrite_rules.prepacked_weights.prepack import prepack

        prepack(model_path, context, limit_mb=self.limit_mb, seconds=self.timeout)

    def session_settings(self) -> Mapping[str, str]:
        """Packing in parallel, where it is asked for."""
        return {"session.prepack.enable_parallel": "1"} if self.parallel else {}

    def gives_memory_back(self) -> bool:
        """Return whether what packing left on the heap goes back to the system."""
        return self.trim

    def child_seconds(self) -> int:
        """The time for packing, and as much for what comes before, ten minutes at least."""
        return self.timeout + max(600, self.timeout)

    def checks_digests(self) -> bool:
        """Whether a start has to read the files whole."""
        return self.verify == "digest"
