# SPDX-License-Identifier: MIT
"""Everything that an optimised model depends on, as one value.

Its JSON is the job of the child process that builds, and, but for what only says how to build,
part of the key in the cache. Importing this imports none of onnx, onnx_ir and onnxscript.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import onnxruntime

from ortplugins.known_starts import processor
from ortplugins.runtime.copied_options import DATA_FOLDER_KEY
from ortplugins.runtime.machine import package_versions
from ortplugins.runtime.session_settings import (
    ALL_OPTIMIZERS,
    OptimizerSettings,
    read_optimizer_settings,
)
from rewrite_rules.onnxruntime_version import are_cpu_only
from session_options.keys import stored
from session_options.plan import Plan, read_entries

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel, ModelLike


class BuildRequest(NamedTuple):
    """A model, and everything else that the result depends on."""

    # Absolute path or serialized; for a file that no session asked for, in memory as well.
    source: ModelLike | bytes
    plan: Plan
    providers: tuple[str, ...] = ("CPUExecutionProvider",)  # in order of precedence
    data_folder: str | None = None  # where external data is; None for beside the model
    optimizers: OptimizerSettings = ALL_OPTIMIZERS  # onnxruntime's own, as sessions run them
    bakes: bool = False  # whether they run before the result is finished
    cpu_arena: bool = True  # whether the session's memory on the CPU comes from an arena
    onnxruntime_version: str = onnxruntime.__version__  # the oldest that the result runs on
    # What a hint sets for the session; where the user did, nothing.
    session_settings: tuple[tuple[str, str], ...] = ()
    provider_options: Mapping[str, Mapping[str, str]] = {}  # by the provider's name

    @property
    def name(self) -> str:
        """The model's path; "bytes" for a serialized one."""
        return "bytes" if isinstance(self.source, bytes) else os.fspath(self.source)  # type: ignore[arg-type]

    @property
    def final_graph(self) -> bool:
        """Whether the session runs no optimiser."""
        return self.optimizers.level == "ORT_DISABLE_ALL"

    def key_parts(self) -> dict[str, Any]:
        """Return what the result depends on besides the model and its data, as JSON."""
        depends_on_arena = any(item.depends_on_arena for item in self.plan.passes)
        return {
            "passes": self.plan.fingerprint(),
            "providers": list(self.providers),
            "optimizers": self.optimizers._asdict() if self.bakes else None,
            "final_graph": self.final_graph,
            "cpu_arena": self.cpu_arena if depends_on_arena else None,
            "native_accuracy_level": self.optimizers.native_accuracy_level,
            "native_block_size": self.optimizers.native_block_size,
            "versions": package_versions(),
            "onnxruntime": self.onnxruntime_version,
            "cpu": processor(),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the request as JSON; the content of a serialized model is left out."""
        return {
            **self._asdict(),
            "source": None if isinstance(self.source, bytes) else self.name,
            "plan": self.plan.entries(),
            "optimizers": self.optimizers._asdict(),
            "key": self.key_parts(),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], model: bytes) -> BuildRequest:
        """Read what :meth:`as_json` returned."""
        fields = {name: _tuples(content[name]) for name in cls._fields}
        optimizers = {name: _tuples(value) for name, value in content["optimizers"].items()}
        fields["optimizers"] = OptimizerSettings(**optimizers)
        fields["plan"] = read_entries(content["plan"].get)
        return cls(**{**fields, "source": content["source"] or model})

    def load(self) -> LoadedModel:
        """Load and check the model."""
        from ortplugins.model_io.loading import load_model

        return load_model(self.source, self.data_folder)

    def data_settings(
        self, names: Mapping[str, str], folder: str | os.PathLike[str]
    ) -> dict[str, str]:
        """Return what a session on the artifact in ``folder`` is set to for its external data.

        ``names`` are those of the files that it reads where the model has them, by location.
        """
        if names:
            from ortplugins.model_io.data_in_place import folder_of

            return {DATA_FOLDER_KEY: folder_of(names, self.name, self.data_folder)}
        # onnxruntime looks in the user's folder for the data of any model, ours too.
        return {} if self.data_folder is None else {DATA_FOLDER_KEY: os.fspath(folder)}


def read_request(
    source: str | bytes | os.PathLike[str],
    plan: Plan,
    options: onnxruntime.SessionOptions,
    providers: Sequence[str],
    disabled_optimizers: Collection[str] | None,
    provider_options: Mapping[str, Mapping[str, str]] = {},
) -> BuildRequest:
    """Read what a session's artifact depends on; the caller holds the lock of the options."""
    settings = read_optimizer_settings(options, disabled_optimizers)
    runs_any = settings.level != "ORT_DISABLE_ALL"
    chosen = stored(options, DATA_FOLDER_KEY)
    own = {
        key: text
        for key, text in plan.session_settings.items()
        if "." not in key or stored(options, key) is None
    }
    arena = own.get("enable_cpu_mem_arena", "1") == "1"
    return BuildRequest(
        source=source if isinstance(source, bytes) else os.path.abspath(source),
        plan=plan,
        providers=tuple(dict.fromkeys(providers)),  # onnxruntime leaves the second out
        data_folder=os.path.abspath(chosen) if chosen else None,
        optimizers=settings,
        bakes=plan.bake and runs_any and are_cpu_only(providers),
        cpu_arena=options.enable_cpu_mem_arena and arena,
        session_settings=tuple(own.items()),
        provider_options=provider_options,
    )


def _tuples(value: Any) -> Any:
    """Return what JSON holds with tuples for its lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
