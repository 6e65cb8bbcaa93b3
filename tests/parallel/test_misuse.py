"""Compressors at the wrong time, and under settings of Horovod that few choose."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import SCENARIOS_LIMIT, Outcome, assert_passed, horovodrun, scenarios
from worker import selected

pytestmark = pytest.mark.parallel

SETTINGS = {
    "small": {"HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.05"},
    "large": {"HOROVOD_FUSION_THRESHOLD": str(2**30), "HOROVOD_CYCLE_TIME": "30"},
    "autotune": {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1"},
}


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_before_init_and_after_shutdown(framework: str) -> None:
    command = [sys.executable, Path(__file__).with_name("misuse_worker.py"), framework]
    done = horovodrun("gloo", 2, command)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("FINISHED") == 2


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Of the launches so far."""
    return {}


def pytest_generate_tests(metafunc: Any) -> None:
    if "scenario" in metafunc.fixturenames:
        names = [name for name, _ in selected(importlib.import_module("torch_scenarios"), "core")]
        metafunc.parametrize(("setting", "scenario"), [(each, name) for each in SETTINGS for name in names])


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_with_settings_of_horovod(
    setting: str, scenario: str, outcomes: dict[str, Outcome], tmp_path: Path
) -> None:
    if setting not in outcomes:
        outcomes[setting] = scenarios("gloo", 2, [], tmp_path, SETTINGS[setting], "torch_scenarios", "core")
    assert_passed(scenario, outcomes[setting])
