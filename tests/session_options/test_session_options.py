# SPDX-License-Identifier: MIT
"""Flags in, an ordered plan out; and passes of other packages."""

import dataclasses
import importlib
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import python
from builders.sessions import CPU, start
from builders.text_models import proto_of
from hypothesis import given
from hypothesis import strategies as st

import ortplugins
import session_options
from ortplugins.cli.run import run
from ortplugins.runtime.copied_options import running_options
from session_options import (
    DqMatMulNBitsFusion,
    OptionError,
    Pass,
    Plan,
    configure,
    environment,
    option,
    our_passes,
    read,
)
from session_options.entries import OPTIONS, is_default, is_without_effect, option_key, stored
from session_options.keys import format_value, options_of
from session_options.plan import GENERAL_OPTIONS, entries_of, make_plan, plan_from_settings
from session_options.presets import PRESETS
from session_options.registry import BUILTIN_PASSES, find

FUSION = DqMatMulNBitsFusion()
CASE = DequantizedMatMul(64, 32, 32)
ENABLE = "ortplugins.enable_dq_matmulnbits_fusion"
ACCURACY_LEVEL = "ortplugins.dq_matmulnbits_fusion.accuracy_level"
ONNXRUNTIMES_ACCURACY_LEVEL = "session.qdq_matmulnbits_accuracy_level"


def with_entries(content: dict[str, str]) -> ort.SessionOptions:
    options = ort.SessionOptions()
    for key, text in content.items():
        options.add_session_config_entry(key, text)
    return options


@dataclasses.dataclass(frozen=True)
class Everything(Pass):
    """One option of each type."""

    name: ClassVar[str] = "everything"
    summary: ClassVar[str] = "have options"

    flag: bool = option(False, "A flag.")
    count: int = option(3, "A count.", choices=(3, 5))
    share: float = option(0.5, "A share.")
    mode: str = option("fast", "A mode.")


@dataclasses.dataclass(frozen=True)
class OfOurName(Pass):
    """Has a name that is taken."""

    name: ClassVar[str] = "conv_fusion"
    summary: ClassVar[str] = "be another"


def test_fields_are_the_options():
    specs = options_of(Everything)
    assert [(spec.name, spec.default, spec.help) for spec in specs] == [
        ("flag", False, "A flag."),
        ("count", 3, "A count."),
        ("share", 0.5, "A share."),
        ("mode", "fast", "A mode."),
    ]
    assert specs[1].choices == (3, 5)
    name = DqMatMulNBitsFusion.name
    assert session_options.enable_key(name) == ENABLE
    assert session_options.option_key(name, "accuracy_level") == ACCURACY_LEVEL
    for cls in our_passes().values():
        assert cls.summary
        assert all(spec.help.endswith(".") for spec in options_of(cls))


def test_general_options_are_the_plans_fields():
    general = {spec.name: spec.default for spec in GENERAL_OPTIONS}
    assert Plan._field_defaults == {"passes": (), **general}


@pytest.mark.parametrize(
    "field",
    [dataclasses.field(default=1), option(None, "Has no type."), option((), "Is a list.")],
    ids=["not by option()", "None", "tuple"],
)
def test_a_field_that_is_no_option_is_refused(field):
    cls = dataclasses.make_dataclass(
        "Odd", [("what", object, field)], bases=(Pass,), namespace={"name": "odd"}, frozen=True
    )
    with pytest.raises(TypeError, match=r"Odd\.what: declare it with session_options\.option"):
        options_of(cls)


@pytest.mark.parametrize(
    "options",
    [
        None,
        ort.SessionOptions(),
        with_entries({ENABLE: "0"}),
        with_entries({ACCURACY_LEVEL: "4"}),
        with_entries({"ortplugins.mixed_precision_boundaries.float_limit_mb": "-1"}),
        with_entries({ONNXRUNTIMES_ACCURACY_LEVEL: "4", "ortplugins.strict": "1"}),
    ],
    ids=["none", "untouched", "off", "option only", "wrong option", "other entries"],
)
def test_nothing_switched_on_is_an_empty_plan(options):
    plan = read(options)
    assert plan == Plan()
    assert not plan


