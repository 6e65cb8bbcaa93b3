"""Elastic training: workers are added, killed in the middle of a backward pass, and removed, several times in one run.

Every step checks, on every worker and with every method, that the gradients are the average of what all workers have at
that time, that parameters are equal, and that BinSGDM's state has survived.
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
    entries, printed = elastic("torch_elastic_worker.py", tmp_path, LIMIT)
    assert_nothing_lost(entries, printed)
