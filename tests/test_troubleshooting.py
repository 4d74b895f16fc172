# SPDX-License-Identifier: MIT
"""Every refusal has a code, and docs/troubleshooting.md and ``explain`` say what to do."""

from __future__ import annotations

import html
from pathlib import Path

import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command
from builders.dequantized_models import DequantizedMatMul
from builders.refusal_texts import HOLE, all_texts, covers, refusal_texts

import ortplugins
from ortplugins.reasons import code_of, reasons

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
BY_CODE = {reason.code: reason for reason in reasons()}


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
    done = ortplugins_command("explain", "ORP999")
    assert done.returncode == 2 and "'ORP999'" in done.stderr


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
