"""examples/terngrad.py trains, in real processes, with a scheme from outside the package."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from parallel.launching import ROOT, environment, horovodrun

SCRIPT = str(ROOT / "examples" / "terngrad.py")


@pytest.mark.parallel
@pytest.mark.extended
def test_trains() -> None:
    done = horovodrun("gloo", 2, [sys.executable, SCRIPT, "--steps", "60"])
    assert done.returncode == 0, done.stdout
    (report,) = re.findall(
        r"TernGrad\(clip=2.5\): test accuracy (\S+)% after 60 steps, (\S+)x less", done.stdout
    )
    assert float(report[0]) > 80
    assert float(report[1]) == pytest.approx(8.8, abs=0.05)  # 3 bits for 2 workers, 10 of which fit a word


@pytest.mark.extended
def test_one_worker_needs_no_launcher() -> None:
    done = alone("--steps", "1", "--no-clip", "--seed", "3")
    assert done.returncode == 0, done.stdout
    assert "TernGrad(clip=None): test accuracy" in done.stdout


def test_wrong_arguments_are_named() -> None:
    done = alone("--clip", "-1")
    assert done.returncode == 2
    assert "terngrad.py: error: clip=-1.0: use a positive number" in done.stdout
    assert "Traceback" not in done.stdout


def alone(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=600,
    )  # fmt: skip
