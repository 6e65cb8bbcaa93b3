"""Every scenario of torch_scenarios.py and tf_scenarios.py, in real processes: Gloo and MPI, 2 and 3 workers."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import horovodrun

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
MODULES = ["torch_scenarios", "tf_scenarios"]
RUNS = [("gloo", 2), ("gloo", 3), ("mpi", 2), ("mpi", 3)]
WITH_EXTRA = {  # variants of methods and kernels
    "torch_scenarios": RUNS,
    "tf_scenarios": [("gloo", 3)],
}
LIMIT = 2400

Outcome = tuple[list[dict[str, str]], str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> dict[tuple, Outcome]:
    """Of the launches so far: for each worker, how each scenario ended; and the launch's output."""
    return {}


def outcome_of(launch: tuple[str, str, int], outcomes: dict, folder: Path) -> Outcome:
    if launch not in outcomes:
        module, controller, workers = launch
        command = [sys.executable, HERE / "worker.py", folder, module]
        command += ["--extra"] if (controller, workers) in WITH_EXTRA[module] else []
        done = horovodrun(controller, workers, command, timeout=LIMIT)
        logs = []
        for rank in range(workers):
            log = folder / f"{rank}.jsonl"
            lines = log.read_text().splitlines() if log.exists() else []
            logs.append({entry["scenario"]: entry["failure"] for entry in map(json.loads, lines)})
        outcomes[launch] = logs, done.stdout[-3000:]
    return outcomes[launch]


def cases() -> list[Any]:
    return [
        pytest.param((module, controller, workers), name, id=f"{module}-{controller}-{workers}-{name}")
        for module in MODULES
        for controller, workers in RUNS
        for name, _ in importlib.import_module(module).scenarios((controller, workers) in WITH_EXTRA[module])
    ]


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("launch", "scenario"), cases())
def test_on_every_worker(launch: Any, scenario: str, outcomes: dict, tmp_path: Path) -> None:
    logs, output = outcome_of(launch, outcomes, tmp_path)
    for rank, log in enumerate(logs):
        ended = f"rank {rank} did not get this far, its last was {list(log)[-1:]}"
        assert scenario in log, f"{ended}; the launch printed\n{output}"
        assert not log[scenario], f"rank {rank}:\n{log[scenario]}"
