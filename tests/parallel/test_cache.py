"""Horovod's response cache has room for a model of 1,000 tensors and the plugin's own collectives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import horovodrun

pytestmark = pytest.mark.parallel


@pytest.mark.extended
@pytest.mark.parametrize("method", ["global-qsgd", "global-qsgd-exponential"])
def test_a_model_of_1000_tensors_evicts_nothing(method: str) -> None:
    program = [sys.executable, Path(__file__).with_name("cache_worker.py"), method]
    done = horovodrun("gloo", 2, program, env={"HOROVOD_LOG_LEVEL": "warning"})
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("TRAINED") == 2, done.stdout[-3000:]
    assert "evicted" not in done.stdout


@pytest.mark.extended
def test_the_eviction_would_be_seen() -> None:
    program = [sys.executable, Path(__file__).with_name("cache_worker.py"), "global-qsgd"]
    done = horovodrun(
        "gloo", 2, program, env={"HOROVOD_LOG_LEVEL": "warning", "HOROVOD_CACHE_CAPACITY": "900"}
    )
    assert "evicted" in done.stdout, done.stdout[-3000:]
