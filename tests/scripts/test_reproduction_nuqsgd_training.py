"""scripts/reproduce nuqsgd-training: its page follows from its figures, and its trainings run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import SEEDS, training
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import common, nuqsgd_training, running

TINY = nuqsgd_training.SIZES["tiny"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEPT", tmp_path / "results" / "runs")


def figures(**ratios: float) -> dict[str, Any]:
    every = dict.fromkeys(nuqsgd_training.PARTS, 1.0) | ratios
    return {"seeds": SEEDS, "trainings": {key: training(ratio) for key, ratio in every.items()}}


def outcomes(found: dict[str, Any]) -> list[bool]:
    """Near QSGDinf and below QSGD, with buckets of 1,024, and of 8,192; near the max norm."""
    return [verdict.holds for verdict in nuqsgd_training.verdicts(found)]


@pytest.mark.parametrize(
    ("nuqsgd", "holds"), [(1.0, [True, True]), (1.015, [False, True]), (1.03, [False, False])]
)
def test_verdicts_come_out_either_way(nuqsgd: float, holds: list[bool]) -> None:
    small, large = {"nuqsgd-4": nuqsgd, "qsgd-4": 1.02}, {"nuqsgd-4/8192": nuqsgd, "qsgd-4/8192": 1.02}
    others = [True, False]  # at equal losses
    assert outcomes(figures(**small)) == [*holds, *others, holds[0]]
    assert outcomes(figures(**large)) == [*others, *holds, True]


def test_a_verdict_waits_for_its_trainings() -> None:
    found = figures()
    del found["trainings"]["qsgd-4"], found["trainings"][nuqsgd_training.MAX.key]
    found["trainings"]["qsgdinf-4/8192"] = training(1.0, SEEDS - 1)
    statements = [verdict.statement for verdict in nuqsgd_training.verdicts(found)]
    assert len(statements) == 2
    assert "1,024" in statements[0]
    assert "QSGDinf" in statements[0]
    assert "8,192" in statements[1]
    assert "than QSGD" in statements[1]
    titles = f"QSGD(bits=4, norm='l2', bucket_size=1024), {nuqsgd_training.MAX.title}"
    assert f"**Not trained yet: {titles}.**" in nuqsgd_training.tables(found)
    assert nuqsgd_training.verdicts({**found, "trainings": {}}) == []


def test_the_plot_has_what_there_is(tmp_path: Path) -> None:
    (plot,) = nuqsgd_training.draw(figures(), tmp_path)
    assert (tmp_path / plot.file).read_bytes()[:4] == b"\x89PNG"
    assert nuqsgd_training.draw({**figures(), "trainings": {}}, tmp_path) == []


def test_the_claim_is_on_the_list() -> None:
    assert "nuqsgd-training" in common.ON_DEMAND


@pytest.mark.parallel
@pytest.mark.extended
def test_trainings_run_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("none", "nuqsgd-4", "nuqsgd-4/8192")
    found = nuqsgd_training.study(TINY._replace(only=chosen))["trainings"]
    assert tuple(found) == chosen
    for own in found.values():
        assert len(own["losses"][0]) == 4
        assert np.isfinite(own["losses"]).all()
    larger, smaller = (found[key]["bytes_per_step"] for key in ("nuqsgd-4/8192", "nuqsgd-4"))
    assert larger < smaller  # fewer scales
    monkeypatch.setattr(running, "horovodrun", None)  # what has ended is not repeated
    assert nuqsgd_training.study(TINY._replace(only=()))["trainings"] == found
