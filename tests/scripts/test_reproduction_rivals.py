"""scripts/reproduce rivals: its rules are those of the papers, and its page follows from its figures."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import SEEDS, training
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import common, rivals, running

TINY = rivals.SIZES["tiny"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEPT", tmp_path / "results" / "runs")


def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, as a module; its neighbours are imported as they are where it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "reproduction"))
    return importlib.import_module("rivals_worker")


def figures(ratio: float, **others: float) -> dict[str, Any]:
    ratios = {each.key: ratio for each in rivals.TRAININGS} | {"none": 1.0} | others
    return {"seeds": SEEDS, "tuned": {}, "trainings": {key: training(own) for key, own in ratios.items()}}


@pytest.mark.parametrize(("ratio", "holds"), [(1.005, True), (1.02, False)])
def test_verdicts_come_out_either_way(ratio: float, holds: bool) -> None:
    adam, eden = rivals.verdicts(figures(ratio, **{"eden-3": 1.01}))
    assert adam.holds is holds
    assert eden.holds is not holds


def test_a_verdict_waits_for_its_trainings() -> None:
    found = figures(1.0)
    del found["trainings"]["onebit-adam"]
    (verdict,) = rivals.verdicts(found)
    assert "1-bit Adam" not in verdict.statement
    assert "**Not trained yet: 1-bit Adam.**" in rivals.tables(found)
    assert rivals.verdicts({**found, "trainings": {}}) == []


def test_the_plot_has_what_there_is(tmp_path: Path) -> None:
    (plot,) = rivals.draw(figures(1.01), tmp_path)
    assert (tmp_path / plot.file).read_bytes()[:4] == b"\x89PNG"
    assert rivals.draw({**figures(1.01), "trainings": {}}, tmp_path) == []


def test_a_rate_is_chosen_when_all_have_been_tried(tmp_path: Path) -> None:
    for number, rate in enumerate(rivals.RATES):
        assert rivals.SIGNS.key not in rivals.study(TINY._replace(only=()))["trainings"]
        job = rivals._job(TINY, rivals.SIGNS, rate)
        running.keep(job.kept_as(rivals.TUNING_SEED), {"validation_loss": 3.0 - number})
    best = rivals._job(TINY, rivals.SIGNS, rivals.RATES[-1])
    run = {"losses": [3.0], "validation_loss": 2.0, "seconds": 1.0}
    running.keep(best.kept_as(0), {**run, "bytes_per_step": 1.0, "float32_bytes_per_step": 8.0})
    found = rivals.study(TINY._replace(only=()))
    assert found["trainings"][rivals.SIGNS.key]["validation_losses"] == [2.0]
    assert f"{rivals.RATES[0]:g}: 3.0000" in rivals.tables(found)


def test_what_is_left_out_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal vectors of one worker, all that was ever given is what was answered and what is still left out."""
    hvd = pytest.importorskip("horovod.torch")
    torch = pytest.importorskip("torch")
    rivals_worker = worker(monkeypatch)
    hvd.init()
    for norm in (1, 2):
        average = rivals_worker.SignAverage(norm)
        vectors = [torch.from_numpy(np.linspace(-1, 2, 37)), torch.from_numpy(np.linspace(-9, 1, 5))]
        answers = [average(vectors) for _ in range(5)]
        left = zip(average._left_out, average._left_out_by_servers)
        for given, answered, (by_worker, by_server) in zip(vectors, zip(*answers), left):
            torch.testing.assert_close(sum(answered) + by_worker + by_server, 5 * given)
            scale = given.abs().mean() if norm == 1 else given.square().mean().sqrt()
            torch.testing.assert_close(answered[0], torch.where(given < 0, -scale, scale))


def test_bytes_are_those_of_bits_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod.torch")
    bytes_per_step = worker(monkeypatch).bytes_per_step
    assert bytes_per_step([800, 7], 4, 10, 0) == 2 * 0.75 * (100 + 1) + 2 * 4 * 2 * 3
    assert bytes_per_step([800], 4, 10, 10) == 1.5 * 3200
    assert math.isclose(bytes_per_step([800], 4, 10, 5), (1.5 * 3200 + 150 + 24) / 2)


@pytest.mark.parallel
@pytest.mark.extended
def test_trainings_run_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "RATES", (0.01,))
    settings = TINY._replace(seeds=(0,), only=("rate 0.01", "onebit-adam", "ef-signsgd"))
    found = rivals.study(settings)["trainings"]
    assert set(found) == {"onebit-adam", "ef-signsgd"}
    for own in found.values():
        assert len(own["losses"][0]) == 4
        assert np.isfinite(own["losses"]).all()
        assert own["bytes_per_step"] < own["float32_bytes_per_step"]
    monkeypatch.setattr(running, "horovodrun", None)  # what has ended is not repeated
    assert rivals.study(settings._replace(only=()))["trainings"] == found


def test_trainings_of_another_size_are_not_shown(tmp_path: Path) -> None:
    settings, own = rivals.SIZES["full"]._replace(only=()), training(1.1)
    for size, taken in (("tiny", {}), ("full", {"none": own, "eden-3": own})):
        for claim, key in (("transformer", "none"), ("eden", "eden-3")):
            result = {"size": size, "figures": {"trainings": {key: own}}}
            common.save(result, tmp_path / "results" / f"{claim}.json")
        assert rivals.study(settings)["trainings"] == taken


def test_the_claim_is_on_the_list() -> None:
    assert "rivals" in common.ON_DEMAND
