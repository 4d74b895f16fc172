# SPDX-License-Identifier: MIT
"""Which onnxruntime has which kernel for quantised weights, on the CPU and with CUDA.

The CPU: measured on onnxruntime 1.22.1, 1.24.4, 1.27.0, 1.29.0, 1.31.1 and 1.32.0 (Linux,
x86-64, AVX-512); a version in between counts as the next older one measured. Forms that were
right on all of them have no entry. CUDA: read from the kernels' messages in the wheels of
onnxruntime-gpu 1.27, 1.28, 1.30 and 1.31.
"""

from __future__ import annotations

from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.onnxruntime_version import Version
from rewrite_rules.remarks import PassContext


class NoKernel(Refusal):
    """No kernel computes on these codes; a float constant might do."""


_CUDA = "CUDAExecutionProvider"


def takes_bias(context: PassContext) -> bool:
    """Whether MatMulNBits may have a bias: CUDA's kernel throws before onnxruntime 1.28."""
    version = context.onnxruntime
    return version is None or version >= (1, 28) or _CUDA not in context.providers


def matmulnbits_unsupported(
    context: PassContext,
    *,
    bits: int,
    accuracy_level: int,
    float16: bool,
    captured_codes: bool,
    captured_zero_points: bool,
) -> None:
    """Refuse what a version of onnxruntime fails on, or computes wrongly.

    Codes and zero points, be they given or written, are captured where the node lies in a
    body (If, Loop, Scan) and they in a graph around it.
    """
    version, cpu = context.onnxruntime, context.cpu_only
    _refuse_missing(
        version,
        ((1, 31), bits == 2 and _CUDA in context.providers, "2-bit weights on CUDA"),
        ((1, 24), cpu and bits == 2, "2-bit weights"),
        ((1, 29), cpu and bits == 2 and float16, "2-bit weights under float16 activations"),
        (
            (1, 24),
            cpu and bits == 8 and accuracy_level != 4,
            f"8-bit weights at accuracy_level {accuracy_level}",
        ),
        # It runs 8-bit codes only once they are packed, and packs them only in the body or
        # right around it: two graphs out the run fails.
        (
            (1, 24),
            cpu and bits == 8 and captured_codes,
            "8-bit weights outside the subgraph of If, Loop or Scan",
        ),
    )
    outside = cpu and captured_zero_points and accuracy_level == 4
    if outside and version is not None and version < (1, 29):
        raise NoKernel(
            f"onnxruntime {_text(version)} computes wrong numbers at accuracy_level 4 from "
            "zero points outside the subgraph of If, Loop or Scan: 1.29 is right, and so is "
            "accuracy_level 0"
        )


def table_unsupported(version: Version | None, *, bits: int, odd_blocks: bool) -> None:
    """Refuse uint8 tables that a version of onnxruntime has no right kernel for.

    ``odd_blocks``: there are zero points, for an odd number of blocks in a row.
    """
    what = f"Gather from uint8 tables of {bits}-bit codes"
    _refuse_missing(version, ((1, 24), True, what), ((1, 27), bits == 2, what))
    if version is not None and version < (1, 27) and bits == 4 and odd_blocks:
        raise NoKernel(
            f"onnxruntime {_text(version)} computes wrong numbers at {what} with zero points "
            "for an odd number of blocks: 1.27 is right"
        )


def _refuse_missing(version: Version | None, *kernels: tuple[Version, bool, str]) -> None:
    """Refuse the first kernel that is needed, and that only a later version has."""
    for first, needed, what in kernels:
        if needed and version is not None and version < first:
            raise NoKernel(
                f"onnxruntime {_text(version)} has no kernel for {what}: {_text(first)} has"
            )


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
