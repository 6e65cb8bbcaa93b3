"""The scenarios of torch_scenarios.py and tf_scenarios.py, in real processes: Gloo and MPI, 2 and 3 workers.

Every scenario runs with each controller and each number of workers, but not with each pair of them, for which there is
the core; TensorFlow's slowest run once. Under Gloo three workers on two cores take ten times as long as under Open MPI,
which was told to yield: hence MPI has the most scenarios. With ``--thorough`` pytest runs all with all.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from launching import SCENARIOS_LIMIT, Outcome, assert_passed, scenarios
from worker import selected

pytestmark = pytest.mark.parallel

LAUNCHES = {  # module, controller, workers: which scenarios
    ("torch_scenarios", "gloo", 2): "full",
    ("torch_scenarios", "gloo", 3): "core",
    ("torch_scenarios", "mpi", 2): "core",
    ("torch_scenarios", "mpi", 3): "extra",
    ("tf_scenarios", "gloo", 2): "full",
    ("tf_scenarios", "gloo", 3): "core",
    ("tf_scenarios", "mpi", 2): "core",
    ("tf_scenarios", "mpi", 3): "quick",
}


FRAMEWORKS = os.environ.get("TEST_FRAMEWORKS", "torch tf").split()
"""Those that Horovod has here; scripts/test-horovod builds it without TensorFlow."""


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple, Outcome]:
    """Of the launches so far."""
    return {}


def outcome_of(launch: tuple[str, str, int, str], outcomes: dict, folder: Path) -> Outcome:
    if launch not in outcomes:
        module, controller, workers, breadth = launch
        outcomes[launch] = scenarios(controller, workers, [], folder, None, module, breadth)
    return outcomes[launch]


def pytest_generate_tests(metafunc: Any) -> None:
    thorough = metafunc.config.getoption("--thorough")
    cases = [
        pytest.param(
            (module, controller, workers, breadth), name, id=f"{module}-{controller}-{workers}-{name}"
        )
        for (module, controller, workers), usual in LAUNCHES.items()
        if module.partition("_")[0] in FRAMEWORKS
        for breadth in ["extra" if thorough else usual]
        for name, _ in selected(importlib.import_module(module), breadth)
    ]
    metafunc.parametrize(("launch", "scenario"), cases)


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_on_every_worker(launch: Any, scenario: str, outcomes: dict, tmp_path: Path) -> None:
    assert_passed(scenario, outcome_of(launch, outcomes, tmp_path))
