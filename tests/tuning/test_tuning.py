# SPDX-License-Identifier: MIT
"""``ortplugins tune``: what is measured decides; the figures come from a table here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.command_line import as_json, printed
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import save

from ortplugins import tuning
from ortplugins.measurement.measure import Candidate, Measurement, Spread
from session_options.plan import Plan

FUSION, ARENA = "dq_matmulnbits_fusion", "enable_cpu_mem_arena = 0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(DequantizedMatMul(64, 32, 32), tmp_path / "model.onnx", external=False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[Candidate]]:
    """What was measured; a candidate takes the ratio of its name, 1 by default."""
    found: list[list[Candidate]] = []

    def measure(
        candidates: Sequence[Candidate], feeds: Sequence[Any], *, rounds: int, **how: Any
    ) -> list[Measurement]:
        found.append([*candidates])
        HOW.append(how)
        return [one(RATIOS.get(item.name, 1.0), rounds) for item in candidates]

    monkeypatch.setattr(tuning, "measure", measure)
    return found


RATIOS: dict[str, Any] = {}
HOW: list[dict[str, Any]] = []  # sessions were measured


def one(ratio: float | str | Sequence[float], rounds: int) -> Measurement:
    if isinstance(ratio, str):
        return Measurement(failed=ratio)
    values = (ratio,) * rounds if isinstance(ratio, float) else tuple(ratio)
    spread = Spread(values)
    return Measurement(spread, spread, (spread,), private=spread)


BOTH = f"{FUSION} + {ARENA}"


@pytest.mark.parametrize(
    ("ratios", "best"),
    [
        ({}, None),
        ({FUSION: 0.99}, None),
        ({FUSION: [0.5, 1.1]}, None),  # not in every round
        ({FUSION: "it crashed"}, None),
        ({FUSION: 0.97}, FUSION),
        ({FUSION: 0.5, ARENA: 0.9, BOTH: 0.45}, BOTH),
        ({FUSION: 0.5, ARENA: 0.9, BOTH: 0.6}, FUSION),
        ({FUSION: 0.5, ARENA: 0.9, BOTH: "it crashed"}, FUSION),
    ],
)
def test_what_gains_most_is_chosen(ratios, best, model, seen, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RATIOS", ratios)
    found, chosen = tuning.tune(model, "memory", rounds=2)
    assert (chosen and chosen.name) == best
    assert len(seen) == (2 if {FUSION, ARENA} <= ratios.keys() else 1)
    assert {item.name for item in found} >= {FUSION, ARENA}
    assert {item.name for item in found if item.failed} == {
        name for name, ratio in ratios.items() if isinstance(ratio, str)
    }


SPEED = [
    *(FUSION, "transformer_fusion", "conv_fusion", "trim_padding", "enable_mem_reuse = 0"),
    "optimization.disable_specified_optimizers = SkipLayerNormFusion",
    "session.dynamic_block_base = 4",
]
TRIED = {
    "latency": [*SPEED, "threads: 2"],
    "throughput": [
        *(*SPEED, "session.intra_op.allow_spinning = 0", "threads: 1", "threads: 2"),
    ],
    "memory": [FUSION, "shape_size_reorder", "prepacked_weights", ARENA],
    "start": [
        *(FUSION, "conv_fusion", "prepacked_weights", "enable_mem_reuse = 0"),
        "session.prepack.enable_parallel = 1",
    ],
}


@pytest.mark.parametrize("hint", TRIED)
def test_what_is_tried_and_can_be_pasted(hint, model, seen, monkeypatch):
    monkeypatch.setattr(tuning, "usable_cores", lambda: 2)
    monkeypatch.setattr(tuning, "host_cores", lambda: 4)
    tuning.tune(model, hint, rounds=2)
    (plain, *others), *_ = seen
    assert not plain.settings
    assert [item.name for item in others] == TRIED[hint]
    for item in others:
        Plan.from_entries(item.settings)
        has_pass = "ortplugins.cache_dir" in item.settings
        assert item.settings and has_pass == {*"=:"}.isdisjoint(item.name)
    at_once, callers = hint in ("latency", "throughput"), 2 if hint == "throughput" else 1
    assert HOW[-1] == {"callers": callers, "lockstep": at_once, "progress": None}


@pytest.mark.parametrize(
    ("ratios", "cells", "end"),
    [
        ({}, "1.00 x\t1.00 x\t1.00 x\t", "nothing gains"),
        ({FUSION: "it crashed"}, "\t\t\tit crashed", "nothing gains"),
        (
            *({FUSION: 0.5}, "0.50 x\t0.50 x\t0.50 x\tgains"),
            'options.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")',
        ),
        ({ARENA: 0.5}, "1.00 x\t1.00 x\t1.00 x\t", f"options.{ARENA}"),
    ],
)
@pytest.mark.usefixtures("seen")
def test_the_command_prints_figures_and_lines_to_paste(ratios, cells, end, model, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RATIOS", ratios)
    heading, first, *rest = printed("tune", model, "--hint", "memory").splitlines()
    assert heading == "a / plain onnxruntime\trun\tstart\tprivate memory\t"
    assert (first, rest[-1]) == (f"{FUSION}\t{cells}", end)
    assert ("options = onnxruntime.SessionOptions()" in rest) == (end != "nothing gains")


def test_the_command(model: Path, tmp_path: Path):
    """With real processes."""
    np.savez(tmp_path / "x.npz", x=np.ones((3, 64), np.float32))
    given = ("--rounds", 1, "--samples", tmp_path / "x.npz", "--hint", "start")
    found = as_json("tune", model, *given)
    assert {row["name"] for row in found["tried"]} >= {FUSION}
    assert not any(row["failed"] for row in found["tried"])