@given(
    accuracy_level=st.sampled_from([0, 1, 2, 3, 4]),
    slow_kernels=st.sampled_from(["float", "fuse", "keep"]),
    general=st.fixed_dictionaries(
        {},
        optional={
            # onnxruntime keeps entries as C strings, which end at a NUL.
            "cache_dir": st.text(st.characters(codec="utf-8", min_codepoint=1), max_size=50),
            "cache_limit": st.sampled_from(["10GB", "1.5 kib"]),
            "strict": st.booleans(),
            "bake": st.booleans(),
        },
    ),
)
def test_what_is_configured_is_read(accuracy_level, slow_kernels, general):
    item = DqMatMulNBitsFusion(accuracy_level, slow_kernels)
    options = ort.SessionOptions()
    configure(options, item, **general)
    assert read(options) == Plan((item,), **general)  # type: ignore[arg-type]


def a_pass(called: str, position: int = 50) -> Pass:
    """A pass of that name, not registered."""
    namespace = {"name": called, "summary": called, "position": position}
    return dataclasses.make_dataclass(
        called, [], bases=(Pass,), namespace=namespace, frozen=True
    )()


def an_entry(key: str, text: str) -> Callable[[], object]:
    return lambda: read(with_entries({ENABLE: "1", key: text}))


def configured(*passes: Pass, **general: object) -> Callable[[], object]:
    """Switch passes on; where that is refused, nothing may be written."""

    def call() -> None:
        options = ort.SessionOptions()
        try:
            configure(options, *passes, **general)  # type: ignore[arg-type]
        finally:
            assert stored(options, ENABLE) is None

    return call


ACCURACY_LEVELS = r"expected one of auto, 0, 1, 2, 3, 4"
HINT = {"hint": "start"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Everything(count=4), r"everything\.count is 4; expected one of 3, 5"),
        (lambda: Everything(count=True), r"everything\.count is True; expected a int"),
        (lambda: Everything(flag=1), r"everything\.flag is 1; expected a bool"),
        (lambda: Everything(mode=None), r"everything\.mode is None; expected a str"),
        (lambda: Everything(share="0.5"), r"everything\.share is '0\.5'; expected a float"),
        (an_entry(ENABLE, "true"), f'{ENABLE} is \'true\'; expected "0" or "1"'),
        (an_entry(ENABLE, ""), f'{ENABLE} is \'\'; expected "0" or "1"'),
        (an_entry(ACCURACY_LEVEL, "5"), f"{ACCURACY_LEVEL} is '5'; {ACCURACY_LEVELS}"),
        (an_entry(ACCURACY_LEVEL, "four"), f"{ACCURACY_LEVEL} is 'four'; {ACCURACY_LEVELS}"),
        (
            an_entry(f"ortplugins.{FUSION.name}.slow_kernels", "Float"),
            "one of float, fuse, keep",
        ),
        (an_entry("ortplugins.strict", "yes"), 'strict is \'yes\'; expected "0" or "1"'),
        (
            configured(a_pass("mine")),
            "pass 'types:mine' cannot be used: AttributeError",
        ),
        (configured(OfOurName()), "'conv_fusion' is the name of a built-in pass"),
        (configured(FUSION, DqMatMulNBitsFusion(4)), "'dq_matmulnbits_fusion' is given twice"),
        (configured(FUSION, strikt=True), "unknown option 'strikt': did you mean 'strict'"),
        (configured(FUSION, strict="1"), "ortplugins.strict is '1'; expected a bool"),
        (configured(FUSION, cache_dir=5), "ortplugins.cache_dir is 5; expected a str"),
        (configured(hint="speed"), "expected one of latency, throughput, memory, start"),
        (configured(hint=1), "hint is 1; expected a str"),
        (configured(FUSION, cache_limit="1 parsec"), "limit is '1 parsec'; expected a size"),
        (configured(**HINT, hint_seconds=60), "unknown option 'hint_seconds'"),
        (configured(FUSION, **HINT), "hint chooses the passes"),
        (lambda: DqMatMulNBitsFusion(float_limit_mb=-3), "is -3; expected 0 or more"),
        (lambda: Everything(share=float("nan")), "share is nan; expected a finite number"),
        (lambda: ortplugins.ShapeSizeReorder(dims="b=1,b=2"), "'b' has two sizes"),
    ],
)
def test_what_an_option_cannot_be(call, words):
    with pytest.raises(OptionError, match=words):
        call()


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({}, True),
        ({"promote": "x"}, False),
        ({"overrides": {"x": [{"quant_type": "QInt16"}]}}, False),
    ],
)
def test_a_promotion_of_nothing_is_noted(options, noted):
    text = """g (float[2] x) => (float[2] y) <float s = {0.1}, uint8 z = {0}>
        { c = QuantizeLinear(x, s, z)  y = DequantizeLinear(c, s, z) }"""
    passes = [ortplugins.MixedPrecisionBoundaries(**options)]
    report = ortplugins.optimize(proto_of(text), passes=passes).report
    assert ("no precision is to change" in str(report)) == noted


