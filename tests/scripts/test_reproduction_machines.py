"""The study of machines: verdicts, the least speed-up, and the cores that a measurement may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import machines, running, steps


def measured(ratio: float) -> dict[str, Any]:
    """All methods `ratio` times as fast as float32, in both rounds."""
    return {
        "results": {
            method: {"seconds": [1.0, 2.0] if method == "none" else [1.0 / ratio, 2.0 / ratio]}
            for method in machines.METHODS
        }
    }


FIGURES = {
    "cores": 2,
    "machines": {
        name: {machines.SMALL: {"100mbit": measured(ratio)}}
        for name, ratio in (("all", 2.0), ("avx2", 1.5), ("one-core", 0.5))
    },
}


def test_a_method_counts_where_it_gains_least() -> None:
    assert machines.least(FIGURES, machines.SMALL, "100mbit", "eden-3") == pytest.approx(0.5)
    assert [verdict.holds for verdict in machines.verdicts(FIGURES)] == [True, True, False]
    assert "EDEN(bits=3) 0.50" in machines.verdicts(FIGURES)[-1].evidence


def test_tables_and_plot_show_every_machine(tmp_path: Path) -> None:
    text = machines.tables(FIGURES)
    assert "| EDEN(bits=3) | 750 | 2.00 | 1000 | 1.50 | 3000 | 0.50 |" in text
    (plot,) = machines.draw(FIGURES, tmp_path)
    assert (tmp_path / plot.file).read_bytes()[:4] == b"\x89PNG"


def test_processes_of_a_measurement_have_its_cores_alone() -> None:
    before = os.sched_getaffinity(0)
    count = "import os; print(len(os.sched_getaffinity(0)))"
    with steps.on_cores(1):
        assert subprocess.check_output([sys.executable, "-c", count], text=True) == "1\n"
    assert os.sched_getaffinity(0) == before
    with steps.on_cores(None):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parallel
@pytest.mark.extended
def test_steps_are_measured_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := machines.problem("tiny"):
        pytest.skip(reason)
    monkeypatch.setattr(running, "KEPT", tmp_path)
    monkeypatch.setitem(running.LAB, "LAB", "test_machines")
    found = machines.study(machines.SIZES["tiny"])
    assert machines.least(found, machines.SMALL, "1gbit", "eden-3") > 0
    assert "| EDEN(bits=3) |" in machines.tables(found)
