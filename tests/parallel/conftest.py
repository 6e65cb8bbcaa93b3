"""Tests of what ran in a launch of worker.py: ``run`` and ``scenario`` are parameters, from a plan of plan.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import SCENARIO_LIMIT, SHORT_LIMIT, Outcome, scenarios
from plan import Run


@pytest.fixture(scope="session")
def outcomes() -> dict[tuple, Outcome]:
    """Of the launches so far."""
    return {}


@pytest.fixture
def outcome(run: Run, outcomes: dict, request: pytest.FixtureRequest, tmp_path: Path) -> Outcome:
    """Of a launch of all this test's scenarios that pytest was asked for."""
    key = request.node.function, run
    if key not in outcomes:
        limit = SCENARIO_LIMIT if request.config.getoption("tier") in ("all", "thorough") else SHORT_LIMIT
        outcomes[key] = scenarios(run, list(_wanted(*key, request.session)), tmp_path, limit)
    return outcomes[key]


def _wanted(function: Any, run: Run, session: pytest.Session) -> Iterator[str]:
    for item in session.items:
        if getattr(item, "function", None) is function and item.callspec.params["run"] == run:
            yield item.callspec.params["scenario"]
