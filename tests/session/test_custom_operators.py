# SPDX-License-Identifier: MIT
"""Libraries of custom operators, which copies of SessionOptions lack."""

import dataclasses
import shutil
import subprocess
from typing import ClassVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import start
from builders.text_models import model_of

import ortplugins


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the operator tests.Three, which returns [3.0]."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "three.c").write_text(CUSTOM_OPERATOR)
    path = folder / "libthree.so"
    command = [compiler, "-shared", "-fPIC", "-o", path, folder / "three.c"]
    subprocess.run(command, check=True)
    return str(path)


# By onnxruntime's C API, whose functions keep their places in every version.
CUSTOM_OPERATOR = """
#include <stdint.h>
#include <stddef.h>
typedef void *(*Function)();
static Function *api;
static void *create(void *op, void *given, void *info) { return op; }
static const char *name(void *op) { return "Three"; }
static const char *provider(void *op) { return NULL; }
static int type(void *op, size_t index) { return 1; }
static int required(void *op, size_t index) { return 0; }
static size_t count(void *op) { return 1; }
static void destroy(void *kernel) {}
static void compute(void *kernel, void *context) {
    int64_t shape[1] = {1};
    void *value;
    float *numbers;
    api[91](context, (size_t)0, shape, (size_t)1, &value);  /* KernelContext_GetOutput */
    api[51](value, &numbers);  /* GetTensorMutableData */
    numbers[0] = 3;
}
static struct { uint32_t version; void *functions[11]; } three = {8, {
    create, name, provider, type, count, type, count, compute, destroy, required, required
}};
struct Base { Function *(*get)(uint32_t version); };
void *RegisterCustomOps(void *options, const struct Base *base) {
    void *domain, *failed;
    api = base->get(1);
    if ((failed = api[26]("tests", &domain))) return failed;  /* CreateCustomOpDomain */
    if ((failed = api[27](domain, &three))) return failed;  /* CustomOpDomain_Add */
    return api[28](options, domain);  /* AddCustomOpDomain */
}
"""


@dataclasses.dataclass(frozen=True)
class NeedsSetting(ortplugins.Pass):
    """Whose results run with a setting of their own."""

    name: ClassVar[str] = "needs_setting"
    summary: ClassVar[str] = "ask for a setting"

    def rewrite(self, model, context):
        return True

    def session_settings(self):
        return {"session.disable_prepacking": "1"}


@pytest.mark.parametrize("other", [None, NeedsSetting()])
def test_artifacts_with_custom_operators(other, library, tmp_path):
    """Copies of options lack them, and some artifacts need settings of their own."""
    codes, scales, _ = DequantizedMatMul(64, 64, 32).arrays()
    text = """g (float[rows, 64] x) => (float[rows, 64] y) {
        w = DequantizeLinear <axis = 0, block_size = 32> (codes, scales)
        hidden = MatMul(x, w)
        three = tests.Three(hidden)
        y = Add(hidden, three)
    }"""
    model = model_of(text, {"codes": codes.astype(ml_dtypes.int4), "scales": scales})
    model.opset_imports["tests"] = 1
    ir.save(model, tmp_path / "model.onnx")
    for expected in ("built", "cache"):
        so = onnxruntime.SessionOptions()
        so.register_custom_ops_library(library)
        ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(), *([other] if other else []))
        session = start(tmp_path / "model.onnx", so)
        report = session.ortplugins_report
        if other is None:
            assert report.source == expected
        else:
            assert report.source == "untouched"
            assert (
                "libraries of custom operators of SessionOptions cannot be" in report.notes[0]
            )
        assert session.run(None, {"x": np.zeros((1, 64), np.float32)})[0][0, 0] == 3
