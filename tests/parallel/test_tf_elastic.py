"""Elastic training in TensorFlow: workers are added, killed in the middle of a backward pass, and removed, in one run.

Every step checks, on every worker and with every method, that the gradients are the average of what all workers have at
that time, rounded to that many workers' levels, that weights are equal, and that BinSGDM's state has survived.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_job import assert_nothing_lost
from launching import elastic

pytestmark = pytest.mark.parallel

LIMIT = 500


@pytest.mark.timeout(LIMIT + 60)
def test_workers_come_are_killed_and_go(tmp_path: Path) -> None:
    entries, printed = elastic("tf_elastic_worker.py", tmp_path, LIMIT)
    for own in assert_nothing_lost(entries, printed):
        traces = [count for entry in own for count in entry["traces"]]
        assert set(traces) == {1}, "a step was traced again"
