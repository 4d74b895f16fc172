# SPDX-License-Identifier: MIT
"""A model in a temporary folder, as it was given: onnxruntime's quantiser writes beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from ortplugins.model_io.loading import LoadedModel, ModelLike, is_path, proto_graphs
from ortplugins.model_io.saving import save_with_data


def stage(model: ModelLike, loaded: LoadedModel, folder: Path) -> Path:
    """Save a model into a temporary folder, as it was given: onnxruntime writes beside it."""
    path = folder / "model.onnx"
    if isinstance(model, ir.Model):
        save_with_data(loaded.model, path)
        return path
    proto = onnx.ModelProto()
    if is_path(model):
        # Not through onnx_ir: loading there makes constants initializers, which onnxruntime
        # would quantise in another way.
        proto = onnx.load(os.fspath(model), load_external_data=False)
        for tensor in _tensors(proto):
            _read_data(tensor, loaded.data_files)
    else:
        proto.CopyFrom(model)
    onnx.save_model(
        proto, os.fspath(path), save_as_external_data=True, location="model.onnx.data"
    )
    return path


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for owner in (proto.graph, *proto.functions):
        for graph in proto_graphs(owner):
            yield from getattr(graph, "initializer", ())
            for attribute in (item for node in graph.node for item in node.attribute):
                yield from (attribute.t, *attribute.tensors)


def _read_data(tensor: onnx.TensorProto, files: Mapping[str, Path]) -> None:
    """Read external data, which was checked where it was found, into the tensor."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    with open(files[entries["location"]], "rb") as file:
        file.seek(int(entries.get("offset", 0)))
        tensor.raw_data = file.read(int(entries.get("length", -1)))
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT
