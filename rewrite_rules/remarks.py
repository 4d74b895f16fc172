# SPDX-License-Identifier: MIT
"""What a pass did to each candidate, in words that a user can act on."""

from __future__ import annotations

__all__ = [
    "Candidate", "Outcome", "PassContext", "Refusal", "Remark", "Remarks", "RewriteError",
    "Trial",
]  # fmt: skip

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rewrite_rules.onnxruntime_version import are_cpu_only

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Outcome(enum.StrEnum):
    """What became of a candidate."""

    FIRED = "fired"
    REFUSED = "refused"
    NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Remark:
    """The outcome of one candidate node.

    Attributes:
        pass_name: Name of the pass that looked at the node, for instance
            ``"dq_matmulnbits_fusion"``.
        node: Name of the node; nodes without a name are called by their first output.
        outcome: Fired, refused, or a note about something that is neither.
        reason: What was done or what stood in the way, with the tensor's or node's name.
    """

    pass_name: str
    node: str
    outcome: Outcome
    reason: str

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


class RewriteError(RuntimeError):
    """A rule failed with an exception that it did not expect.

    Attributes:
        node: Name of the node that the rule was looking at.
    """

    def __init__(self, node: str, error: BaseException) -> None:
        super().__init__(f"node {node!r}: {type(error).__name__}: {error}")
        self.node = node


class Refusal(Exception):
    """A candidate cannot be rewritten; the text is the reason a user reads."""


class Candidate(NamedTuple):
    """One place that one rule may rewrite: the same in every run of a pass over a model."""

    rule: str
    node: str