def test_passes_run_by_position_then_by_name():
    ordered = (a_pass("z", 10), a_pass("a", 20), a_pass("b", 20), a_pass("y", 50))
    for given_order in itertools.permutations(ordered):
        assert make_plan(given_order).passes == ordered


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the source of a module ``acme`` where it can be imported."""

    def write(source: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "acme.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(tmp_path / "site")
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("acme", None)


PLACE = {"ortplugins.passes": "acme:Stamp"}
STAMP = """
    import dataclasses
    from pathlib import Path
    from typing import ClassVar

    import ortplugins


    @dataclasses.dataclass(frozen=True)
    class Stamp(ortplugins.Pass):
        '''Write a text into the model, and work in every stage.'''

        name: ClassVar[str] = "stamp"
        summary: ClassVar[str] = "write a text into the model"
        position: ClassVar[int] = 10

        text: str = ortplugins.option("hello", "What to write.")

        def rewrite(self, model, context):
            model.metadata_props["stamp"] = self.text
            context.remarks.fired("model", f"stamped {self.text!r}")

        def rearrange(self, model, context):
            seen = " ".join(sorted(node.op_type for node in model.graph))
            model.metadata_props["rearranged"] = seen
            context.remarks.note("model", "rearranged")

        def finish(self, model_path, context):
            size = model_path.stat().st_size
            model_path.with_name("stamp.txt").write_text(str(size))

        def session_settings(self):
            return {"session.disable_prepacking": "1"}
