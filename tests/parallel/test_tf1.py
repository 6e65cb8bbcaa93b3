"""Programs that switch TensorFlow 2's behaviour off, in real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import horovodrun

pytestmark = [pytest.mark.parallel, pytest.mark.extended]  # by default `graph_and_session` is what there is

WORKER = Path(__file__).with_name("tf1_worker.py")


@pytest.mark.timeout(660)
@pytest.mark.parametrize("switch", ["disable_eager_execution", "disable_v2_behavior"])
def test_programs_of_tensorflow_1(switch: str) -> None:
    done = horovodrun("gloo", 2, [sys.executable, WORKER, switch])
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("FINISHED") == 2
