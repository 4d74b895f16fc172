# SPDX-License-Identifier: MIT
"""Runs at the start of each Python process below ``ortplugins run``; see ``cli/run.py``.

onnxruntime is not imported for processes that don't: passes are switched on when it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``onnxruntime`` where it would be found without us; switches passes on then."""

    def __init__(self) -> None:
        self._loader: Any = None  # onnxruntime's own, once it was found

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "onnxruntime":
            return None
        # Many ask only whether it is there, so that this finder stays until it is imported.
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # readers of sources and resources

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if importlib.util.find_spec("ortplugins") is None:  # another virtual environment
            text = f"{sys.executable} has no ortplugins: its sessions stay as they are"
            warnings.warn(text, stacklevel=2)
            return
        from ortplugins.session.patching import enable

        enable()


def _run_the_other_one() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


_run_the_other_one()
sys.meta_path.insert(0, _AfterImport())
