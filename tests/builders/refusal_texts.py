# SPDX-License-Identifier: MIT
"""Every text by which the sources refuse something, or warn, read from the sources.

A part that is only known at run time is a hole in the text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("session_options", "rewrite_rules", "ortplugins")
HOLE = "\0"

# Exceptions whose text becomes a remark, and the methods of Remarks that take one.
_EXCEPTIONS = ("Refusal", "NoKernel", "Unrepresentable", "_Failed", "_Broken", "warn_caller")
_METHODS = ("refused", "failed")
# Their refusals end a proof of shapes: shape_sources words what users read.
_INTERNAL = ("shape_data.py", "operator_shapes.py", "node_facts.py")


def refusal_texts() -> Iterator[tuple[str, str]]:
    """Yield where each text stands, and the text; holes where parts are not written there."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name in _INTERNAL:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (argument := _reason(node)) is not None:
                    text = _text(argument)
                    if text.strip(HOLE + " :;,."):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _reason(call: ast.Call) -> ast.expr | None:
    function = call.func
    if isinstance(function, ast.Name) and function.id in _EXCEPTIONS and call.args:
        return call.args[0]
    if isinstance(function, ast.Attribute) and function.attr in _METHODS and call.args:
        return call.args[-1]
    if isinstance(function, ast.Attribute) and function.attr == "warn" and call.args:
        return call.args[0]
    return None


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return HOLE


def all_texts() -> Iterator[str]:
    """Yield every text of the sources that may be shown; no docstrings."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            docstrings = {
                id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                    text = "" if id(node) in docstrings else _text(node)
                    if " " in text:
                        yield text


def covers(row: str, text: str) -> bool:
    """Whether a row of the page, with ``...`` for what varies, speaks of a text."""
    at = 0
    for number, piece in enumerate(row.split("...")):
        piece = piece.strip()
        found = text.find(piece, at)
        if found < 0 or (number == 0 and piece and text[:found].strip(HOLE + " ")):
            return False
        at = found + len(piece)
    return True
