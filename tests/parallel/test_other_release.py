"""A release of Horovod whose frames are unknown to the package: it says what to do, and does without them then."""

from __future__ import annotations

from typing import Any

import pytest
from launching import SCENARIOS_LIMIT, Outcome, assert_passed
from plan import FEWEST, Run, parametrize
from scenario_table import names

pytestmark = pytest.mark.parallel


def pytest_generate_tests(metafunc: Any) -> None:
    run = Run("torch_other_release_scenarios", "gloo", FEWEST)
    parametrize(metafunc, {run: names(run.module, "full")})


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_an_unknown_caller(scenario: str, outcome: Outcome) -> None:
    assert_passed(scenario, outcome)
