# SPDX-License-Identifier: MIT
"""What a pass is: a frozen dataclass whose fields are its options, a method per stage."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from session_options.entries import option_key
from session_options.keys import OptionError, check_choice, options_of

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext

# What is noted of a pass that met no candidate.
NOTHING_TO_DO = "nothing to do in this model"


class Pass:
    """Base of every pass, ours and those of other packages.

    A pass is a frozen dataclass.

    A pass overrides the stages it takes part in. A model goes through them in this order; in
    each stage, passes run by ``position``:

    1. :meth:`rewrite`: the graph as the user gave it;
    2. onnxruntime's own optimisers (for CPU sessions that come from the cache);
    3. :meth:`rearrange`: the graph that will run, fused nodes included;
    4. :meth:`finish`: the saved files.

    Each of the three returns whether it modified anything; None stands for whether one of its
    remarks says that something fired. Where no pass modified anything, nothing is saved and
    the original runs. One that raises is left out; the others start again from the original.

    A session that is opened on the result gets :meth:`session_settings`.

    Attributes:
        name: Lower snake case; gives the session keys. Unique.
        summary: One line of help.
        position: Smaller runs earlier; 50 unless said otherwise.
        version: Change it when modules other than the class's own do the work and change: a
            cache entry is built again if it, or the class's module, changes.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    position: ClassVar[int] = 50
    version: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            OptionError: If a value has the wrong type or is none of the choices.
        """
        for spec in options_of(type(self)):
            check_choice(option_key(self.name, spec.name), getattr(self, spec.name), spec)

    def rewrite(self, model: ir.Model, context: PassContext) -> bool | None:
        """Rewrite the user's graph in place."""

    def rearrange(self, model: ir.Model, context: PassContext) -> bool | None:
        """Change the graph that will run, after onnxruntime's own optimisers, in place."""

    def finish(self, model_path: Path, context: PassContext) -> bool | None:
        """Work on the saved model; its folder holds its files and nothing else."""

    def session_settings(self) -> Mapping[str, str]:
        """Return what a session on the result needs of its ``SessionOptions``.

        A key with a dot is a config entry with value ``"0"`` or ``"1"``, ``"0"`` being
        onnxruntime's default; one without is an attribute, its value ``"0"`` or ``"1"`` for a
        bool, else the name of a member of the attribute's enumeration:
        ``{"execution_order": "PRIORITY_BASED"}``.
        """
        return types.MappingProxyType({})

    def takes_part_in(self, stage: str) -> bool:
        """Whether the class overrides a stage: "rewrite", "rearrange" or "finish"."""
        return getattr(type(self), stage) is not getattr(Pass, stage)

    @classmethod
    def validate(cls) -> None:
        """Check what the class says of itself, for classes that come from elsewhere."""
        params = getattr(cls, "__dataclass_params__", None)
        if "__dataclass_params__" not in vars(cls) or params is None or not params.frozen:
            raise OptionError(f"{cls.__name__} is not a frozen dataclass")
        kinds = {"name": str, "summary": str, "version": str, "position": int}
        for field, kind in kinds.items():
            if not isinstance(found := getattr(cls, field, None), kind):
                raise OptionError(
                    f"{cls.__name__}.{field} is {found!r}; expected {kind.__name__}"
                )
        options_of(cls)
        cls()  # the defaults have to be among the choices