class Remarks:
    """Collects the remarks of one pass over one model; not shared between threads.

    Attributes:
        pass_name: Name of the pass.
        provisional: What :meth:`failed` was given.
        rewritten: What fired for each candidate that was named by :meth:`trying`.
    """

    def __init__(
        self, pass_name: str, withheld: Mapping[Candidate, Remark] | None = None
    ) -> None:
        """``withheld``: candidates to leave, and what an earlier run's remark becomes."""
        self.pass_name = pass_name
        self.provisional: list[str] = []
        self.rewritten: dict[Candidate, Remark] = {}
        self._withheld = withheld or {}
        self._candidate: Candidate | None = None
        self._remarks: dict[tuple[str, str, Outcome], Remark] = {}

    def __iter__(self) -> Iterator[Remark]:
        return iter(self._remarks.values())

    def __len__(self) -> int:
        return len(self._remarks)

    def fired(self, node: str, reason: str) -> None:
        """Record that ``node`` was rewritten."""
        remark = self._add(node, Outcome.FIRED, reason)
        if self._candidate is not None:
            self.rewritten[self._candidate] = remark

    def refused(self, node: str, reason: str) -> None:
        """Record that ``node`` was left as it was, and why."""
        self._add(node, Outcome.REFUSED, reason)

    def note(self, node: str, reason: str) -> None:
        """Record something about ``node`` that is neither a rewrite nor a refusal."""
        self._add(node, Outcome.NOTE, reason)

    def failed(self, node: str, reason: str) -> None:
        """Record that ``node`` was left because something broke that may work another time.

        The result is not final then: it is tried again at a later start.
        """
        self.provisional.append(f"{node}: {reason}")
        self.refused(node, reason)

    @contextlib.contextmanager
    def trying(self, rule: str, node: str) -> Iterator[bool]:
        """Name what fires in the block; gives whether the candidate may be rewritten."""
        candidate = Candidate(rule, node)
        withheld = self._withheld.get(candidate)
        if withheld is not None:
            self._add(withheld.node, withheld.outcome, withheld.reason)
        self._candidate = candidate
        try:
            yield withheld is None
        finally:
            self._candidate = None

    @contextlib.contextmanager
    def at(self, node: str) -> Iterator[None]:
        """Name ``node`` in whatever exception leaves the block, by a :class:`RewriteError`."""
        try:
            yield
        except RewriteError:
            raise
        except Exception as error:
            raise RewriteError(node, error) from error

    def _add(self, node: str, outcome: Outcome, reason: str) -> Remark:
        # A rule set may look at one node several times; an outcome is reported once.
        remark = Remark(self.pass_name, node, outcome, reason)
        return self._remarks.setdefault((node, reason, outcome), remark)


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """Made-up inputs on which the result of a pass has to agree with the model before it.

    Attributes:
        name: What is tried, for messages.
        feeds: The inputs.
        compared: Which elements of an output count, as a bool array that broadcasts to it;
            outputs that are not named are compared whole.
        bound: Greatest difference, as a share of the greatest magnitude of the output; more
            is allowed where the model before moves that far by rounding alone.
        tokens: Which new tokens count, bool ``[batch, sequence]``, in values that no output
            shows; None for all.
        guessed: Whether its sizes are guesses: nothing follows where the model before runs no
            trial, which else withdraws the result.
        optional: Whether the trial is left out where the model before cannot run it, for
            instance because it is longer than the model takes.
        timed: Whether the result is dropped where such runs take more time.
        required: Whether the pass fails where its result does: callers rely on all of it.
    """

    name: str
    feeds: Mapping[str, NDArray[Any]]
    compared: Mapping[str, NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    bound: float = 1e-6
    optional: bool = False
    timed: bool = False
    tokens: NDArray[np.bool_] | None = None
    guessed: bool = False
    required: bool = False

    def counted(self, name: str, shape: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which elements of a value count, broadcast to its shape; None for all.

        Values inside have the axis of the tokens where one behind the batch has their number.
        """
        import numpy as np

        counted = self.compared.get(name)
        if (
            counted is None
            and self.tokens is not None
            and tuple(shape[:1]) == self.tokens.shape[:1]
        ):
            places = [
                axis for axis in range(1, len(shape)) if shape[axis] == self.tokens.shape[1]
            ]
            others = [axis for axis in range(1, len(shape)) if axis not in places[:1]]
            counted = np.expand_dims(self.tokens, others) if places else None
        if counted is None:
            return None
        # A model may drop what lies behind some length.
        first = tuple(map(slice, shape[len(shape) - counted.ndim :]))
        return np.broadcast_to(counted[first], shape)


@dataclasses.dataclass(frozen=True)
class PassContext:
    """What a pass may know about the session that its result is for.

    Attributes:
        remarks: Where the pass answers.
        providers: Execution providers of the session in order of precedence, for instance
            ``("CPUExecutionProvider",)``.
        onnxruntime: Major and minor version that the result is for; None for the newest.
        cpu_arena: Whether the session's memory on the CPU comes from an arena, which gives
            nothing back; a pass that looks at it sets ``Pass.depends_on_arena``.
        final_graph: Whether no optimiser of onnxruntime will change the graph any more.
        trials: What the result is tried on beside the model before; a pass adds to it. Where
            they differ, the pass runs again without the candidates that make the difference.
        session_settings: What sessions on the result have to be set to, for this model; a pass
            adds to it. As ``Pass.session_settings`` returns them, and after those.
        child_python: Interpreter and environment for child processes; None where the pass must
            start none.
        native_accuracy_level: The ``accuracy_level`` of MatMulNBits nodes that onnxruntime's
            own optimizer would make; None where it does not run.
        native_block_size: Their block size where a weight has one scale, or one for each
            column; 0 for onnxruntime's default, -1 for the size that pads K least.
    """

    remarks: Remarks
    providers: Sequence[str] = ("CPUExecutionProvider",)
    onnxruntime: tuple[int, int] | None = None
    final_graph: bool = False
    session_settings: dict[str, str] = dataclasses.field(default_factory=dict)
    cpu_arena: bool = True
    child_python: tuple[str, Mapping[str, str]] | None = None
    trials: list[Trial] = dataclasses.field(default_factory=list)
    native_accuracy_level: int | None = 4
    native_block_size: int = 0

    @property
    def cpu_only(self) -> bool:
        """Whether every node will run on the CPU."""
        return are_cpu_only(self.providers)
