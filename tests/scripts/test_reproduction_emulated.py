"""scripts/reproduce emulated, by-workers: what they say follows from their figures, and what they measure runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import by_workers, common, emulated, page, running

CASES = {case.ratio: case for case in emulated.SIZES["full"].cases if case.part == "bert-base"}
NESTED = next(case for case in emulated.SIZES["full"].cases if case.per_host > 1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEPT", tmp_path / "results" / "runs")
    # Tests of another file may have a lab at the same time.
    monkeypatch.setitem(running.LAB, "LAB", "test_emulated")


def measured(case: emulated.Case, times: float, nested: float = 1.0) -> dict[str, Any]:
    """Made up: float32 takes its transfer and computing, BinSGDM so many times less."""
    whole = case.computing + case.transfer
    walls = dict.fromkeys(case.methods, [whole, whole])
    walls["binsgdm"] = [whole / times] * 2
    if case.per_host > 1:
        walls["binsgdm hierarchical"] = [whole / nested] * 2
    forward = case.computing * (1 - emulated.BACKWARD)
    steps = emulated.steps(case, {method: [wall - forward for wall in own] for method, own in walls.items()})
    return {**case._asdict(), "steps": steps}


def test_computing_is_the_ratio_th_part_of_float32s_transfer() -> None:
    case = CASES[6.26]
    assert case.transfer == pytest.approx(2 * 3 / 4 * 4 * 109_482_240 / 125e6)
    assert case.computing == pytest.approx(case.transfer / 6.26)
    found = measured(case, 3.0)
    assert emulated.times_as_fast(found, "binsgdm") == pytest.approx(3.0, rel=1e-3)
    assert emulated.limit(found) == pytest.approx(7.26, rel=1e-3)


@pytest.mark.parametrize("winner", sorted({m for h in emulated.HEADLINES for m in h.methods}))
def test_any_method_can_be_the_fastest(winner: str) -> None:
    cases = [case for case in emulated.SIZES["full"].cases if winner in case.methods and case.per_host == 1]
    found = [measured(case, 1.0) for case in cases]
    for each in found:
        each["steps"][winner] = [seconds / 9 for seconds in each["steps"][winner]]
    verdicts = emulated.verdicts({"cases": found})
    assert verdicts
    for verdict in verdicts:
        assert emulated.title(winner) in verdict.evidence


@pytest.mark.parametrize(("times", "holds"), [(6.5, True), (6.0, False)])
def test_the_largest_ratio_decides(times: float, holds: bool) -> None:
    cases = [measured(CASES[5.26], 2.0), measured(CASES[11.5], times), measured(CASES[6.26], 2.0)]
    (found,) = emulated.verdicts({"cases": cases})
    assert found.holds is holds
    assert "if the float32 transfer takes 11.5× the compute time" in found.statement
    assert "our assumption" in found.evidence
    assert (
        f"speed-up 2.00 with BinSGDM() at 5.26, speed-up 2.00 with BinSGDM() at 6.26, speed-up {times:.2f} with"
        in found.evidence
    )


@pytest.mark.parametrize(("nested", "holds"), [(3.0, True), (1.5, False)])
def test_hierarchical_times_are_compared_with_flat_ones(nested: float, holds: bool) -> None:
    (found,) = emulated.verdicts({"cases": [measured(NESTED, 2.0, nested)]})
    assert found.holds is holds
    assert found.statement.startswith("Between 2 hosts of 2 workers, at 1gbit, ")


def test_the_page_says_that_it_is_emulated(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir(parents=True)
    cases = [measured(case, 2.0) for case in CASES.values()] + [measured(NESTED, 2.0, 3.0)]
    machine = {"cores": 2, "processor": "a processor", "kernels": "some"}
    result = {"size": "full", "seconds": 1.0, "machine": machine, "figures": {"cases": cases}}
    common.save(result, folder / "emulated.json")
    text = page.write(folder)[-1].read_text()
    assert "### BERT-Base, 4 hosts\n\n| emulated steps, ms (speed-up over float32) |" in text
    assert "| BinSGDM(), hierarchical |" in text
    assert "| 2 hosts, 1gbit: " in text
    assert "(emulated-speed.png)" in text


def test_a_kept_case_is_not_measured_again_and_forgotten_alone() -> None:
    case = CASES[6.26]
    running.keep(emulated.kept_as(case), {"none": [1.0], "binsgdm": [0.5]})
    running.keep("by-workers-2-abc", {})
    running.keep("eden-3-seed-0-abc", {})
    settings = emulated.Settings((case,), ())
    assert emulated.study(settings)["cases"][0]["steps"]["none"] == [
        pytest.approx(1 + case.computing / 3, abs=1e-5)
    ]
    running.forget("emulated")
    assert emulated.study(settings)["cases"] == []
    assert running.kept("by-workers-2-abc") == {} == running.kept("eden-3-seed-0-abc")
    running.forget("eden")
    assert running.kept("by-workers-2-abc") == {}


def clusters(*saved: float, predicted: float = 1.0) -> dict[str, Any]:
    """Made up: QSGD takes a second per host, Global-QSGD so many times less, and the model is off by a factor."""
    found: dict[str, Any] = {"rate": "100mbit", "cores": 2, "clusters": {}, "predicted": {}}
    for hosts, times in zip(by_workers.PARTS, saved):
        seconds = dict.fromkeys(by_workers.METHODS, [1.0 * int(hosts)] * 3)
        seconds[by_workers.GLOBAL] = [int(hosts) / times] * 3
        found["clusters"][hosts] = {"seconds": seconds, "bytes": dict.fromkeys(by_workers.METHODS, 1e6)}
        found["predicted"][hosts] = {method: predicted * own[0] for method, own in seconds.items()}
    return found


def test_an_advantage_has_to_grow_at_every_step() -> None:
    grows, faster, predicted = by_workers.verdicts(clusters(1.5, 2.0, 3.0, 4.0))
    assert grows.holds
    assert faster.holds
    assert predicted.holds
    grows, faster, predicted = by_workers.verdicts(clusters(1.5, 2.0, 1.9, 0.5, predicted=1.3))
    assert not grows.holds
    assert not faster.holds
    assert not predicted.holds
    assert by_workers.verdicts(clusters(1.5)) == []


def test_a_table_has_what_is_predicted_and_what_bytes_need(tmp_path: Path) -> None:
    found = clusters(1.5, 2.0, 3.0, 4.0)
    del found["clusters"]["16"]["seconds"]["eden-3"]
    text = by_workers.tables(found)
    assert "| GlobalQSGD(bits=8) | 1,333 (1,333) | 80 | 2,000 (2,000) | 80 |" in text
    assert "| impossible |  |" in text
    (plot,) = by_workers.draw(found, tmp_path)
    assert (tmp_path / plot.file).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parallel
@pytest.mark.extended
def test_exchanges_are_measured_and_the_model_calibrated() -> None:
    settings = emulated.SIZES["tiny"]
    found = emulated.study(settings)
    for each in found["cases"]:
        assert set(each["steps"]) == {emulated.NOTHING, *each["methods"]}
        assert all(seconds > 0 for own in each["steps"].values() for seconds in own)
    assert emulated.study(settings._replace(only=())) == found
    sizes = by_workers.SIZES["tiny"]
    measured = by_workers.study(sizes)
    assert list(measured["clusters"]) == ["2", "3"]
    for hosts, own in measured["clusters"].items():
        assert set(own["seconds"]) == set(by_workers.METHODS)
        assert set(measured["predicted"][hosts]) == set(by_workers.METHODS)
    assert "| GlobalQSGD(bits=8) |" in by_workers.tables(measured)
