"""scripts/reproduce eden: its page follows from its figures, also while some are missing, and its own trainings run."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import SEEDS, training
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import __main__ as command
from reproduction import common, eden, eden_errors, embeddings, page, running, transformer

TINY = eden.SIZES["tiny"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEPT", tmp_path / "results" / "runs")


@pytest.fixture(scope="module")
def errors() -> list[dict[str, Any]]:
    return eden_errors.measure(eden_errors.Settings((2, 5), 2**14, (0, 1)))


def figures(errors: Any, ratio: float, whitened: float) -> dict[str, Any]:
    """Made up but for the errors: losses by float32's."""
    ratios = {each.key: ratio for each in eden.TRAININGS}
    ratios.update({"none": 1.0, "whitened-1": whitened, "whitened-2": whitened})
    runs = [{"losses": [1.0, 1.0], "accuracy": 0.9}] * SEEDS
    other = [{"losses": [ratio**9, ratio**9], "accuracy": 0.9}] * SEEDS
    embedded = {"untouched": 0.2, "moved": 0.1}
    return {
        "seeds": SEEDS,
        "entropies": {"nothing": 3.0, "one character": 2.5},
        "trainings": {key: training(own) for key, own in ratios.items()},
        "errors": errors,
        "digits": {
            model: {method: runs if method == "none" else other for method in eden.WITH_SGD}
            for model in eden.MODELS
        },
        "embeddings": {
            optimizer: {
                method: [{**embedded, "validation_loss": 1.0 if method == "none" else ratio}] * SEEDS
                for method in eden.WITH_EMBEDDING
            }
            for optimizer in eden.OPTIMIZERS
        },
    }


def holding(found: dict[str, Any]) -> dict[str, bool]:
    return {verdict.statement: verdict.holds for verdict in eden.verdicts(found)}


def test_errors_are_those_of_the_formula(errors: Any) -> None:
    as_predicted, *others = eden_errors.verdicts(errors)
    assert as_predicted.holds, as_predicted.evidence
    assert ["larger for 1 to 10 non-zeros" in verdict.evidence for verdict in others] == [True, False]
    worse = [{**each, "nmse": 1.1 * each["nmse"]} for each in errors]
    assert not eden_errors.verdicts(worse)[0].holds
    more = [{**each, "nmse": 100.0 if each["method"] == "eden-4" else each["nmse"]} for each in errors]
    assert not any(verdict.holds for verdict in eden_errors.verdicts(more))


def test_verdicts_come_out_either_way(errors: Any) -> None:
    good, bad = holding(figures(errors, 1.004, 1.03)), holding(figures(errors, 1.02, 1.03))
    assert good.keys() == bad.keys()
    from_trainings = [key for key in good if "ends within" in key or "trains as well" in key]
    assert len(from_trainings) == 9
    assert all(good[key] for key in from_trainings)
    assert not any(bad[key] for key in from_trainings)


@pytest.mark.parametrize(
    ("plain", "whitened", "holds"),
    [(1.03, 1.009, True), (1.03, 1.019, True), (1.03, 1.025, False), (1.005, 1.005, False)],
)
def test_whitening_has_to_reach_what_plain_gradients_do_not(
    errors: Any, plain: float, whitened: float, holds: bool
) -> None:
    (found,) = (own for key, own in holding(figures(errors, plain, whitened)).items() if "Whitened" in key)
    assert found == holds


def test_close_trainings_have_more_seeds() -> None:
    run = {"losses": [2.0], "validation_loss": 2.0, "seconds": 1.0, "bytes_per_step": 1.0}
    chosen = [each for each in eden.TRAININGS if each.key in ("none", "eden-3", "eden-2")]
    for each, seed in itertools.product(chosen, (*TINY.seeds, *TINY.more_seeds)):
        running.keep(eden._job(TINY, each).kept_as(seed), {**run, "float32_bytes_per_step": 8.0})
    found = eden.study(TINY._replace(only=()))
    counts = {key: len(own["validation_losses"]) for key, own in found["trainings"].items()}
    assert counts == {"none": 3, "eden-3": 3, "eden-2": 2}
    assert "EDEN(bits=3, server_bits=3) ends within 0.5% of the float32 loss" in holding(found)
    assert "| EDEN(bits=3, server_bits=3) | 3 |" in eden.tables(found)


