# SPDX-License-Identifier: MIT
"""Models from disk, checked before anything trusts them, and back, tensor by tensor."""

from __future__ import annotations

__all__ = [
    "DATA_THRESHOLD",
    "LoadedModel",
    "ModelLike",
    "Progress",
    "check_absent",
    "check_output",
    "from_memory",
    "is_path",
    "lift_constants",
    "load_bytes",
    "load_path",
    "needs_data_file",
    "output_data_path",
    "read_model_file",
    "same_kind",
    "save_with_data",
    "stored_bytes",
]

import dataclasses
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import onnx_ir.passes.common

from ortplugins.errors import MissingFileError, ModelFileError
from rewrite_rules.graph.lazy_tensors import AliasTensor, ChunkedTensor, relabel
from rewrite_rules.graph.nodes import normalize_domains

if TYPE_CHECKING:
    import onnx

    ModelLike = str | os.PathLike[str] | onnx.ModelProto | ir.Model

# Tensors of fewer bytes stay inside the .onnx file.
DATA_THRESHOLD = 1024
# Offsets of tensors in the files that we write: whole pages, so that onnxruntime's mapping of
# a tensor is aligned for every kernel.
_ALIGNMENT = 4096
# Tensors in the making, all threads together.
_IN_FLIGHT_BYTES = 64 << 20
# A protobuf ends at 2 GiB; above this the tensors leave the file whatever the source did.
_INLINE_BYTES = 1 << 30
# Constant nodes of fewer elements stay nodes: shapes and axes, which other tools expect there.
_LIFTED_ELEMENTS = 16

# (tensors written so far, tensors in all, name of the next one)
Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model whose external data was checked; large tensors are still on disk.

    Attributes:
        model: The model; external tensors carry absolute paths.
        data_files: The external files by the location that the model has for them.
        name: How messages call the model.
    """

    model: ir.Model
    data_files: dict[str, Path]
    name: str


def read_model_file(path: str | os.PathLike[str]) -> bytes:
    """Read an .onnx file, without external data.

    Raises:
        MissingFileError: If there is no such file.
        ModelFileError: If it can't be read or is empty.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise MissingFileError(f"{os.fspath(path)}: there is no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    if not content:
        raise ModelFileError(f"{os.fspath(path)}: the file is empty")
    return content


def load_path(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    map_inline: bool = False,
) -> LoadedModel:
    """Load an .onnx file lazily; its external data is looked for beside it, or in ``folder``.

    A path that is a symbolic link (as in Hugging Face's cache) may have its data beside the
    link or beside the file that it points to, as onnxruntime allows.

    Args:
        path: The file.
        folder: Where its external data is; None for beside it.
        map_inline: Whether large tensors within the file count as external data of it. Results
            that point to them must not be saved as such.

    Raises:
        MissingFileError: If the model or an external file is not there.
        ModelFileError: If the model can't be parsed, or external data is too short or outside
            the model's folder.
    """
    folders = [Path(path).absolute().parent, Path(os.path.realpath(path)).parent]
    if folder is not None:
        folders = [Path(folder).absolute()]
    if map_inline and os.path.isfile(path):
        content = _read_reduced(path)
        if content is not None:
            return _load(content, folders, os.fspath(path))
    return _load(read_model_file(path), folders, os.fspath(path))


def _read_reduced(path: str | os.PathLike[str]) -> bytes | None:
    from ortplugins.model_io.mapped_initializers import read_without_tensors

    try:
        return read_without_tensors(path)
    except OSError:
        return None  # whoever reads it whole says what is wrong


def load_bytes(content: bytes, folder: str | os.PathLike[str] | None) -> LoadedModel:
    """Load a serialized model; ``folder`` holds its external data, None where it has none.

    Raises:
        MissingFileError, ModelFileError: As :func:`load_path`.
    """
    folders = [] if folder is None else [Path(folder).absolute()]
    return _load(content, folders, "model given as bytes")


