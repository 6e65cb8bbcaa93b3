"""scripts/test-aarch64: says what is missing, and compares the kernels with numpy's on aarch64."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "test-aarch64"
COMPARISONS = [f"tests/kernels/test_{name}.py" for name in ("native", "rotated_sums", "keys")]
COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64", "qemu-aarch64-static")


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ([], "apt-get install g++-aarch64-linux-gnu qemu-user\n"),
        ([COMPILER], "apt-get install qemu-user\n"),
        ([EMULATORS[0]], "apt-get install g++-aarch64-linux-gnu\n"),
        ([EMULATORS[1]], "apt-get install g++-aarch64-linux-gnu\n"),
        ([COMPILER, EMULATORS[1]], "there is no apt-get"),
        ([COMPILER, EMULATORS[0], "apt-get"], "run scripts/setup first\n"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_what_is_missing_is_named(tmp_path: Path, there: Sequence[str], said: str) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("dirname", "id"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    for tool in there:
        (tools / tool).write_text("#!/bin/sh\nexit 1\n")
        (tools / tool).chmod(0o755)
    done = subprocess.run(
        [str(shutil.which("bash")), SCRIPT], capture_output=True, text=True, timeout=60,
        env={"PATH": str(tools), "VENV": str(tmp_path / "venv")},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.extended
@pytest.mark.timeout(1800)  # minutes of emulation
def test_the_kernels_have_the_same_bits_on_aarch64() -> None:
    if not shutil.which(COMPILER) or not any(map(shutil.which, EMULATORS)) or not shutil.which("apt-get"):
        pytest.skip("it takes Debian with g++-aarch64-linux-gnu and qemu-user")
    done = subprocess.run(
        [SCRIPT, *COMPARISONS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1700
    )
    unavailable = re.search(r"could not get .*", done.stdout)
    if unavailable:
        pytest.skip(unavailable[0])
    assert done.returncode == 0, done.stdout[-5000:]
    assert "aarch64, native kernels with baseline (this processor has baseline)\n" in done.stdout
    passed = re.search(r"(\d+) passed.* in .*\s*\Z", done.stdout)
    assert passed, done.stdout[-1000:]
    assert int(passed[1]) > 200
