# SPDX-License-Identifier: MIT
"""Every refusal has a code, and docs/troubleshooting.md and ``explain`` say what to do."""

import ast
import html
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command, refused
from builders.dequantized_models import DequantizedMatMul

import ortplugins
from ortplugins.reasons import code_of, reasons

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("session_options", "rewrite_rules", "ortplugins")
HOLE = "\0"  # a part of a text that is only known at run time

# Exceptions whose text becomes a remark, and the methods of Remarks that take one.
_EXCEPTIONS = ("Refusal", "NoKernel", "Unrepresentable", "_Broken", "warn_caller")
_METHODS = ("refused", "failed")
# Their refusals end a proof of shapes: shape_sources words what users read.
_INTERNAL = ("shape_data.py", "operator_shapes.py", "node_facts.py")
BY_CODE = {reason.code: reason for reason in reasons()}


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


def test_every_refusal_has_the_code_of_its_own_text():
    found = list(refusal_texts())
    assert len(found) > 100
    wrong = []
    for where, text in found:
        code = code_of(text.replace(HOLE, "'name' 7").strip())
        if not code or not any(covers(row, text) for row in BY_CODE[code].texts):
            wrong.append(f"{where}: {text.replace(HOLE, '...')}: {code}")
    assert not wrong, "\n".join(wrong)


def test_every_text_of_the_table_is_there_once():
    texts = set(all_texts())
    rows = [row for reason in reasons() for row in reason.texts]
    assert len(set(rows)) == len(rows) and len(BY_CODE) == len(reasons())
    gone = [row for row in rows if not any(covers(row, text) for text in texts)]
    assert not gone, "\n".join(gone)


def test_the_page_has_the_table():
    """Run ``ortplugins explain`` for the new one."""
    assert ortplugins_command("explain").stdout.strip() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "what",
    ["ORP503", "orp503", "pool: mixes positions, and no mask leaves padding out", "by token"],
)
def test_explain_takes_a_code_a_remark_or_words(what: str):
    done = ortplugins_command("explain", what)
    assert done.stdout.startswith("ORP503  Padding") and "is not known to work" in done.stdout


def test_explain_of_what_is_not_there():
    assert "'ORP999'" in refused("explain", "ORP999")


def test_reports_name_the_codes(tmp_path: Path):
    model = DequantizedMatMul(64, 16, 48)  # no power of 2
    ir.save(model.model(), tmp_path / "model.onnx")
    report = ortplugins.optimize(
        tmp_path / "model.onnx", options={"dq_matmulnbits_fusion.slow_kernels": "keep"}
    ).report
    assert report.refused and "[ORP1" in str(report) and "[ORP1" in report.to_text()
    (remark,) = report.to_dict()["passes"][0]["remarks"]
    code = remark["code"]
    assert code in BY_CODE
    pytest.importorskip("jinja2")
    arguments = (tmp_path / "model.onnx", "--set", "dq_matmulnbits_fusion.slow_kernels=keep")
    for form, shown in {
        "text": f"[{code}]",
        "github": f"[{code}]",
        "json": f'"{code}"',
    }.items():
        assert shown in ortplugins_command("inspect", *arguments, "--format", form).stdout
    page = tmp_path / "report.html"
    ortplugins_command("report", *arguments, "-o", page, "--no-measure")
    assert f"<code>{code}</code> {html.escape(BY_CODE[code].advice)}" in page.read_text(
        "utf-8"
    )
