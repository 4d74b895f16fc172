# SPDX-License-Identifier: MIT
"""``ortplugins.in_memory``: a model that a program decrypts never touches the disk."""

import dataclasses
import json

import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import python
from builders.sessions import EXACT, check, options, start
from builders.text_models import proto_of

import ortplugins
from ortplugins.optimization import build
from ortplugins.runtime.copied_options import running_options

CASE = DequantizedMatMul(512, 64, 32)
WATCHED = """
import json, os, sys
import numpy as np
import onnxruntime
import ortplugins

written = []
def watch(event, arguments):
    writes = os.O_WRONLY | os.O_RDWR
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writes:
        written.append(str(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "subprocess.Popen"):
        written.append(f"{event} {arguments[0]}")

content = open(sys.argv[1], "rb").read()
so = onnxruntime.SessionOptions()
ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(), in_memory=True)
sys.dont_write_bytecode = True
sys.addaudithook(watch)
session = ortplugins.InferenceSession(content, so, providers=["CPUExecutionProvider"])
session.run(None, {"x": np.ones((1, 512), np.float32)})
report = session.ortplugins_report
print(json.dumps([report.source, len(report.fired), written]))
"""


def test_nothing_is_written_and_no_process_is_started(tmp_path, cache_dir):
    ir.save(CASE.model(), tmp_path / "model.onnx")
    variables = {"ORTPLUGINS_BUILD_IN_PROCESS": "0"}
    done = python("-c", WATCHED, tmp_path / "model.onnx", **variables)
    assert json.loads(done.stdout) == ["built", 1, []], done.stderr
    assert not cache_dir.exists()


def test_passes_that_work_on_files_are_left_out_with_a_note():
    content = ir.to_proto(CASE.model()).SerializeToString()
    so = options(EXACT, ortplugins.PrepackedWeights(), in_memory=True)
    for _ in range(2):
        session = start(content, so)
        assert session.ortplugins_report.source == "built"
        check(session, CASE)
    (note,) = session.ortplugins_report.notes
    assert note == "prepacked_weights works on files, and in_memory allows none"


@dataclasses.dataclass(frozen=True)
class Wrong(ortplugins.Pass):
    """Makes the outputs a number too large for the smoke check."""

    name = "wrong"
    summary = "is wrong"

    def rewrite(self, model: ir.Model, context: object) -> bool:
        scales = next(x for x in model.graph.initializers.values() if x.name == "w_scale")
        scales.const_value = ir.tensor(100 * scales.const_value.numpy(), name="w_scale")
        return True


def test_a_wrong_result_is_withdrawn_without_a_file(monkeypatch):
    def scratch_within(_: object) -> None:
        raise AssertionError("a folder is made")

    monkeypatch.setattr(build, "scratch_within", scratch_within)
    content = ir.to_proto(CASE.model()).SerializeToString()
    with pytest.warns(ortplugins.OrtpluginsWarning, match="'wrong'"):
        session = start(content, options(Wrong(), EXACT, in_memory=True))
    assert len(session.ortplugins_report.fired) == 1
    check(session, CASE)


def test_what_no_pass_changes_runs_untouched():
    content = ir.to_proto(CASE.model()).SerializeToString()
    session = start(content, options(ortplugins.TrimPadding(), in_memory=True))
    assert session.ortplugins_report.source == "untouched"
    # What a hint sets for the session counts all the same.
    so = ort.SessionOptions()
    ortplugins.configure(so, hint="memory", in_memory=True)
    relu = proto_of("g (float[n] x) => (float[n] y) { y = Relu(x) }").SerializeToString()
    assert not running_options(start(relu, so)).enable_cpu_mem_arena
