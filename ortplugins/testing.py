# SPDX-License-Identifier: MIT
"""Assertions about models and sessions, for the tests of those who optimise graphs.

Example::

    from ortplugins.testing import assert_fused, assert_same_outputs

    def test_the_model_is_fused(tmp_path):
        result = ortplugins.optimize("model.onnx", tmp_path / "fused.onnx")
        assert_fused(result, {"MatMulNBits": 151, "DequantizeLinear": 0})
        assert_same_outputs("model.onnx", result)

They need no pytest. A model is a path, bytes, an ``onnx.ModelProto``, an ``onnx_ir.Model``,
what ``ortplugins.optimize`` returned, or a session, which stands for the model that it opened.
"""

from __future__ import annotations

__all__ = [
    "assert_fused",
    "assert_no_unfused_weights",
    "assert_same_outputs",
]

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ortplugins.errors import PassError
from ortplugins.measurement import models
from ortplugins.measurement.compare import compare
from ortplugins.measurement.models import GivenModel, ModelSource

# Lines of a message about nodes; a model has thousands.
_SHOWN = 30


def assert_fused(model: ModelSource, counts: Mapping[str, int]) -> None:
    """Assert how many nodes of each operator a model has, including subgraphs and functions.

    The graph that onnxruntime gets is counted, before its own fusions, without constants.

    Args:
        model: The model.
        counts: Exact numbers by operator: ``"MatMulNBits"`` in any domain,
            ``"com.microsoft:MatMulNBits"`` in one, ``"ai.onnx:MatMul"`` in ONNX's own.

    Raises:
        AssertionError: If a number differs; lists what was found, what was not fused and why.
        MissingFileError, ModelFileError: If the model cannot be used.
    """
    __tracebackhide__ = True
    given = GivenModel(model)
    found = models.operator_counts(given.graph())
    wrong = []
    for name, expected in counts.items():
        number = sum(n for key, n in found.items() if _is_meant(name, key))
        if number != expected:
            wrong.append(f"  {name}: {number}, expected {expected}")
    if not wrong:
        return
    listed = ", ".join(
        f"{domain}{':' if domain else ''}{op_type} {n}"
        for (domain, op_type), n in sorted(found.items())
    )
    reasons = [f"  {node}: {why}" for node, why in _reasons(given).items()]
    head = [f"{given.name} has other operators:", *wrong, f"operators found: {listed}"]
    _fail("\n".join([*head, "not fused:"] if reasons else head), reasons)


def assert_no_unfused_weights(model: ModelSource) -> None:
    """Assert that no weight is unpacked at every inference.

    For a session or a result of ``optimize``, which run as they are, weights that the fusion
    could take count as well. For any other model, only those count that it refuses.

    Args:
        model: The model.

    Raises:
        AssertionError: If there is such a weight; names the nodes and the reasons.
        MissingFileError, ModelFileError: If the model cannot be used.
        PassError: If the fusion fails.
    """
    __tracebackhide__ = True
    given = GivenModel(model)
    unfused = models.unfused_in(given, final=given.is_final)
    if unfused:
        _fail(
            f"{len(unfused)} nodes of {given.name} keep a dequantised weight:",
            (f"  {node}: {why}" for node, why in unfused.items()),
        )


def assert_same_outputs(
    a: ModelSource,
    b: ModelSource,
    rtol: float = 1e-5,
    atol: float | None = None,
    inputs: Any = None,
    *,
    dims: Mapping[str, int] | None = None,
    samples: int = 1,
    seed: int = 0,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> None:
    """Assert that ``|b - a| <= atol + rtol * |a|`` for every element of every output.

    NaN equals NaN, an infinity itself. What is not a session runs without onnxruntime's own
    optimisers.

    Args:
        a: The reference.
        b: The other. Sessions run as they are.
        rtol: The relative tolerance.
        atol: The absolute tolerance; None for ``rtol`` times the output's greatest magnitude.
        inputs: A sample (input name -> array), an iterable of them, the path of an .npz file,
            or None for random ones.
        dims: Sizes of symbolic dimensions of random inputs, by name, ``"x[1]"`` for the second
            axis of input x if it has none; others are guessed.
        samples: How many random samples.
        seed: Seed of the random samples.
        providers: Execution providers for models that are not sessions.

    Raises:
        AssertionError: If an output differs or exists in one model only; names it, the place,
            both values and the errors.
        CalibrationError: If a given input does not fit.
        MissingFileError, ModelFileError: If a model cannot be used or run.
        UsageError: If an argument is invalid; names it.
    """
    __tracebackhide__ = True
    found = compare(
        a,
        b,
        inputs=inputs,
        dims=dims,
        samples=samples,
        seed=seed,
        providers=providers,
        rtol=rtol,
        atol=atol,
    )
    if found.failures:
        tolerance = f"rtol {rtol:g}, atol {'rtol * max |a|' if atol is None else f'{atol:g}'}"
        head = f"{found.b} computes something else than {found.a} ({tolerance}):"
        _fail(head, found.failures)


def _is_meant(name: str, key: tuple[str, str]) -> bool:
    domain, colon, op_type = name.rpartition(":")
    if op_type != key[1]:
        return False
    return not colon or ("" if domain == "ai.onnx" else domain) == key[0]


def _reasons(model: GivenModel) -> dict[str, str]:
    """Return why nodes are not fused, from the report or by running the fusion."""
    if model.report is not None:
        return models.by_node((remark.node, remark.reason) for remark in model.report.refused)
    try:
        return models.unfused_in(model)
    except PassError as error:
        # The counts are wrong in any case, so they are reported.
        return {"dq_matmulnbits_fusion": f"gives no reasons: {error}"}


def _fail(head: str, lines: Iterable[str]) -> NoReturn:
    __tracebackhide__ = True
    listed = list(lines)
    more = [f"  and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
    raise AssertionError("\n".join([head, *listed[:_SHOWN], *more]))