def test_a_verdict_waits_for_all_seeds(errors: Any) -> None:
    found = figures(errors, 1.0, 1.0)
    found["trainings"]["eden-3"] = training(1.0, seeds=1)
    del found["trainings"]["whitened-1"]
    statements = " ".join(holding(found))
    assert "at most 2.1 bits on the reduce-scatter side" in statements
    assert "EDEN(bits=3, server_bits=3) ends within 0.5%" not in statements
    assert "Whitened" not in statements
    shown = eden.tables(found)
    assert "| EDEN(bits=3, server_bits=3) | **1 of 3** |" in shown
    assert "**Not trained yet: EDEN(bits=1, server_bits=1), whitened.**" in shown


def test_the_page_is_made_of_the_figures_alone(errors: Any, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    machine = {"cores": 2, "processor": "a processor", "kernels": "some"}
    found = figures(errors, 1.004, 1.03)
    result = {"claim": "eden", "size": "full", "seconds": 1.0, "machine": machine, "figures": found}
    common.save(result, folder / "eden.json")
    text = page.write(folder)[-1].read_text()
    for verdict in eden.verdicts(json.loads((folder / "eden.json").read_text())["figures"]):
        assert f"**{page.outcome(verdict.holds)}**: {verdict.statement} ({verdict.evidence})" in text
    for plot in eden.draw(found, folder):
        assert f"({plot.file})" in text
        assert (folder / plot.file).stat().st_size < 150_000
    assert page.write(folder)[-1].read_text() == text


def test_without_any_part_the_page_has_what_is_kept() -> None:
    found = common.run_study("eden", "tiny", [])["figures"]
    assert found["trainings"] == {}
    assert eden.verdicts(found) == []
    assert eden.tables(found) == ""
    assert eden.draw(found, running.KEPT) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["eden", "--only", "eden-5"], "--only eden-5: choose from none, eden-4, "),
        (["qsgd", "--only", "none"], "--only: name one claim that has parts: eden"),
        (["--only", "none"], "--only: name one claim that has parts: eden"),
        (["eden", "--again", "--only", "none"], "--again measures all parts of a claim: leave out --only"),
    ],
)
def test_an_unknown_part_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce", *options])
    with pytest.raises(SystemExit):
        command.parse_arguments()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("claim", ["transformer", "machines"])
