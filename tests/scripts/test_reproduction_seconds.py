"""scripts/reproduce seconds: its page follows from its figures, and its trainings run, here and between hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import __main__ as command
from reproduction import common, page, running, seconds

TINY, FULL = seconds.SIZES["tiny"], seconds.SIZES["full"]
TRAININGS = {each.key: each for each in seconds.TRAININGS}
FLAT = 40
"""Losses of a made-up training: they fall to their end, and stay there for the last quarter."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEPT", tmp_path / "results" / "runs")
    # Tests of another file may have a lab at the same time.
    monkeypatch.setitem(running.LAB, "LAB", "test_seconds")


def training(end: float, step: float) -> dict[str, Any]:
    losses = [end + max(0.0, 0.1 * (3 * FLAT // 4 - place)) for place in range(FLAT)]
    return {
        "losses": losses,
        "seconds": [10 * step * (place + 1) for place in range(FLAT)],
        "validation_loss": end,
        "bytes_per_step": 1e6,
    }


def figures(end: float, step: float, **others: tuple[float, float]) -> dict[str, Any]:
    """Made up: float32 ends at a loss of 2 with steps of 0.1 s, the others as told."""
    own = {key: training(end, step) for key in TRAININGS}
    own["none"] = training(2.0, 0.1)
    own.update({key.replace("_", "-"): training(*told) for key, told in others.items()})
    return {"cores": 2, "workers": 4, "every": 10, "rates": {"100mbit": own, seconds.LOCAL: own}}


def test_a_loss_is_reached_when_the_last_hundred_steps_have_it_on_average() -> None:
    found = figures(2.0, 0.1, eden_3=(2.015, 0.05))
    found["rates"]["100mbit"]["eden-2/4"] = training(2.03, 0.01)
    # From the 30th loss on all are the last one; the mean of ten is within 0.02 after the 39th, with 0.1 among them.
    assert seconds.arrival(found, "100mbit", "none") == seconds.Arrival(390, pytest.approx(39.0))
    assert seconds.arrival(found, "100mbit", "none", 1.0) == seconds.Arrival(400, pytest.approx(40.0))
    assert seconds.arrival(found, "100mbit", "eden-3") == seconds.Arrival(400, pytest.approx(20.0))
    assert seconds.arrival(found, "100mbit", "eden-3", 1.0) is None
    assert seconds.arrival(found, "100mbit", "eden-2/4") is None
    assert seconds.times_as_fast(found, "100mbit", "eden-3") == pytest.approx(1.95)
    assert seconds.network_seconds(found, "100mbit", "none") == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("end", "step", "holds"), [(2.0, 0.05, True), (2.0, 0.15, False), (2.1, 0.01, False)]
)
def test_verdicts_come_out_either_way(end: float, step: float, holds: bool) -> None:
    found = seconds.verdicts(figures(end, step, powersgd_2=(2.0, 0.06)))
    assert [verdict.holds for verdict in found] == [holds] * 4
    assert ("never reached" in found[0].evidence) == (end > 2.02)


def test_the_page_is_made_of_the_figures_alone(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir(parents=True)
    assert seconds.TITLE not in page.write(folder)[0].read_text()
    machine = {"cores": 2, "processor": "a processor", "kernels": "some"}
    found = figures(2.1, 0.01, eden_3=(2.0, 0.02))
    result = {"claim": "seconds", "size": "full", "seconds": 1.0, "machine": machine, "figures": found}
    common.save(result, folder / "seconds.json")
    text = page.write(folder)[-1].read_text()
    for verdict in seconds.verdicts(json.loads((folder / "seconds.json").read_text())["figures"]):
        assert f"**{page.outcome(verdict.holds)}**: {verdict.statement} ({verdict.evidence})" in text
    assert "4 workers share 2 cores of one machine, and their links are emulated" in text
    assert "Of the 100 ms of a step with float32 the links need 80; the rest" in text
    assert (
        "| **EDEN(bits=3, server_bits=3)** | 1.000 | 20.0 | 80.0 | +0.00% | +0.00% | 390 | 8 | 5.00 | 8 |"
        in text
    )
    assert "| PowerSGD, rank 2 | 1.000 | 10.0 | 80.0 | +5.00% | +5.00% | never |  |  | never |" in text
    for rate in found["rates"]:
        assert f"(seconds-{rate}.png)" in text
        assert (folder / f"seconds-{rate}.png").stat().st_size < 150_000


def test_without_float32_there_is_a_table_and_nothing_to_compare(tmp_path: Path) -> None:
    found = figures(2.0, 0.05)
    found["rates"] = {"100mbit": {"eden-3": found["rates"]["100mbit"]["eden-3"]}}
    assert seconds.verdicts(found) == []
    assert "| **EDEN(bits=3, server_bits=3)** | 1.000 | 50.0 | 80.0 |  |" in seconds.tables(found)
    assert seconds.draw(found, tmp_path) == []


def test_a_kept_training_is_not_repeated_and_forgotten_alone() -> None:
    each = TRAININGS["eden-2/4"]
    run = {"losses": [3.0, 2.0] * 10, "times": [0.5 * step for step in range(1, 21)]}
    run.update({"validation_loss": 2.0, "bytes_per_step": 1.0})
    running.keep(seconds.kept_as(FULL, each, "1gbit"), run)
    running.keep("eden-3-seed-0-abc", {})
    found = seconds.study(FULL._replace(only=("eden-2/4@1gbit",)))["rates"]
    assert found["1gbit"]["eden-2/4"]["losses"] == [2.5, 2.5]
    assert found["1gbit"]["eden-2/4"]["seconds"] == [5.0, 10.0]
    running.forget("eden")
    assert seconds.study(FULL._replace(only=()))["rates"] == found
    running.forget("seconds")
    assert seconds.study(FULL._replace(only=()))["rates"] == {}


def test_an_unknown_rate_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce", "--size", "tiny", "seconds", "--only", "none@56kbit"])
    with pytest.raises(SystemExit):
        command.parse_arguments()
    assert "--only none@56kbit: choose from none@100mbit, " in capsys.readouterr().err


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize("rate", [seconds.LOCAL, "1gbit"])
def test_trainings_are_timed_and_logged(rate: str) -> None:
    reason = running.why_no_lab() if rate != seconds.LOCAL else None
    if reason:
        pytest.skip(f"LEFT OUT, because no lab of several hosts can be made here: {reason}")
    chosen = ("eden-3", "powersgd-2")
    found = seconds.study(TINY._replace(only=tuple(f"{key}@{rate}" for key in chosen)))
    for key in chosen:
        own = found["rates"][rate][key]
        assert len(own["losses"]) == len(own["seconds"]) == 4
        assert 0 < own["seconds"][0] < own["seconds"][-1]
        (log,) = running.KEPT.glob(f"seconds-{rate}-{key}-*.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert [line["seconds"] for line in lines] == pytest.approx(own["seconds"], abs=1e-3)
