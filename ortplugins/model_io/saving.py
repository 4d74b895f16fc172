# SPDX-License-Identifier: MIT
"""Saves models, tensor by tensor; files appear when they are complete."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import EncodeError

from ortplugins.errors import ModelFileError
from ortplugins.model_io.loading import (
    LoadedModel,
    has_kept_types,
    initializer_tensors,
    paths_of,
    relocated,
    stored_bytes,
    to_proto,
)
from rewrite_rules.graph.lazy_tensors import AliasTensor, ChunkedTensor, relabel

# Smaller tensors, in bytes, stay inside the .onnx file.
DATA_THRESHOLD = 1024
# Tensors begin at whole pages in our files, so that onnxruntime's mappings are aligned for
# every kernel.
_ALIGNMENT = 4096
# Bytes of tensors that all threads together hold in memory while writing.
_IN_FLIGHT_BYTES = 64 << 20
# A protobuf is limited to 2 GiB; larger tensors leave the file whatever the source did.
_INLINE_BYTES = 1 << 30

# (tensors written so far, tensors in all, name of the next one)
Progress = Callable[[int, int, str], None]


@contextlib.contextmanager
def scratch_within(folder: str | os.PathLike[str] | None) -> Iterator[str]:
    """Yield a temporary folder inside ``folder``; None stands for the system's own."""
    try:
        path = tempfile.mkdtemp(prefix="ortplugins-", dir=folder)
    except OSError as error:
        where = tempfile.gettempdir() if folder is None else os.fspath(folder)
        text = f"{where}: cannot be written to ({error.strerror}); choose another output"
        raise type(error)(text) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _staged_name(output: Path, used: Collection[str], *, overwrite: bool) -> str:
    """Return a name for the new model until it is in place; its data files begin with it.

    It is the output's own unless data files of that name exist which the new ones must not
    replace: those in use or, if ``output`` may exist, any, as until the new model is in
    place the old one reads them.
    """

    def is_free(name: str) -> bool:
        there = _data_of(output.with_name(name))
        return not there or not (overwrite or {*used} & {*map(os.path.realpath, there)})

    numbered = (f"{output.name}.{number}" for number in itertools.count(1))
    return next(filter(is_free, itertools.chain([output.name], numbered)))


def _data_of(output: Path) -> list[Path]:
    """Return the files that bear names which we give to the data of a model."""
    ours = re.compile(re.escape(output.name) + r"(\.[0-9]+)*\.data")
    return [path for path in output.parent.iterdir() if ours.fullmatch(path.name)]