def from_memory(model: onnx.ModelProto | ir.Model) -> LoadedModel:
    """Copy a model from memory; tensors are shared, and nothing is checked on disk.

    Raises:
        MissingFileError: If a ModelProto has external data: it doesn't know in which folder.
        ModelFileError: If the model can't be parsed.
    """
    name = "model given as object"
    if isinstance(model, ir.Model):
        copy = model.clone()
        normalize_domains(copy)
    else:
        # Tensors keep their proto, and passes may rename them.
        own = type(model)()
        own.CopyFrom(model)
        copy = _deserialize(own, name)
        _lift_checked_constants(copy)
        for _, tensor in _tensors(copy):
            if isinstance(tensor, ir.ExternalTensor):
                raise MissingFileError(
                    f"{name}: tensor {tensor.name!r} has external data in "
                    f"{str(tensor.location)!r}, but a ModelProto knows no folder; give a path"
                )
    _check_parsed(copy, name)
    return LoadedModel(copy, {}, name)


def _load(content: bytes, folders: Sequence[Path], name: str) -> LoadedModel:
    import google.protobuf.message
    import onnx

    if content[4:8] == b"ORTM":
        raise ModelFileError(
            f"{name}: is in ORT format, which was optimised already; give the .onnx"
        )
    try:
        proto = onnx.ModelProto.FromString(content)
    except google.protobuf.message.DecodeError as error:
        raise ModelFileError(
            f"{name}: is no ONNX model, or was cut off ({len(content)} bytes): {error}"
        ) from error
    model = _deserialize(proto, name)
    _check_parsed(model, name)
    return LoadedModel(model, _bind_external_data(model, folders, name), name)


def _deserialize(proto: onnx.ModelProto, name: str) -> ir.Model:
    if any(graph.sparse_initializer for graph in _proto_graphs(proto.graph)):
        raise ModelFileError(f"{name}: has sparse initializers; make them dense first")
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # any malformed field, in any of onnx_ir's exceptions
        raise ModelFileError(f"{name}: is not a valid ONNX model: {error}") from error
    normalize_domains(model)
    return model


def _proto_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in (
                *attribute.graphs,
                *([attribute.g] if attribute.HasField("g") else ()),
            ):
                yield from _proto_graphs(body)


def _check_parsed(model: ir.Model, name: str) -> None:
    # A protobuf that was cut off between two fields parses, and lacks what came after.
    if not model.graph.outputs or not model.opset_imports:
        missing = "outputs" if model.opset_imports else "opset imports"
        raise ModelFileError(f"{name}: has no graph {missing}; was the file cut off?")
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.is_ref():
                raise ModelFileError(
                    f"{name}: attribute {attribute.name!r} of node {node.name!r} refers to "
                    "one of a function, but the node is in none"
                )
    try:
        model.graph.sort()
    except Exception as error:  # ValueError for a cycle, others for damaged bodies
        raise ModelFileError(f"{name}: its nodes can't be put in order: {error}") from error


