# SPDX-License-Identifier: MIT
"""Models of others through all passes: values, metadata and warnings are stock onnxruntime's.

onnx's backend tests, from the installed wheel, with their own inputs; and every model below
the folders of ORTPLUGINS_PEER_MODELS, with made-up ones. Nothing is fetched.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime
import pytest
from builders.sessions import CPU, PASSES, facts
from onnx.backend.test.case.node import collect_testcases

import ortplugins
from ortplugins.runtime.stock_session import quiet_runner
from ortplugins.samples.made_up import MadeUpInputs

BY_CHANCE = ("Bernoulli", "Multinomial", "Random", "Dropout")
# Of the greatest number of an output.
BOUND = 1e-5
FOLDERS = [
    Path(x) for x in os.environ.get("ORTPLUGINS_PEER_MODELS", "").split(os.pathsep) if x
]
MODELS = sorted(path for folder in FOLDERS for path in folder.rglob("*.onnx"))


@functools.cache
def cases() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about numbers that the tests want
        return {case.name: case for case in collect_testcases(None) if case.model is not None}


def options() -> onnxruntime.SessionOptions:
    so = onnxruntime.SessionOptions()
    so.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    so.log_severity_level, so.intra_op_num_threads = 4, 1
    return so


def same(one: Any, other: Any) -> bool:
    """Whether two outputs are equal; of floats, to a share of the greatest number."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(x, other[key]) for key, x in one.items()
        )
    if not isinstance(one, np.ndarray) or one.dtype.kind not in "fc":
        return type(one) is type(other) and bool(np.all(one == other))
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return False
    far = np.abs(one[finite] - other[finite]).max(initial=0)
    return bool(far <= BOUND * np.abs(one[finite]).max(initial=0))


def check(model: str | bytes, feeds: Callable[[onnxruntime.InferenceSession], Any]) -> None:
    try:
        stock = onnxruntime.InferenceSession(model, options(), providers=CPU)
        runs = [(feed, stock.run(None, feed)) for feed in feeds(stock)]
    except Exception as error:  # onnxruntime's own classes, none of which is documented
        pytest.skip(f"stock onnxruntime: {str(error)[:100]}")
    so = options()
    ortplugins.configure(so, *PASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ortplugins.OrtpluginsWarning)
        session = ortplugins.InferenceSession(model, so, providers=CPU)
    assert facts(session) == facts(stock)
    for feed, expected in runs:
        assert same(expected, session.run(None, feed)), session.ortplugins_report.to_text()


def differs_by_chance(proto: onnx.ModelProto) -> bool:
    return any(node.op_type.startswith(BY_CHANCE) for node in proto.graph.node)


@pytest.mark.parametrize("name", cases())
def test_onnx(name):
    case = cases()[name]
    if differs_by_chance(case.model):
        pytest.skip("its numbers are random")
    names = [value.name for value in case.model.graph.input]

    def feeds(_: object) -> Iterator[dict[str, Any]]:
        for inputs, _ in case.data_sets:
            arrays = (
                onnx.numpy_helper.to_array(x)
                if isinstance(x, onnx.TensorProto)
                else np.asarray(x)
                if isinstance(x, np.generic)
                else x
                for x in inputs
            )
            yield dict(zip(names, arrays, strict=False))

    check(case.model.SerializeToString(), feeds)


@pytest.mark.skipif(not MODELS, reason="ORTPLUGINS_PEER_MODELS names no folder of models")
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_models(path):
    def feeds(session: onnxruntime.InferenceSession) -> Iterator[dict[str, Any]]:
        proto = onnx.load(path, load_external_data=False)
        if differs_by_chance(proto):
            pytest.skip("its numbers are random")
        inputs = MadeUpInputs(ir.from_proto(proto).graph)
        inputs.fit(quiet_runner(session))
        yield from inputs.feeds(steps=True)

    check(str(path), feeds)
