"""Compressors at the wrong time, and under settings of Horovod that few choose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import misuse_worker
import pytest
from helpers import extended
from launching import SCENARIOS_LIMIT, Outcome, assert_passed, horovodrun
from plan import parametrize, with_settings

pytestmark = pytest.mark.parallel

MORE_ATTEMPTS = 2
"""When Horovod itself does not come up again, see misuse_worker.py."""


def run_until_horovod_comes_up_again(command: list[Any]) -> Any:
    done = horovodrun("gloo", 2, command)
    for _ in range(MORE_ATTEMPTS):
        if misuse_worker.HUNG in done.stdout or "gloo::IoException" in done.stdout:
            done = horovodrun("gloo", 2, command)
    return done


@pytest.mark.parametrize("framework", ["torch", extended("tensorflow")])
def test_before_init_and_after_shutdown(framework: str) -> None:
    command = [sys.executable, Path(__file__).with_name("misuse_worker.py"), framework]
    done = run_until_horovod_comes_up_again(command)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("FINISHED") == 2


@pytest.mark.parametrize("where", ["pass", "synchronize"])
def test_an_exception_from_a_signal_handler(where: str) -> None:
    """It may come anywhere in this package, and ``synchronize()`` goes on from there."""
    done = horovodrun("gloo", 2, [sys.executable, Path(__file__).with_name("interrupt_worker.py"), where])
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("WENT ON") == 2, done.stdout[-3000:]
    assert done.stdout.count("HIT") > 2, done.stdout[-3000:]


def pytest_generate_tests(metafunc: Any) -> None:
    if "scenario" in metafunc.fixturenames:
        parametrize(metafunc, with_settings(metafunc.config.getoption("tier")))


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_with_settings_of_horovod(scenario: str, outcome: Outcome) -> None:
    assert_passed(scenario, outcome)