def _bind_external_data(
    model: ir.Model, folders: Sequence[Path], name: str
) -> dict[str, Path]:
    """Check every external tensor, give it an absolute path; return the files by location."""
    _lift_checked_constants(model)
    found: dict[str, Path] = {}
    sizes: dict[Path, int] = {}
    for owner, tensor in _tensors(model):
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        what = f"{name}: tensor {tensor.name!r}"
        location = tensor.location
        if any(not isinstance(size, int) or size < 0 for size in tensor.shape):
            raise ModelFileError(f"{what}: has shape {list(tensor.shape)}")
        if not isinstance(location, str) or not location or "\0" in location:
            raise ModelFileError(
                f"{what}: external data location {location!r} is no file name"
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
        if offset < 0 or offset + tensor.nbytes > sizes[path]:
            raise ModelFileError(
                f"{what}: needs bytes {offset} to {offset + tensor.nbytes} of {str(path)!r}, "
                f"which has {sizes[path]}; is the file complete?"
            )
        # Checked here once, the links included; an empty base_dir tells onnx_ir so.
        owner.const_value = ir.ExternalTensor(
            str(path),
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            doc_string=tensor.doc_string,
            base_dir="",
        )
    return found


def lift_constants(model: ir.Model) -> None:
    """Make Constant nodes initializers: one kind of constant to look after."""
    onnx_ir.passes.common.LiftConstantsToInitializersPass(
        lift_all_constants=False, size_limit=_LIFTED_ELEMENTS
    )(model)


def _lift_checked_constants(model: ir.Model) -> None:
    """Lift constants of a model that nobody has checked yet.

    Raises:
        ModelFileError: If another attribute has external data; onnxruntime reads none there.
    """
    lift_constants(model)
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for node in (node for graph in graphs for node in graph.all_nodes()):
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.TENSOR and isinstance(
                attribute.value, ir.ExternalTensor
            ):
                raise ModelFileError(
                    f"attribute {attribute.name!r} of node {node.name!r} ({node.op_type}) has "
                    "external data; only initializers and Constant nodes of "
                    f"{_LIFTED_ELEMENTS} elements or more may"
                )


def _tensors(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value, value.const_value


def stored_bytes(tensor: ir.TensorProtocol) -> int:
    """Bytes that a tensor takes in a data file; strings stay in the model: 0."""
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return 0
    return tensor.nbytes


def _find_data_file(location: str, folders: Sequence[Path], what: str) -> Path:
    if not folders:
        raise MissingFileError(
            f"{what}: has external data in {location!r}, but the model was given as bytes; "
            "set session.model_external_initializers_file_folder_path or give a path"
        )
    if os.path.isabs(location) or ".." in Path(location).parts:
        raise ModelFileError(
            f"{what}: external data location {location!r} leaves the model's folder"
        )
    roots = [Path(os.path.realpath(folder)) for folder in folders]
    for folder in folders:
        real = Path(os.path.realpath(folder / location))
        try:
            mode = real.stat().st_mode
        except OSError:
            continue
        if not any(real.is_relative_to(root) for root in roots):
            raise ModelFileError(
                f"{what}: external data location {location!r} is a link to {str(real)!r}, "
                "outside the model's folder"
            )
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{what}: external data {str(real)!r} is not a regular file")
        return real
    raise MissingFileError(
        f"{what}: external data file {str(folders[0] / location)!r} is missing"
    )


def output_data_path(model: ir.Model, output: Path) -> Path:
    """Return a name for the data file of ``output`` that no tensor of the model lies in."""
    used = {
        os.path.realpath(tensor.path)
        for _, tensor in _tensors(model)
        if isinstance(tensor, ir.ExternalTensor)
    }
    for suffix in (".data", ".ortplugins.data"):
        path = output.with_name(output.name + suffix)
        if os.path.realpath(path) not in used:
            return path
    raise ModelFileError(
        f"{output}: the model's own data lies in {path}; choose another output"
    )


def save_with_data(
    model: ir.Model,
    output: Path,
    *,
    keep_in_place: bool = False,
    inline: bool = False,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Save a model and its tensors; the files appear only when they are complete.

    The model's tensors point to the new files afterwards.

    Args:
        model: The model to save.
        output: The .onnx file.
        keep_in_place: Leave tensors where they are that lie in files of the output's folder
            already; nothing of them is copied.
        inline: Keep all tensors inside the .onnx file.
        overwrite: Whether the files may exist.
        finish: Called with the saved model, in a folder of its own with all its files, before
            they appear; may change them and add others.
        progress: Called before each tensor.

    Returns:
        The files written.

    Raises:
        FileExistsError: If a file exists and ``overwrite`` is false.
        ModelFileError: If the model holds what ONNX cannot.
        OSError: If they can't be written; earlier files of that name are as they were.
    """
    folder = Path(os.path.realpath(output.parent))
    data = output_data_path(model, output)
    to_write = []
    for value, tensor in _tensors(model):
        if isinstance(tensor, AliasTensor):
            tensor = _under(_original(tensor), tensor)
        if keep_in_place and isinstance(tensor, ir.ExternalTensor):
            path = Path(os.path.realpath(tensor.path))
            if path.is_relative_to(folder):
                value.const_value = _moved(tensor, path.relative_to(folder), folder)
                continue
        if not inline and stored_bytes(tensor) >= DATA_THRESHOLD:
            to_write.append(value)
        elif isinstance(tensor, ir.ExternalTensor):
            (value.const_value,) = ir.external_data.convert_tensors_from_external([tensor])
    with tempfile.TemporaryDirectory(prefix=".ortplugins-", dir=folder) as scratch:
        if to_write:
            check_absent([data], overwrite)
            _write_tensors(to_write, Path(scratch), data.name, progress)
        try:
            ir.save(model, Path(scratch, output.name))
        except OSError:
            raise
        except Exception as error:  # a name that is no UTF-8, an attribute without a type
            raise ModelFileError(f"{output.name}: cannot be written: {error}") from error
        if finish is not None:
            finish(Path(scratch, output.name))
        # The model last: it must never point to data that is not there yet.
        names = sorted(os.listdir(scratch), key=lambda name: (name == output.name, name))
        written = [output.with_name(name) for name in names]
        check_absent(written, overwrite)
        for path in written:
            os.replace(Path(scratch, path.name), path)
    for value in to_write:
        assert isinstance(value.const_value, ir.ExternalTensor)
        value.const_value.base_dir = str(folder)
    return written


def _write_tensors(
    values: Sequence[ir.Value], folder: Path, location: str, progress: Progress | None
) -> None:
    # Tensors that are the same bytes (a tied embedding and head, under two shapes) are written
    # once; the others point there.
    groups: dict[object, list[ir.Value]] = {}
    for value in values:
        groups.setdefault(_identity(value.const_value), []).append(value)
    done = 0

    def callback(tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        nonlocal done
        if progress is not None:
            progress(done, info.total, tensor.name or "")
        done += 1

    tensors = [_original(members[0].const_value) for members in groups.values()]
    workers = min(4, os.cpu_count() or 1)
    # onnx_ir counts every tensor whole. One that is made in chunks is never held whole: as
    # many as can be in the making come on top, or one large weight would keep others waiting.
    chunked = sorted(item.nbytes for item in tensors if isinstance(item, ChunkedTensor))
    written = ir.external_data.convert_tensors_to_external(
        tensors,
        folder,
        location,
        callback=callback,
        max_workers=workers,
        max_in_flight_bytes=_IN_FLIGHT_BYTES + sum(chunked[-workers:]),
        alignment=_ALIGNMENT,
        align_threshold=DATA_THRESHOLD - 1,
    )
    for members, tensor in zip(groups.values(), written, strict=True):
        for value in members:
            assert value.const_value is not None
            value.const_value = _under(tensor, value.const_value)


def _under(tensor: ir.TensorProtocol, like: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor in a file under another's type, shape and name; others as they are."""
    if not isinstance(tensor, ir.ExternalTensor):
        return like
    return relabel(tensor, like.dtype, tuple(like.shape.numpy()), like.name or "")


def _identity(tensor: ir.TensorProtocol | None) -> object:
    """What two tensors have in common when their bytes are the same."""
    tensor = _original(tensor)
    if isinstance(tensor, ir.ExternalTensor):
        return tensor.path, tensor.offset, tensor.length
    return id(tensor)


def _original(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol:
    while isinstance(tensor, AliasTensor):
        tensor = tensor.original.const_value
    assert tensor is not None
    return tensor


def _moved(tensor: ir.ExternalTensor, location: Path, folder: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        location.as_posix(),
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape),
        name=tensor.name,
        doc_string=tensor.doc_string,
        base_dir=str(folder),
    )


def check_absent(paths: Sequence[Path], overwrite: bool) -> None:
    """Raise FileExistsError or IsADirectoryError where an output cannot go."""
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path}: is a folder")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path}: exists; choose another output, or say overwrite")


def check_output(model: ModelLike, output: Path, overwrite: bool) -> None:
    """Raise, before any work is done, where a model's output cannot go.

    Raises:
        FileExistsError, IsADirectoryError: As :func:`check_absent`.
        ModelFileError: If it is the model itself, or its folder does not exist.
    """
    if is_path(model) and os.path.realpath(model) == os.path.realpath(output):  # type: ignore[arg-type]
        raise ModelFileError(f"{output}: is the model itself; choose another output")
    check_absent([output], overwrite)
    if not output.absolute().parent.is_dir():
        raise ModelFileError(f"{output}: its folder does not exist")


def is_path(model: ModelLike) -> bool:
    """Whether a model was given by its path."""
    return isinstance(model, (str, os.PathLike))


def same_kind(given: ModelLike, result: ir.Model) -> Any:
    """Return the result as a ModelProto where one was given."""
    return result if is_path(given) or isinstance(given, ir.Model) else ir.to_proto(result)


def needs_data_file(model: ir.Model) -> bool:
    """Whether a model's tensors are too large to stay within its file."""
    size = sum(stored_bytes(tensor) for _, tensor in _tensors(model))
    return size > _INLINE_BYTES
