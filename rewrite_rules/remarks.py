# SPDX-License-Identifier: MIT
"""What a pass did to each candidate, in words that a user can act on."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from rewrite_rules.onnxruntime_version import are_cpu_only


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
        code: Of a refusal, what to do about it is under this code; empty where there is none.
    """

    pass_name: str
    node: str
    outcome: Outcome
    reason: str
    code: str = ""

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
    """A candidate cannot be rewritten.

    ``Refusal("ORP101", "what was found: what was expected")``. The code says what to do about
    it (``ortplugins explain``); a pass of another package gives one of its own, or "".

    Attributes:
        code: The code of the reason.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    def behind(self, text: str) -> Refusal:
        """Return the same refusal with text in front."""
        return Refusal(self.code, f"{text}{self}")


class Remarks:
    """Collects the remarks of one pass over one model; not shared between threads.

    Attributes:
        pass_name: Name of the pass.
    """

    def __init__(self, pass_name: str) -> None:
        self.pass_name = pass_name
        self._remarks: dict[tuple[str, str, Outcome], Remark] = {}

    def __iter__(self) -> Iterator[Remark]:
        return iter(self._remarks.values())

    def __len__(self) -> int:
        return len(self._remarks)

    def fired(self, node: str, reason: str) -> None:
        """Record that ``node`` was rewritten."""
        self._add(node, Outcome.FIRED, reason)

    def refused(self, node: str, reason: Refusal | str) -> None:
        """Record that ``node`` was left as it was, and why; a text has no code."""
        code = reason.code if isinstance(reason, Refusal) else ""
        self._add(node, Outcome.REFUSED, str(reason), code)

    def note(self, node: str, reason: str) -> None:
        """Record something about ``node`` that is neither a rewrite nor a refusal."""
        self._add(node, Outcome.NOTE, reason)

    @contextlib.contextmanager
    def at(self, node: str) -> Iterator[None]:
        """Name ``node`` in whatever exception leaves the block, by a :class:`RewriteError`."""
        try:
            yield
        except RewriteError:
            raise
        except Exception as error:
            raise RewriteError(node, error) from error

    def _add(self, node: str, outcome: Outcome, reason: str, code: str = "") -> None:
        # A rule set may look at one node several times; an outcome is reported once.
        remark = Remark(self.pass_name, node, outcome, reason, code)
        self._remarks.setdefault((node, reason, outcome), remark)


@dataclasses.dataclass(frozen=True)
class PassContext:
    """What a pass may know about the session that its result is for.

    Attributes:
        remarks: Where the pass answers.
        providers: Execution providers of the session in order of precedence, for instance
            ``("CPUExecutionProvider",)``.
        onnxruntime: Major and minor version that the result is for; None for the newest.
        cpu_arena: Whether the session's memory on the CPU comes from an arena, which gives
            nothing back.
        final_graph: Whether no optimiser of onnxruntime will change the graph any more.
        session_settings: What sessions on the result have to be set to, for this model; a pass
            adds to it. As ``Pass.session_settings`` returns them, and after those.
        child_python: Interpreter and environment for child processes; None where the pass must
            start none.
        native_accuracy_level: The ``accuracy_level`` of MatMulNBits nodes that onnxruntime's
            own optimizer would make; None where it does not run.
    """

    remarks: Remarks
    providers: Sequence[str] = ("CPUExecutionProvider",)
    onnxruntime: tuple[int, int] | None = None
    final_graph: bool = False
    session_settings: dict[str, str] = dataclasses.field(default_factory=dict)
    cpu_arena: bool = True
    child_python: tuple[str, Mapping[str, str]] | None = None
    native_accuracy_level: int | None = 4

    @property
    def cpu_only(self) -> bool:
        """Whether every node will run on the CPU."""
        return are_cpu_only(self.providers)