def test_measuring_a_claim_again_leaves_other_claims_their_runs(
    claim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def study(*arguments: Any) -> None:
        assert [running.kept(name) for name in ("none-seed-0-abc", "bytes-count-1gbit-abc")] == [
            None,
            {"old": 2},
        ]
        raise InterruptedError

    running.keep("none-seed-0-abc", {"old": 1})
    running.keep("bytes-count-1gbit-abc", {"old": 2})
    monkeypatch.setattr(common, "run_study", study)
    monkeypatch.setattr(common.module_of("machines"), "problem", lambda size: None)
    monkeypatch.setattr(sys, "argv", ["reproduce", "--output", str(tmp_path / "results"), "--again", claim])
    with pytest.raises(InterruptedError):
        command.main()
    path = running.KEPT / "none-seed-0-abc.json"
    assert json.loads(path.read_text()) == {"old": 1}, "a later run has nothing to go on with"
    running.keep("none-seed-0-abc", {"new": 1})
    assert running.kept("none-seed-0-abc") == {"new": 1}


@pytest.mark.parametrize(
    ("options", "folder"),
    [([], "docs/results"), (["--size=tiny"], "build/results"), (["--size=tiny", "--output=o"], "o")],
)
def test_a_tiny_run_replaces_no_result_by_default(
    options: list[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce", *options])
    assert command.parse_arguments().output == (Path("o") if folder == "o" else ROOT / folder)


def test_binsgdm_is_taken_from_the_transformers_result(tmp_path: Path) -> None:
    settings = eden.SIZES["full"]._replace(only=())
    assert eden.study(settings)["trainings"] == {}
    own = training(1.1)
    for size, taken in (("tiny", {}), ("full", {"binsgdm": own})):
        result = {"size": size, "figures": {"trainings": {"binsgdm": own}}}
        common.save(result, tmp_path / "results" / "transformer.json")
        assert eden.study(settings)["trainings"] == taken


def test_parts_are_added_to_a_result_that_was_measured_elsewhere(errors: Any, tmp_path: Path) -> None:
    settings = eden.SIZES["full"]._replace(only=())
    before = figures(errors, 1.1, 1.1)
    path = tmp_path / "results" / "eden.json"
    common.save({"size": "full", "figures": before}, path)
    found = eden.study(settings)
    assert found["errors"] == errors
    assert found["trainings"].keys() == before["trainings"].keys()
    each = next(each for each in eden.TRAININGS if each.key == "eden-2")
    run = {"losses": [9.0], "validation_loss": 9.0, "seconds": 1.0, "bytes_per_step": 1.0}
    for seed in settings.seeds:
        assert eden.study(settings)["trainings"]["eden-2"] == before["trainings"]["eden-2"]
        job = eden._job(settings, each)
        running.keep(job.kept_as(seed), {**run, "float32_bytes_per_step": 8.0})
    assert eden.study(settings)["trainings"]["eden-2"]["losses"] == [[9.0]] * 3
    for other in ({"size": "tiny", "figures": before}, None):  # of another size, or none
        path.unlink() if other is None else common.save(other, path)
        assert set(eden.study(settings)["trainings"]) == {"eden-2"}
    common.save({"size": "full", "figures": before}, path)
    assert common.earlier("eden", eden.SIZES["full"]) == {}, "all of it is measured again"


@pytest.mark.extended
def test_simulated_trainings_are_kept_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TINY._replace(only=(eden.DIGITS, eden.EMBEDDINGS))
    first = eden.study(settings)
    assert eden.study(settings._replace(only=())) == first
    for own in first["embeddings"].values():
        assert own["none"][0]["moved"] == own["eden-2" + eden.EXCLUDED][0]["moved"] == 0
        assert own["eden-2"][0]["moved"] > 0
    assert len(eden.verdicts(first)) == 5
    assert "ResNet: mean loss" in eden.tables(first)


def test_words_of_the_vocabulary_are_in_alphabetical_order() -> None:
    words = embeddings.load_words(1024)
    assert words.training.max() == 1023
    assert 0 < (words.training == 0).mean() < 0.5
    assert len(set(words.answers.tolist())) == embeddings.ANSWERS


@pytest.mark.parallel
@pytest.mark.extended
def test_own_trainings_run_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options of its own, the worker trains as the example does."""
    found = eden.study(TINY._replace(seeds=(0,), only=("whitened-2", "powersgd-2", "eden-2")))
    assert set(found["trainings"]) == {"whitened-2", "powersgd-2", "eden-2"}
    plain, whitened, powersgd = (found["trainings"][key] for key in ("eden-2", "whitened-2", "powersgd-2"))
    assert whitened["bytes_per_step"] == plain["bytes_per_step"]
    assert whitened["losses"][0][:2] == plain["losses"][0][:2]
    assert whitened["losses"] != plain["losses"] != powersgd["losses"]
    assert powersgd["bytes_per_step"] < powersgd["float32_bytes_per_step"] / 2
    options = tuple(TINY.options)
    as_the_example = running.Job(
        str(eden.WORKER), (transformer.SCRIPT, *transformer.IMPORTED), "eden-2", options, TINY.workers
    )
    assert running.trainings(as_the_example, (0,))[0]["validation_loss"] == plain["validation_losses"][0]
    monkeypatch.setattr(running, "horovodrun", None)  # what has ended is not repeated
    assert eden.study(TINY._replace(seeds=(0,), only=("whitened-2",)))["trainings"] == found["trainings"]
