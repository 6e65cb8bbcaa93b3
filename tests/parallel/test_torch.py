"""Every scenario of torch_scenarios.py, in real processes: Gloo and MPI, 2 and 3 workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch_scenarios
from launching import horovodrun

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
RUNS = [("gloo", 2), ("gloo", 3), ("mpi", 2), ("mpi", 3)]
LIMIT = 1200

Outcome = tuple[list[dict[str, str]], str]


@pytest.fixture(scope="module", params=RUNS, ids=[f"{controller}-{workers}" for controller, workers in RUNS])
def outcome(request: Any, tmp_path_factory: Any) -> Outcome:
    """For each worker, how each scenario ended; and the launch's output."""
    controller, workers = request.param
    results = tmp_path_factory.mktemp(f"{controller}-{workers}")
    command = [sys.executable, HERE / "worker.py", results, "torch_scenarios"]
    done = horovodrun(controller, workers, command, timeout=LIMIT)
    logs = []
    for rank in range(workers):
        log = results / f"{rank}.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        logs.append({entry["scenario"]: entry["failure"] for entry in map(json.loads, lines)})
    return logs, done.stdout[-3000:]


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("scenario", [name for name, _ in torch_scenarios.scenarios()])
def test_on_every_worker(outcome: Outcome, scenario: str) -> None:
    logs, output = outcome
    for rank, log in enumerate(logs):
        ended = f"rank {rank} did not get this far, its last was {list(log)[-1:]}"
        assert scenario in log, f"{ended}; the launch printed\n{output}"
        assert not log[scenario], f"rank {rank}:\n{log[scenario]}"
