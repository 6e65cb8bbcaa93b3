"""``horovod_quant.keras`` under Keras 3, in real processes: scripts/test --latest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_job import assert_nothing_lost
from helpers import has_keras_3
from launching import ROOT, SCENARIOS_LIMIT, Outcome, assert_passed, elastic, environment
from plan import parametrize, with_keras_3

ELASTIC_LIMIT = 700

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(not has_keras_3(), reason="Keras 3 is not here: scripts/test --latest"),
]


def pytest_generate_tests(metafunc: Any) -> None:
    if "scenario" in metafunc.fixturenames:
        parametrize(metafunc, with_keras_3(metafunc.config.getoption("tier")))


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_on_every_worker(scenario: str, outcome: Outcome) -> None:
    assert_passed(scenario, outcome)


@pytest.mark.timeout(ELASTIC_LIMIT + 60)
def test_workers_come_are_killed_and_go(tmp_path: Path) -> None:
    """`model.fit` goes on, with averages over the workers that are there, and the optimizer's state."""
    assert_nothing_lost(*elastic("keras_elastic_worker.py", tmp_path, ELASTIC_LIMIT))


def test_another_backend_is_refused() -> None:
    """PyTorch's, which is here; the message is the same with others."""
    done = subprocess.run(
        [sys.executable, "-c", "import horovod_quant.keras"],
        env=environment({"KERAS_BACKEND": "torch"}), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "set KERAS_BACKEND=tensorflow" in done.stderr, done.stderr
