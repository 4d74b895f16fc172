# SPDX-License-Identifier: MIT
"""Judges mutants and counts what became of them.

usage: python -m mutations [--count N] [--seed S] [--jobs J] [--out DIR] [--form TEXT]
       python -m mutations --again "FORM / MUTATION / SEED"
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx

from .forms import FAMILIES, FORMS
from .judge import Name, Verdict, judge, mutant_of, runs, text_of
from .mutate import MUTATIONS

_CHUNK = 16
_KINDS = ("right", "refused", "wrong", "raised", "invalid")


def names(seed: int, form: str = "", small: bool = False) -> Iterator[Name]:
    """Yield mutants at random, the same for a seed; a quarter has two mutations."""
    rng = np.random.default_rng(seed)
    forms, shares = list[str](), list[float]()
    for share, members in FAMILIES.values():
        chosen = [n for n in members if form in n and (FORMS[n].small or not small)]
        forms += chosen
        shares += [share / max(len(chosen), 1)] * len(chosen)
    probabilities, kinds = np.array(shares) / sum(shares), list(MUTATIONS)
    while True:
        count = 2 if rng.random() < 0.25 else 1
        mutation = " + ".join(kinds[i] for i in rng.integers(len(kinds), size=count))
        yield Name(
            str(rng.choice(forms, p=probabilities)), mutation, int(rng.integers(1 << 30))
        )


def judged(chunk: list[Name]) -> list[tuple[Name, Verdict]]:
    return [(name, judge(name)) for name in chunk]


def all_judged(source: Iterator[Name], jobs: int) -> Iterator[tuple[Name, Verdict]]:
    """Judge in processes; where one dies, its mutants are judged one by one."""
    while True:
        chunks = [list(itertools.islice(source, _CHUNK)) for _ in range(2 * jobs)]
        unknown = list[Name]()
        with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
            for chunk, future in [(chunk, pool.submit(judged, chunk)) for chunk in chunks]:
                try:
                    yield from future.result()
                except concurrent.futures.process.BrokenProcessPool:
                    unknown += chunk
        yield from map(_alone, unknown)


def _alone(name: Name) -> tuple[Name, Verdict]:
    """Judge a mutant of which a process may die; of the original, or of the result."""
    for work, kind in ((runs, "invalid"), (judge, "wrong")):
        with concurrent.futures.ProcessPoolExecutor(1) as pool:
            try:
                found = pool.submit(work, name).result()
            except concurrent.futures.process.BrokenProcessPool:
                return name, Verdict(kind, "the process died")
    assert isinstance(found, Verdict)
    return name, found


def report(found: Iterable[tuple[Name, Verdict]], count: int, out: Path | None) -> int:
    """Print counts by pass of forms; write each wrong mutant. Return how many are wrong."""
    table = collections.defaultdict[str, collections.Counter](collections.Counter)
    start, valid = time.monotonic(), 0
    for name, verdict in found:
        family = next(key for key, (_, forms) in FAMILIES.items() if name.form in forms)
        table[family][verdict.kind] += 1
        valid += verdict.kind != "invalid"
        if verdict.kind in ("wrong", "raised"):
            print(f"{verdict.kind}: {name}: {verdict.detail}", flush=True)
            _write(out, name, verdict)
        if valid >= count:
            break
    print("form".ljust(14), *(kind.rjust(10) for kind in _KINDS))
    total = sum(table.values(), collections.Counter())
    for family, counts in [*sorted(table.items()), ("all", total)]:
        print(family.ljust(14), *(str(counts[kind]).rjust(10) for kind in _KINDS))
    print(f"{valid} mutants in {time.monotonic() - start:.0f} s")
    return total["wrong"]


def _write(out: Path | None, name: Name, verdict: Verdict) -> None:
    made = mutant_of(name)
    if out is None or made is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{verdict.kind}_{text_of(name)[:100]}"
    onnx.save(made[0], path.with_suffix(".onnx"))
    record = {"name": str(name), "pass": repr(made[1]), "detail": verdict.detail}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--form", default="", help="only forms that hold this text")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", help="one mutant, by its name")
    given = parser.parse_args()
    if given.again:
        form, mutation, seed = given.again.split(" / ")
        name = Name(form, mutation, int(seed))
        print(judge(name))
        _write(given.out, name, judge(name))
        return 0
    found = all_judged(names(given.seed, given.form), given.jobs)
    return min(report(found, given.count, given.out), 1)


if __name__ == "__main__":
    sys.exit(main())
