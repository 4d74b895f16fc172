# SPDX-License-Identifier: MIT
"""Folders of onnxruntime-genai: a decoder, and the genai_config.json that describes it.

Names and defaults are those of ``src/config.h`` and ``src/config.cpp`` of its release 0.18.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime

from ortplugins.errors import MissingFileError, ModelFileError, PassError
from ortplugins.model_io.model_folder import OutputFolder
from ortplugins.runtime.session_settings import OptimizerSettings
from session_options.keys import parse_bool

_NAME = "genai_config.json"
# By the field of model.decoder; %d stands for the number of the layer.
_INPUTS = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
}
_OUTPUTS = {
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}
# What genai_config.json has as bool; other attributes of SessionOptions that passes set, it
# does not know.
_ATTRIBUTES = ("enable_mem_pattern", "enable_cpu_mem_arena")


def genai_layout(
    model: Path, target: Path, overwrite: bool
) -> tuple[OutputFolder, Callable[..., None], OptimizerSettings]:
    """Return a folder of onnxruntime-genai, what finishes it, how its sessions optimise."""
    source = model if model.is_dir() else model.parent
    config = _Config.read(source / _NAME)
    filename = config.decoder["filename"]
    found = source / filename if model.is_dir() else model
    if not found.is_file():
        raise MissingFileError(
            f"{config.path}: model.decoder.filename is {filename!r}, which is not there"
        )

    def finish(
        folder: Path,
        written: Path,
        session: onnxruntime.InferenceSession,
        settings: Mapping[str, str],
    ) -> None:
        if fault := next(config.faults(session), None):
            raise ModelFileError(f"{config.path}: {fault}")
        config.decoder["filename"] = written.relative_to(folder).as_posix()
        given = config.decoder.get("session_options") or {}
        config.decoder["session_options"] = {**given, **_embedded(settings)}
        text = json.dumps(config.content, indent=4)
        (folder / _NAME).write_text(text + "\n", encoding="utf-8")

    return OutputFolder(source, found, target, overwrite), finish, config.optimizers()


class _Config(NamedTuple):
    """A genai_config.json."""

    path: Path
    content: dict[str, Any]
    decoder: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Config:
        """Read a file that describes one decoder."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingFileError(
                f"{path}: is missing; onnxruntime-genai's model builder writes it"
            ) from None
        except ValueError as error:
            raise ModelFileError(f"{path}: is not JSON: {error}") from error
        model = content.get("model") if isinstance(content, dict) else None
        decoder = model.get("decoder") if isinstance(model, dict) else None
        if not isinstance(model, dict) or not isinstance(decoder, dict):
            raise ModelFileError(f"{path}: has no model.decoder")
        parts = [
            name
            for name, part in model.items()
            if isinstance(part, dict) and "filename" in part
        ]
        if len(parts) > 1 or decoder.get("pipeline"):
            named = ", ".join(parts) if len(parts) > 1 else "a pipeline"
            raise ModelFileError(
                f"{path}: names several models ({named}), and pack takes one: give each "
                "to ortplugins optimize"
            )
        if not isinstance(decoder.get("filename"), str):
            raise ModelFileError(f"{path}: has no model.decoder.filename")
        return cls(path, content, decoder)

    def optimizers(self) -> OptimizerSettings:
        """Return how sessions of this configuration optimise a model."""
        given = dict(self.decoder.get("session_options") or {})
        level = given.pop("graph_optimization_level", "ORT_ENABLE_ALL")
        entries = ((key, text) for key, text in given.items() if isinstance(text, str))
        return OptimizerSettings(str(level), (), tuple(entries))

    def faults(self, session: onnxruntime.InferenceSession) -> Iterator[str]:
        """Hold the configuration against the graph."""
        length = self.content["model"].get("context_length")
        if not isinstance(length, int) or length < 1:
            yield f"model.context_length is {length}; a number of tokens is expected"
        layers = self.decoder.get("num_hidden_layers")
        if not isinstance(layers, int) or layers < 1:
            yield f"model.decoder.num_hidden_layers is {layers}"
            return
        inputs = {item.name: item.shape for item in session.get_inputs()}
        outputs = {item.name: item.shape for item in session.get_outputs()}
        fed = self._names("inputs", _INPUTS, layers)
        read = self._names("outputs", _OUTPUTS, layers)
        for name in (name for name in inputs if name not in fed):
            yield f"model.decoder.inputs does not name input {name!r} of the graph"
        for name, field in fed.items():
            if name not in inputs and (field == "input_ids" or field.startswith("past_")):
                yield f"model.decoder.inputs.{field} names {name!r}, which the graph lacks"
        for name, field in read.items():
            if name not in outputs:
                yield f"model.decoder.outputs.{field} names {name!r}, which the graph lacks"
        shapes = {**inputs, **outputs}
        cached = (None, "num_key_value_heads", None, "head_size")
        sizes: dict[str, tuple[str | None, ...]]
        sizes = {name: cached for name, field in fed.items() if field.startswith("past_")}
        sizes |= {name: (None, None, "vocab_size") for name in read if read[name] == "logits"}
        for name, fields in sizes.items():
            for key, size in zip(fields, shapes.get(name, ()), strict=False):
                owner = self.content["model"] if key == "vocab_size" else self.decoder
                if key and isinstance(size, int) and owner.get(key) != size:
                    yield f"{key} is {owner.get(key)}, but {name!r} has {size}"

    def _names(self, group: str, defaults: Mapping[str, str], layers: int) -> dict[str, str]:
        """Return the field of each name; names of layers one by one."""
        fields = {**defaults, **self.decoder.get(group, {})}
        return {
            (name % layer if "%d" in name else name): field
            for field, name in fields.items()
            for layer in range(layers if "%d" in name else 1)
        }


def _embedded(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of a session as genai_config.json has them."""
    found: dict[str, Any] = {}
    for name, text in settings.items():
        if name in _ATTRIBUTES:
            found[name] = parse_bool(name, text)
        elif "." in name or name == "graph_optimization_level":
            found[name] = text
        else:
            raise PassError(
                f"{_NAME} cannot set {name} = {text}, which the result of these passes needs"
            )
    return found
