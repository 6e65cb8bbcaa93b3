"""The scenarios of torch_scenarios.py and tf_scenarios.py, in real processes: Gloo and MPI, 2 and 3 workers.

TensorFlow traces for seconds what PyTorch just runs. There every scenario runs with each controller and each number of
workers, but not with each pair of them, unless pytest gets ``--thorough``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import horovodrun
from worker import selected

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
LAUNCHES = {  # module, controller, workers: which scenarios
    ("torch_scenarios", "gloo", 2): "extra",
    ("torch_scenarios", "gloo", 3): "extra",
    ("torch_scenarios", "mpi", 2): "extra",
    ("torch_scenarios", "mpi", 3): "extra",
    ("tf_scenarios", "gloo", 2): "core",
    ("tf_scenarios", "gloo", 3): "extra",
    ("tf_scenarios", "mpi", 2): "full",
    ("tf_scenarios", "mpi", 3): "core",
}
LIMIT = 2400

Outcome = tuple[list[dict[str, str]], str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> dict[tuple, Outcome]:
    """Of the launches so far: for each worker, how each scenario ended; and the launch's output."""
    return {}


def outcome_of(launch: tuple[str, str, int, str], outcomes: dict, folder: Path) -> Outcome:
    if launch not in outcomes:
        module, controller, workers, breadth = launch
        command = [sys.executable, HERE / "worker.py", folder, module, breadth]
        done = horovodrun(controller, workers, command, timeout=LIMIT)
        logs = []
        for rank in range(workers):
            log = folder / f"{rank}.jsonl"
            lines = log.read_text().splitlines() if log.exists() else []
            logs.append({entry["scenario"]: entry["failure"] for entry in map(json.loads, lines)})
        outcomes[launch] = logs, done.stdout[-3000:]
    return outcomes[launch]


def pytest_generate_tests(metafunc: Any) -> None:
    thorough = metafunc.config.getoption("--thorough")
    cases = [
        pytest.param(
            (module, controller, workers, breadth), name, id=f"{module}-{controller}-{workers}-{name}"
        )
        for (module, controller, workers), usual in LAUNCHES.items()
        for breadth in ["full" if usual == "core" and thorough else usual]
        for name, _ in selected(importlib.import_module(module), breadth)
    ]
    metafunc.parametrize(("launch", "scenario"), cases)


@pytest.mark.timeout(LIMIT + 60)
def test_on_every_worker(launch: Any, scenario: str, outcomes: dict, tmp_path: Path) -> None:
    logs, output = outcome_of(launch, outcomes, tmp_path)
    for rank, log in enumerate(logs):
        ended = f"rank {rank} did not get this far, its last was {list(log)[-1:]}"
        assert scenario in log, f"{ended}; the launch printed\n{output}"
        assert not log[scenario], f"rank {rank}:\n{log[scenario]}"
