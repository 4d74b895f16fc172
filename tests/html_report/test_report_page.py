# SPDX-License-Identifier: MIT
"""The page of a model: its figures are the JSON's, its text is only text."""

import html
import html.parser
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command, printed, refused
from builders.dequantized_models import DequantizedMatMul
from builders.text_models import proto_of

from ortplugins.errors import UsageError
from ortplugins.html_report import facts as report_facts
from ortplugins.html_report import page as report_page
from ortplugins.html_report.facts import gather_facts, weight_bytes
from ortplugins.html_report.page import render_page
from ortplugins.measurement.measure import Measurement

pytest.importorskip("jinja2", reason="the page needs ortplugins[report]")

CASE = DequantizedMatMul(64, 32, 32)
HOSTILE = "<script>document.title='owned'</script></script>\u202eevil\u2066 'quote\" & <b>"


def save_named(path: Path, name: str = "matmul") -> Path:
    model = CASE.model()
    (matmul,) = (node for node in model.graph if node.op_type == "MatMul")
    matmul.name = name
    ir.save(model, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    """Everything there is, of a model that everything works on."""
    model = save_named(folder / "model.onnx")
    exact = {"dq_matmulnbits_fusion.accuracy_level": "0"}
    return gather_facts(model, options=exact, rounds=1, dims={"rows": 5}, command="a < b")


@pytest.fixture(scope="module")
def hostile(folder: Path) -> dict[str, Any]:
    model = save_named(folder / "hostile.onnx", HOSTILE)
    return gather_facts(model, measure=False, command=HOSTILE)


class Page(html.parser.HTMLParser):
    """Tags, the text between them, and what <data> elements say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.figures: dict[str, tuple[str, str]] = {}
        self._attributes: dict[str, str | None] = {}
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in, self._attributes = tag, dict(attrs)

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts.append(data)
        elif self._in != "style":
            self.text += data
            if self._in == "data":
                where = self._attributes["data-fact"] or ""
                self.figures[where] = self._attributes["value"] or "", data
        self._in = ""


def look_up(facts: Any, path: str) -> Any:
    for part in path.split("."):
        facts = facts[int(part)] if part.isdecimal() else facts[part]
    return facts


def words(facts: dict[str, Any], *arguments: str) -> str:
    """What a reader of the page reads."""
    return re.sub(r"\s+", " ", Page(render_page(facts, *arguments)).text)


def test_every_number_of_the_page_is_the_json_s(facts):
    written = json.loads(json.dumps(facts, allow_nan=False))
    page = Page(render_page(facts))
    assert len(page.figures) > 40
    for path, (value, _) in page.figures.items():
        assert json.loads(value) == look_up(written, path), path
    for part in ("sessions.figures.0.ratio", "weights.0.after", "operators.0.before",
                 "memory.curves.0.peak", "report.fired"):  # fmt: skip
        assert part in page.figures


def test_the_numbers_are_the_model_s(facts):
    operators = {row["operator"]: (row["before"], row["after"]) for row in facts["operators"]}
    assert operators == {"DequantizeLinear": (1, 0), "MatMul": (1, 0), "MatMulNBits": (0, 1)}
    assert facts["nodes"] == {"before": 2, "after": 1}
    kinds = {row["kind"]: (row["before"], row["after"]) for row in facts["weights"]}
    assert (kinds["int4"], kinds["uint8"]) == ((64 * 32 // 2, 0), (0, 64 * 32 // 2))
    assert kinds["float"] == (2 * 32 * 4, 2 * 32 * 4)
    assert (facts["report"]["fired"], facts["report"]["refused"]) == (1, 0)
    assert facts["sizes"] == {"rows": 5}
    assert facts["sessions"]["inputs"] == [{"name": "x", "type": "float32", "shape": [5, 64]}]
    names = [figure["what"] for figure in facts["sessions"]["figures"]]
    assert names[:2] == ["run", "start"]
    if Path("/proc/self/status").exists():
        assert len(names) == 6
    for figure in facts["sessions"]["figures"]:
        assert figure["distinct"] is None  # one round tells no range
        assert figure["ratio"] == figure["ours"] / figure["plain"] > 0
    # x, and what MatMulNBits makes
    curve = facts["memory"]["curves"][0]
    assert curve["name"].startswith("rewritten")
    assert curve["peak"] == 5 * 32 * 4 + (5 * 64 * 4 if len(curve["live"]) == 2 else 0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1616, "count", "1,616"),
        (0.2174, "ratio", "0.217 \N{MULTIPLICATION SIGN}"),
        (31.62, "ratio", "31.6 \N{MULTIPLICATION SIGN}"),
        (0.0506, "s", "50.6 ms"),
        (2.084, "s", "2.08 s"),
        (7_839_744, "B", "7.8 MB"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(value, unit, text):
    assert report_page._shown(value, unit) == text


def test_what_fails_is_reported_in_its_place(folder):
    text = """g (float[points] x) => (float[m, 77] y) <int64[2] shape = {-1, 77}>
        { y = Reshape(x, shape) }"""
    onnx.save(proto_of(text), folder / "cloud.onnx")
    facts = gather_facts(folder / "cloud.onnx", rounds=1)
    assert "give the size of 'points'" in facts["sessions"]["failed"]
    reported = words(facts)
    assert "Not measured: made-up inputs do not run" in reported
    assert "nothing to do in this model" in reported


def test_an_unknown_dimension_is_named(facts, folder):
    with pytest.raises(UsageError, match=r"'row'.*did you mean 'rows'"):
        gather_facts(folder / "model.onnx", dims={"row": 5}, measure=False)


def test_given_samples_are_measured(folder):
    """The page says so, and sizes are those of the samples."""
    np.savez(folder / "samples.npz", x=np.ones((7, 64), np.float32))
    model = save_named(folder / "given.onnx")
    page, data = folder / "given.html", folder / "given.json"
    arguments = ["report", model, "-o", page, "--json", data, "--rounds", "1"]
    arguments += ["--samples", folder / "samples.npz"]
    printed(*arguments)
    written = json.loads(data.read_text("utf-8"))
    assert (written["inputs"], written["sizes"]) == ("given", {"rows": 7})
    assert written["sessions"]["inputs"][0]["shape"] == [7, 64]
    assert "1 inputs, given" in Page(page.read_text("utf-8")).text
    np.savez(folder / "samples.npz", y=np.ones((7, 64), np.float32))
    assert "'y', which is not an input" in refused(*arguments, "--force")


def test_shared_bytes_count_once():
    model = CASE.model()
    (codes,) = (v for v in model.graph.initializers.values() if v.name == "w")
    twin = ir.Value(name="twin", const_value=codes.const_value, type=codes.type)
    model.graph.initializers["twin"] = twin
    assert weight_bytes(model)["int4"] == (2, 64 * 32 // 2)


def poisoned(value: Any) -> Any:
    """Facts whose every text is hostile; words of ours apart."""
    if isinstance(value, dict):
        fixed = ("unit", "outcome")
        return {key: item if key in fixed else poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return HOSTILE + value if isinstance(value, str) and value else value


def test_no_text_at_all_becomes_a_tag(facts):
    worse = poisoned(facts)
    for key in ("sizes", "options"):
        worse[key] = {HOSTILE + name: item for name, item in worse[key].items()}
    clean, page = Page(render_page(facts)), Page(render_page(worse, HOSTILE))
    assert page.tags == clean.tags and page.scripts == clean.scripts
    assert page.text.count("document.title='owned'") > 30


def test_only_the_page_s_own_script_may_run(hostile):
    text = html.unescape(render_page(hostile))
    policy = re.search(r'content="(default-src[^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';") and "unsafe" not in policy[1]
    code = Page(text).scripts[-1]
    assert f"script-src '{report_page._digest(code)}'" in policy[1]
    assert not re.search(r'\b(?:src|href)="(?!#)|url\(|@import|<[^>]* (?:style|on\w+)=', text)


def test_large_models_stay_readable(hostile):
    """Nothing is left out in silence."""
    remark = {"node": "layers.7/MatMul", "outcome": "refused", "pass": "p"}
    remarks = [{**remark, "reason": f"weight 'layers.{i}' has a block"} for i in range(20_000)]
    operators = [
        {"operator": f"Op{i}", "domain": "", "before": 1, "after": 1} for i in range(1002)
    ]
    large = {**hostile, "remarks": remarks, "operators": operators, "command": "x" * 100_000}
    text = render_page(large, "facts.json")
    assert len(text.encode()) < 1_000_000
    assert "19,000 more remarks: in facts.json" in text
    assert "2 more operators: in the JSON that --json FILE writes" in words(large)


def test_report_writes_page_and_json(folder, facts):
    model, page, data = folder / "model.onnx", folder / "p.html", folder / "p.json"
    done = ortplugins_command("report", model, "-o", page, "--json", data, "--no-measure")
    assert (done.returncode, done.stdout) == (0, f"wrote {page}\nwrote {data}\n"), done.stderr
    written = json.loads(data.read_text("utf-8"))
    assert written["sessions"] is None and written["operators"] == facts["operators"]
    assert "p.html" not in written["model"]["path"]


def test_what_was_not_measured_is_said(folder, monkeypatch):
    def no_time(*_: object, **__: object) -> list[Measurement]:
        return [Measurement(failed="plain onnxruntime: no time")] * 2

    monkeypatch.setattr(report_facts, "measure", no_time)
    model, page = save_named(folder / "given.onnx"), folder / "made.html"
    done = ortplugins_command("report", model, "-o", page)
    assert (done.returncode, done.stdout) == (0, f"wrote {page}\n"), done.stderr
    assert done.stderr == "note: sessions: plain onnxruntime: no time\n"
    assert "Not measured: plain onnxruntime: no time" in Page(page.read_text("utf-8")).text


def test_without_jinja_one_sentence_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "ortplugins.html_report.page")
    done = ortplugins_command("report", folder / "model.onnx", "-o", folder / "no.html")
    reported = "error: the page needs: pip install 'ortplugins[report]'\n"
    assert (done.returncode, done.stdout + done.stderr) == (2, reported)
