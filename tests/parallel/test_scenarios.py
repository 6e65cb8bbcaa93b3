"""The scenarios of torch_scenarios.py and tf_scenarios.py, in real processes: Gloo and MPI, 2 to 4 workers.

Which of them with which controller and number of workers is in plan.py.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from launching import SCENARIOS_LIMIT, Outcome, assert_passed
from plan import among_four, flat, parametrize

pytestmark = pytest.mark.parallel

FRAMEWORKS = os.environ.get("TEST_FRAMEWORKS", "torch tf").split()
"""Those that Horovod has here; scripts/test-horovod builds it without TensorFlow."""


def pytest_generate_tests(metafunc: Any) -> None:
    tier = metafunc.config.getoption("tier")
    plan = {**flat(tier), **among_four(tier)}
    parametrize(
        metafunc,
        {run: names for run, names in plan.items() if run.module.partition("_")[0] in FRAMEWORKS},
    )


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_on_every_worker(scenario: str, outcome: Outcome) -> None:
    assert_passed(scenario, outcome)
