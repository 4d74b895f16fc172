# SPDX-License-Identifier: MIT
"""Operators as passes ask for them: those that compute each token by itself, and attention.

Of the former, what they keep of a token's padding.

One row for each, read by everything that asks:

- ``zero``: which operands have to be 0 for the result to be 0;
- ``low``: which have to be far below what is real for the result to be so;
- ``packs``: whether rows ``[N, D]`` of tokens alone compute as ``[batch, sequence, D]`` does.

``all``, ``any`` or ``first`` operand, those to be ``chosen`` from, the ``dividend`` where the
divisor is not 0 as well, or ``-`` where none makes it so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from rewrite_rules.graph.nodes import DOMAINS

Join = Callable[[list[bool]], bool]
_JOINS: dict[str, Join] = {
    "all": all,
    "any": any,
    "first": lambda flags: flags[0],
    "dividend": lambda flags: flags[0] and not any(flags[1:]),
    "chosen": lambda flags: all(flags[1:]),
    "-": lambda _: False,
}


@dataclasses.dataclass(frozen=True)
class PerToken:
    """What an operator keeps at padded positions, from whether its operands have it."""

    zero: Join
    low: Join
    packs: bool


_TABLE = """
zero   low    packs  operators
all    all    yes    Cast CastLike Dropout Identity
all    -      yes    Abs Ceil Celu Elu Erf Floor Gelu HardSwish LeakyRelu Mish PRelu Relu Round
all    -      yes    Selu Sign Sin Softsign Sqrt Swish Tan Tanh BiasGelu FastGelu QuickGelu
-      -      yes    Acos Asin Atan BitwiseNot Clip Cos Exp HardSigmoid IsInf IsNaN Log Neg Not
-      -      yes    Reciprocal Sigmoid Softplus
-      -      yes    And BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less
-      -      yes    LessOrEqual Max Mean Min Mod Or Pow Sum Xor
-      -      yes    DequantizeLinear QuantizeLinear
all    any    yes    Add
all    first  yes    Sub
any    -      yes    Mul
dividend -   yes    Div
chosen chosen -      Where
-      -      yes    SkipLayerNormalization SkipSimplifiedLayerNormalization
-      -      yes    LayerNormalization RMSNormalization SimplifiedLayerNormalization
"""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()[1:]]
PER_TOKEN = {
    name: PerToken(_JOINS[zero], _JOINS[low], packs == "yes")
    for zero, low, packs, *names in _ROWS
    for name in names
}
NORMS = frozenset(_ROWS[-1][3:])
SKIP_NORMS = frozenset(_ROWS[-2][3:])


@dataclasses.dataclass(frozen=True)
class Attention:
    """The inputs of an operator that is attention as a whole, by their place.

    Attributes:
        keys: Queries, keys and values, ``[batch, (heads,) tokens, D]``.
        masks: What is added to scores, or leaves those that are True.
        counted: Which keys count, of integers: those above 0, ``[batch, (queries,) keys]``; or
            as many as it says, ``[batch]``.
        absent: Inputs that make another operator of it.
    """

    keys: tuple[int, int, int]
    masks: tuple[int, ...]
    counted: int
    absent: tuple[int, ...]


# onnxruntime hides keys by adding -10000, mask_filter_value or the lowest float to scores.
ATTENTIONS = {
    ("", "Attention"): Attention((0, 1, 2), (3,), 6, (4, 5)),
    ("com.microsoft", "Attention"): Attention((0, 0, 0), (5,), 3, (4, 6)),
    ("com.microsoft", "MultiHeadAttention"): Attention((0, 1, 2), (5,), 4, (6, 7, 8, 9)),
}


def per_token(node: ir.Node) -> PerToken | None:
    """Return the row of a node that works element by element, or on each token's features."""
    return PER_TOKEN.get(node.op_type) if node.domain in DOMAINS else None
