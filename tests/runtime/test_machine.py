# SPDX-License-Identifier: MIT
"""What is read of the machine."""

import pytest

from ortplugins.runtime import machine
from ortplugins.runtime.machine import host_cores, usable_cores

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
    monkeypatch.setattr("os.sched_getaffinity", {0: {0, 1}}.get, raising=False)
    groups = {"proc/self/cgroup": "0::/a/b\n3:memory:/m:n\n2:cpu,cpuacct:/c\n"}
    for name, text in {**groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(str(tmp_path)) == cores
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert host_cores(str(tmp_path)) == (1 if CORE.format(0) in files else 2)


@pytest.mark.parametrize(("told", "cores"), [(3, 3), (None, 1)])
def test_cores_where_less_is_known(told, cores, tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: told)
    monkeypatch.setattr("sys.platform", "darwin")
    assert (usable_cores(), host_cores(str(tmp_path))) == (cores, cores)


@pytest.mark.parametrize(
    ("told", "name"), [("flags: fma\nmodel name\t: Fast 9\n", "Fast 9"), ("", "arm")]
)
def test_the_machine(told, name, monkeypatch):
    monkeypatch.setattr(machine, "text_of", lambda *_: told)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "arm")
    found = machine.machine()
    assert (found["processor"], found["memory_bytes"] > 1 << 20) == (name, True)


def test_memory_is_what_linux_says_of_a_process(monkeypatch):
    status = (
        "Name:\tpython 3 kB\nVmHWM:\t    30 kB\nVmRSS:\t 20 kB\nRssAnon:\t 10 kB\nThreads:\t1"
    )
    monkeypatch.setattr(machine, "text_of", lambda *_: status)
    assert machine.process_memory() == (10 << 10, 20 << 10, 30 << 10)
    monkeypatch.setattr(machine, "text_of", lambda *_: "")
    assert machine.process_memory() == (None, None, None)
