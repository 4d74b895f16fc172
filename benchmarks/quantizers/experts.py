# SPDX-License-Identifier: MIT
"""A made-up mixture of experts of realistic size: time, memory and file, by its form.

python -m benchmarks.quantizers.experts [--experts 32] [--hidden 1024] [--inner 2048]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

from ortplugins.measurement.measure import Candidate, measure
from ortplugins.quantization import quantize

_CHOICES = 4
_TOKENS = (1, 16, 256)
_SETTINGS = {"intra_op_num_threads": 2}


def operator(experts: int, hidden: int, inner: int) -> ir.Model:
    """Return one MoE of gated experts, behind its router."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> ir.Value:
        numbers = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        return ir.val(name, const_value=ir.tensor(numbers, name=name))

    x = ir.val("x", ir.DataType.FLOAT, ("tokens", hidden))
    router = weight("router", hidden, experts)
    first = weight("gate_up_proj", experts, 2 * inner, hidden)
    last = weight("down_proj", experts, hidden, inner)
    op = TapeBuilder()
    y = op.MoE(
        x,
        op.MatMul(x, router),
        first,
        None,
        last,
        k=_CHOICES,
        activation_type="swiglu",
        swiglu_fusion=1,
        normalize_routing_weights=1,
        _domain="com.microsoft",
        _name="moe",
    )
    y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, x.shape
    graph = ir.Graph(
        [x],
        [y],
        nodes=op.nodes,
        initializers=[router, first, last],
        opset_imports={"": 21, "com.microsoft": 1},
        name="mixture",
    )
    return ir.Model(graph, ir_version=10)


def forms(path: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the forms of a float mixture, and their files."""
    yield "float", path
    for bits in (4, 8):
        made = folder / f"qmoe{bits}.onnx"
        quantize(path, made, bits=bits)
        yield f"QMoE, {bits} bits", made
    made = folder / "products.onnx"
    # Rules that give one expert another form leave products.
    rules = {"down_proj.0": {"block_size": 64}}
    quantize(path, made, rules=rules, quant_format="MatMulNBits", accuracy_level=0)
    yield "a MatMulNBits for each, 4 bits", made


def main() -> None:
    """Print a table: bytes of the files, then milliseconds and private memory of sessions."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("experts", 32), ("hidden", 1024), ("inner", 2048), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "float.onnx"
        model = operator(given.experts, given.hidden, given.inner)
        ir.save(model, path, external_data="float.onnx.data")
        del model
        print("| form | file | memory | " + " | ".join(f"{n} tokens" for n in _TOKENS) + " |")
        print("|---" * (3 + len(_TOKENS)) + "|")
        made = list(forms(path, folder))
        candidates = [Candidate(file, label, settings=_SETTINGS) for label, file in made]
        rng = np.random.default_rng(1)
        feeds = [{"x": rng.standard_normal((n, given.hidden), np.float32)} for n in _TOKENS]
        found = measure(candidates, feeds, rounds=given.rounds, runs=10)
        for (label, file), item in zip(made, found, strict=True):
            assert item.private is not None, item.failed
            times = [f"{1e3 * run.median:.2f} ms" for run in item.runs]
            memory = f"{item.private.median / 1e6:.0f} MB"
            print(f"| {label} | {_size(file)} | {memory} | {' | '.join(times)} |")


def _size(model: Path) -> str:
    data = model.with_name(f"{model.name}.data")
    size = model.stat().st_size + (data.stat().st_size if data.exists() else 0)
    return f"{size / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