"""


@pytest.mark.parametrize("start_number", [1, 2], ids=["first start", "from the cache"])
def test_a_pass_of_another_package_works_in_every_stage(acme, model_path, start_number):
    acme(STAMP)
    options = with_entries({**PLACE, "ortplugins.stamp.text": "hi", ENABLE: "1"})
    for _ in range(start_number):
        session = start(model_path, options)
    report = session.ortplugins_report
    assert report.source == ("built" if start_number == 1 else "cache")
    # The smaller position first.
    assert [item.name for item in report.passes] == ["stamp", "dq_matmulnbits_fusion"]
    assert "model: stamped 'hi'" in map(str, report.fired)
    properties = session.get_modelmeta().custom_metadata_map
    assert properties["stamp"] == "hi"
    assert properties["rearranged"] == "MatMulNBits"
    artifact = Path(report.artifact)
    assert artifact.with_name("stamp.txt").read_text() == str(artifact.stat().st_size)
    used = running_options(session)
    assert used.get_session_config_entry("session.disable_prepacking") == "1"
    assert stored(options, "session.disable_prepacking") is None


BROKEN = {
    "import error": ("import no_such_package", "ModuleNotFoundError"),
    "error at import": ("1 / 0", "ZeroDivisionError"),
    "exit at import": ("raise SystemExit(3)", "SystemExit: 3"),
    "no such class": ("Other = 1", "AttributeError"),
    "no pass": ("class Stamp: pass", "is not a subclass of ortplugins.Pass"),
    "an instance": ("Stamp = 5", "is not a subclass of ortplugins.Pass"),
    "no dataclass": (
        "import ortplugins\nclass Stamp(ortplugins.Pass):\n    name = 'stamp'",
        "Stamp is not a frozen dataclass",
    ),
    "a name of ours": (
        textwrap.dedent(STAMP).replace('"stamp"\n', '"conv_fusion"\n'),
        "'conv_fusion' is the name of a built-in pass",
    ),
    "no name": (
        textwrap.dedent(STAMP).replace('    name: ClassVar[str] = "stamp"\n', ""),
        "Stamp.name is None; expected str",
    ),
    "an option that is none": (
        textwrap.dedent(STAMP).replace('ortplugins.option("hello", "What to write.")', '"x"'),
        "Stamp.text: declare it with session_options.option()",
    ),
}


@pytest.mark.parametrize(("source", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_class_that_is_no_pass_is_an_error_wherever_it_is_named(
    acme, model_path, source, words
):
    acme(source)
    for named in (
        lambda: start(model_path, with_entries(PLACE)),
        lambda: plan_from_settings(["acme:Stamp"], {}),
        lambda: Plan.from_entries(PLACE),
    ):
        with pytest.raises(OptionError, match="pass 'acme:Stamp' cannot be used: ") as caught:
            named()
        assert words in str(caught.value)


def test_a_pass_is_given_as_an_object_or_by_its_place(acme, monkeypatch):
    acme(STAMP)
    stamp = importlib.import_module("acme").Stamp
    options = ort.SessionOptions()
    ortplugins.configure(options, FUSION, stamp(text="hi"))
    assert stored(options, "ortplugins.passes") == "acme:Stamp"
    plan = make_plan([stamp(text="hi"), FUSION])
    assert read(options) == plan
    assert plan_from_settings([FUSION, "acme:Stamp"], {"stamp.text": "hi"}) == plan
    monkeypatch.setenv("ORTPLUGINS", f"{FUSION.name} acme:Stamp stamp.text=hi")
    assert Plan.from_entries(environment.environment_entries()) == plan
    with pytest.raises(OptionError, match="did you mean 'text'"):
        Plan.from_entries({**PLACE, "ortplugins.stamp.txt": "hi"})
    with pytest.raises(OptionError, match="pass 'stamp' is given twice"):
        Plan.from_entries({"ortplugins.passes": "acme:Stamp, acme:Stamp"})
    with pytest.raises(OptionError, match="hint chooses the passes"):
        Plan.from_entries({**PLACE, "ortplugins.hint": "latency"})


def test_run_gives_options_to_a_pass_of_another_package(acme, model_path, monkeypatch):
    acme(STAMP)
    for passes, variable in ((("acme:Stamp",), ""), ((), "acme:Stamp")):
        monkeypatch.setenv("ORTPLUGINS", variable)
        run(__file__, passes=passes, settings=("stamp.text=hi",))
        session = ort.InferenceSession(model_path, providers=CPU)
        ortplugins.disable()
        assert session.get_modelmeta().custom_metadata_map["stamp"] == "hi"


STAMPED = """
import sys, onnxruntime, ortplugins
so = onnxruntime.SessionOptions()
so.add_session_config_entry("ortplugins.passes", "acme:Stamp")
session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
print(session.get_modelmeta().custom_metadata_map["stamp"], session.ortplugins_report.source)
"""


def test_a_pass_of_a_program_that_lies_in_no_file(model_path, tmp_path):
    code = textwrap.dedent(STAMP) + STAMPED.replace("acme:Stamp", "__main__:Stamp")
    for origin in ("built", "cache"):
        done = python("-c", code, str(model_path))
        assert done.stdout == f"hello {origin}\n", done.stderr


def test_another_text_of_its_module_and_another_version_are_noticed(model_path, tmp_path):
    changes = (
        ("what it does", '"hello"', '"hi"'),
        ("its version", "    position", '    version: ClassVar[str] = "2"\n    position'),
    )
    source = textwrap.dedent(STAMP)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for _, before, after in (("", "", ""), *changes):
        source = source.replace(before, after) if before else source
        (tmp_path / "acme.py").write_text(source)
        text = "hi" if '"hi"' in source else "hello"
        for origin in ("built", "cache"):
            done = python("-B", "-c", STAMPED, str(model_path), PYTHONPATH=path)
            assert done.stdout == f"{text} {origin}\n", done.stderr


def test_the_entries_that_a_start_asks_for_are_those_of_the_classes():
    classes = {name: find(name) for name in OPTIONS}
    assert {*OPTIONS} == {*BUILTIN_PASSES}
    for name, cls in classes.items():
        assert getattr(ortplugins, cls.__name__) is cls
        specs = options_of(cls)
        defaults = {spec.name: format_value(spec.default) for spec in specs}
        assert OPTIONS[name] == defaults, f"session_options/entries.py: {name}"
        keys = {option_key(name, option): text for option, text in defaults.items()}
        assert all(itertools.starmap(is_default, keys.items()))
        on = session_options.enable_key(name)
        assert (is_default(on, "0"), is_default(on, "1")) == (True, False)
    for spec in GENERAL_OPTIONS:
        key = f"ortplugins.{spec.name}"
        counts = not is_without_effect(key, "1")
        assert counts == is_default(key, format_value(spec.default)) and not is_default(
            key, "x"
        )


# The example package of docs/write-a-pass.md: its own tests; the page's blocks run it.


ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "acme_passes"


def test_its_own_tests_pass():
    quiet = "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"
    done = python("-m", "pytest", *quiet, ".", cwd=EXAMPLE, PYTHONPATH=str(EXAMPLE))
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "write-a-pass.md").read_text(encoding="utf-8")
    licence, code = (EXAMPLE / "acme_passes.py").read_text(encoding="utf-8").split("\n", 1)
    assert licence.startswith("# SPDX")
    assert code in page


@pytest.mark.parametrize("hint", PRESETS)
def test_a_hint_stands_for_its_passes(hint: str):
    entries = entries_of((), hint=hint) | {f"ortplugins.{FUSION.name}.slow_kernels": "keep"}
    plan = Plan.from_entries(entries)
    assert {item.name for item in plan.passes} == {*PRESETS[hint].passes}
    (fusion,) = (item for item in plan.passes if item.name == FUSION.name)
    assert fusion.slow_kernels == "keep"
    assert PRESETS[plan.hint].settings == PRESETS[hint].settings
    with pytest.raises(OptionError, match="hint chooses the passes"):
        Plan.from_entries({**entries, "ortplugins.enable_trim_padding": "1"})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("ortplugins.enable_dq_matmulnbit_fusion", "mean 'dq_matmulnbits_fusion'"),
        ("ortplugins.dq_matmulnbits_fusion.acuracy_level", "did you mean 'accuracy_level'"),
        ("ortplugins.dq_matmulnbit_fusion.accuracy_level", "mean 'dq_matmulnbits_fusion'"),
        ("ortplugins.strikt", "did you mean 'strict'"),
    ],
)
def test_an_entry_that_nobody_reads_is_an_error(key: str, words: str, monkeypatch, tmp_path):
    entries = {ENABLE: "1", key: "1"}
    with pytest.raises(OptionError, match=words):
        Plan.from_entries(entries)
    assert Plan.from_entries({ENABLE: "1", "session.x": "1", "ortpluginsx": "1"})
    with pytest.raises(OptionError, match=words):
        ortplugins.warm([tmp_path / "m.onnx"], session_entries=entries)
