"""What each tier runs, by the tables alone: nothing is left out that is in a table, and no pair of what matters."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import timings

PARALLEL = Path(__file__).with_name("parallel")
sys.path.append(str(PARALLEL))

import plan  # noqa: E402
import scenario_table  # noqa: E402
from covering import Launch, cover, each_feature_once  # noqa: E402
from plan import BREADTHS, DEFAULT, Plan, flat, hierarchical, on_a_gpu, with_settings  # noqa: E402
from scenario_table import METHODS, ON_DEVICES, TABLES, Part, Table, names, problems, split  # noqa: E402

Trial = tuple[str, str, str, int]
"""A feature, a method, a controller and a number of workers that were tried together."""


def trials(chosen: Plan, module: str) -> Iterator[Trial]:
    for run, scenarios in chosen.items():
        if run.module == module:
            for name in scenarios:
                yield (*split(name), run.controller, run.workers)


def uncovered(chosen: Plan, module: str) -> set[tuple]:
    """The pairs that scripts/test promises and a plan does not have."""
    table, tried = TABLES[module], set(trials(chosen, module))
    wanted: set[tuple] = set(DEFAULT[module])
    for feature, method in map(split, names(module, "extra")):
        wanted |= {(feature, place) for place in ("gloo", "mpi", 2)}
        if method:
            wanted |= {(method, place) for place in ("gloo", "mpi", 2, 3)}
        if feature not in (*table.slow, *table.in_pairs):
            wanted.add((feature, 3))
        if method not in table.sampled:
            wanted.add((feature, method))
    for trial in tried:
        wanted.difference_update(itertools.permutations(trial, 2))
    return wanted


@pytest.mark.parametrize("module", TABLES)
def test_every_scenario_function_is_in_the_table(module: str) -> None:
    assert list(problems(module, PARALLEL)) == []


def test_a_function_in_no_list_is_named(tmp_path: Path) -> None:
    source = (PARALLEL / "torch_other_release_scenarios.py").read_text()
    (tmp_path / "torch_other_release_scenarios.py").write_text(
        f"{source}\ndef a_new_one(make): ...\n\ndef with_options(make, size=3): ...\n\ndef helper(make, *, n): ...\n"
    )
    found = " ".join(problems("torch_other_release_scenarios", tmp_path))
    assert "a_new_one is in no list" in found
    assert "with_options is in no list" in found
    assert "helper" not in found


def test_a_table_that_repeats_itself_or_has_an_unknown_core_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "torch_other_release_scenarios"
    part = Part(METHODS, ["asks_for_names", "is_content_with_names"])
    monkeypatch.setitem(TABLES, module, Table([part, part], core=["misspelt"]))
    found = " ".join(problems(module, PARALLEL))
    assert "no feature 'misspelt'" in found
    assert "asks_for_names-qsgd more than once" in found


@pytest.mark.parametrize("module", BREADTHS)
def test_the_default_tier_has_every_pair(module: str) -> None:
    assert not uncovered(flat("default"), module)


@pytest.mark.parametrize("module", BREADTHS)
def test_a_feature_that_no_launch_has_would_be_noticed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = flat("default")
    parts = [*TABLES[module].parts, Part(METHODS, ["something_new"])]
    monkeypatch.setitem(TABLES, module, TABLES[module]._replace(parts=parts))
    missing = uncovered(before, module)
    assert {("something_new", method) for method in METHODS} < missing
    assert {("something_new", "gloo"), ("something_new", "mpi")} < missing
    assert not uncovered(flat("default"), module)


def test_every_run_is_needed() -> None:
    usual = flat("default")
    for run in usual:
        assert uncovered({**usual, run: []}, run.module), run


@pytest.mark.parametrize("module", BREADTHS)
def test_all_has_every_scenario_with_each_controller_and_number_of_workers(module: str) -> None:
    tried, table = set(trials(flat("all"), module)), TABLES[module]
    for part in table.parts:
        for feature, method in map(split, part.names()):
            places = {
                (controller, workers) for f, m, controller, workers in tried if (f, m) == (feature, method)
            }
            once = part.extra or feature in table.slow
            least = {("gloo", 2), ("mpi", 3)} - ({("mpi", 3)} if feature in table.slow else set())
            assert places >= least or (once and places), (feature, method, places)
            if feature in table.core and not part.extra:
                assert len(places) == 4, (feature, method, places)


def test_all_has_what_the_default_tier_has_and_thorough_has_all_with_all() -> None:
    for kind in (flat, hierarchical, with_settings, gpu, one_gpu):
        usual, every, thorough = kind("default"), kind("all"), kind("thorough")
        for run, scenarios in usual.items():
            assert set(scenarios) <= set(every[run]), run
        for run, scenarios in every.items():
            assert set(scenarios) <= set(thorough[run]), run
    assert all(scenarios == names(run.module, "extra") for run, scenarios in flat("thorough").items())


def gpu(tier: str) -> Plan:
    return on_a_gpu(tier, 2, {})


def one_gpu(tier: str) -> Plan:
    return on_a_gpu(tier, 1, {})


def test_on_one_gpu_the_default_tier_has_each_feature_direct_and_staged() -> None:
    every = {split(name)[0] for name in names("torch_gpu_scenarios", "full")}
    ran = {(run.label, run.workers): names for run, names in one_gpu("default").items()}
    assert ran.keys() == {("direct", 1), ("staged", 2)}
    for scenarios in ran.values():
        assert {split(name)[0] for name in scenarios} == every


@pytest.mark.parametrize("tier", ["default", "all"])
def test_hierarchical_exchanges_and_those_on_a_gpu_have_every_feature_and_method(tier: str) -> None:
    for kind, module in (
        (hierarchical, "torch_hierarchical_scenarios"),
        (hierarchical, "tf_hierarchical_scenarios"),
        (gpu, "torch_gpu_scenarios"),
    ):
        ran = {name for run, scenarios in kind(tier).items() if run.module == module for name in scenarios}
        every = names(module, "extra")
        assert {split(name)[0] for name in ran} == {split(name)[0] for name in every}, module
        methods = METHODS if kind is hierarchical else ON_DEVICES
        assert {split(name)[1] for name in ran} >= set(methods), module
        if tier == "all" and module != "tf_hierarchical_scenarios":
            assert ran >= set(names(module, "full")), module


def test_quick_is_one_launch_with_each_feature() -> None:
    ((run, scenarios),) = flat("quick").items()
    assert (run.module, run.workers) == ("torch_scenarios", plan.FEWEST)
    features = [split(name)[0] for name in scenarios]
    assert len(features) == len(set(features))
    assert set(features) == {split(name)[0] for name in names(run.module, "full")}


def test_covering_prefers_cheap_launches_and_keeps_the_order() -> None:
    launches = {Launch("gloo", 2): 1.0, Launch("mpi", 2): 1.0, Launch("mpi", 3): 1.5, Launch("gloo", 3): 50.0}
    every = [f"f{index}-{method}" for method in "abcd" for index in range(20)]
    chosen = cover(every, launches, few_workers=["f3"])
    assert len(chosen[Launch("gloo", 3)]) == 4, "each method once"
    assert len({split(name)[0] for name in chosen[Launch("gloo", 3)]}) > 1
    assert not any("f3-" in name for launch in launches if launch.workers == 3 for name in chosen[launch])
    for own in chosen.values():
        assert own == sorted(own, key=every.index)
    assert {name for own in chosen.values() for name in own} == set(every)
    assert sum(map(len, chosen.values())) < 1.25 * len(every)


def test_covering_takes_a_dear_feature_only_where_there_is_no_other() -> None:
    launches = {Launch("gloo", 2): 1.0, Launch("mpi", 3): 1.5}
    every = [f"f{index}-{method}" for method in "abv" for index in range(6)]
    chosen = cover(every, launches, sampled=["v"], dear=[f"f{index}" for index in range(5)])
    assert all([name for name in own if name.endswith("-v")] == ["f5-v"] for own in chosen.values())
    assert {"f0-a", "f0-b"} < {name for own in chosen.values() for name in own}


def test_each_feature_once_takes_methods_by_turns() -> None:
    assert each_feature_once(["f-a", "g-a", "h", "f-b", "g-b"]) == ["f-a", "h", "g-b"]
    assert each_feature_once(["f-a", "g-a", "g-b", "h-b"], last=["b"]) == ["f-a", "g-a", "h-b"]


def test_time_of_a_launch_is_that_of_its_scenarios() -> None:
    launches = [timings.Launch("a.py::one", "torch-gloo-2", 30.0, {"x-qsgd": 20.0, "y-qsgd": 4.0})]
    lines = list(timings.table({"a.py::one": 30.5, "a.py::two": 0.5, "b.py::three": 9.0}, launches))
    assert "| torch-gloo-2, 2 scenarios | 30.0 | 75.0% |" in lines
    assert "| a.py | 1.0 | 2.5% |" in lines
    assert "| torch-gloo-2, x-qsgd | 20.0 | 50.0% |" in lines
    assert "| a.py::one | 0.5 | 1.2% |" in lines
    slowest = lines[lines.index("") :]
    assert slowest[3].startswith("| torch-gloo-2, x-qsgd")


def test_the_names_need_no_framework() -> None:
    assert not {"torch", "tensorflow", "horovod"} & {
        line.split()[1].partition(".")[0]
        for file in (scenario_table, plan, sys.modules["covering"])
        for line in Path(file.__file__).read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
