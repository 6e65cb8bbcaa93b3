"""Hierarchical exchanges in real processes, with nodes that are hosts for Horovod, and with nodes by number."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import SCENARIOS_LIMIT, Outcome, assert_passed, horovodrun, scenarios
from worker import selected

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent


class Launch(NamedTuple):
    module: str
    controller: str
    workers: int
    hierarchical: str
    hosts: str = ""
    dynamic: bool = False  # process sets are added later, not in hvd.init
    breadth: str = "full"

    def __str__(self) -> str:
        return f"{self.module.partition('_')[0]}-{self.controller}-{self.workers}-by-{self.hierarchical}"


TWO_HOSTS = "localhost:2,127.0.0.1:2"
LAUNCHES = [
    Launch("torch_hierarchical_scenarios", "gloo", 4, "True", TWO_HOSTS, breadth="core"),
    Launch("torch_hierarchical_scenarios", "mpi", 4, "2", dynamic=True, breadth="extra"),
    Launch("torch_hierarchical_scenarios", "gloo", 2, "True"),
    Launch("torch_hierarchical_scenarios", "gloo", 1, "True", breadth="core"),
    Launch("tf_hierarchical_scenarios", "mpi", 4, "2", dynamic=True, breadth="core"),
    Launch("tf_hierarchical_scenarios", "gloo", 2, "True", breadth="core"),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[Launch, Outcome]:
    """Of the launches so far."""
    return {}


def outcome_of(launch: Launch, outcomes: dict, folder: Path) -> Outcome:
    if launch not in outcomes:
        options = ["-H", launch.hosts] if launch.hosts else []
        environment = {"HIERARCHICAL": launch.hierarchical}
        environment.update({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if launch.dynamic else {})
        outcomes[launch] = scenarios(
            launch.controller, launch.workers, options, folder, environment, launch.module, launch.breadth
        )
    return outcomes[launch]


def pytest_generate_tests(metafunc: Any) -> None:
    if "launch" not in metafunc.fixturenames:
        return
    os.environ.setdefault("HIERARCHICAL", "True")  # the modules ask for it, for their workers
    thorough = metafunc.config.getoption("--thorough")
    cases = [
        pytest.param(launch, name, id=f"{launch}-{name}")
        for usual in LAUNCHES
        for launch in [usual._replace(breadth="extra") if usual.breadth == "core" and thorough else usual]
        for name, _ in selected(importlib.import_module(launch.module), launch.breadth)
    ]
    metafunc.parametrize(("launch", "scenario"), cases)


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_on_every_worker(launch: Launch, scenario: str, outcomes: dict, tmp_path: Path) -> None:
    assert_passed(scenario, outcome_of(launch, outcomes, tmp_path))


IMPOSSIBLE = [
    (
        ["-np", 3, "-H", "localhost:2,127.0.0.1:1"],
        "True",
        "construction: ValueError: hierarchical=True: some hosts have more workers",
    ),
    (["-np", 3], "2", "construction: ValueError: hierarchical: 3 workers cannot be on nodes of 2 each"),
    (["-np", 4], "2", "exchange: RuntimeError: hierarchical: Horovod has no process set of the ranks [0, 1]"),
]


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize(("options", "hierarchical", "message"), IMPOSSIBLE)
def test_every_worker_says_what_is_wrong(
    framework: str, options: list[Any], hierarchical: str, message: str, tmp_path: Path
) -> None:
    _, workers, *hosts = options
    command = [*hosts, sys.executable, HERE / "nodes_worker.py", tmp_path, framework, hierarchical]
    done = horovodrun("gloo", workers, command, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    for rank in range(workers):
        assert (tmp_path / str(rank)).read_text().startswith(message)


@pytest.mark.timeout(360)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_horovod_is_initialized_again(framework: str, tmp_path: Path) -> None:
    """Process sets are looked for again: those of before may be gone, or others have their numbers."""
    command = [sys.executable, HERE / "reinit_worker.py", tmp_path, framework]
    done = horovodrun("gloo", 4, command, timeout=300)  # under MPI Horovod itself cannot
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("FINISHED") == 4
