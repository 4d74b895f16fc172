# SPDX-License-Identifier: MIT
"""Loads models, and checks them before anything trusts them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import graphlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.model_io.data_in_place import data_file, data_folders
from rewrite_rules.graph.nodes import all_nodes, normalize_domains

if TYPE_CHECKING:
    import onnx

ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"

# The limit of a protobuf message.
_MAX_PROTO_BYTES = (1 << 31) - 1
# From this ir_version on, an initializer is an input only if callers may override it.
_OPTIONAL_INPUTS = 4
# Key in a graph's metadata for the types of maps, by the names of inputs and outputs.
_TYPES = "ortplugins.types"
# Constant nodes with fewer elements stay: shapes and axes, which other tools expect there.
_LIFTED_ELEMENTS = 16
# Most nodes that a model may have once its functions are inlined; where counting stops.
_MAX_INLINED, _MOST_COUNTED = 1_000_000, 1 << 40


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model whose external data was checked; large tensors are still on disk."""

    model: ir.Model
    data_files: dict[str, Path]  # by their location in the model
    name: str
    sources: frozenset[str]  # files that it was read from, or reads, with links resolved


def read_model_file(path: str | os.PathLike[str]) -> bytes:
    """Read an .onnx file, without external data."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise MissingFileError(f"{os.fspath(path)}: no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    if not content:
        raise ModelFileError(f"{os.fspath(path)}: the file is empty")
    return content


def load_model(
    model: ModelLike | bytes,
    folder: str | os.PathLike[str] | None = None,
    *,
    map_inline: bool = False,
) -> LoadedModel:
    """Load a model lazily; an object is copied.

    External data is looked for next to the .onnx file, or in ``folder``; for bytes, in the
    current folder. If the path is a symbolic link (as in Hugging Face's cache), data may lie
    next to the link or next to its target, as in onnxruntime.

    With ``map_inline``, large tensors inside the file are treated as its external data;
    results that refer to them must not be saved that way.
    """
    data_folder = None if folder is None else str(Path(folder).absolute())
    if isinstance(model, bytes):
        content, folders, name = model, [data_folder or os.curdir], "model given as bytes"
    elif isinstance(model, str | os.PathLike):
        name, mapped = os.fspath(model), None
        folders = data_folders(str(Path(model).absolute()), data_folder)
        if map_inline and os.path.isfile(model):
            from ortplugins.model_io.mapped_initializers import read_without_tensors

            with contextlib.suppress(OSError):  # reading it whole will say what is wrong
                mapped = read_without_tensors(model)
        content = mapped or read_model_file(model)
    else:
        return _from_memory(model)
    loaded = _load(content, folders, name)
    if isinstance(model, bytes):
        return loaded
    sources = loaded.sources | {os.path.realpath(model)}
    return dataclasses.replace(loaded, sources=sources)


def _from_memory(model: onnx.ModelProto | ir.Model) -> LoadedModel:
    """Copy a model in memory; tensors are shared, and nothing is checked on disk."""
    name = "model given as object"
    if isinstance(model, ir.Model):
        copy = model.clone()
        _prepare(copy, name)
    else:
        # Tensors keep their protobuf, and passes may rename them.
        own = type(model)()
        own.CopyFrom(model)
        copy = _deserialize(own, name)
        _lift_checked_constants(copy, name)
        for _, tensor in initializer_tensors(copy):
            if isinstance(tensor, ir.ExternalTensor):
                raise MissingFileError(
                    f"{name}: tensor {tensor.name!r} has external data in "
                    f"{str(tensor.location)!r}, but a ModelProto knows no folder; give a path"
                )
    return LoadedModel(copy, {}, name, frozenset(paths_of(copy)))


def _load(content: bytes | onnx.ModelProto, folders: Sequence[str], name: str) -> LoadedModel:
    proto = _parsed(content, name) if isinstance(content, bytes) else content
    model = _deserialize(proto, name)
    data_files = _bind_external_data(model, folders, name)
    return LoadedModel(model, data_files, name, frozenset(paths_of(model)))


def _parsed(content: bytes, name: str) -> onnx.ModelProto:
    import google.protobuf.message
    import onnx

    if content[4:8] == b"ORTM":
        raise ModelFileError(
            f"{name}: is in ORT format, which was optimised already; give the .onnx"
        )
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(content)
    except google.protobuf.message.DecodeError as error:
        raise ModelFileError(
            f"{name}: is not an ONNX model, or was cut off ({len(content)} bytes): {error}"
        ) from error
    return proto


def _deserialize(proto: onnx.ModelProto, name: str) -> ir.Model:
    try:
        _make_dense(proto)
        model = _as_model(proto)
    except Exception as error:  # for malformed fields, onnx_ir raises all kinds of exceptions
        cause: BaseException = error  # onnx_ir wraps it once per enclosing message
        while found := cause.__cause__ or cause.__context__:
            cause = found
        raise ModelFileError(f"{name}: is not a valid ONNX model: {cause}") from error
    _prepare(model, name)
    return model


def _make_dense(proto: onnx.ModelProto) -> None:
    """Replace sparse initializers and constants with dense ones, as onnxruntime does."""
    for graph in _all_graphs(proto):
        if sparse := getattr(graph, "sparse_initializer", ()):
            graph.initializer.extend(map(_dense, sparse))
            del graph.sparse_initializer[:]
        # onnxruntime takes the first or the last of a name, by size; onnx_ir the first.
        first: dict[str, onnx.TensorProto] = {}
        for tensor in getattr(graph, "initializer", ()):
            other = first.setdefault(tensor.name, tensor)
            if other is not tensor and other != tensor:
                raise ValueError(f"initializer {tensor.name!r} is there twice")
        for attribute in (item for node in graph.node for item in node.attribute):
            if attribute.name == "sparse_value":
                dense = _dense(attribute.sparse_tensor)
                attribute.Clear()
                attribute.name, attribute.type = "value", attribute.TENSOR
                attribute.t.CopyFrom(dense)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    from onnx import numpy_helper

    values = numpy_helper.to_array(sparse.values)
    indices = numpy_helper.to_array(sparse.indices)
    if math.prod(sparse.dims) * values.itemsize > _MAX_PROTO_BYTES:
        raise ValueError(f"sparse tensor {sparse.values.name!r} has shape {[*sparse.dims]}")
    if (indices < 0).any() or len(indices) != values.size:
        raise ValueError(f"sparse tensor {sparse.values.name!r} has no valid indices")
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:  # flat indices; otherwise one row per element
        indices = np.stack(np.unravel_index(indices, dense.shape), 1)
    dense[tuple(indices.T)] = values
    return numpy_helper.from_array(dense, sparse.values.name)


def _all_graphs(
    proto: onnx.ModelProto,
) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    for owner in (proto.graph, *proto.functions):
        yield from proto_graphs(owner)


def load_result(path: Path) -> ir.Model:
    """Return the model in a file that we made; external tensors stay where they are."""
    import onnx

    proto = onnx.load(os.fspath(path), load_external_data=False)
    model = _as_model(proto)
    ir.external_data.set_base_dir(model.graph, os.path.dirname(path))
    return model


def proto_graphs(
    graph: onnx.GraphProto | onnx.FunctionProto,
) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Yield a graph, or a function, and its subgraphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in (
                *attribute.graphs,
                *([attribute.g] if attribute.HasField("g") else ()),
            ):
                yield from proto_graphs(body)


def _prepare(model: ir.Model, name: str) -> None:
    """Normalise a model, and check what everything else relies on."""
    normalize_domains(model)
    # Before version 4 all initializers were inputs, which onnxruntime lets no caller feed.
    if model.ir_version < _OPTIONAL_INPUTS:
        inputs = [value for value in model.graph.inputs if not value.is_initializer()]
        model.graph.inputs[:] = inputs
        model.ir_version = _OPTIONAL_INPUTS
    # A protobuf that was cut off between two fields parses but lacks the rest.
    if not model.graph.outputs or not model.opset_imports:
        missing = "outputs" if model.opset_imports else "opset imports"
        raise ModelFileError(f"{name}: has no graph {missing}; was the file cut off?")
    _check_are_computed(model.graph.outputs, f"{name}: an output is")
    for node in model.graph.all_nodes():
        _check_are_computed(node.inputs, f"{name}: node {node.name!r} ({node.op_type}) reads")
        for attribute in node.attributes.values():
            if attribute.is_ref():
                raise ModelFileError(
                    f"{name}: attribute {attribute.name!r} of node {node.name!r} refers to "
                    "one of a function, but the node is in none"
                )
    if model.functions:
        _check_functions(model, name)
    try:
        model.graph.sort()
    except Exception as error:  # ValueError for a cycle, others for damaged subgraphs
        raise ModelFileError(f"{name}: its nodes can't be put in order: {error}") from error


def _check_functions(model: ir.Model, name: str) -> None:
    """Refuse functions that call themselves, or would fill the memory once inlined."""
    graphs = {identifier: each.graph for identifier, each in model.functions.items()}
    calls = {
        identifier: collections.Counter(node.op_identifier() for node in graph.all_nodes())
        for identifier, graph in graphs.items()
    }
    sizes: dict[ir.OperatorIdentifier, int] = {}
    try:
        for called in graphlib.TopologicalSorter(calls).static_order():
            inside = calls.get(called, collections.Counter()).items()
            size = 1 + sum(sizes[inner] * count for inner, count in inside)
            sizes[called] = min(size, _MOST_COUNTED)
    except graphlib.CycleError as error:
        names = " -> ".join(identifier[1] for identifier in error.args[1])
        raise ModelFileError(
            f"{name}: functions call each other in a cycle: {names}"
        ) from None
    total = sum(sizes.get(node.op_identifier(), 1) for node in model.graph.all_nodes())
    if total > _MAX_INLINED:
        raise ModelFileError(
            f"{name}: would have {total} nodes or more once its functions are inlined: "
            f"{_MAX_INLINED} at most are read"
        )


def _check_are_computed(values: Iterable[ir.Value | None], what: str) -> None:
    for value in filter(None, values):
        is_given = value.is_graph_input() or value.is_initializer()
        if value.producer() is None and not is_given:
            raise ModelFileError(
                f"{what} {value.name!r}, which is neither an input, an initializer nor the "
                "output of a node"
            )


def _bind_external_data(model: ir.Model, folders: Sequence[str], name: str) -> dict[str, Path]:
    """Check external tensors and give them absolute paths; return the files by location."""
    _lift_checked_constants(model, name)
    found: dict[str, Path] = {}
    sizes: dict[Path, int] = {}
    for owner, tensor in initializer_tensors(model):
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        what = f"{name}: tensor {tensor.name!r}"
        location = tensor.location
        if any(not isinstance(size, int) or size < 0 for size in tensor.shape):
            raise ModelFileError(f"{what}: has shape {list(tensor.shape)}")
        if not isinstance(location, str) or not location or "\0" in location:
            raise ModelFileError(
                f"{what}: external data location {location!r} is not a file name"
            )
        if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
            kind = tensor.dtype.name.lower()
            raise ModelFileError(f"{what}: has external data but is of type {kind}")
        if location not in found:
            found[location] = _find_data_file(location, folders, what)
            sizes[found[location]] = found[location].stat().st_size
        path = found[location]
        offset, length = tensor.offset or 0, tensor.length
        if length is not None and length != tensor.nbytes:
            raise ModelFileError(
                f"{what}: external data is {length} bytes long, but shape "
                f"{list(tensor.shape)} of {tensor.dtype.name.lower()} takes {tensor.nbytes}"
            )
        if offset + tensor.nbytes > sizes[path]:
            raise ModelFileError(
                f"{what}: needs bytes {offset} to {offset + tensor.nbytes} of {str(path)!r}, "
                f"which has {sizes[path]}; is the file complete?"
            )
        # The path, including links, was checked here; an empty base_dir tells onnx_ir so.
        owner.const_value = relocated(tensor, str(path), "")
    return found


def relocated(tensor: ir.ExternalTensor, location: str, folder: str) -> ir.ExternalTensor:
    """Return the same tensor at the same offset of another file, relative to a folder."""
    return ir.ExternalTensor(
        location,
        tensor.offset or 0,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape),
        name=tensor.name,
        doc_string=tensor.doc_string,
        base_dir=folder,
    )


def lift_constants(model: ir.Model) -> None:
    """Turn Constant nodes into initializers, so that there is one kind of constant."""
    onnx_ir.passes.common.LiftConstantsToInitializersPass(
        lift_all_constants=False, size_limit=_LIFTED_ELEMENTS
    )(model)


def _lift_checked_constants(model: ir.Model, name: str) -> None:
    """Lift the constants of a model that was not checked before."""
    try:
        lift_constants(model)
    except Exception as error:  # for invalid values, onnx_ir raises all kinds of exceptions
        raise ModelFileError(f"{name}: a Constant node has no valid value: {error}") from error
    for node in all_nodes(model):
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.TENSOR and isinstance(
                attribute.value, ir.ExternalTensor
            ):
                raise ModelFileError(
                    f"{name}: attribute {attribute.name!r} of node {node.name!r} "
                    f"({node.op_type}) has external data; only initializers and Constant "
                    f"nodes of {_LIFTED_ELEMENTS} elements or more may"
                )


def initializer_tensors(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield the constant initializers of a model and its subgraphs with their tensors."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value, value.const_value


def paths_of(model: ir.Model) -> Iterator[str]:
    """Yield the files that contain tensors of a model."""
    for _, tensor in initializer_tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            yield os.path.realpath(tensor.path)


def stored_bytes(tensor: ir.TensorProtocol) -> int:
    """Return the bytes of a tensor in a data file; 0 for strings, which stay in the model."""
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return 0
    return tensor.nbytes


def _find_data_file(location: str, folders: Sequence[str], what: str) -> Path:
    if os.path.isabs(location) or ".." in Path(location).parts:
        raise ModelFileError(
            f"{what}: external data location {location!r} leaves the model's folder"
        )
    real = Path(data_file(location, folders))
    if not os.path.exists(real):
        path = os.path.join(folders[0], location)
        raise MissingFileError(f"{what}: external data file {path!r} is missing")
    if not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise ModelFileError(
            f"{what}: external data location {location!r} is a link to {str(real)!r}, "
            "outside the model's folder"
        )
    if not os.path.isfile(real):
        raise ModelFileError(f"{what}: external data {str(real)!r} is not a regular file")
    return real


def is_path(model: ModelLike) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a model was given as a path."""
    return isinstance(model, (str, os.PathLike))


def same_kind(given: ModelLike, result: ir.Model) -> Any:
    """Return the result as a ModelProto if a ModelProto was given."""
    return result if is_path(given) or isinstance(given, ir.Model) else to_proto(result)


# onnx_ir cannot represent types of maps: they are kept aside and written back.


def _as_model(proto: onnx.ModelProto) -> ir.Model:
    """Return the model of a protobuf; :func:`to_proto` will write its types of maps."""
    types = {}
    for value in (*proto.graph.input, *proto.graph.output):
        if _holds_map(value.type):
            types[value.name] = type(value.type)()
            types[value.name].CopyFrom(value.type)
    for graph in _all_graphs(proto):
        ends = [*graph.input, *graph.output] if hasattr(graph, "initializer") else []
        for value in (*ends, *graph.value_info):
            if _holds_map(value.type):
                value.ClearField("type")
    model = ir.from_proto(proto)
    if types:
        model.graph.meta[_TYPES] = types
    return model


def has_kept_types(model: ir.Model) -> bool:
    """Whether an input or output of the model has such a type."""
    return _TYPES in model.graph.meta


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf, including what onnx_ir omits: map types, version 0."""
    proto = ir.to_proto(model)
    if model.model_version is not None:
        proto.model_version = model.model_version
    types = model.graph.meta.get(_TYPES, {})
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in types:
            value.type.CopyFrom(types[value.name])
    return proto


def _holds_map(kind: onnx.TypeProto) -> bool:
    if kind.HasField("sequence_type"):
        return _holds_map(kind.sequence_type.elem_type)
    if kind.HasField("optional_type"):
        return _holds_map(kind.optional_type.elem_type)
    return bool(kind.HasField("map_type"))
