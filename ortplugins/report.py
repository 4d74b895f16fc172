# SPDX-License-Identifier: MIT
"""Reports on what the passes did to a model, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rewrite_rules.remarks import Outcome, Remark

_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class PassReport:
    """The run of one pass on one model.

    Attributes:
        name: The name of the pass.
        seconds: Wall-clock time.
        remarks: The outcome of every candidate, in order.
    """

    name: str
    seconds: float
    remarks: tuple[Remark, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """What happened between a model and its session.

    Attributes:
        passes: One entry per pass that ran.
        source: Where the running model came from: ``"stock"`` (no pass was switched on),
            ``"built"`` (now), ``"cache"`` (made earlier) or ``"untouched"`` (the original,
            because nothing fired or something failed). With a hint that changes settings
            only, it is "built" or "cache", although the original runs.
        notes: Notes that belong to no node.
        artifact: The path of the model that runs or was written; empty for the original.
    """

    passes: tuple[PassReport, ...] = ()
    source: str = "stock"
    notes: tuple[str, ...] = ()
    artifact: str = ""

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """All remarks of all passes."""
        return tuple(remark for item in self.passes for remark in item.remarks)

    @property
    def fired(self) -> tuple[Remark, ...]:
        """The candidates that were rewritten."""
        return self._with(Outcome.FIRED)

    @property
    def refused(self) -> tuple[Remark, ...]:
        """The candidates that were left unchanged, with the reason."""
        return self._with(Outcome.REFUSED)

    @property
    def on_model(self) -> tuple[Remark, ...]:
        """The notes of passes on the model as a whole."""
        return tuple(item for item in self._with(Outcome.NOTE) if item.node == "model")

    def __str__(self) -> str:
        """Return one line with the counts, the first refusals and all notes."""
        if not self.passes:
            return "; ".join((f"{self.source}: no pass ran", *self.notes))
        text = f"{self.source}: fired {len(self.fired)}, refused {len(self.refused)}"
        if self.refused:
            shown = [f'"{worded(remark)}"' for remark in self.refused[:_SHOWN]]
            more = len(self.refused) - len(shown)
            text += ": " + ", ".join(shown) + (f", and {more} more" if more else "")
        noted = [f"{remark.pass_name}: {remark.reason}" for remark in self.on_model]
        return "; ".join((text, *noted, *self.notes))

    def to_text(self) -> str:
        """Return every remark on its own line, grouped by pass."""
        lines = [str(self)]
        for item in self.passes:
            lines.append(f"{item.name} ({item.seconds * 1e3:.0f} ms)")
            lines += [f"  {remark.outcome.value:8}{worded(remark)}" for remark in item.remarks]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as JSON; :meth:`from_json` reads it."""
        return json.dumps(self.to_dict(), indent=1)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as lists, dicts, strings and numbers."""
        return {
            "source": self.source,
            "artifact": self.artifact,
            "notes": list(self.notes),
            "fired": len(self.fired),
            "refused": len(self.refused),
            "passes": [
                {
                    "name": item.name,
                    "seconds": round(item.seconds, 6),
                    "remarks": [_remark_to_dict(remark) for remark in item.remarks],
                }
                for item in self.passes
            ],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Report:
        """Read what :meth:`to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        return cls(
            passes=tuple(
                PassReport(
                    item["name"],
                    float(item["seconds"]),
                    tuple(
                        Remark(
                            item["name"],
                            r["node"],
                            Outcome(r["outcome"]),
                            r["reason"],
                            r.get("code", ""),
                        )
                        for r in item["remarks"]
                    ),
                )
                for item in content["passes"]
            ),
            source=content["source"],
            notes=tuple(content["notes"]),
            artifact=content["artifact"],
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        return cls.from_dict(json.loads(text))

    @classmethod
    def of_session(
        cls, stored: bytes, source: str, artifact: str, notes: Sequence[str]
    ) -> Report:
        """Return the report of a session from the JSON of its entry, if any, and notes."""
        report = cls.from_dict(json.loads(stored)) if stored else cls()
        return dataclasses.replace(
            report, source=source, artifact=artifact, notes=(*report.notes, *notes)
        )

    def _with(self, outcome: Outcome) -> tuple[Remark, ...]:
        return tuple(remark for remark in self.remarks if remark.outcome is outcome)


def worded(remark: Remark) -> str:
    """Return a remark as text; a refusal includes its code for ``explain``."""
    return f"{remark} [{remark.code}]" if remark.code else str(remark)


def _remark_to_dict(remark: Remark) -> dict[str, str]:
    found = {"node": remark.node, "outcome": remark.outcome.value, "reason": remark.reason}
    if remark.outcome is Outcome.REFUSED:
        found["code"] = remark.code
    return found
