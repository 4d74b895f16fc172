# SPDX-License-Identifier: MIT
"""A mixture of experts as a graph computes it, whatever its nodes.

    y[t] = sum over j of shares[t, j] * expert[chosen[t, j]](x[t])
    expert(x) = last(activation(first(x)))

``first`` is one layer, or a gate and what it multiplies, in one matrix or two.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One layer of all experts: their matrices, and what is added."""

    matrices: ir.Value  # [E, N, K] or [E, K, N], a constant
    tensor: ir.TensorProtocol
    k_last: bool
    bias: ir.Value | None = None  # [E, N], a constant

    @property
    def experts(self) -> int:
        """How many there are."""
        return int(self.tensor.shape.numpy()[0])

    @property
    def N(self) -> int:
        """Number of output columns."""
        return int(self.tensor.shape.numpy()[1 if self.k_last else 2])

    @property
    def K(self) -> int:
        """Size that is reduced."""
        return int(self.tensor.shape.numpy()[2 if self.k_last else 1])


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """Columns of the output of a layer, one for each column of the activation's."""

    layer: Layer
    places: range


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """What lies between two layers, in onnxruntime's words.

    swiglu: ``g * sigmoid(alpha g) * (u + beta)``, with ``g = min(gate, limit)`` and ``u`` the
    other half clipped to ``-limit`` and ``limit``. The others work on the gate alone.
    """

    kind: str  # relu, gelu (by tanh), silu, identity or swiglu
    gate: Columns
    other: Columns | None = None
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    @property
    def parts(self) -> tuple[Columns, ...]:
        """The gate, and the other half where there is one."""
        return (self.gate,) if self.other is None else (self.gate, self.other)

    @property
    def layers(self) -> list[Layer]:
        """The layers that it reads, each once."""
        return list(dict.fromkeys(part.layer for part in self.parts))

    def attributes(self) -> dict[str, float | int | str]:
        """Return it as attributes of onnxruntime's operators."""
        found: dict[str, float | int | str] = {"activation_type": self.kind}
        if self.kind == "swiglu":  # interleaved, the one form that the CPU has
            found |= {"swiglu_fusion": 1}
            found |= {"activation_alpha": self.alpha, "activation_beta": self.beta}
            if self.limit < math.inf:
                found["swiglu_limit"] = self.limit
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """The router of an operator: logits, of which it takes the softmax."""

    logits: ir.Value  # [T, E]
    normalize: bool  # whether the shares of the chosen add up to 1


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A router in nodes: what TopK chose, and shares that are not negative."""

    chosen: ir.Value  # [T, k], no number twice in a row
    shares: ir.Value  # [T, k]


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Experts that each token is sent to some of."""

    node: ir.Node  # that stands for it: what comes out of it is the last expert's sum
    x: ir.Value  # [T, K], or of rank 3 for an operator
    router: Operator | Choice
    k: int
    activation: Activation
    last: Layer

    @property
    def layers(self) -> list[Layer]:
        """All layers, in order."""
        return [*self.activation.layers, self.last]

    @property
    def output(self) -> ir.Value:
        """What it computes, shaped as ``x``."""
        return self.node.outputs[0]
