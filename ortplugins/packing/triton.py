# SPDX-License-Identifier: MIT
"""Folders of a Triton model repository: config.pbtxt beside 1/model.onnx.

The configuration names every input and output, so that Triton completes nothing by itself and
servers that forbid completion take it, too. Fields: ``model_config.proto`` of
triton-inference-server/common and the README of its onnxruntime_backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnxruntime

from ortplugins.errors import ModelFileError, PassError
from ortplugins.model_io.model_folder import OutputFolder, model_in
from ortplugins.runtime.session_settings import ALL_OPTIMIZERS, OptimizerSettings
from ortplugins.runtime.stock_session import type_of

_NAME = "config.pbtxt"
_TYPES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "double": "FP64",
    "float": "FP32",
    "float16": "FP16",
    "string": "STRING",
    **{name: name.upper() for name in ("int8", "int16", "int32", "int64")},
    **{name: name.upper() for name in ("uint8", "uint16", "uint32", "uint64")},
}
# Attributes of SessionOptions, as Triton's parameters call them.
_PARAMETERS = {
    "enable_mem_pattern": "enable_mem_pattern",
    "enable_cpu_mem_arena": "enable_mem_arena",
}


def triton_layout(
    model: Path, target: Path, overwrite: bool
) -> tuple[OutputFolder, Callable[..., None], OptimizerSettings]:
    """Return a model's folder in Triton's repository, what finishes it, how it optimises.

    A folder with a config.pbtxt keeps all that it has.
    """
    found, text = model_in(model), ""
    is_triton = model.is_dir() and (model / _NAME).is_file()
    if is_triton:
        text = (model / _NAME).read_text(encoding="utf-8")
        named = re.search(r'^\s*default_model_filename\s*:\s*"([^"]*)"', text, re.MULTILINE)
        expected = named[1] if named else "model.onnx"
        if found.name != expected:
            raise ModelFileError(
                f"{model / _NAME}: the model is called {expected!r}, but the folder has "
                f"{str(found.relative_to(model))!r}"
            )

    def finish(
        folder: Path,
        written: Path,
        session: onnxruntime.InferenceSession,
        settings: Mapping[str, str],
    ) -> None:
        lines = [text.rstrip()]
        if not text:  # without batching: the model's shapes as they are
            lines = ['backend: "onnxruntime"', "max_batch_size: 0"]
            lines += [f"input {_tensor(item)}" for item in session.get_inputs()]
            lines += [f"output {_tensor(item)}" for item in session.get_outputs()]
        missing = [name for name in _names(session) if f'"{name}"' not in text]
        if missing and re.search(r"^\s*(input|output)\s*[\[{:]", text, re.MULTILINE):
            raise ModelFileError(f"{model / _NAME}: does not name {missing[0]!r} of the graph")
        content = "\n".join([*lines, *_parameters(settings), ""])
        (folder / _NAME).write_text(content, encoding="utf-8")

    folder = OutputFolder(
        model if model.is_dir() else model.parent,
        found,
        target,
        overwrite,
        given_location=None if is_triton else Path("1/model.onnx"),
        companions=is_triton,
        added=(_NAME,),
    )
    return folder, finish, ALL_OPTIMIZERS


def _names(session: onnxruntime.InferenceSession) -> list[str]:
    return [item.name for item in (*session.get_inputs(), *session.get_outputs())]


def _tensor(item: Any) -> str:
    if type_of(item) not in _TYPES:
        raise ModelFileError(f"{item.name}: is {item.type}, which Triton does not have")
    name = item.name.replace("\\", "\\\\").replace('"', '\\"')
    dims = ", ".join(str(size) if isinstance(size, int) else "-1" for size in item.shape)
    shape = f"dims: [ {dims} ]"
    if not item.shape:  # Triton has no scalars
        shape = "dims: [ 1 ] reshape { shape: [ ] }"
    return f'{{ name: "{name}" data_type: TYPE_{_TYPES[type_of(item)]} {shape} }}'


def _parameters(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield settings of a session as lines of the configuration."""
    for name, text in settings.items():
        if name not in _PARAMETERS:
            raise PassError(
                f"Triton cannot set {name} = {text}, which the result of these passes needs"
            )
        value = f'value: {{ string_value: "{text}" }}'
        yield f'parameters {{ key: "{_PARAMETERS[name]}" {value} }}'
