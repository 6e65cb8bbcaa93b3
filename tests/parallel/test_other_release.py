"""A release of Horovod whose frames are unknown to the package: it says what to do, and does without them then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch_other_release_scenarios
from launching import SCENARIOS_LIMIT, assert_passed, scenarios
from worker import selected

pytestmark = pytest.mark.parallel


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_an_unknown_caller(tmp_path: Path) -> None:
    outcome = scenarios("gloo", 2, [], tmp_path, None, torch_other_release_scenarios.__name__, "full")
    for name, _ in selected(torch_other_release_scenarios, "full"):
        assert_passed(name, outcome)
