# SPDX-License-Identifier: MIT
"""Links the data files of a model into another folder, in place of copying tensors."""

from __future__ import annotations

__all__ = ["link_data"]

import os
import stat
import sys
from pathlib import Path

import onnx_ir as ir

from ortplugins.model_io.loading import initializer_tensors, stored_bytes
from ortplugins.model_io.saving import DATA_THRESHOLD, relocated
from rewrite_rules.graph.lazy_tensors import AliasTensor

# linux/fs.h: the new file shares the old one's blocks until either is written to.
_FICLONE = 0x40049409


def link_data(model: ir.Model, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Link the files that tensors lie in into a folder; the tensors refer to the links then.

    A file is cloned where the file system can do that, else hard-linked. onnxruntime accepts
    no symbolic link that leaves the model's folder.

    Args:
        model: The model; small tensors, which are saved inside of the .onnx file, stay as
            they are.
        folder: Gets the links.

    Returns:
        The hard links, ``{name: path of the source}``; and for each file that can't be linked
        why: its tensors have to be copied.
    """
    names: dict[str, str | None] = {}
    hard_links: dict[str, str] = {}
    notes = []
    for value in _holders(model):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or stored_bytes(tensor) < DATA_THRESHOLD:
            continue
        source = os.path.realpath(tensor.path)
        if source not in names:
            names[source] = name = f"linked-{len(names)}.data"
            try:
                if not _clone(source, folder / name):
                    _check_owner(source)
                    os.link(source, folder / name)
                    hard_links[name] = source
            except OSError as error:
                names[source] = None
                notes.append(f"{source} is copied, not linked: {error.strerror or error}")
        if (name_or_none := names[source]) is not None:
            value.const_value = relocated(tensor, Path(name_or_none), folder)
    return hard_links, notes


def _holders(model: ir.Model) -> list[ir.Value]:
    """The values that hold the tensors; several may show one under other names."""
    found = {}
    for value, _ in initializer_tensors(model):
        while isinstance(value.const_value, AliasTensor):
            value = value.const_value.original
        found[id(value)] = value
    return list(found.values())


def _clone(source: str, target: Path) -> bool:
    """Make a file of its own that shares the source's blocks; return whether that worked."""
    if sys.platform != "linux":
        return False
    import fcntl

    with open(source, "rb") as old, open(target, "xb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            target.unlink()
            return False
    return True


def _check_owner(source: str) -> None:
    """Refuse files that others may change under our hands.

    Raises:
        PermissionError: If that is so.
    """
    if not hasattr(os, "geteuid"):
        return
    status = os.stat(source)
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError("it belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others may write to it")
