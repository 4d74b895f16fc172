# SPDX-License-Identifier: MIT
"""The hint: what is measured decides, and nothing is taken that does not gain."""

import dataclasses
import itertools
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders.command_line import as_json, printed
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import CPU, save, start
from builders.text_models import model_of, proto_of

import ortplugins
from ortplugins.measurement.measure import Candidate, Measurement, Spread, measure
from ortplugins.optimization import request
from ortplugins.optimization.request import read_request
from ortplugins.runtime import machine
from ortplugins.runtime.copied_options import apply_settings, running_options
from ortplugins.runtime.machine import usable_cores
from ortplugins.session.warming import warm
from ortplugins.tuning import tune as tuning
from ortplugins.tuning.changes import changes_for
from session_options.keys import stored
from session_options.plan import HINTS, make_plan

FUSION, BLOCKS = "dq_matmulnbits_fusion", "dynamic blocks"
DENORMALS, NO_PLAN = "denormals as zero", "no plan for buffers"
FLOAT_WEIGHTS, UNPACKED = "float weights", "weights not packed"
IN_PARALLEL = "weights packed in parallel"
DYNAMIC_BLOCKS = "session.dynamic_block_base"
OPERATORS = frozenset({"MatMul", "Erf", "LayerNormalization"})
Ratios = Mapping[str, float | Sequence[float] | str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(DequantizedMatMul(64, 32, 32), tmp_path / "model.onnx", external=False)


def written(folder: Path, text: str, domain: str = "") -> Path:
    proto = proto_of(text)
    if domain:
        proto.opset_import.add(domain=domain, version=1)
    onnx.save(proto, folder / "written.onnx")
    return folder / "written.onnx"


def hinted(cache: Path, **general: Any) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    ortplugins.configure(options, cache_dir=str(cache), **{"hint": "latency", **general})
    return options


def open_session(model: Path, cache: Path, **general: Any) -> ortplugins.InferenceSession:
    return start(model, hinted(cache, **general))


def taken(session: ortplugins.InferenceSession) -> list[str]:
    return [row.name for row in session.ortplugins_report.tried if row.taken]


def why(session: ortplugins.InferenceSession, name: str) -> str:
    return next(row.why for row in session.ortplugins_report.tried if row.name == name)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have candidates take the ratios of a table; another may hold for the first rounds."""

    def script(
        ratios: Ratios,
        at_first: Ratios | None = None,
        noise: float = 0.0,
        seed: int = 0,
        exact: bool = True,
        busy: int = 0,
        runs: Ratios = MappingProxyType({}),  # where they are not those of starts
    ) -> None:
        rng = np.random.default_rng(seed)
        comparisons = itertools.count()
        if exact:
            monkeypatch.setattr(tuning._Search, "_error", lambda *_: 0.0)

        def measure(
            candidates: Sequence[Candidate], feeds: Sequence[Any], *, rounds: int, **_: Any
        ) -> list[Measurement]:
            first, *others = candidates
            names = ["", *("again" if x.name == first.name else x.name for x in others)]
            table = at_first if at_first and rounds == 2 else ratios
            if "again" in names and next(comparisons) < busy:
                table = {**table, "again": 0.5}
            found = [one(table.get(name, 1.0), len(feeds), rounds) for name in names]
            return [
                dataclasses.replace(item, run=Spread((runs[name],) * rounds))
                if feeds and name in runs
                else item
                for name, item in zip(names, found, strict=True)
            ]

        def one(ratio: float | Sequence[float] | str, feeds: int, rounds: int) -> Measurement:
            if isinstance(ratio, str):
                return Measurement(failed=ratio)
            each = ratio if isinstance(ratio, Sequence) else [ratio] * feeds
            spreads = [Spread(tuple(v * rng.normal(1, noise, rounds))) for v in each]
            single = Spread((ratio if isinstance(ratio, float) else 1.0,) * rounds)
            mean = single
            if feeds:
                mean = Spread(tuple(np.prod([x.values for x in spreads], 0) ** (1 / feeds)))
            return Measurement(single, mean, tuple(spreads), private=single)

        monkeypatch.setattr(tuning, "measure", measure)

    return script


# What candidates take beside what was taken before them, what is taken, and the ratios of the
# first rounds where they are others.
GAINS = {
    "nothing gains": ({}, []),
    "much, believed at once": ({FUSION: 0.5}, [FUSION]),
    "little, confirmed": ({FUSION: 0.9}, [FUSION]),
    "too little": ({FUSION: 0.99}, []),
    "a setting alone": ({BLOCKS: 0.9}, [BLOCKS]),
    "a setting beside the fusion": ({FUSION: 0.5, BLOCKS: 0.9}, [FUSION, BLOCKS]),
    "three, each on top": (
        {BLOCKS: 0.8, DENORMALS: 0.85, NO_PLAN: 0.9},
        [NO_PLAN, BLOCKS, DENORMALS],
    ),
    "the second adds nothing": ({BLOCKS: 0.9}, [BLOCKS], {BLOCKS: 0.9, DENORMALS: 0.95}),
    "one that crashes": ({BLOCKS: "it crashed"}, []),
    "one that crashes on top": (
        {BLOCKS: "it crashed", DENORMALS: 0.9},
        [DENORMALS],
        {BLOCKS: 0.9, DENORMALS: 0.85},
    ),
}


@pytest.mark.parametrize("case", GAINS.values(), ids=GAINS)
def test_what_gains_is_taken(case, model, tmp_path, measured):
    ratios, expected, *at_first = case
    measured(ratios, *at_first)
    session = open_session(model, tmp_path / "cache")
    assert sorted(taken(session)) == sorted(expected)
    if ratios.get(BLOCKS) == "it crashed":
        assert why(session, BLOCKS) == "it crashed"


@pytest.mark.parametrize("seed", range(4))
def test_what_seemed_best_by_chance_is_dropped(seed, model, tmp_path, measured):
    at_first = {BLOCKS: 0.9, DENORMALS: 0.8}
    measured({BLOCKS: 0.9}, at_first, noise=0.01, seed=seed)
    assert taken(open_session(model, tmp_path / "cache")) == [BLOCKS]


@pytest.mark.parametrize(
    ("bursts", "ratio", "expected"), [(1, 0.4, [BLOCKS]), (2, 0.4, []), (2, 0.1, [BLOCKS])]
)
def test_load_hides_what_gains_less(bursts, ratio, expected, model, tmp_path, measured):
    """A burst is measured again once; what gains more than the noise is seen through it."""
    measured({BLOCKS: ratio}, busy=bursts)
    session = open_session(model, tmp_path / "cache")
    assert taken(session) == expected
    busy = "the machine is busy" in session.ortplugins_report.notes[-1]
    assert busy is not bool(expected)


@pytest.mark.parametrize("seconds", [20, 40])
def test_changes_that_run_longer_than_the_base_keep_to_the_time(
    seconds, model, tmp_path, measured, monkeypatch
):
    """By a clock that only measuring moves: 0.1 s for a session as it is, 0.4 for a change."""
    measured({BLOCKS: 0.9, DENORMALS: 0.95, NO_PLAN: 0.9})
    scripted, now = tuning.measure, [0.0]

    def measure(candidates: Sequence[Candidate], *args: Any, **named: Any) -> Any:
        each = (0.1 if item.name == candidates[0].name else 0.4 for item in candidates)
        now[0] += named["rounds"] * sum(each)
        return scripted(candidates, *args, **named)

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: now[0]))
    open_session(model, tmp_path / "cache", hint_seconds=seconds)
    assert now[0] <= seconds


def test_nothing_is_measured_that_cannot_be_kept(model, tmp_path):
    """Every start of every worker would measure."""
    (tmp_path / "file").touch()
    with pytest.warns(ortplugins.OrtpluginsWarning, match="nothing is measured, as"):
        session = open_session(model, tmp_path / "file" / "cache")
    assert session.ortplugins_report.source == "untouched"
    with pytest.warns(ortplugins.OrtpluginsWarning, match="works without its cache"):
        unmeasured = open_session(model, tmp_path / "file" / "cache", hint_seconds=0)
    assert taken(unmeasured) == [FUSION]


def test_one_workload_may_not_pay_for_another(tmp_path, measured):
    path = written(
        tmp_path,
        """encoder (int64[batch, seq] attention_mask)
        => (float[batch, seq] y) { y = Cast<to=1>(attention_mask) }""",
    )
    measured({BLOCKS: [0.5, 1.1]})
    session = open_session(path, tmp_path / "cache")
    assert taken(session) == []
    assert why(session, BLOCKS) == "is slower on workload 'padded run'"


@pytest.mark.parametrize(("error", "expected"), [(7e-5, [FUSION]), (1.3e-4, [])])
def test_a_change_may_round_as_stock_does(
    error, expected, model, tmp_path, measured, monkeypatch
):
    measured({FUSION: 0.5})
    monkeypatch.setattr(
        tuning._Search,
        "_error",
        lambda _, candidate: error if candidate.name == FUSION else 5.5e-5,
    )
    assert taken(open_session(model, tmp_path)) == expected


def test_what_is_not_packed_is_not_packed_in_parallel(model, tmp_path, measured):
    measured({UNPACKED: 0.6, IN_PARALLEL: 0.8})
    session = open_session(model, tmp_path, hint="start")
    assert taken(session) == [UNPACKED]
    assert why(session, IN_PARALLEL) == "it finds nothing to do"


def test_the_error_counts_and_its_bound_can_be_given(model, tmp_path, measured):
    # Plain onnxruntime fuses these weights at level 4 itself, so both have that error.
    measured({FUSION: 0.5}, exact=False)
    assert taken(open_session(model, tmp_path / "cache")) == [FUSION]
    session = open_session(model, tmp_path / "b", hint_error=1e-9)
    assert taken(session) == []
    assert "is greater than 1.0e-09 (hint_error)" in why(session, FUSION)


@pytest.mark.parametrize("numbers", [[np.nan, 1], [1, np.inf], [1], [1, 2.1]])
def test_numbers_that_are_no_rounding_are_refused(
    numbers, model, tmp_path, measured, monkeypatch
):
    def outputs(_: object, candidate: Candidate) -> list[np.ndarray]:
        return [np.float32(numbers if candidate.name == BLOCKS else [1, 2])]

    measured({BLOCKS: 0.5}, exact=False)
    monkeypatch.setattr(tuning._Search, "_outputs", outputs)
    session = open_session(model, tmp_path / "cache")
    assert taken(session) == []
    assert "is greater than 1.0e-05 (hint_error)" in why(session, BLOCKS)


@pytest.mark.parametrize(("run", "expected"), [(1.3, [UNPACKED]), (1.6, [])])
def test_a_start_may_cost_runs_up_to_a_bound(run, expected, model, tmp_path, measured):
    measured({UNPACKED: 0.5}, runs={UNPACKED: run})
    session = open_session(model, tmp_path / "cache", hint="start")
    assert taken(session) == expected
    if expected:
        note = "time of a start 0.50 x, time of a run 1.30 x"
        assert session.ortplugins_report.notes[-1].endswith(note)
    else:
        assert why(session, UNPACKED) == "a run takes 1.60 x, above 1.5"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_without_an_arena_buffers_go_back_to_the_system(tmp_path, measured):
    path = written(
        tmp_path,
        """large (float[1000] x) => (float[1, 1] y)
        <int64[2] shape = {4000, 1000}> {
            a = Expand(x, shape) b = Exp(a) c = Add(a, b) y = ReduceSum(c) }""",
    )
    measured({"no arena": 0.5})
    entries = {"ortplugins.hint": "memory", "ortplugins.cache_dir": str(tmp_path / "cache")}
    warm([path], (), session_entries=entries)
    feed = {"x": np.ones(1000, np.float32)}
    plain, ours = measure(
        [Candidate(path), Candidate(path, settings=entries)],
        feed,
        rounds=1,
        runs=1,
    )
    assert ours.private is not None and plain.private is not None
    assert (plain.private.median - ours.private.median) / 1e6 > 30  # of two buffers of 16


def test_settings_are_the_sessions_and_the_options_are_left_alone(model, tmp_path, measured):
    measured({BLOCKS: 0.9})
    options = hinted(tmp_path / "cache")
    for origin in ("built", "cache"):
        session = start(model, options)
        report = session.ortplugins_report
        assert (report.source, report.artifact) == (origin, "")
        own = running_options(session)
        assert own.get_session_config_entry(DYNAMIC_BLOCKS) == "4"
        assert stored(options, DYNAMIC_BLOCKS) is None


def test_what_a_choice_depends_on():

    def key_of(options: onnxruntime.SessionOptions) -> dict[str, Any]:
        plan = make_plan((), hint="latency")
        return read_request(
            "model.onnx", plan, options, ["CPUExecutionProvider"], ()
        ).key_parts()

    expected = key_of(onnxruntime.SessionOptions())
    for change in (change for hint in HINTS for change in changes_for(hint, {}, OPERATORS)):
        options = onnxruntime.SessionOptions()
        apply_settings(options, change.settings)
        assert (key_of(options) == expected) is not bool(change.settings), change.name


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """The candidates of a search, none of which runs."""
    found: list[Candidate] = []

    def measure(candidates: Sequence[Candidate], *_: Any, **__: Any) -> list[Measurement]:
        found.extend(candidates)
        return [Measurement(failed="seen")] * len(candidates)

    monkeypatch.setattr(tuning, "measure", measure)
    return found


def test_plain_onnxruntime_is_measured_as_the_user_set_it(model, tmp_path, seen):
    level = "session.qdq_matmulnbits_accuracy_level"
    left_out = "optimization.disable_specified_optimizers"
    options = hinted(tmp_path / "cache")
    options.add_session_config_entry(level, "0")  # not onnxruntime's default
    options.add_session_config_entry(left_out, "GeluFusion")
    ortplugins.InferenceSession(
        model, options, providers=CPU, disabled_optimizers=["ConstantFolding"]
    )
    expected = {level: "0", left_out: "GeluFusion;ConstantFolding"}
    assert seen and all(each.settings.items() >= expected.items() for each in seen)


def test_options_of_providers_are_measured_with(model, tmp_path, seen):
    """But for addresses, which are those of another process."""
    cpu = "CPUExecutionProvider"
    given = {"use_arena": 0, "user_compute_stream": 4711}
    for number, arguments in enumerate((([(cpu, given)], None), ([cpu], [given]))):
        ortplugins.InferenceSession(model, hinted(tmp_path / str(number)), *arguments)
        assert seen
        assert all([*each.providers] == [(cpu, {"use_arena": "0"})] for each in seen)
        seen.clear()


def test_providers_that_the_options_do_not_name(model, tmp_path):
    options = hinted(tmp_path / "cache")
    options.set_provider_selection_policy(
        onnxruntime.OrtExecutionProviderDevicePolicy.PREFER_CPU
    )
    note = ortplugins.InferenceSession(model, options).ortplugins_report.notes[-1]
    assert note.endswith("SessionOptions have no getter for their providers")


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


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found in /proc")
@pytest.mark.parametrize("found", [True, False])
def test_custom_operators(found, library, tmp_path, monkeypatch):
    """Of a library that is not found, nothing is measured."""
    text = "custom (float[n] x) => (float[m] y) { z = tests.Three(x) y = Add(z, z) }"
    path = written(tmp_path, text, domain="tests")
    if found:
        monkeypatch.delenv("ORTPLUGINS_BUILD_IN_PROCESS")
    else:
        monkeypatch.setattr(request, "custom_op_libraries", tuple)
    options = hinted(tmp_path / "cache", hint_seconds=4)
    options.register_custom_ops_library(library)
    session = start(path, options)
    assert session.run(None, {"x": np.zeros(2, np.float32)})[0] == [6]
    note = session.ortplugins_report.notes[-1]
    unmeasured = "only what is safe is taken: measuring processes cannot open it"
    assert (unmeasured in note) is not found
    assert ("is not a registered function" in note) is not found


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found in /proc")
@pytest.mark.parametrize("other", [None, ortplugins.PrepackedWeights()])
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
        assert session.ortplugins_report.source == expected
        assert session.run(None, {"x": np.zeros((1, 64), np.float32)})[0][0, 0] == 3


def tried(hint: str, session: Mapping[str, str], *operators: str) -> set[str]:
    return {item.name for item in changes_for(hint, session, frozenset(operators))}


def test_what_the_user_set_is_left_alone():
    assert "no arena" in tried("memory", {"enable_cpu_mem_arena": "1"}, *OPERATORS)
    assert "no arena" not in tried("memory", {"enable_cpu_mem_arena": "0"}, *OPERATORS)
    assert BLOCKS not in tried("latency", {DYNAMIC_BLOCKS: "2"}, *OPERATORS)


def test_fewer_threads_than_cores_are_for_many_callers(monkeypatch):
    """For a single caller they gain while something else keeps a core busy, and lose after."""
    monkeypatch.setattr("ortplugins.tuning.changes.usable_cores", lambda: 3)
    monkeypatch.setattr("ortplugins.tuning.changes.host_cores", lambda: 8)
    threads = {"threads: 1", "threads: 3"}
    assert tried("latency", {}) & threads == {"threads: 3"}
    assert tried("throughput", {}) & threads == threads


def test_a_setting_for_an_operator_is_not_tried_without_it():
    others = tried("latency", {}, "Conv", "ReduceMean")
    assert "approximate Gelu" not in others
    more = {"approximate Gelu", "sums apart from norms"}
    assert tried("latency", {}, "Erf", "LayerNormalization") - tried("latency", {}) == more
    assert tried("latency", {}, "DequantizeLinear") - others == {FLOAT_WEIGHTS}


def test_float_weights_are_exact(model, tmp_path, measured):
    # Plain onnxruntime fuses these weights itself, with int8 activations.
    measured({FLOAT_WEIGHTS: 0.5}, exact=False)
    session = open_session(model, tmp_path / "cache", hint_error=1e-6)
    assert taken(session) == [FLOAT_WEIGHTS]


def test_a_real_search_keeps_outputs_and_is_found_again(model, tmp_path):
    feed = {"x": np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)}
    plain = onnxruntime.InferenceSession(model, providers=CPU)
    for hint in ("throughput", "memory", "start"):
        first = open_session(model, tmp_path / hint, hint=hint, hint_seconds=3)
        again = open_session(model, tmp_path / hint, hint=hint, hint_seconds=3)
        assert first.ortplugins_report.tried == again.ortplugins_report.tried
        assert again.ortplugins_report.source in ("cache", "untouched")
        for session in (first, again):
            a, b = plain.run(None, feed)[0], session.run(None, feed)[0]
            assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()


@pytest.mark.parametrize(
    ("hint", "expected"),
    [("memory", [FUSION, "no arena", "prepacked_weights"]), ("latency", [FUSION])],
)
def test_what_is_safe_needs_no_measuring(hint, expected, tmp_path, seen):
    path = save(DequantizedMatMul(512, 256, 32), tmp_path / "model.onnx", external=False)
    session = open_session(path, tmp_path / "cache", hint=hint, hint_seconds=0)
    assert (taken(session), seen) == (expected, [])
    assert "hint_seconds is 0" in session.ortplugins_report.notes[-1]
    assert running_options(session).enable_cpu_mem_arena is (hint != "memory")


def test_memory_that_the_system_does_not_report(model, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "text_of", lambda *_: "")
    session = open_session(model, tmp_path / "cache", hint="memory")
    assert "private memory is not known on this system" in session.ortplugins_report.notes[-1]
    assert "no arena" in taken(session)


def test_too_little_time_is_said(model, tmp_path):
    session = open_session(model, tmp_path / "cache", hint_seconds=1)
    assert "no time for it in 1 s (hint_seconds)" in why(session, BLOCKS)


def test_inputs_that_cannot_be_made_up(tmp_path):
    text = "text (string[n] words) => (string[n] same) { same = Identity(words) }"
    path = written(tmp_path, text)
    session = open_session(path, tmp_path / "cache")
    assert "input 'words' takes strings" in session.ortplugins_report.notes[-1]
    assert "hint_samples names an .npz file" in session.ortplugins_report.notes[-1]


def test_a_dimension_that_is_not_there(model, tmp_path):
    with pytest.warns(ortplugins.OrtpluginsWarning, match=r"hint_dims: .*'length'"):
        session = open_session(model, tmp_path / "cache", hint_dims="length=3")
    assert session.ortplugins_report.source == "untouched"


def test_samples_are_what_is_measured_with(model, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones((5, 64), np.float32))
    session = open_session(
        model, tmp_path / "cache", hint_samples=str(tmp_path / "x.npz"), hint_seconds=4
    )
    assert "not measured" not in session.ortplugins_report.notes[-1]


CGROUPS, CORE = "sys/fs/cgroup", "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 2),
        ({f"{CGROUPS}/a/b/cpu.max": "max 100000"}, 2),
        ({f"{CGROUPS}/a/b/cpu.max": "100000 100000"}, 1),
        ({f"{CGROUPS}/a/cpu.max": "150000 100000"}, 2),
        ({f"{CGROUPS}/cpu.max": "50000 100000"}, 1),
        ({f"{CGROUPS}/cpu/c/cpu.cfs_{name}_us": "100000" for name in ("quota", "period")}, 1),
        ({f"{CGROUPS}/cpu/c/cpu.cfs_quota_us": "-1"}, 2),
        ({CORE.format(number): "0,1" for number in (0, 1)}, 1),
    ],
)
def test_usable_cores(files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    groups = {"proc/self/cgroup": "0::/a/b\n3:memory:/m\n2:cpu,cpuacct:/c\n"}
    for name, text in {**groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(str(tmp_path)) == cores


def test_the_command_prints_what_to_set(model, measured, monkeypatch):
    measured({FUSION: 0.5, BLOCKS: 0.9})
    shown = printed("tune", model)
    assert f'("ortplugins.enable_{FUSION}", "1")' in shown
    assert f'("{DYNAMIC_BLOCKS}", "4")' in shown
    content = as_json("tune", model)
    assert content["settings"] == {f"ortplugins.enable_{FUSION}": "1", DYNAMIC_BLOCKS: "4"}
    assert {row["name"] for row in content["tried"] if row["taken"]} == {FUSION, BLOCKS}


def test_optimize_writes_what_the_hint_chose(model, tmp_path, measured):
    measured({FUSION: 0.5, BLOCKS: 0.9})
    output = tmp_path / "out.onnx"
    shown = printed("optimize", model, "--hint", "latency", "-o", output)
    assert "MatMulNBits" in {node.op_type for node in onnx.load(output).graph.node}
    assert f"set for its sessions: {DYNAMIC_BLOCKS} = 4" in shown