def save_with_data(
    model: ir.Model,
    output: Path,
    *,
    keep_in_place: bool = False,
    inline: bool = False,
    least_bytes: int = DATA_THRESHOLD,
    overwrite: bool = False,
    sources: Collection[str] = (),
    data_folder: Path | None = None,
    finish: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Save a model and its tensors; return the files, which appear only when complete.

    Afterwards the model's tensors refer to the new files.

    Args:
        model: The model to save.
        output: The .onnx file.
        keep_in_place: Leave tensors where they are if their file is in the output's folder.
        inline: Keep all tensors inside the .onnx file.
        least_bytes: Smaller tensors stay inside.
        overwrite: Whether the files may exist.
        sources: Files of the model that this one was made from. They stay as they are.
        data_folder: Tensors in files of this folder stay there, and all others are stored
            inside the .onnx file. Sessions need the folder to find them.
        finish: Called with the path of the saved model, in a folder with only its files,
            before they appear; may change them and add others.
        progress: Called before each tensor.
    """
    folder = Path(os.path.realpath(output.parent))
    used = {*sources, *paths_of(model)}
    name = _staged_name(output, used, overwrite=overwrite)
    with scratch_within(folder) as scratch:
        stays_in = data_folder or (folder if keep_in_place else None)
        leaving = None if inline or data_folder is not None else least_bytes
        if to_write := _sort_tensors(model, stays_in, leaving):
            data = f"{name}.data"
            check_absent([output.with_name(data)], overwrite)
            _write_tensors(to_write, Path(scratch), data, progress)
        staged = Path(scratch, name)
        _write_model(model, staged)
        if finish is not None:
            finish(staged)
        old = _old_data(folder / output.name)
        # The model comes last: until then the old one, if any, reads the old data.
        made = sorted(Path(scratch).iterdir(), key=lambda path: (path == staged, path))
        written = [output if x == staged else output.with_name(x.name) for x in made]
        check_absent(written, overwrite)
        for new, path in zip(made, written, strict=True):
            os.replace(new, path)
    in_use = {*(folder / path.name for path in written), *map(Path, used)}
    for path in old - in_use:
        with contextlib.suppress(OSError):  # open in a process of Windows
            path.unlink()
    for _, tensor in initializer_tensors(model):
        if isinstance(tensor, ir.ExternalTensor) and os.fspath(tensor.base_dir) == scratch:
            tensor.base_dir = str(folder)
    return written


def _old_data(output: Path) -> set[Path]:
    """Return the data files that the current model at ``output`` reads.

    Only files that we may have written count, by their names.
    """
    found = {*_data_of(output)}
    if not found or not output.is_file() or not output.stat().st_size:
        return set()
    with (
        open(output, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as old,
    ):
        # Others may be the user's, or those of an earlier output that has another name now.
        return {path for path in found if old.find(os.fsencode(path.name)) != -1}


def serialized(model: ir.Model) -> bytes:
    """Return the content of an .onnx file for a model with all its tensors.

    Raises:
        ModelFileError: If it exceeds the limit of a protobuf.
    """
    _sort_tensors(model, None, None)
    try:
        return bytes(to_proto(model).SerializeToString())
    except (ValueError, EncodeError) as error:  # of more than 2 GiB
        raise ModelFileError(f"the model cannot be kept in memory alone: {error}") from error


def _sort_tensors(
    model: ir.Model, stays_in: Path | None, least_bytes: int | None
) -> list[ir.Value]:
    """Leave tensors in files of a folder, take small ones into the model; return the rest.

    These are the values whose tensors, of at least ``least_bytes``, go to the data file.
    """
    to_write = []
    for value, tensor in initializer_tensors(model):
        if isinstance(tensor, AliasTensor):
            tensor = _under(original_of(tensor), tensor)
        if isinstance(tensor, ir.ExternalTensor) and stays_in is not None:
            path = Path(os.path.realpath(tensor.path))
            if path.is_relative_to(stays_in):
                location = path.relative_to(stays_in).as_posix()
                value.const_value = relocated(tensor, location, str(stays_in))
                continue
        if least_bytes is not None and stored_bytes(tensor) >= least_bytes:
            to_write.append(value)
        elif isinstance(tensor, ir.ExternalTensor):
            (value.const_value,) = ir.external_data.convert_tensors_from_external([tensor])
    return to_write


def _write_model(model: ir.Model, path: Path) -> None:
    """Write the .onnx file of a model whose tensors are in their places."""
    try:
        if has_kept_types(model) or model.model_version == 0:
            path.write_bytes(to_proto(model).SerializeToString())
        else:
            ir.save(model, path)
    except OSError:
        raise
    except Exception as error:  # a name that is not UTF-8, an attribute without a type
        raise ModelFileError(f"{path.name}: cannot be written: {error}") from error


def _write_tensors(
    values: Sequence[ir.Value], folder: Path, location: str, progress: Progress | None
) -> None:
    # Tensors with the same bytes (a tied embedding and head, in two shapes) are written once.
    groups: dict[object, list[ir.Value]] = {}
    for value in values:
        groups.setdefault(identity_of(value.const_value), []).append(value)
    done = 0

    def callback(tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        nonlocal done
        if progress is not None:
            progress(done, info.total, tensor.name or "")
        done += 1

    tensors = [original_of(members[0].const_value) for members in groups.values()]
    workers = min(4, os.cpu_count() or 1)
    # onnx_ir counts tensors by their full size, but those made in chunks are never held whole.
    # So as many as are written at once come on top; otherwise a large one blocks the others.
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
    """Return a tensor of a file with the type, shape and name of ``like``; else ``like``."""
    if not isinstance(tensor, ir.ExternalTensor):
        return like
    return relabel(tensor, like.dtype, tuple(like.shape.numpy()), like.name or "")


def identity_of(tensor: ir.TensorProtocol | None) -> object:
    """Return a key that two tensors share if their bytes are the same."""
    tensor = original_of(tensor)
    if isinstance(tensor, ir.ExternalTensor):
        return tensor.path, tensor.offset, tensor.length
    return id(tensor)


def original_of(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol:
    """Return the tensor behind aliases, which have another type or shape."""
    while isinstance(tensor, AliasTensor):
        tensor = tensor.original.const_value
    assert tensor is not None
    return tensor


def check_absent(paths: Sequence[Path], overwrite: bool) -> None:
    """Raise FileExistsError or IsADirectoryError if an output cannot be written."""
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path}: is a folder")
        if path.exists() and not path.is_file():  # /dev/null, which we would replace
            raise FileExistsError(f"{path}: is a device or a pipe; choose another output")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path}: exists; --force or overwrite=True overwrites it")


def check_output(loaded: LoadedModel, output: Path, overwrite: bool) -> None:
    """Raise, before any work is done, if the output for a model cannot be written."""
    if os.path.realpath(output) in loaded.sources:
        raise ModelFileError(
            f"{output}: is the model itself, or its data; choose another output"
        )
    try:
        os.fspath(output).encode()
    except UnicodeEncodeError:
        raise ModelFileError(
            f"{output}: is not UTF-8, and onnxruntime opens no such file; rename it"
        ) from None
    if output.suffix.lower() == ".ort":
        raise ModelFileError(
            f"{output}: onnxruntime reads a file of this name as a model in its own format; "
            "name it .onnx"
        )
    check_absent([output], overwrite)
    if not output.absolute().parent.is_dir():
        raise ModelFileError(f"{output}: its folder does not exist")


def has_data_file(loaded: LoadedModel, model: ir.Model) -> bool:
    """Whether a result gets a data file by default: if the source has one, or by size."""
    # Tensors that are mapped from the model's own file do not count as external.
    own = os.path.realpath(loaded.name)
    if any(os.path.realpath(path) != own for path in loaded.data_files.values()):
        return True
    size = sum(stored_bytes(tensor) for _, tensor in initializer_tensors(model))
    return size > _INLINE_BYTES
