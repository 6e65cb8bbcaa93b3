"""The tables and verdicts that scripts/lab-speed makes of what it has measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import lab_speed  # noqa: E402

FASTER = {
    "none": 1.0, "no exchange": 50.0, "fp16": 0.5, "global-qsgd-8": 3.5, "global-qsgd-4": 6.0, "qsgd-4": 2.0,
    "nuqsgd-4": 2.0, "eden-3": 8.0, "eden-2": 10.0, "binsgdm": 9.0,
}  # fmt: skip
DDP = {"none": 1.2, "powersgd-1": 3.0, "powersgd-2": 2.5}
BACKWARD = {"none": 1.0, "fp16": 0.5, "eden-3": 3.0}
BACKWARD_DDP = {"none": 1.2, "fp16": 2.0, "powersgd-1": 3.0, "eden-3": 3.1}
AVX2 = {"none": 1.0, "global-qsgd-8": 3.25}
SPEEDS = {
    "gloo": FASTER, "mpi": FASTER, "avx2-gloo": AVX2, "avx2-mpi": AVX2, "ddp": DDP, "backward": BACKWARD,
    "backward-ddp": BACKWARD_DDP,
}  # fmt: skip
SECONDS = {"1gbit": 2.0, "100mbit": 20.0, "none": 0.2}


@pytest.fixture
def measured(tmp_path: Path) -> Any:
    """Return a function that writes made-up files, those of a name with other speeds, and reads them."""

    def make(name: str = "", **changed: float) -> lab_speed.Results:
        for each, usual in SPEEDS.items():
            given = changed if each == name else {}
            for rate, seconds in SECONDS.items():
                results = [
                    {"method": method, "wall_seconds": [seconds / times * noise for noise in (1, 1.5, 0.9)]}
                    for method, times in {**usual, **given}.items()
                ]
                (tmp_path / f"{each}-{rate}.json").write_text(json.dumps({"results": results}))
        (tmp_path / "load").write_text("0.25\n")
        return lab_speed.Results(tmp_path)

    return make


def missed(results: lab_speed.Results) -> list[str]:
    return [text for reached, text in lab_speed.verdicts(results) if not reached]


def test_what_is_fast_enough_reaches_every_aim(measured: Any) -> None:
    assert missed(measured()) == []


def test_what_is_too_slow_is_named(measured: Any) -> None:
    assert missed(measured("mpi", **{"eden-2": 8.9})) == [
        "eden-2 with MPI at 100mbit: speed-up 8.90 over none (target: 9)"
    ]
    assert missed(measured("mpi", **{"global-qsgd-8": 2.9})) == [
        "global-qsgd-8 with MPI at 1gbit: speed-up 2.90 over none (target: 3.3)",
        "global-qsgd-8 with MPI at 1gbit: speed-up 0.97 over ddp-powersgd-1",
    ]
    assert "eden-3 with MPI at 100mbit: speed-up 0.89 over global-qsgd-4" in missed(
        measured("mpi", **{"global-qsgd-4": 9.0})
    )
    assert missed(measured("backward-ddp", **{"eden-3": 2.85})) == [
        "eden-3 under DDP: speed-up 0.95 over eden-3 under Horovod",
        "eden-3 under DDP: speed-up 0.95 over ddp-powersgd-1",
    ]
    assert missed(measured("mpi", **{"qsgd-4": 0.8})) == [
        "qsgd-4 with MPI, no limit: 1.25 of the time of none"
    ]


def test_the_page_gets_the_tables(measured: Any) -> None:
    results = measured()
    page = (ROOT / "docs" / "speed.md").read_text()
    written = lab_speed.write(page, results)
    assert "| eden-2 | 200 | 10.00 | 200 | 10.00 | 20 | 20 |" in written
    assert "| eden-2 | 2,000 | 10.00 | 2,000 | 10.00 |\n" in written
    assert "| ddp | 1,667 | 1.20 |  |  |  |  |\n" in written
    assert "| ddp-powersgd-2 | 8,000 | 2.50 |  |  |\n" in written
    assert "| global-qsgd-8 | 615 | 3.25 | 615 | 3.25 |\n\nLoad of the machine before" in written
    assert written.count("Load of the machine before the measurements: 0.25.") == 4
    assert "| none | 2,000 | 1,667 |\n" in written
    assert "| powersgd-1 |  | 667 |\n| eden-3 | 667 | 645 |\n" in written
    assert "no exchange" not in written[: written.index("## Two workers")]
    assert lab_speed.write(written, results) == written


@pytest.mark.parametrize("call", ["measure gloo gloo 1gbit 9 none", "measure_ddp gloo 1gbit 9 none"])
def test_only_a_finished_measurement_replaces_an_earlier_one(call: str, tmp_path: Path) -> None:
    lab = tmp_path / "scripts" / "lab"
    lab.parent.mkdir()
    text = (ROOT / "scripts" / "lab-speed").read_text()
    functions = text[text.index("# measure NAME") : text.index("\nscripts/setup")]
    script = f"set -euo pipefail\nROOT=$PWD RESULTS=. HOSTS=host1:1 PY=python\n{functions}\n{call}"
    lab.write_text(
        '#!/bin/bash\n[ "$1" != rate ] || exit 0\n'
        'while [ "$1" != --json ]; do shift; done\necho "$WRITTEN" > "$2"\nexit "$STATUS"\n'
    )
    lab.chmod(0o755)
    for written, status in (("whole", 0), ("a part", 1)):
        done = subprocess.run(
            [str(shutil.which("bash")), "-c", script], cwd=tmp_path, timeout=60,
            env={**os.environ, "WRITTEN": written, "STATUS": str(status)},
        )  # fmt: skip
        assert done.returncode == status
        assert (tmp_path / "gloo-1gbit.json").read_text() == "whole\n"
