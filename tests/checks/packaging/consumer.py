# SPDX-License-Identifier: MIT
"""What other people's code does with ortplugins; checked by mypy and pyright, strict."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

import ortplugins
from ortplugins.quantization import quantize

if TYPE_CHECKING:
    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class DropDropout(ortplugins.Pass):
    name: ClassVar[str] = "drop_dropout"
    summary: ClassVar[str] = "remove Dropout nodes"

    keep_named: str = ortplugins.option("", "A node of this name stays.")

    def rewrite(self, model: ir.Model, context: "PassContext") -> None:
        context.remarks.fired("node", "removed")


class Options:
    def add_session_config_entry(self, key: str, value: str, /) -> None: ...

    def get_session_config_entry(self, key: str, /) -> str:
        return "1"


def use() -> str:
    ortplugins.configure(
        Options(), ortplugins.DqMatMulNBitsFusion(accuracy_level=4), strict=True
    )
    plan = ortplugins.read(Options())
    names: list[str] = [item.name for item in plan.passes]
    result = ortplugins.optimize(
        "model.onnx", "out.onnx", passes=[DropDropout(keep_named="x")]
    )
    fired: int = len(result.report.fired)
    report: ortplugins.Report = result.report
    quantized = quantize("model.onnx", "int4.onnx", rules={"a": {"bits": 8}})
    mixed = ortplugins.quantize_static_mixed("a.onnx", "b.onnx", [{"x": np.zeros(3)}])
    with ortplugins.enabled(ortplugins.PrepackedWeights(verify="digest")):
        session = ortplugins.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    text: str = session.ortplugins_report.to_json()
    return f"{names} {fired} {report} {quantized.report} {mixed.report} {text}"
