"""scripts/reproduce binsgdm-tuning: what is chosen and said follows from the losses, and its rule is BinSGDM's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import SEEDS, training
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import binsgdm_tuning as tuning
from reproduction import common, page, running

TINY = tuning.SIZES["tiny"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEPT", tmp_path / "results" / "runs")


def tuned(best: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Losses that are least at a pair of beta and rate."""
    return {
        f"{beta:g}": {
            f"{rate:g}": 2.0 + abs(beta - best[0]) + 9 * abs(rate - best[1]) for rate in tuning.RATES
        }
        for beta in tuning.BETAS
    }


def figures(**ratios: float) -> dict[str, Any]:
    """Losses relative to Adam's of as many steps; 1.05 where nothing is said."""
    named = {key.replace(" ", "_").replace(",", "").replace("'", ""): key for key in tuning.COMPARED}
    told = {named[name]: ratio for name, ratio in ratios.items()}
    found = {each.key: training(1.0) for each in tuning.TRAININGS}
    found.update({key: training(told.get(key, 1.05)) for key in tuning.COMPARED})
    return {"seeds": SEEDS, "tuned": tuned((0.8, 0.005)), "trainings": found}


def test_the_best_pair_is_known_when_all_have_been_tried() -> None:
    losses = tuned((0.85, 0.003))
    assert tuning.best_pair(losses) == (0.85, 0.003)
    assert tuning.best_of(losses, 0.6) == (0.6, 0.003)
    del losses["0.6"]["0.008"]
    assert tuning.best_of(losses, 0.6) is None
    assert tuning.best_pair(losses) is None


def test_what_is_tuned_is_trained_with_the_best_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[running.Job, tuple[int, ...]]] = []
    monkeypatch.setattr(running, "trainings", lambda job, seeds: asked.append((job, tuple(seeds))))
    first = tuning.study(TINY._replace(only=("tune beta 0.9", "tuned", "beta 0.9")))
    assert [seeds for _, seeds in asked] == [(tuning.TUNING_SEED,)] * len(tuning.RATES)
    assert first == {"seeds": 1, "tuned": {}, "trainings": {}}
    losses = tuned((0.7, 0.005))
    for beta in tuning.BETAS:
        for rate in tuning.RATES:
            job = tuning._job(TINY, tuning._tuned("", ""), tuning.Pair(beta, rate))
            loss = losses[f"{beta:g}"][f"{rate:g}"]
            running.keep(job.kept_as(tuning.TUNING_SEED), {"validation_loss": loss})
    asked.clear()
    only = ("tuned", "server bits", "no bits", "beta 0.95")
    assert tuning.study(TINY._replace(only=only))["tuned"] == losses
    options = [job.options for job, _ in asked]
    assert all("--lr=0.005" in each for each in options)
    assert [next(o for o in each if o.startswith("--beta")) for each in options] == [
        "--beta=0.95", "--beta=0.7", "--beta=0.7", "--beta=0.7",
    ]  # fmt: skip
    assert [job.method for job, _ in asked] == ["binsgdm", "binsgdm", "binsgdm", "none"]
    assert ["--server-bits=3" in each for each in options] == [False, False, True, False]
    assert {seeds for _, seeds in asked} == {TINY.seeds}


def test_verdicts_come_out_either_way() -> None:
    good = tuning.verdicts(
        figures(tuned=1.009, tuned_more_steps=1.005, tuned_larger_batches=1.001, workers_bits_alone=1.002)
    )
    assert [verdict.holds for verdict in good] == [True] * 5
    bad = tuning.verdicts(
        figures(tuned=1.02, tuned_more_steps=1.03, tuned_larger_batches=1.04, workers_bits_alone=1.019)
    )
    assert [verdict.holds for verdict in bad] == [False] * 5
    assert {verdict.statement for verdict in bad} == {verdict.statement for verdict in good}


def test_a_verdict_waits_for_adam_too(tmp_path: Path) -> None:
    found = figures()
    del found["trainings"][tuning.ADAM_MORE]
    found["trainings"][tuning.ADAM_LARGE] = training(1.0, seeds=1)
    assert [verdict.statement[:19] for verdict in tuning.verdicts(found)] == [
        "At its best setting", "Without the roundin",
    ]  # fmt: skip
    assert "**Not trained yet: Adam, twice the steps.**" in tuning.tables(found)
    assert tuning.draw({**found, "trainings": {}}, tmp_path) == []


def test_the_page_has_the_tuning_and_each_training(tmp_path: Path) -> None:
    folder, found = tmp_path / "results", figures()
    found["trainings"]["beta 0.8"] = training(1.07)
    machine = {"cores": 2, "processor": "a processor", "kernels": "some"}
    result = {"size": "full", "seconds": 1.0, "machine": machine, "figures": found}
    common.save(result, folder / "binsgdm-tuning.json")
    text = page.write(folder)[-1].read_text()
    assert "Best: beta 0.8 with rate 0.005." in text
    assert "| BinSGDM(), batches 8× as large | 2 | 3 |" in text
    assert "| BinSGDM(server_bits=3) | 2 | 3 |" in text
    assert "(+6.97%" in text
    assert "(binsgdm-tuning-loss.png)" in text


def test_the_rule_is_momentum_by_magnitude_and_its_bits_have_it_as_their_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One worker's, after two steps; of 4,000 equal elements' bits the mean is off by 0.08, 5 deviations, once in
    1,700,000 times."""
    hvd = pytest.importorskip("horovod.torch")
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "reproduction"))
    rule = importlib.import_module("binsgdm_worker").Rule
    hvd.init()
    for bits in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(4001))
        optimizer = rule([parameter], 1.0, 0.5, bits, 0)
        moved = []
        for gradient in (1.0, -0.5):
            parameter.grad = torch.full((4001,), gradient)
            parameter.grad[-1] = 0
            before = parameter.detach().clone()
            optimizer.step()
            moved.append((before - parameter).detach().numpy())
        # m = .5 g1 = .5, then .25 + .5 (-.5) = 0; b = .5, then .5.
        assert np.isclose(moved[0][:-1].mean(), 1.0)
        assert abs(moved[1][:-1].mean()) < 0.08
        assert set(np.unique(moved[1])) == ({-1.0, 1.0} if bits else {0.0})


@pytest.mark.parallel
@pytest.mark.extended
def test_trainings_run_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BETAS", (0.8,))
    monkeypatch.setattr(tuning, "RATES", (0.005,))
    settings = TINY._replace(
        only=("tune beta 0.8", "beta 0.8", "none", "tuned", "server bits", "workers' bits alone", "no bits")
    )
    found = tuning.study(settings)
    assert set(found["trainings"]) == {*settings.only} - {"tune beta 0.8"}
    losses = {key: own["losses"][0] for key, own in found["trainings"].items()}
    assert losses["beta 0.8"] == losses["tuned"]
    assert len({tuple(own) for own in losses.values()}) == 5
    monkeypatch.setattr(running, "horovodrun", None)  # what has ended is not repeated
    assert tuning.study(settings) == found
