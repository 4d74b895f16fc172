# SPDX-License-Identifier: MIT
"""Fuse the decoder in a folder of onnxruntime-genai, and keep genai_config.json in step.

    python -m examples.genai.fuse_folder SOURCE TARGET

The model builder writes MatMulNBits for the CPU, or with ``use_qdq`` DequantizeLinear and
MatMul, which onnxruntime fuses at every start. This fuses them once, at the accuracy level
that the sessions of the folder have.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ortplugins
from ortplugins.model_io.loading import load_model

CONFIG = "genai_config.json"
_LEVEL = "session.qdq_matmulnbits_accuracy_level"
# What genai_config.json has as bool; it knows no other attribute of SessionOptions.
_BOOLS = ("enable_mem_pattern", "enable_cpu_mem_arena")


def fuse_folder(source: Path, target: Path) -> ortplugins.Report:
    """Write ``target``, a new folder with the decoder of ``source`` fused; return the report.

    Raises:
        ValueError: If the configuration is not that of one decoder on the CPU; says what is.
        FileExistsError: If the target exists.
        MissingFileError, ModelFileError, PassError: As for ``ortplugins.optimize``.
    """
    content = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    decoder = _decoder_of(content["model"])
    given = decoder.get("session_options") or {}
    if others := _providers(given):
        raise ValueError(f"{CONFIG}: its provider is {', '.join(others)}, not the CPU")
    model = source / decoder["filename"]
    weights = {path.resolve() for path in load_model(model).data_files.values()}
    target.mkdir()
    try:
        for path in sorted(source.rglob("*")):
            if path.is_file() and path.resolve() not in {model.resolve(), *weights}:
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=_level(given))
        output = target / decoder["filename"]
        output.parent.mkdir(parents=True, exist_ok=True)
        result = ortplugins.optimize(model, output, passes=[fusion], external_data=True)
        decoder["session_options"] = {**given, **_embedded(result.session_settings)}
        text = json.dumps(content, indent=4)
        (target / CONFIG).write_text(f"{text}\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(target)
        raise
    return result.report


def _decoder_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part on the decoder, the only model of the folder."""
    parts = [
        name for name, part in model.items() if isinstance(part, dict) and "filename" in part
    ]
    if parts != ["decoder"] or model["decoder"].get("pipeline"):
        found = "a pipeline" if parts == ["decoder"] else ", ".join(parts) or "no model"
        raise ValueError(f"{CONFIG}: describes {found}, not one decoder")
    decoder: dict[str, Any] = model["decoder"]
    return decoder


def _providers(options: Mapping[str, Any]) -> list[str]:
    """Return the names of execution providers that are not the CPU's."""
    named = [name for item in options.get("provider_options") or () for name in item]
    return [name for name in named if name.lower() not in ("cpu", "cpuexecutionprovider")]


def _level(options: Mapping[str, Any]) -> str:
    """Return the accuracy level at which sessions of these options fuse; 0 if they don't."""
    if options.get("graph_optimization_level") in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC"):
        return "0"
    return str(options.get(_LEVEL, "auto"))


def _embedded(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of a session as genai_config.json has them."""
    found: dict[str, Any] = {}
    for name, text in settings.items():
        if name in _BOOLS:
            found[name] = text == "1"
        elif "." in name or name == "graph_optimization_level":
            found[name] = text
        else:
            raise ValueError(f"{CONFIG} cannot set {name} = {text}, which the result needs")
    return found


if __name__ == "__main__":
    print(fuse_folder(Path(sys.argv[1]), Path(sys.argv[2])))
