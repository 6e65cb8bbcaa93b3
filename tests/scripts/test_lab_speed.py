"""The tables and verdicts that scripts/lab-speed makes of what it has measured."""

from __future__ import annotations

import json
import os
import re
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
GROUPS = {"none": 1.0, "eden-3, 8 MiB": 4.0, "eden-3, 32 MiB": 2.5}
SPEEDS = {
    "gloo": FASTER, "mpi": FASTER, "avx2-gloo": AVX2, "avx2-mpi": AVX2, "ddp": DDP, "backward": BACKWARD,
    "backward-ddp": BACKWARD_DDP, "groups-gloo": GROUPS, "groups-mpi": GROUPS, "variants": {"none": 1.0, "eden-3": 5.0},
    "variants-avx2": {"none": 1.0, "eden-3": 4.0},
}  # fmt: skip
MACHINE = ("machine", "machine-tensorflow", "small-gloo", "small-mpi", "small-ddp")
FIELDS = ("wall_seconds", "cpu_seconds", "hook_cpu_seconds", "finish_cpu_seconds")
SECONDS = {"1gbit": 2.0, "100mbit": 20.0, "none": 0.2}


@pytest.fixture
def measured(tmp_path: Path) -> Any:
    """Return a function that writes made-up files, those of a name with other speeds, and returns their folder."""

    def make(name: str = "", **changed: float) -> Path:
        for each, usual in SPEEDS.items():
            given = changed if each == name else {}
            for rate, seconds in SECONDS.items():
                results = [
                    {"method": method, "wall_seconds": [seconds / times * noise for noise in (1, 1.5, 0.9)]}
                    for method, times in {**usual, **given}.items()
                ]
                (tmp_path / f"{each}-{rate}.json").write_text(json.dumps({"results": results}))
        for each in MACHINE:
            results = [
                {
                    "method": method,
                    "bytes_sent": 4.5e6 / times,
                    **dict.fromkeys(FIELDS, [0.06 / times, 0.06 / times]),
                }
                for method, times in {"none": 1.0, "eden-3": 2.0}.items()
            ]
            (tmp_path / f"{each}.json").write_text(json.dumps({"results": results}))
        ways = {"one call": [1.0, 2.0, 3.0], "gather": [4.0, 4.0, 9.0]}
        (tmp_path / "alltoalls-100mbit.json").write_text(
            json.dumps({"seconds": ways, "sent": 4e6, "rate": 1e6})
        )
        timed = [
            {"kernel": kernel, "size": size, "instruction_set": isa, "target": target, "milliseconds": 2.5,
             "times_memcpy": times}
            for size in ("1M", "25.6M") for isa in ("avx512", "avx2")
            for kernel, times, target in (("memcpy", 1.0, None), ("vote", 0.75, 1.5))
        ]  # fmt: skip
        (tmp_path / "kernels.json").write_text(json.dumps({"results": timed}))
        for part in lab_speed.TABLES:
            (tmp_path / f"{part}.load").write_text("0.25 (a processor)\n")
        return tmp_path

    return make


def missed(folder: Path) -> list[str]:
    return [text for reached, text in lab_speed.verdicts(lab_speed.Results(folder)) if not reached]


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
    folder = measured()
    page = (ROOT / "docs" / "speed.md").read_text()
    written = lab_speed.write(page, folder)
    for row in (
        "| eden-2 | 200 | 10.00 | 200 | 10.00 | 20 | 20 |",
        "| eden-2 | 2,000 | 10.00 | 2,000 | 10.00 |",
        "| ddp | 1,667 | 1.20 |  |  |  |  |",
        "| ddp-powersgd-2 | 8,000 | 2.50 |  |  |",
        "| global-qsgd-8 | 615 | 3.25 | 615 | 3.25 |",
        "| none | 2,000 | 1,667 |",
        "| powersgd-1 |  | 667 |\n| eden-3 | 667 | 645 |",
        "| method | 8 MiB | 32 MiB |\n| --- | ---: | ---: |\n| none, Gloo | 2,000 |  |\n| eden-3, Gloo | 500 | 800 |",
        "| eden-3 | 400 | 500 |",
        "| gather | 4,000 | 3.00 | 1.00 |",
        "| eden-3 | 30 | 30 | 0.50 | 2.2 |",
        "| eden-3, MPI | 30.0 | 30.0 | 30.0 | 0.50 | 30.0 | 0.50 |",
        "| eden-3 | 30 | 0.50 |",
        "| memcpy | 2.50 ms | 2.50 ms | 2.50 ms | 2.50 ms |",
        "| vote | 0.75 (1.5) | 0.75 (1.5) | 0.75 (1.5) | 0.75 (1.5) |",
    ):
        assert f"{row}\n" in written
    marks = sum(map(len, lab_speed.TABLES.values()))
    assert written.count("Load of the machine before the measurements: 0.25 (a processor).") == marks
    assert "no exchange" not in written
    assert lab_speed.write(written, folder) == written


def test_the_page_names_the_aims_that_are_missed(measured: Any) -> None:
    text = lab_speed.aims_list(lab_speed.Results(measured()))
    assert re.fullmatch(r"(\d+) of \1 are reached\.", text)
    text = lab_speed.aims_list(lab_speed.Results(measured("mpi", **{"eden-2": 8.9})))
    assert text.endswith("reached.\n\n- eden-2 with MPI at 100mbit: speed-up 8.90 over none (target: 9)")


def test_what_was_not_measured_stays(measured: Any) -> None:
    folder = measured()
    page = (ROOT / "docs" / "speed.md").read_text()
    for part in lab_speed.TABLES:
        (folder / f"{part}.load").unlink()
    assert lab_speed.write(page, folder) == page


@pytest.mark.parametrize(
    "call", ["measure gloo gloo 1gbit exchange.py --rounds 9", "measure_ddp gloo 1gbit 9 none"]
)
def test_only_a_finished_measurement_replaces_an_earlier_one(call: str, tmp_path: Path) -> None:
    lab = tmp_path / "scripts" / "lab"
    lab.parent.mkdir()
    text = (ROOT / "scripts" / "lab-speed").read_text()
    functions = text[text.index("# save NAME") : text.index("\nhosts()")]
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
