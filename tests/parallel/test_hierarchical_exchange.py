"""Hierarchical exchanges in real processes, with nodes that are hosts for Horovod, and with nodes by number."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import horovodrun
from worker import selected

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
LIMIT = 2400


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
    Launch("torch_hierarchical_scenarios", "gloo", 4, "True", TWO_HOSTS, breadth="extra"),
    Launch("torch_hierarchical_scenarios", "mpi", 4, "2", dynamic=True),
    Launch("torch_hierarchical_scenarios", "gloo", 2, "True"),
    Launch("torch_hierarchical_scenarios", "gloo", 1, "True", breadth="core"),
    Launch("tf_hierarchical_scenarios", "gloo", 4, "True", TWO_HOSTS, breadth="core"),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[Launch, tuple[list[dict[str, str]], str]]:
    """Of the launches so far: for each worker, how each scenario ended; and the launch's output."""
    return {}


def outcome_of(launch: Launch, outcomes: dict, folder: Path) -> tuple[list[dict[str, str]], str]:
    if launch not in outcomes:
        command = ["-H", launch.hosts] if launch.hosts else []
        command += [sys.executable, HERE / "worker.py", folder, launch.module, launch.breadth]
        environment = {"HIERARCHICAL": launch.hierarchical}
        environment.update({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if launch.dynamic else {})
        done = horovodrun(launch.controller, launch.workers, command, timeout=LIMIT, env=environment)
        logs = []
        for rank in range(launch.workers):
            log = folder / f"{rank}.jsonl"
            lines = log.read_text().splitlines() if log.exists() else []
            logs.append({entry["scenario"]: entry["failure"] for entry in map(json.loads, lines)})
        outcomes[launch] = logs, done.stdout[-3000:]
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


@pytest.mark.timeout(LIMIT + 60)
def test_on_every_worker(launch: Launch, scenario: str, outcomes: dict, tmp_path: Path) -> None:
    logs, output = outcome_of(launch, outcomes, tmp_path)
    for rank, log in enumerate(logs):
        ended = f"rank {rank} did not get this far, its last was {list(log)[-1:]}"
        assert scenario in log, f"{ended}; the launch printed\n{output}"
        assert not log[scenario], f"rank {rank}:\n{log[scenario]}"


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
