# SPDX-License-Identifier: MIT
"""The core of the suite on aarch64, emulated by qemu: ``make test-arm64``.

pytest collects files called ``test_*.py``, so that this one runs only where it is named.
Debian's qemu-user, its Python for arm64 and the aarch64 wheels are unpacked, once, in
.cache/arm64; nothing is installed, and no rights are needed. Emulation proves that numbers are
right, not that they are fast: no test of this list reads a clock.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checks.environments import CACHE, unavailable

ROOT = Path(__file__).resolve().parents[3]
HOME = CACHE / "arm64"
SYSTEM = HOME / "root"
SITE = SYSTEM / "usr/local/lib/python3.11/dist-packages"
PYTHON = HOME / "python"
QEMU = HOME / "qemu/usr/bin/qemu-aarch64-static"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
DEBIAN = f"deb [signed-by={KEYS}] http://deb.debian.org/debian bookworm main\n"
GLIBC = ("_2_28", "_2_27", "_2_26", "_2_17", "2014")
# What the tests import; pip resolves for aarch64 only what wheels give.
WHEELS = (
    "onnxruntime==1.32.0", "numpy", "onnx", "onnx_ir>=1.1,<2", "onnxscript>=0.7.2", "filelock",
    "ml_dtypes", "platformdirs", "threadpoolctl", "pyyaml", "cyclopts", "rich",
    "safetensors", "pytest", "hypothesis",
)  # fmt: skip
# onnxruntime reads the processor from here, and crashes without it: a Neoverse N1.
FEATURES = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp"
)
PROCESSOR = f"""processor	: {{}}
BogoMIPS	: 50.00
Features	: {FEATURES}
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1

"""
# A child process runs the same interpreter, by the emulator.
RUN = """#!/bin/sh
export PYTHONHOME={system}/usr PYTHONDONTWRITEBYTECODE=1 EMULATED_PYTHON={python}
exec {qemu} -cpu neoverse-n1 -L {system} {system}/usr/bin/python3.11 "$@"
"""
CHILDREN = 'import os, sys; sys.executable = os.environ["EMULATED_PYTHON"]\n'
CORE = {
    "fusion": "rewrite_rules/dq_matmulnbits_fusion",
    "packing": "rewrite_rules/prepacked_weights",
    "convolution": "rewrite_rules/conv_fusion",
    "padding": "rewrite_rules/trim_padding/test_trim_padding.py",
    "cache": "cache/test_artifact_cache.py",
}


def do(*command: str | Path, **env: str) -> None:
    """Run a command; skip the test where it fails, for nothing of the project's is in it."""
    try:
        variables = os.environ | env
        subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        call = shlex.join(map(str, command[:2]))
        unavailable(f"no emulated system: {call}: {lines[-1]}")


def packages_of(architecture: str, *names: str, into: Path) -> None:
    """Unpack Debian's packages, and what they depend on if it is for arm64."""
    apt = HOME / "apt" / architecture
    for folder in ("lists/partial", "archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(DEBIAN)
    (apt / "apt.conf").write_text(
        f'APT::Architecture "{architecture}"; APT::Architectures {{ "{architecture}"; }};\n'
        f'Dir::State "{apt}"; Dir::State::status "{apt}/status"; Dir::Cache "{apt}";\n'
        f'Dir::Etc::sourcelist "{apt}/sources.list"; Dir::Etc::sourceparts "-";\n'
        'APT::Sandbox::User ""; Debug::NoLocking "1";\n'
    )
    call = ("apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", "install")
    do("apt-get", "-qq", "update", APT_CONFIG=str(apt / "apt.conf"))
    do(*call, *names, APT_CONFIG=str(apt / "apt.conf"))
    for package in sorted((apt / "archives").glob("*.deb")):
        do("dpkg", "-x", package, into)
    shutil.rmtree(apt)


@pytest.fixture(scope="session")
def emulated() -> Path:
    """Return a Python for aarch64, made at the first call."""
    if (HOME / "done").exists():
        return PYTHON
    shutil.rmtree(HOME, ignore_errors=True)
    packages_of("amd64", "qemu-user-static", into=HOME / "qemu")
    packages_of("arm64", "python3.11", "libstdc++6", into=SYSTEM)
    platforms = [f"--platform=manylinux{glibc}_aarch64" for glibc in GLIBC]
    only = ("--only-binary=:all:", "--python-version=3.11", "--quiet", f"--target={SITE}")
    do(sys.executable, "-m", "pip", "install", *only, *platforms, *WHEELS)
    (SITE / "emulated.pth").write_text(CHILDREN)
    for name, text in {
        "proc/cpuinfo": "".join(map(PROCESSOR.format, range(2))),
        "sys/devices/system/cpu/possible": "0-1\n",
        "sys/devices/system/cpu/present": "0-1\n",
    }.items():
        (SYSTEM / name).parent.mkdir(parents=True, exist_ok=True)
        (SYSTEM / name).write_text(text)
    PYTHON.write_text(RUN.format(system=SYSTEM, qemu=QEMU, python=PYTHON))
    PYTHON.chmod(0o755)
    (HOME / "done").touch()
    return PYTHON


@pytest.mark.parametrize("part", CORE)
def test_a_part_of_the_suite_on_aarch64(part: str, emulated: Path) -> None:
    tests = ROOT / "tests" / CORE[part]
    done = subprocess.run(
        [emulated, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout[-500:])
    assert done.returncode == 0, done.stdout[-8000:]
